"""Writing a store so that a killed process leaves nothing that looks complete, and a second run continues.

Everything goes to a hidden folder beside the destination, which a journal makes resumable: it lists each finished record with its
checksum. Files are synced, the manifest is written last, and the folder is renamed. What a journal says is checked by reading it
back, since after a loss of power a journal may know more than the disk.

A journal or a manifest is also the mark by which a folder is known as one of ours: nothing is removed from a folder without it. The
journal goes last, when the store has its name, so that a hidden folder with a manifest and no journal is one that was replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from torch_mesh.cache import unwritable
from torch_mesh.errors import StoreError
from torch_mesh.files import exchange, locked
from torch_mesh.store.header import parse_json, store_error
from torch_mesh.store.manifest import (
    BLOCK_BYTES,
    FORMAT_VERSIONS,
    MANIFEST_NAME,
    MAX_FILE_BYTES,
    Calibration,
    Manifest,
    OtherFile,
    Shape,
    Store,
    block_checksum,
    is_store,
    open_store,
    plan_record_files,
    read_manifest,
)

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_JOURNAL_NAME = "journal.jsonl"
_JOURNAL_START = b'{"plan":{"format_version":'
_SYNC_BYTES = 256 << 20  # written between two syncs, the first of which may still run: bounds the dirty pages
_SMALL_FILE = 1 << 20
_THREADS_READING = 2  # beside those that pack: about as many wait for the disk
_SPARE_BYTES = 16 << 20  # for the manifest, the journal and the file system's own needs

_Result = TypeVar("_Result")
_Written = OtherFile | tuple[int, int, int]  # a file, or layer, expert and checksum of a record
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Chunk = bytes | memoryview
RecordMaker = Callable[[], "torch.Tensor"]  # -> uint8 [record_bytes]; called from a worker thread


@dataclass(frozen=True)
class StorePlan:
    """What a store will hold. Two runs with equal plans write the same store."""

    shape: Shape
    modules: tuple[str, ...]
    weights: str
    group_size: int  # 0 for bf16
    source_name: str
    source_fingerprint: str
    calibration: Calibration | None = None

    @property
    def record_bytes(self) -> int:
        return self.shape.record_bytes(self.weights, self.group_size)

    def identity(self) -> dict[str, Any]:
        table = asdict(self)
        del table["source_name"]  # a folder may move
        if self.calibration is None:
            del table["calibration"]
        if isinstance(self.shape.activation, tuple):  # as it comes back from the journal
            table["shape"]["activation"] = list(self.shape.activation)
        return {"format_version": FORMAT_VERSIONS[self.weights], **table, "modules": list(self.modules)}

    def is_plan_of(self, manifest: Manifest) -> bool:
        mine = (
            self.shape,
            self.modules,
            self.weights,
            self.group_size,
            self.source_fingerprint,
            self.calibration,
        )
        shape = manifest.shape
        if shape.activation is None:  # perhaps one that was not fused yet when the same records were written
            shape = replace(shape, activation=self.shape.activation)
        return mine == (
            shape,
            manifest.modules,
            manifest.weights,
            manifest.group_size,
            manifest.source_fingerprint,
            manifest.calibration,
        )


@dataclass(frozen=True)
class Scratch:
    """Files that records are made with, which the unfinished folder has and the store has not.

    ``prepare(folder, done)`` makes them, or continues what an earlier run began, before the first record is made; ``done`` is told of bytes that are there.
    ``names`` are all that it may leave, ``bytes`` what they take at most.
    """

    names: tuple[str, ...]
    bytes: int
    prepare: Callable[[Path, Callable[[int], None]], None]


@dataclass(frozen=True)
class NewFile:
    """A file to write beside the records. ``chunks`` yields its ``size`` bytes, anew at each call; it is called from a worker thread.
    A chunk need not outlive the next."""

    name: str
    size: int
    chunks: Callable[[], Iterable[Chunk]]


@dataclass(frozen=True)
class Written:
    """``existed``: the destination was this very store already, and nothing was written."""

    store: Store
    existed: bool


def write_store(
    folder: str | os.PathLike[str],
    plan: StorePlan,
    records: Iterable[tuple[int, int, RecordMaker]],
    files: Sequence[NewFile] = (),
    *,
    force: bool = False,
    private: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    check_source: Callable[[], None] = lambda: None,
    scratch: Scratch | None = None,
) -> Written:
    """Writes the store of ``plan`` to ``folder``, or continues what an earlier run of the same plan began.

    ``records`` gives every (layer, expert) once, with a callable that makes its packed record; callables run on ``workers`` threads
    (default: two more than the processors this process may use), a few at a time. ``force`` replaces a store that is there already. ``private`` says that no
    other process knows of ``folder``, so that no lock is needed, which some file systems do not have. ``check_source``
    is called when everything is read, and raises if that was not of one piece: then no store comes of it. ``scratch`` is prepared before the first
    record, if one is still to be made.

    A link is followed: what it leads to is written or replaced. A store of this plan that is there already is only looked at.

    Raises ``StoreError`` if ``folder`` holds something else, cannot be written, or the disk has too little room or fills up. After any
    error, a kill or Ctrl-C, the same call continues.
    """
    folder = _real_folder(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    # Without the lock, whose file needs a folder that may be written to. What is not of this plan may be being replaced just now.
    problem: StoreError | None = None
    try:
        existing = _existing_store(folder, plan, force)
    except StoreError as error:
        existing, problem = None, error
    except OSError as error:
        raise unwritable(folder, error) from error
    if existing is not None:
        with contextlib.suppress(OSError):  # in a folder of another's, or while another process writes
            if _remains(folder) or lock_path(folder).exists():
                with locked(lock_path(folder)):
                    _remove_remains(folder)
        return Written(existing, existed=True)
    if os.path.ismount(folder):
        raise problem or store_error(
            folder,
            "is where a file system is mounted, and a store is put in its place under its name: name a folder in it",
        )
    with contextlib.nullcontext() if private else _lock_of(folder, problem):
        existing = _existing_store(folder, plan, force)
        if existing is None:
            _check_ours(partial)
            _remove_remains(folder)
            if not _is_finished(partial, plan):
                record_files = plan_record_files(plan.shape, plan.modules, plan.record_bytes, bytes(16), max_file_bytes)
                total = sum(file.size for file in files) + sum(file.bytes for file, _ in record_files)
                total += 0 if scratch is None else scratch.bytes
                present = sum(path.stat().st_blocks * 512 for path in partial.iterdir()) if partial.is_dir() else 0
                check_free_space(partial.parent, total, present, " or smaller weights")
                with (
                    full_disk_as_store_error(
                        partial, "What is finished stays there: free some room and run the same command again"
                    ),
                    contextlib.closing(_Conversion(partial, plan, max_file_bytes)) as conversion,
                ):
                    conversion.run(
                        records,
                        files,
                        workers or len(os.sched_getaffinity(0)) + _THREADS_READING,
                        progress,
                        check_source,
                        scratch,
                    )
            _move_into_place(partial, folder)
    return Written(existing or open_store(folder), existed=existing is not None)


def write_folder(
    folder: Path,
    files: Sequence[NewFile],
    progress: Progress | None = None,
    check_source: Callable[[], None] = lambda: None,
) -> None:
    """Writes files to a folder of the cache, all of them or none, unless an earlier call has. ``check_source`` as of ``write_store``.

    Raises ``StoreError`` for a disk without room and a cache that cannot be written to.
    """
    if _has_all(folder, files):
        return
    with _lock_of(folder, None):
        if _has_all(folder, files):  # by another process meanwhile
            return
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            for left in (partial, folder):
                shutil.rmtree(left, ignore_errors=True)
            total, done = sum(file.size for file in files), 0
            check_free_space(folder.parent, total)
            partial.mkdir()
            with full_disk_as_store_error(folder.parent, "Free some room and open the model again"):
                for file in files:
                    with (partial / file.name).open("wb") as stream:
                        for chunk in file.chunks():
                            stream.write(chunk)
                            done += len(chunk)
                            if progress is not None:
                                progress(done, total)
                        stream.flush()
                        os.fsync(stream.fileno())
            check_source()
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _has_all(folder: Path, files: Sequence[NewFile]) -> bool:
    try:
        return all((folder / file.name).stat().st_size == file.size for file in files)
    except OSError:
        return False


def remove_made_from(folder: str | os.PathLike[str], fingerprint: str) -> None:
    """Removes the store in ``folder``, or what there is of it beside that, if it was made from the source of this fingerprint.

    Raises ``OSError`` or ``StoreError`` if it cannot be.
    """
    folder = _real_folder(folder)
    found = [folder.with_name(f".{folder.name}.partial"), folder]
    if not any(_is_made_from(path, fingerprint) for path in found):
        return
    with _lock_of(folder, None):
        for path in found:
            if _is_made_from(path, fingerprint):
                _remove_store(path)


class _Journal:
    """Lines of JSON: the plan, then what is finished. A torn last line is dropped."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.records: dict[tuple[int, int], int] = {}
        self.files: dict[str, OtherFile] = {}
        self.resumed = False
        kept = self._load(path, identity)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # open as long as the conversion
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self.store_id = secrets.token_bytes(16)
            self._append({"plan": identity, "store_id": self.store_id.hex()})

    def _load(self, path: Path, identity: dict[str, Any]) -> int:
        """Bytes of ``path`` that are a journal of this plan."""
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        kept = 0
        for number, line in enumerate(lines):
            try:
                entry = parse_json(line)
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    if entry["plan"] != identity:
                        return 0
                    self.store_id = bytes.fromhex(entry["store_id"])
                    if len(self.store_id) != 16:
                        return 0
                elif "record" in entry:
                    layer, expert = entry["record"]
                    if layer not in range(identity["shape"]["layers"]) or expert not in range(
                        identity["shape"]["experts"]
                    ):
                        break
                    self.records[layer, expert] = int(entry["checksum"], 16)
                else:
                    self.files[entry["name"]] = OtherFile(**entry)
            except (ValueError, TypeError, KeyError):
                break
            kept += len(line)
        self.resumed = kept > 0
        return kept

    def add_record(self, layer: int, expert: int, checksum: int) -> None:
        self.records[layer, expert] = checksum
        self._append({"record": [layer, expert], "checksum": f"{checksum:016x}"})

    def add_file(self, file: OtherFile) -> None:
        self.files[file.name] = file
        self._append(asdict(file))

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))


class _Conversion:
    """The folder of one unfinished store."""

    def __init__(self, folder: Path, plan: StorePlan, max_file_bytes: int) -> None:
        self._folder = folder
        self._plan = plan
        self._record_bytes = plan.record_bytes
        folder.mkdir(exist_ok=True)
        self._journal = _Journal(folder / _JOURNAL_NAME, plan.identity())
        self._files = plan_record_files(
            plan.shape, plan.modules, self._record_bytes, self._journal.store_id, max_file_bytes
        )
        self._descriptors: list[int] = []
        self._stopping = threading.Event()
        self._file_under_way = False
        self._one_file = threading.Lock()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._journal.close()

    def run(
        self,
        records: Iterable[tuple[int, int, RecordMaker]],
        files: Sequence[NewFile],
        workers: int,
        progress: Progress | None,
        check_source: Callable[[], None],
        scratch: Scratch | None,
    ) -> None:
        names = () if scratch is None else scratch.names
        self._remove_leftovers(files, names)
        counter = _Counter(self._plan, self._record_bytes, files, 0 if scratch is None else scratch.bytes, progress)
        self._open_record_files()
        self._drop_damaged_records(counter)
        if scratch is not None:
            prepared = counter.done + scratch.bytes
            if not self._has_all_records():
                scratch.prepare(self._folder, counter.add)
            counter.add(prepared - counter.done)  # it may be less than was asked for
        with _Workers(workers) as packing, _Workers(1) as syncing:
            try:
                self._collect(packing.run(self._tasks(records, files)), syncing, counter)
            except BaseException:
                self._stopping.set()  # whoever leaves the context waits for what has begun
                raise
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        check_source()
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        self._write_manifest(files)

    def _has_all_records(self) -> bool:
        shape = self._plan.shape
        return len(self._journal.records) == shape.layers * shape.experts

    def _remove_leftovers(self, files: Sequence[NewFile], others: Iterable[str]) -> None:
        """What an earlier run left and this one does not continue."""
        continued = {file.name for file in files} | {file.name for file, _ in self._files} | set(others)
        for path in self._folder.iterdir():
            kept = self._journal.resumed and path.name in continued and not path.is_symlink()
            if path.name != _JOURNAL_NAME and not kept:
                if _is_folder(path):
                    raise store_error(path, "is in the way: no conversion made this folder. Move it")
                path.unlink()

    def _open_record_files(self) -> None:
        for file, header in self._files:
            descriptor = os.open(self._folder / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            self._descriptors.append(descriptor)
            _write_all(descriptor, header, 0)
            os.ftruncate(descriptor, file.bytes)

    def _place(self, layer: int, expert: int) -> tuple[int, int]:
        index = layer * self._plan.shape.experts + expert
        number, within = divmod(index, self._files[0][0].records)  # every file but the last holds as many
        return self._descriptors[number], self._files[number][0].data_start + within * self._record_bytes

    def _drop_damaged_records(self, counter: _Counter) -> None:
        for (layer, expert), checksum in list(self._journal.records.items()):
            descriptor, offset = self._place(layer, expert)
            if self._checksum(layer, expert, os.pread(descriptor, self._record_bytes, offset)) == checksum:
                counter.add(self._record_bytes)
            else:
                del self._journal.records[layer, expert]

    def _checksum(self, layer: int, expert: int, record: bytes | npt.NDArray[np.uint8]) -> int:
        from torch_mesh import _C

        return _C.record_checksum(self._journal.store_id, layer, expert, record)

    def _write_file(self, file: NewFile) -> OtherFile:
        path = self._folder / file.name
        known = self._journal.files.get(file.name)
        # Small files are written anew: they may have been edited in the source since.
        may_stay = known is not None and file.size == known.bytes > _SMALL_FILE and path.is_file()
        with self._one_file:
            if known is not None and may_stay and file_digest(path, self._stop_if_asked) == known.digest:
                return known
            return self._write_anew(path, file)

    def _write_anew(self, path: Path, file: NewFile) -> OtherFile:
        digest, checksums = hashlib.blake2b(digest_size=16), []
        with path.open("wb", buffering=0) as stream:
            for number, block in enumerate(_blocks(file.chunks())):
                self._stop_if_asked()
                _write_all(stream.fileno(), block, number * BLOCK_BYTES)
                digest.update(block)
                checksums.append(block_checksum(self._journal.store_id, file.name, number, block))
                if (number + 1) * BLOCK_BYTES % _SYNC_BYTES == 0:
                    _sync_data(stream.fileno())
            os.fsync(stream.fileno())
            written = os.fstat(stream.fileno()).st_size
        if written != file.size:
            raise store_error(
                path, f"{written} bytes were written, {file.size} expected: did the source change meanwhile?"
            )
        return OtherFile(file.name, written, digest.hexdigest(), " ".join(checksums))

    def _tasks(
        self, records: Iterable[tuple[int, int, RecordMaker]], files: Sequence[NewFile]
    ) -> Iterator[Callable[[], _Written]]:
        """One file beside the records at a time, since a file may hold a whole tensor in memory."""
        waiting = deque(files)
        for layer, expert, make in records:
            if (layer, expert) in self._journal.records:
                continue
            if waiting and not self._file_under_way:
                self._file_under_way = True
                yield partial(self._write_file, waiting.popleft())
            yield partial(self._write_record, layer, expert, make)
        for file in waiting:
            yield partial(self._write_file, file)

    def _collect(self, written: Iterable[_Written], syncing: _Workers, counter: _Counter) -> None:
        unsynced = 0
        for each in written:
            if isinstance(each, OtherFile):
                self._file_under_way = False
                if self._journal.files.get(each.name) != each:
                    self._journal.add_file(each)
                counter.add(each.bytes)
                continue
            self._journal.add_record(*each)
            counter.add(self._record_bytes)
            unsynced += self._record_bytes
            if unsynced >= _SYNC_BYTES:
                syncing.begin(self._sync)  # once the last one is done, while the next records are packed
                unsynced = 0

    def _write_record(self, layer: int, expert: int, make: RecordMaker) -> tuple[int, int, int]:
        record = make().numpy()
        if record.dtype != np.uint8 or record.shape != (self._record_bytes,):
            raise ValueError(
                f"the record of layer {layer}, expert {expert} is {record.dtype} {record.shape}, not uint8 ({self._record_bytes},)"
            )
        checksum = self._checksum(layer, expert, record)
        descriptor, offset = self._place(layer, expert)
        _write_all(descriptor, record.data, offset)
        return layer, expert, checksum

    def _stop_if_asked(self) -> None:
        if self._stopping.is_set():
            raise CancelledError  # which nobody collects: there is an error already

    def _sync(self) -> None:
        for descriptor in self._descriptors:
            _sync_data(descriptor)
        self._journal.sync()

    def _write_manifest(self, files: Sequence[NewFile]) -> None:
        plan, journal = self._plan, self._journal
        shape = plan.shape
        missing = shape.layers * shape.experts - len(journal.records)
        if missing:
            raise ValueError(f"{missing} of {shape.layers * shape.experts} records were not given")
        checksums = np.empty((shape.layers, shape.experts), dtype=np.uint64)
        for place, checksum in journal.records.items():
            checksums[place] = checksum
        manifest = Manifest(
            store_id=journal.store_id,
            source_name=plan.source_name,
            source_fingerprint=plan.source_fingerprint,
            weights=plan.weights,
            group_size=plan.group_size,
            record_bytes=self._record_bytes,
            shape=shape,
            modules=plan.modules,
            record_files=tuple(file for file, _ in self._files),
            other_files=tuple(journal.files[file.name] for file in files),
            checksums=checksums,
            calibration=plan.calibration,
        )
        unfinished = self._folder / f"{MANIFEST_NAME}.new"
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(manifest.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(self._folder / MANIFEST_NAME)


class _Workers(contextlib.AbstractContextManager["_Workers"]):
    """Threads that are handed a few tasks at a time. Whoever leaves the context waits for those that have begun."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="torch_mesh-store")
        self._waiting: set[Future[Any]] = set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()

    def run(self, tasks: Iterable[Callable[[], _Result]]) -> Iterator[_Result]:
        """What they return, in the order of their ends. Raises what one of them raises."""
        for task in tasks:
            self._waiting.add(self._executor.submit(task))
            if len(self._waiting) > self._count:
                yield from self._finished()
        while self._waiting:
            yield from self._finished()

    def begin(self, task: Callable[[], None]) -> None:
        """Returns when a thread can take it up. Raises what an earlier one raised."""
        while len(self._waiting) >= self._count:
            for _ in self._finished():
                pass
        self._waiting.add(self._executor.submit(task))

    def _finished(self) -> Iterator[Any]:
        done, self._waiting = wait(self._waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


class _Counter:
    def __init__(
        self,
        plan: StorePlan,
        record_bytes: int,
        files: Sequence[NewFile],
        scratch_bytes: int,
        progress: Progress | None,
    ) -> None:
        records = plan.shape.layers * plan.shape.experts * record_bytes
        self._total = records + sum(file.size for file in files) + scratch_bytes
        self.done = 0
        self._progress = progress
        self.add(0)

    def add(self, count: int) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(self.done, self._total)


def _blocks(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    """The same bytes, cut where a file's checksums are. Each is overwritten by the next."""
    block, filled = np.empty(BLOCK_BYTES, dtype=np.uint8).data, 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            part = rest[: BLOCK_BYTES - filled]
            block[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == BLOCK_BYTES:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


def described(path: Path, store_id: bytes) -> OtherFile:
    """What a store's manifest says of a file that holds no records."""
    digest = hashlib.blake2b(digest_size=16)
    checksums: list[str] = []
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            checksums.append(block_checksum(store_id, path.name, len(checksums), block))
        size = stream.tell()
    return OtherFile(path.name, size, digest.hexdigest(), " ".join(checksums))


def file_digest(path: Path, before_each: Callable[[], None] = lambda: None) -> str:
    """BLAKE2b-128 of a file's bytes, in hex. ``before_each`` is called before each piece, and may raise."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            before_each()
            digest.update(chunk)
    return digest.hexdigest()


def _real_folder(folder: str | os.PathLike[str]) -> Path:
    """``folder`` without links. Raises ``StoreError`` for one that leads nowhere."""
    real = Path(os.path.realpath(folder))
    if os.path.islink(folder) and not real.exists():
        raise store_error(folder, f"is a link to {real}, which does not exist: make that folder, or remove the link")
    return real


def lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextlib.contextmanager
def _lock_of(folder: Path, problem: StoreError | None) -> Iterator[None]:
    """Keeps other processes from writing the same store. ``problem``: what is wrong with the folder if no lock can be had."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            waiting = partial(_LOG.warning, "Another process is writing %s; waiting for it.", folder)
            stack.enter_context(locked(lock_path(folder), waiting))
        except OSError as error:
            raise problem or unwritable(folder, error) from error
        yield


def _existing_store(folder: Path, plan: StorePlan, force: bool) -> Store | None:
    """The store of this very plan if ``folder`` holds it; None if it may be written."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not is_store(folder):
        raise store_error(folder, "exists and is not a store: choose another folder")
    if force:
        return None
    store = open_store(folder)
    if plan.is_plan_of(store.manifest):
        return store
    held = store.manifest
    raise store_error(
        folder,
        f"holds another store ({held.weights}, group size {held.group_size}, made from {held.source_name}, or from another version of "
        "it): choose another folder, or --force to replace it",
    )


def check_free_space(folder: Path, total: int, present: int = 0, advice: str = "") -> None:
    """Raises ``StoreError`` unless ``total`` bytes, of which ``present`` are there already, fit on the disk of ``folder``."""
    left = max(0, total - present)
    free = shutil.disk_usage(folder).free
    if free < left + _SPARE_BYTES:
        raise store_error(
            folder,
            f"the disk has {_megabytes(free)} free; {_megabytes(left)} of {_megabytes(total)} are still to be written, and "
            f"{_megabytes(_SPARE_BYTES)} have to stay free. Free some, or choose another folder{advice}",
        )


def _check_ours(partial: Path) -> None:
    """Raises ``StoreError`` if the place of the unfinished folder is taken by something that no conversion left."""
    if os.path.lexists(partial) and not _is_ours(partial):
        raise store_error(
            partial,
            "is in the way: an unfinished conversion would stand there, and this is none. Move it, or choose another folder for the store",
        )


def _is_ours(folder: Path) -> bool:
    """Whether a conversion made this: by its journal or its manifest, or because there is nothing in it."""
    if not _is_folder(folder):
        return False
    names = set(os.listdir(folder))
    if _JOURNAL_NAME in names and stat.S_ISREG(os.lstat(folder / _JOURNAL_NAME).st_mode):
        with (folder / _JOURNAL_NAME).open("rb") as stream:
            start = stream.read(len(_JOURNAL_START))
        # Killed at its first line it may have left part of that, and nothing else yet.
        return start == _JOURNAL_START or (names == {_JOURNAL_NAME} and _JOURNAL_START.startswith(start))
    return not names or _has_manifest(folder)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_manifest(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except StoreError:
        return False
    return True


def _is_made_from(folder: Path, fingerprint: str) -> bool:
    if not _is_folder(folder) or not _is_ours(folder):
        return False
    if is_store(folder):
        return read_manifest(folder).source_fingerprint == fingerprint
    try:
        with (folder / _JOURNAL_NAME).open("rb") as stream:
            return bool(parse_json(stream.readline())["plan"]["source_fingerprint"] == fingerprint)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return False  # nothing is in it, or one line that was cut off: whoever comes next goes on with it


def _is_finished(partial: Path, plan: StorePlan) -> bool:
    """Whether the last run was killed between its manifest and its rename."""
    if not is_store(partial):
        return False
    try:
        return plan.is_plan_of(open_store(partial).manifest)
    except StoreError:
        return False


def _move_into_place(partial: Path, folder: Path) -> None:
    _sync_folder(partial)
    if is_store(folder):
        replaced = folder.with_name(f".{folder.name}.replaced-{secrets.token_hex(4)}")
        if exchange(partial, folder):
            partial.rename(replaced)
        else:  # killed between these two there is no store under the name, and the next run puts the new one there
            folder.rename(replaced)
            partial.rename(folder)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)
    _remove_remains(folder)


def _remains(folder: Path) -> list[Path]:
    """What replacing a store leaves when it is killed: the old one, and the journal of the new one."""
    pattern = re.compile(re.escape(f".{folder.name}.replaced-") + "[0-9a-f]{8}")
    replaced = [path for path in folder.parent.iterdir() if pattern.fullmatch(path.name)]
    partial = folder.with_name(f".{folder.name}.partial")
    if is_store(partial) and not (partial / _JOURNAL_NAME).exists():
        replaced.append(partial)
    journal = folder / _JOURNAL_NAME
    return [*filter(_is_ours, replaced), *([journal] if is_store(folder) and journal.exists() else [])]


def _remove_remains(folder: Path) -> None:
    for path in _remains(folder):
        try:
            _remove_store(path) if path.is_dir() else path.unlink()
        except OSError as error:
            _LOG.warning("%s was replaced, and what is left of it in %s cannot be removed: %s", folder, path, error)


def _remove_store(folder: Path) -> None:
    """Its marks last, by which the next run knows what is left of it."""
    marks = (MANIFEST_NAME, _JOURNAL_NAME)
    for path in folder.iterdir():
        if path.name not in marks:
            shutil.rmtree(path) if _is_folder(path) else path.unlink()
    for name in marks:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_data(descriptor: int) -> None:
    os.fdatasync(descriptor)
    # Written once and not read here again: leave the page cache to others.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest, at = memoryview(data), offset
    while len(rest):
        count = os.pwrite(descriptor, rest, at)
        rest, at = rest[count:], at + count
    # Begins to write what is dirty, rather than all of it at the next sync.
    os.posix_fadvise(descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def full_disk_as_store_error(folder: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise store_error(folder, f"the disk is full. {advice}") from problem


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
