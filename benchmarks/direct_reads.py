"""Plain direct reads with the reader's chunk size and number of requests in flight: the limit for cold reads.

Like the pool's reads they go into huge pages that were touched before, and more of them than caches hold. Small pages
split the disk's requests. Where the disk is virtual the host copies what was read, a quarter faster into a cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch_mesh.planning.machine import huge_pages
from torch_mesh.store.manifest import open_store
from torch_mesh.system.timing import LARGE_BYTES

CHUNK, DEPTH = 1 << 20, 16  # as in csrc/io/reader.h
BLOCK = 4096

Part = tuple[int, int, int]  # index of the file, offset, bytes


def read_records(folder: Path) -> float:
    """Seconds to read all records of a store."""
    source = open_store(folder).source_arguments()
    return read_parts([path for path, _ in source["files"]], source["extents"].reshape(-1, 3).tolist())


def read_files(paths: Sequence[Path]) -> float:
    """Seconds to read files from end to end."""
    return read_parts(paths, [(file, 0, path.stat().st_size) for file, path in enumerate(paths)])


def read_parts(paths: Sequence[str | Path], parts: Iterable[Part]) -> float:
    """Seconds to read parts of files; each part begins at a block."""
    with reader_of(paths) as seconds:
        return seconds(parts)


@contextmanager
def reader_of(paths: Sequence[str | Path]) -> Iterator[Callable[[Iterable[Part]], float]]:
    """Return ``read_parts`` for these files, for several calls. The threads start with the first call; buffers and
    descriptors exist before."""
    pages = memoryview(huge_pages(LARGE_BYTES))
    buffers = LARGE_BYTES // (DEPTH * CHUNK)  # of each thread
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC) for path in paths]

    used = [0] * DEPTH

    def read(reader: int, chunks: Sequence[Part]) -> None:
        for file, offset, size in chunks:
            begin = (reader * buffers + used[reader] % buffers) * CHUNK
            used[reader] += 1
            blocks = pages[begin : begin + -(-size // BLOCK) * BLOCK]  # the last block of a file may be shorter
            if os.preadv(descriptors[file], [blocks], offset) < size:
                raise RuntimeError(f"a read of {paths[file]} at {offset} was short")

    try:
        with ThreadPoolExecutor(DEPTH) as readers:

            def seconds(parts: Iterable[Part]) -> float:
                chunks = [
                    (file, offset + start, min(CHUNK, size - start))
                    for file, offset, size in parts
                    for start in range(0, size, CHUNK)
                ]
                chunks_of_readers = [chunks[first::DEPTH] for first in range(min(DEPTH, len(chunks)))]
                begin = time.perf_counter()
                list(readers.map(read, range(DEPTH), chunks_of_readers))
                return time.perf_counter() - begin

            yield seconds
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
