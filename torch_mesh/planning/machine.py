"""Measure how fast this machine reads records and computes one token."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS, layer_formats
from torch_mesh.planning.formats import compared_formats
from torch_mesh.planning.sizes import Sizes
from torch_mesh.planning.token_time import Speeds
from torch_mesh.store.manifest import Shape
from torch_mesh.store.mirrors import find_copies
from torch_mesh.system.background import TaskThreads
from torch_mesh.system.timing import LARGE_BYTES, SECONDS, seconds_per_call

_READERS = 8
_HUGE_PAGE = 2 << 20

# Without compilation, a decoder layer spends as much time outside its products as this many calls of a small torch
# function. Measured with mesh-tiny, whose weights take no time.
_SMALL_CALLS_PER_LAYER = 300

# The largest number of outputs of a matrix that represents the weights outside the experts. Narrow models get several
# matrices, since kernels limit the size.
_MAX_ROWS = 1 << 16


def measure_speeds(
    sizes: Sizes, config: MeshConfig, *, disk: float | None = None, memory: float | None = None
) -> Speeds | None:
    """Speeds for a model of these sizes. ``disk`` and ``memory`` (bytes per second) are used if given; the rest is
    measured.

    None if ``disk`` is not given and the files are too small to measure it. Checks the mirrors as ``find_copies`` does.
    """
    measured = [name for name, given in (("disk", disk), ("experts", memory), ("dense", memory)) if given is None]
    copies = find_copies([(str(file), file.stat().st_size) for file in sizes.files], config.mirrors)
    reads = disk if disk is not None else _drives_speed(sizes, copies)
    if reads is None:
        return None
    with torch.device("cpu"):  # models may be opened under another default device
        return Speeds(
            disk=reads,
            experts=memory if memory is not None else _experts_speed(sizes),
            dense=memory if memory is not None else _dense_speed(sizes, config.dense, config.group_size),
            layer_seconds=_SMALL_CALLS_PER_LAYER * _small_call_seconds(),
            measured=(*measured, "layer_seconds"),
        )


def measure_formats(sizes: Sizes, config: MeshConfig, *, memory: float | None = None) -> dict[str, float]:
    """Bytes per second of packed experts of this shape, computed for one token, in each format that ``plan`` compares;
    ``memory``, if given, instead of measuring."""
    speeds = {}
    for weights, (group, _) in compared_formats(sizes, config).items():
        of_format = dataclasses.replace(
            sizes,
            weights=weights,
            group_size=group or None,
            expert_bytes=sizes.shape.record_bytes(weights, group),
        )
        with torch.device("cpu"):
            speeds[weights] = memory if memory is not None else _experts_speed(of_format)
    return speeds


def _drives_speed(sizes: Sizes, copies: Sequence[Sequence[str]]) -> float | None:
    """The speed of the files' drive together with the mirrors', which are read at the same time. ``copies``: as of
    ``find_copies``. What no mirror of some of the files has is read from the other drives alone."""
    own = disk_speed(sizes.files, sizes.expert_bytes)
    if own is None:
        return None
    whole, partial = own, 0.0  # drives with all files, and with some
    alone = set(range(len(copies)))  # files that no drive of the latter has
    for column in zip(*copies, strict=True):
        speed = disk_speed([Path(copy) for copy in column if copy], sizes.expert_bytes) or 0.0
        if all(column):
            whole += speed
        else:
            partial += speed
            alone -= {index for index, copy in enumerate(column) if copy}
    every = [file.stat().st_size for file in sizes.files]
    fraction = sum(every[index] for index in alone) / sum(every)
    return min(whole / fraction, whole + partial) if fraction > 0 else whole + partial


def disk_speed(files: Sequence[Path], block: int) -> float | None:
    """Bytes per second of direct reads of ``block`` bytes at random offsets of ``files``, several at a time.

    If the file system refuses direct I/O the result includes the page cache. None for less data than eight blocks.
    """
    block = -(-block // 4096) * 4096
    blocks = [(file, at) for file in files for at in range(0, file.stat().st_size - block + 1, block)]
    if len(blocks) < _READERS:
        return None
    # Read each block once: a buffered read leaves it in the page cache.
    order = np.random.default_rng().permutation(len(blocks))
    parts = [[blocks[index] for index in order[first::_READERS]] for first in range(_READERS)]
    # A pool's slots are in no CPU cache. Reads into cached memory would cost a third less, so the buffers exceed the
    # caches.
    each = max(1, LARGE_BYTES // (_READERS * block))
    with _opened(files) as descriptors, TaskThreads(_READERS) as readers:
        buffers = huge_pages(_READERS * each * block).reshape(_READERS, each, block)
        deadline = time.monotonic() + SECONDS
        begin = time.perf_counter()
        done = sum(readers.map(lambda part, own: _read(descriptors, part, own, deadline), parts, buffers))
        return done / (time.perf_counter() - begin)


def huge_pages(count: int) -> np.ndarray:
    """Memory like the pool's: in huge pages if there are any, and touched before reads.

    Private, since shared memory (Python's default) has no huge pages by default; aligned to a huge page.
    """
    pages = mmap.mmap(-1, count + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    array = array[-array.ctypes.data % _HUGE_PAGE :][:count]
    array[::4096] = 0
    return array


@contextlib.contextmanager
def _opened(files: Sequence[Path]) -> Iterator[dict[Path, int]]:
    """File descriptors, for direct reads if the file system supports them."""
    descriptors: dict[Path, int] = {}
    with contextlib.ExitStack() as stack:
        for file in files:
            direct = _C.direct_io_alignment(str(file)) >= 0
            descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            stack.callback(os.close, descriptors[file])
        yield descriptors


def _read(
    descriptors: dict[Path, int], blocks: Sequence[tuple[Path, int]], buffers: np.ndarray, deadline: float
) -> int:
    """Read the blocks into ``buffers`` [number, bytes] in turn. Return the bytes read before the deadline."""
    done = 0
    for (file, offset), buffer in zip(blocks, itertools.cycle(buffers), strict=False):
        if time.monotonic() > deadline:
            break
        done += os.preadv(descriptors[file], [buffer.data], offset)
    return done


def pool_of_zeros(shape: Shape, weights: str, group_size: int) -> _C.Engine:
    """An engine with all experts in memory and zero weights. With several formats, all layers have the largest."""
    weights = max(layer_formats(weights), key=lambda each: shape.record_bytes(each, group_size))
    engine = _C.Engine(
        layers=shape.layers,
        experts=shape.experts,
        format=weights,
        group_size=group_size,
        **shape.sizes._asdict(),
        activation=shape.activation_of(0) or "silu",  # does not affect the time
        slots=shape.layers * shape.experts,
        policy="lru",
        verify="never",
        io="auto",
        threads=0,
        workspace=64 << 20,
        timeout=30.0,
        source=None,
    )
    record = np.zeros(shape.record_bytes(weights, group_size), dtype=np.uint8)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            engine.fill(layer, expert, record)
    return engine


def _experts_speed(sizes: Sizes) -> float:
    """Bytes per second of one token's experts in memory, through the op that a model calls."""
    shape = sizes.shape
    experts = min(shape.experts, max(shape.top_k, LARGE_BYTES // sizes.expert_bytes))
    layers = max(1, min(LARGE_BYTES // (experts * sizes.expert_bytes), 256))
    engine = pool_of_zeros(
        dataclasses.replace(shape, layers=layers, experts=experts), sizes.weights, sizes.group_size or 0
    )
    try:
        handles = [torch.tensor([engine.id, layer]) for layer in range(layers)]
        x = torch.randn(1, shape.hidden, dtype=torch.bfloat16)
        weights = torch.full((1, shape.top_k), 1 / shape.top_k)
        steps = iter(range(1 << 30))

        def step() -> None:
            index = next(steps)
            first = index // layers * shape.top_k
            ids = (torch.arange(first, first + shape.top_k) % experts).view(1, -1)
            torch.ops.torch_mesh.experts(x, ids, weights, handles[index % layers])

        return shape.top_k * sizes.expert_bytes / seconds_per_call(step)
    finally:
        engine.close()


def _dense_speed(sizes: Sizes, form: str, group_size: int) -> float:
    """Bytes per second of one row times large matrices, as ``dense=`` computes it."""
    form = sizes.dense_format or form
    hidden = -(-sizes.shape.hidden // 256) * 256  # in whole blocks of every format
    rows = max(64, min(_MAX_ROWS, LARGE_BYTES // (2 * hidden) // 64 * 64))
    count = max(1, LARGE_BYTES // (2 * hidden * rows))
    x = torch.randn(1, hidden, dtype=torch.bfloat16)
    if form in ("auto", "none"):
        weights = torch.zeros(count, rows, hidden, dtype=torch.bfloat16)
        product = torch.ops.torch_mesh.plain_linear if form == "auto" else torch.nn.functional.linear
        plain = itertools.cycle(weights.unbind())
        return weights[0].nbytes / seconds_per_call(lambda: product(x, next(plain), None))
    group = group_size if FORMATS[form].chosen_groups else 0
    matrices = torch.zeros(count, _C.linear_bytes(form, group, hidden, rows), dtype=torch.uint8)
    packed = itertools.cycle(matrices.unbind())
    return matrices[0].nbytes / seconds_per_call(
        lambda: torch.ops.torch_mesh.linear(x, next(packed), None, hidden, rows, form, group)
    )


def product_flops(shape: Shape) -> float:
    """Operations per second of an expert's product for some rows in fp32, as in a backward."""
    rows = torch.randn(64, shape.hidden, device="cpu")
    weight = torch.randn(shape.hidden, 2 * shape.intermediate, device="cpu")
    return 2 * rows.size(0) * weight.numel() / seconds_per_call(lambda: rows @ weight)


def _small_call_seconds() -> float:
    x = torch.randn(1, 1024, dtype=torch.bfloat16)

    def calls() -> None:
        for _ in range(100):
            torch.nn.functional.silu(x)

    return seconds_per_call(calls, 0.1) / 100
