"""Writing a store so that a killed process leaves nothing that looks complete, and a second run continues.

Everything goes to a hidden folder beside the destination, which a journal makes resumable: it lists each finished record with its
checksum. Files are synced, the manifest is written last, and the folder is renamed. What a journal says is checked by reading it
back, since after a loss of power a journal may know more than the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import StoreError
from torch_mesh.store.header import parse_json, store_error
from torch_mesh.store.manifest import (
    FORMAT_VERSIONS,
    MANIFEST_NAME,
    MAX_FILE_BYTES,
    Manifest,
    OtherFile,
    Shape,
    Store,
    is_store,
    open_store,
    plan_record_files,
)

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_JOURNAL_NAME = "journal.jsonl"
_SYNC_BYTES = 256 << 20  # written between two syncs: bounds the dirty pages, and what a loss of power undoes
_SMALL_FILE = 1 << 20
_SPARE_BYTES = 16 << 20  # for the manifest, the journal and the file system's own needs

Progress = Callable[[int, int], None]  # bytes done, bytes in all
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

    @property
    def record_bytes(self) -> int:
        return self.shape.record_bytes(self.weights, self.group_size)

    def identity(self) -> dict[str, Any]:
        table = asdict(self)
        del table["source_name"]  # a folder may move
        return {"format_version": FORMAT_VERSIONS[self.weights], **table, "modules": list(self.modules)}

    def is_plan_of(self, manifest: Manifest) -> bool:
        mine = (self.shape, self.modules, self.weights, self.group_size, self.source_fingerprint)
        shape = manifest.shape
        if shape.activation is None:  # perhaps one that was not fused yet when the same records were written
            shape = replace(shape, activation=self.shape.activation)
        return mine == (
            shape,
            manifest.modules,
            manifest.weights,
            manifest.group_size,
            manifest.source_fingerprint,
        )


@dataclass(frozen=True)
class NewFile:
    """A file to write beside the records. ``chunks`` yields its ``size`` bytes, anew at each call."""

    name: str
    size: int
    chunks: Callable[[], Iterable[bytes]]


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
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Writes the store of ``plan`` to ``folder``, or continues what an earlier run of the same plan began.

    ``records`` gives every (layer, expert) once, with a callable that makes its packed record; callables run on ``workers`` threads
    (default: the processors this process may use), a few at a time. ``force`` replaces a store that is there already.

    Raises ``StoreError`` if ``folder`` holds something else, or the disk has too little room or fills up. After any error, a kill or
    Ctrl-C, the same call continues.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        existing = _existing_store(folder, plan, force)
        if existing is not None:
            return Written(existing, existed=True)
        partial = folder.with_name(f".{folder.name}.partial")
        if not _is_finished(partial, plan):
            _check_free_space(partial, plan, files, max_file_bytes)
            with (
                _full_disk_as_store_error(partial),
                contextlib.closing(_Conversion(partial, plan, max_file_bytes)) as conversion,
            ):
                conversion.run(records, files, workers or len(os.sched_getaffinity(0)), progress)
        _move_into_place(partial, folder)
    return Written(open_store(folder), existed=False)


class _Journal:
    """Lines of JSON: the plan, then what is finished. A torn last line is dropped."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.records: dict[tuple[int, int], int] = {}
        self.files: dict[str, OtherFile] = {}
        self.resumed = False
        kept = self._load(path, identity)
        self._file = path.open("r+b" if kept else "w+b", buffering=0)
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
                elif "record" in entry:
                    layer, expert = entry["record"]
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
        self._unsynced = 0

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
    ) -> None:
        self._remove_leftovers(files)
        counter = _Counter(self._plan, self._record_bytes, files, progress)
        self._open_record_files()
        self._drop_damaged_records(counter)
        for file in files:
            self._write_file(file)
            counter.add(file.size)
        self._write_records(records, workers, counter)
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        self._write_manifest(files)

    def _remove_leftovers(self, files: Sequence[NewFile]) -> None:
        """What an earlier run left and this one does not continue."""
        continued = {file.name for file in files} | {file.name for file, _ in self._files}
        for path in self._folder.iterdir():
            if path.name != _JOURNAL_NAME and not (self._journal.resumed and path.name in continued):
                path.unlink()

    def _open_record_files(self) -> None:
        for file, header in self._files:
            descriptor = os.open(self._folder / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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

    def _write_file(self, file: NewFile) -> None:
        path = self._folder / file.name
        known = self._journal.files.get(file.name)
        # Small files are written anew: they may have been edited in the source since.
        if known is not None and file.size == known.bytes > _SMALL_FILE and _has_digest(path, known.digest):
            return
        digest = hashlib.blake2b(digest_size=16)
        with path.open("wb") as stream:
            for chunk in file.chunks():
                stream.write(chunk)
                digest.update(chunk)
            stream.flush()
            os.fsync(stream.fileno())
            written = stream.tell()
        if written != file.size:
            raise store_error(
                path, f"{written} bytes were written, {file.size} expected: did the source change meanwhile?"
            )
        self._journal.add_file(OtherFile(file.name, written, digest.hexdigest()))

    def _write_records(self, records: Iterable[tuple[int, int, RecordMaker]], workers: int, counter: _Counter) -> None:
        waiting: set[Future[tuple[int, int, int]]] = set()
        executor = ThreadPoolExecutor(workers, thread_name_prefix="torch_mesh-pack")
        try:
            for layer, expert, make in records:
                if (layer, expert) in self._journal.records:
                    continue
                waiting.add(executor.submit(self._write_record, layer, expert, make))
                if len(waiting) > workers:
                    waiting = self._collect(waiting, counter)
            while waiting:
                waiting = self._collect(waiting, counter)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

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

    def _collect(
        self, waiting: set[Future[tuple[int, int, int]]], counter: _Counter
    ) -> set[Future[tuple[int, int, int]]]:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            self._journal.add_record(*future.result())
            counter.add(self._record_bytes)
            self._unsynced += self._record_bytes
        if self._unsynced >= _SYNC_BYTES:
            self._sync()
        return waiting

    def _sync(self) -> None:
        for descriptor in self._descriptors:
            os.fdatasync(descriptor)
            # Written once and not read here again: leave the page cache to others.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._journal.sync()
        self._unsynced = 0

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
        )
        unfinished = self._folder / f"{MANIFEST_NAME}.new"
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(manifest.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(self._folder / MANIFEST_NAME)


class _Counter:
    def __init__(self, plan: StorePlan, record_bytes: int, files: Sequence[NewFile], progress: Progress | None) -> None:
        self._total = plan.shape.layers * plan.shape.experts * record_bytes + sum(file.size for file in files)
        self._done = 0
        self._progress = progress
        self.add(0)

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _has_digest(path: Path, digest: str) -> bool:
    return path.is_file() and file_digest(path) == digest


def file_digest(path: Path) -> str:
    """BLAKE2b-128 of a file's bytes, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing the same store. The kernel lets go when the process dies."""
    path = folder.with_name(f".{folder.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _wait_for_lock(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        # Whoever held the lock before may have removed the file: then this is the lock of a file nobody else sees.
        if _same_file(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink()
        os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _LOG.warning("Another process is writing %s; waiting for it.", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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


def _check_free_space(partial: Path, plan: StorePlan, files: Sequence[NewFile], max_file_bytes: int) -> None:
    """Raises ``StoreError`` unless what is still to write fits on the disk."""
    record_files = plan_record_files(plan.shape, plan.modules, plan.record_bytes, bytes(16), max_file_bytes)
    total = sum(file.size for file in files) + sum(file.bytes for file, _ in record_files)
    present = sum(path.stat().st_blocks * 512 for path in partial.iterdir()) if partial.is_dir() else 0
    needed = max(0, total - present) + _SPARE_BYTES
    status = os.statvfs(partial.parent)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise store_error(
            partial.parent,
            f"the disk has {_megabytes(free)} free; {_megabytes(needed)} of {_megabytes(total)} are still to be written. "
            "Free some, or choose another folder or smaller weights",
        )


def _is_finished(partial: Path, plan: StorePlan) -> bool:
    """Whether the last run was killed between its manifest and its rename."""
    if not is_store(partial):
        return False
    try:
        return plan.is_plan_of(open_store(partial).manifest)
    except StoreError:
        return False


def _move_into_place(partial: Path, folder: Path) -> None:
    (partial / _JOURNAL_NAME).unlink(missing_ok=True)
    _sync_folder(partial)
    if is_store(folder):
        replaced = folder.with_name(f".{folder.name}.replaced-{secrets.token_hex(4)}")
        folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while len(rest):
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


@contextlib.contextmanager
def _full_disk_as_store_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise store_error(
            folder, "the disk is full. What is finished stays there: free some room and run the same command again"
        ) from problem


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
