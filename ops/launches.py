"""Launch parameters of the Triton kernels: a fixed table without autotuning.

Only shapes enter, so that one call always takes one path and gives the same bits. No figure has been tuned on a GPU:
docs/gpu.md says what ran where.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_COLUMNS = 64  # of a record: csrc/store/record.h


@dataclass(frozen=True)
class Launch:
    """Options of one kernel launch."""

    warps: int
    stages: int  # of the software pipeline


# Few rows: each row reads the weights in 64-column blocks, split along their depth into enough programs to saturate
# memory.
_FOUR_BITS = "int4", "lut4", "int4_fp16", "mxfp4", "nvfp4"
_EIGHT_BITS = "int8", "int8_fp16", "fp8"
_TRELLIS = "tcq3", "tcq2"  # with as many windows as words of eight bits
FEW: dict[str, Launch] = {
    "bf16": Launch(4, 3),
    **dict.fromkeys(_EIGHT_BITS, Launch(4, 3)),
    **dict.fromkeys(_FOUR_BITS, Launch(2, 4)),
    **dict.fromkeys(_TRELLIS, Launch(4, 3)),
}
# Many rows: tiles of an expert's rows, through the tensor cores.
MANY: dict[str, Launch] = {"bf16": Launch(4, 4), **dict.fromkeys((*_EIGHT_BITS, *_FOUR_BITS, *_TRELLIS), Launch(4, 3))}
ELEMENTWISE = Launch(4, 1)

_FEW_PROGRAMS = 1024  # two waves of four on each of an H100's multiprocessors
_MAX_SPLITS = 16
_MIN_DEPTH = 256  # of a split
TILE_ROWS = (16, 32, 64, 128)  # tl.dot needs 16
REDUCE_COLUMNS = 256


def depth_step(format: str, group_size: int) -> int:
    """Depth of a step of a product: a group, for most formats.

    fp8's groups of 128 are split and nvfp4's of 16 joined; blocks are padded to a multiple of 64.
    """
    if format in ("bf16", "nvfp4") or (format == "fp8" and group_size != 32):
        return 64
    return group_size


def uses_tiles(pairs: int, experts: int) -> bool:
    """Whether to use tiles for ``pairs`` (token, choice) pairs: from one per expert on, reading an expert once pays."""
    return pairs > experts


def splits(pairs: int, blocks: int, depth: int) -> int:
    """Splits of the depth for pairs x blocks few-row products: a power of two, since each is compiled."""
    wanted = -(-_FEW_PROGRAMS // max(1, pairs * blocks))
    most = max(1, min(wanted, _MAX_SPLITS, depth // _MIN_DEPTH))
    return 1 << (most.bit_length() - 1)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: an expert's average, rounded up to the next of ``TILE_ROWS``."""
    average = -(-pairs // experts)
    return next((rows for rows in TILE_ROWS if rows >= average), TILE_ROWS[-1])
