"""The folder of an unfinished store: records and files on several threads, a journal of finished ones, the manifest
last."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import prefix_errors_with
from torch_mesh.store.folders import is_folder
from torch_mesh.store.header import store_error
from torch_mesh.store.journal import JOURNAL_NAME, Journal
from torch_mesh.store.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    Manifest,
    OtherFile,
    block_checksum,
    file_digest,
    plan_record_files,
)
from torch_mesh.store.stages import Stage, Streaming
from torch_mesh.store.store_plan import (
    TEMPLATES_FOLDER,
    Chunk,
    NewFile,
    Pack,
    Progress,
    Record,
    Scratch,
    StorePlan,
)
from torch_mesh.system.atomic_files import FILE_MODE, new_file
from torch_mesh.system.background import Flag, Task, TaskThreads

_SYNC_BYTES = 256 << 20  # written between two syncs, which may overlap: bounds the dirty pages
_SMALL_FILE = 1 << 20

_Written = OtherFile | tuple[int, int, int]  # a file, or layer, expert and checksum of a record


class UnfinishedStore:
    """The folder of one unfinished store."""

    def __init__(self, folder: Path, plan: StorePlan, max_file_bytes: int) -> None:
        self._folder = folder
        self._plan = plan
        self._record_bytes = plan.record_bytes
        folder.mkdir(exist_ok=True)
        self._journal = Journal(folder / JOURNAL_NAME, plan.identity())
        self._files = plan_record_files(
            plan.shape, plan.modules, self._record_bytes, self._journal.store_id, max_file_bytes
        )
        self._descriptors: list[int] = []
        self._intact: set[str] = set()  # files of an earlier run with the right digest
        self._stopping = Flag()
        self._file_under_way = False
        self._one_file = threading.Lock()
        self._writing = threading.Lock()  # of records; the kernel writes to a file one at a time anyway
        self._last_sync: Task[None] | None = None

    def close(self) -> None:
        self._stopping.set()
        with self._writing:  # repeated Ctrl-C leaves threads that pack: they must not write to closed descriptors
            for descriptor in self._descriptors:
                os.close(descriptor)
        self._journal.close()

    def run(
        self,
        pack: Pack,
        files: Sequence[NewFile],
        workers: int,
        progress: Progress | None,
        check_source: Callable[[], None],
        scratch: Scratch | None,
        streaming: Streaming | None,
    ) -> None:
        names, scratch_bytes = ((), 0) if scratch is None else (scratch.names, scratch.bytes)
        self._remove_leftovers(files, names)
        records = self._plan.shape.layers * self._plan.shape.experts * self._record_bytes
        counter = _Counter(records + sum(file.size for file in files) + scratch_bytes, progress)
        self._open_record_files()
        self._drop_damaged_records(counter)
        if scratch is not None:
            prepared = counter.done + scratch.bytes
            if self._missing_records():
                scratch.prepare(self._folder, counter.add)
            counter.add(prepared - counter.done)  # preparing may take less than its maximum
        with TaskThreads(workers) as packing, TaskThreads(1) as syncing:
            try:
                for stage in self._stages(files, streaming):
                    self._collect(packing.run(self._tasks(pack, stage.records, stage.files)), syncing, counter)
                self._finish_sync()
            except BaseException:
                self._stopping.set()  # leaving the context waits for running tasks
                raise
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        check_source()
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        self._write_manifest(files)

    def _missing_records(self) -> list[Record]:
        return [record for record in self._plan.shape.records() if record not in self._journal.records]

    def _remove_leftovers(self, files: Sequence[NewFile], others: Iterable[str]) -> None:
        """Remove files of an earlier run that this one does not continue."""
        continued = {file.name for file in files} | {file.name for file, _ in self._files} | set(others)
        for path in self._folder.iterdir():
            kept = self._journal.resumed and path.name in continued and not path.is_symlink()
            if is_folder(path) and path.name == TEMPLATES_FOLDER:
                shutil.rmtree(path)  # small files are written anew
            elif path.name != JOURNAL_NAME and not kept:
                if is_folder(path):
                    raise store_error(path, "is in the way: no conversion made this folder. Move it")
                path.unlink()

    def _open_record_files(self) -> None:
        for file, header in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._folder / file.name, flags, FILE_MODE)
            self._descriptors.append(descriptor)
            _write_all(descriptor, header, 0)
            os.ftruncate(descriptor, file.bytes)

    def _locate(self, layer: int, expert: int) -> tuple[int, int]:
        index = layer * self._plan.shape.experts + expert
        number, within = divmod(index, self._files[0][0].records)  # every file but the last has the same number
        return self._descriptors[number], self._files[number][0].data_start + within * self._record_bytes

    def _drop_damaged_records(self, counter: _Counter) -> None:
        for (layer, expert), checksum in list(self._journal.records.items()):
            descriptor, offset = self._locate(layer, expert)
            if self._checksum(layer, expert, os.pread(descriptor, self._record_bytes, offset)) == checksum:
                counter.add(self._record_bytes)
            else:
                del self._journal.records[layer, expert]

    def _checksum(self, layer: int, expert: int, record: bytes | npt.NDArray[np.uint8]) -> int:
        from torch_mesh import _C

        return _C.record_checksum(self._journal.store_id, layer, expert, record)

    def _stages(self, files: Sequence[NewFile], streaming: Streaming | None) -> Iterator[Stage]:
        """Yield the remaining records and files when they can be made. The caller makes all of a stage before it
        requests the next."""
        missing = self._missing_records()
        if streaming is None:
            yield Stage(None, missing, list(files))
            return
        # The hub's hashes identify files made from weights, so that these weights need not be fetched again.
        self._intact = {file.name for file in files if file.pieces and self._is_intact(file)}
        unwritten = [replace(file, pieces=()) if file.name in self._intact else file for file in files]
        yield from streaming.fetched(missing, unwritten)

    def _write_file(self, file: NewFile) -> OtherFile:
        with self._one_file:
            # Small files are rewritten: they may have been edited in the source.
            if file.name in self._intact or (file.size > _SMALL_FILE and self._is_intact(file)):
                return self._journal.files[file.name]
            return self._write_anew(self._folder / file.name, file)

    def _is_intact(self, file: NewFile) -> bool:
        """Whether an earlier run wrote the file, by its digest."""
        path, known = self._folder / file.name, self._journal.files.get(file.name)
        if known is None or file.size != known.bytes or not path.is_file():
            return False
        return file_digest(path, self._stop_if_asked) == known.digest

    def _write_anew(self, path: Path, file: NewFile) -> OtherFile:
        digest, checksums = hashlib.blake2b(digest_size=16), []
        path.parent.mkdir(exist_ok=True)
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
        self, pack: Pack, records: Iterable[Record], files: Sequence[NewFile]
    ) -> Iterator[Callable[[], _Written]]:
        """Write one file beside the records at a time, since a file may hold a whole tensor in memory."""
        waiting = deque(files)
        for record in records:
            if waiting and not self._file_under_way:
                self._file_under_way = True
                yield partial(self._write_file, waiting.popleft())
            yield partial(self._write_record, pack, *record)
        for file in waiting:
            yield partial(self._write_file, file)

    def _collect(self, written: Iterable[_Written], syncing: TaskThreads, counter: _Counter) -> None:
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
                self._finish_sync()
                self._last_sync = syncing.submit(self._sync)  # while the next records are packed
                unsynced = 0

    def _finish_sync(self) -> None:
        if self._last_sync is not None:
            self._last_sync.result()

    def _write_record(self, pack: Pack, layer: int, expert: int) -> tuple[int, int, int]:
        with prefix_errors_with(f"{self._plan.modules[layer]}, expert {expert}"):
            record = pack(layer, expert).numpy()
        if record.dtype != np.uint8 or record.shape != (self._record_bytes,):
            raise ValueError(
                f"the record of layer {layer}, expert {expert} is {record.dtype} {record.shape}, not uint8 "
                f"({self._record_bytes},)"
            )
        checksum = self._checksum(layer, expert, record)
        descriptor, offset = self._locate(layer, expert)
        with self._writing:
            self._stop_if_asked()
            _write_all(descriptor, record.data, offset)
        return layer, expert, checksum

    def _stop_if_asked(self) -> None:
        if self._stopping.is_set():
            raise CancelledError  # not collected, since another error is raised

    def _sync(self) -> None:
        for descriptor in self._descriptors:
            _sync_data(descriptor)
        self._journal.sync()

    def _write_manifest(self, files: Sequence[NewFile]) -> None:
        plan, journal = self._plan, self._journal
        shape = plan.shape
        checksums = np.empty((shape.layers, shape.experts), dtype=np.uint64)
        for record, checksum in journal.records.items():
            checksums[record] = checksum
        manifest = Manifest(
            **vars(plan),
            store_id=journal.store_id,
            record_bytes=self._record_bytes,
            record_files=tuple(file for file, _ in self._files),
            other_files=tuple(journal.files[file.name] for file in files),
            checksums=checksums,
        )
        with new_file(self._folder / MANIFEST_NAME) as stream:
            stream.write(manifest.to_json().encode())


class _Counter:
    """Reports the bytes that are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = 0
        self._total, self._progress = total, progress
        self.add(0)

    def add(self, count: int) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(self.done, self._total)


def _blocks(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    """The bytes of ``chunks``, cut at the blocks of a file's checksums. Each block overwrites the previous one."""
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


def _sync_data(descriptor: int) -> None:
    os.fdatasync(descriptor)
    # Written once: do not occupy the page cache.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest, at = memoryview(data), offset
    while len(rest):
        count = os.pwrite(descriptor, rest, at)
        rest, at = rest[count:], at + count
    # Begin writeback now, instead of all of it at the next sync.
    os.posix_fadvise(descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)
