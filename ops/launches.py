"""How the Triton kernels are launched: a small table, read and never searched for at first use.

Only shapes enter, so that the same call always takes the same path and gives the same bits. None of these figures has been
tuned on a card: docs/gpu.md says what has run where.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_COLUMNS = 64  # of a record: csrc/store/record.h


@dataclass(frozen=True)
class Launch:
    """Options of one kernel launch."""

    warps: int
    stages: int  # of the software pipeline


# Few rows: each row reads the weights itself, in 64-column blocks that are cut along their depth into enough programs to keep a
# card's memory busy.
_FOUR_BITS = "int4", "lut4", "int4_fp16", "mxfp4", "nvfp4"
_EIGHT_BITS = "int8", "int8_fp16", "fp8"
_TRELLIS = "tcq3", "tcq2"  # whose windows are as many as words of eight bits
FEW: dict[str, Launch] = {
    "bf16": Launch(4, 3),
    **dict.fromkeys(_EIGHT_BITS, Launch(4, 3)),
    **dict.fromkeys(_FOUR_BITS, Launch(2, 4)),
    **dict.fromkeys(_TRELLIS, Launch(4, 3)),
}
# Many rows: an expert's rows in tiles, through the tensor cores.
MANY: dict[str, Launch] = {"bf16": Launch(4, 4), **dict.fromkeys((*_EIGHT_BITS, *_FOUR_BITS, *_TRELLIS), Launch(4, 3))}
ELEMENTWISE = Launch(4, 1)

_FEW_PROGRAMS = 1024  # four on each of an H100's multiprocessors, twice
_MAX_SPLITS = 16
_MIN_DEPTH = 256  # of a split
TILE_ROWS = (16, 32, 64, 128)  # 16 is the least that tl.dot takes
REDUCE_COLUMNS = 256


def depth_step(format: str, group_size: int) -> int:
    """Values along the depth that products take at a time: a group of most formats.

    fp8's of 128 and nvfp4's of 16 are divided or joined: blocks are filled up to a multiple of 64.
    """
    if format in ("bf16", "nvfp4") or (format == "fp8" and group_size != 32):
        return 64
    return group_size


def uses_tiles(pairs: int, experts: int) -> bool:
    """Whether ``pairs`` (token, choice) pairs go in tiles: from one per expert on, reading an expert once pays."""
    return pairs > experts


def splits(pairs: int, blocks: int, depth: int) -> int:
    """Into how many parts the depth of each of pairs x blocks few-row products is cut: a power of two, each of which is compiled."""
    wanted = -(-_FEW_PROGRAMS // max(1, pairs * blocks))
    most = max(1, min(wanted, _MAX_SPLITS, depth // _MIN_DEPTH))
    return 1 << (most.bit_length() - 1)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: what an expert has on average, rounded up to a size that there is."""
    average = -(-pairs // experts)
    return next((rows for rows in TILE_ROWS if rows >= average), TILE_ROWS[-1])
