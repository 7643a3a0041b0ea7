"""Launch parameters of the Triton kernels: a fixed table of shapes, so that one call always gives the same bits.

Measured on an H200 for bf16, int8, int4 and mxfp4 (docs/decisions/0025-triton-experts.md); other formats have the
options of the most similar of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_mesh.formats import FORMATS

BLOCK_COLUMNS = 64  # columns in a block of a record: csrc/store/record.h
# Formats of single matrices that the kernels support.
_FORMATS = {name: each for name, each in FORMATS.items() if each.gpu and each.matrices is None}
# Values in a word (16 bits for fp8), or in a window of a trellis' codes.
VALUES_PER_WORD = {
    name: 2 if name == "fp8" else 4 if each.trellis else int(32 // each.bits) for name, each in _FORMATS.items()
}
TRELLIS_BITS = {name: int(each.bits) if each.trellis else 0 for name, each in _FORMATS.items()}
SCALE_WORDS = {name: each.scale_bits * BLOCK_COLUMNS // 32 for name, each in _FORMATS.items()}  # before a group's codes


@dataclass(frozen=True)
class Launch:
    """Options of one kernel launch."""

    warps: int
    stages: int  # of the software pipeline


_LIKE_BF16 = ("bf16", "bf12")
_LIKE_INT4 = ("int4", "int4_fp16")
_LIKE_MXFP4 = ("mxfp4", "nvfp4", "lut4")  # each value is taken from a table or converted
# Few rows: each row reads the weights in 64-column blocks, split along their depth into enough programs to saturate
# memory.
FEW: dict[str, Launch] = {
    **dict.fromkeys(_FORMATS, Launch(4, 3)),
    **dict.fromkeys(_LIKE_BF16, Launch(2, 3)),
    **dict.fromkeys(_LIKE_INT4, Launch(4, 1)),
    **dict.fromkeys(_LIKE_MXFP4, Launch(1, 3)),
}
# Many rows: tiles of an expert's rows, through the tensor cores.
MANY: dict[str, Launch] = {
    **dict.fromkeys(_FORMATS, Launch(4, 3)),
    **dict.fromkeys(_LIKE_BF16, Launch(4, 4)),
    **dict.fromkeys(_LIKE_INT4, Launch(4, 2)),
}
ELEMENTWISE = Launch(4, 1)

_FEW_PROGRAMS = 2048
_MAX_SPLITS = 16
_MIN_DEPTH = 128  # minimum depth of a split
# tl.dot needs 16. Of the measured sizes, 16 to 64, these were the fastest for some number of rows.
TILE_ROWS = {
    **dict.fromkeys(_FORMATS, (16, 32)),
    **dict.fromkeys(_LIKE_BF16, (16, 64)),
    **dict.fromkeys(_LIKE_INT4, (16, 32, 64)),
}
REDUCE_COLUMNS = 256


def depth_step(format: str, group_size: int) -> int:
    """Depth of a step of a product: a group, for most formats.

    fp8's groups of 128 are split and nvfp4's of 16 joined; blocks are padded to a multiple of 64.
    """
    if format in ("bf16", "bf12", "nvfp4") or (format == "fp8" and group_size != 32):
        return 64
    return group_size


def uses_tiles(pairs: int, experts: int) -> bool:
    """Whether to use tiles for ``pairs`` (token, choice) pairs: from one per expert on, reading an expert once pays."""
    return pairs > experts


def splits(pairs: int, blocks: int, depth: int) -> int:
    """Splits of the depth for pairs x blocks few-row products: a power of two, since each is compiled."""
    wanted = -(-_FEW_PROGRAMS // max(1, pairs * blocks))
    limit = max(1, min(wanted, _MAX_SPLITS, depth // _MIN_DEPTH))
    return 1 << (limit.bit_length() - 1)


def tile_rows(format: str, pairs: int, experts: int) -> int:
    """Rows of a tile: an expert's average, rounded up to the next size that the format has, or the largest."""
    average = -(-pairs // experts)
    sizes = TILE_ROWS[format]
    return next((rows for rows in sizes if rows >= average), sizes[-1])
