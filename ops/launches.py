"""Launch parameters of the Triton kernels: a fixed table without autotuning.

Only shapes enter, so that one call always takes one path and gives the same bits. No figure has been tuned on a GPU:
docs/gpu.md says what ran where.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_mesh.formats import FORMATS

BLOCK_COLUMNS = 64  # of a record: csrc/store/record.h
# Of one matrix, that the kernels compute with.
_FORMATS = {name: each for name, each in FORMATS.items() if each.gpu and each.matrices is None}
# Values in a word, of which fp8's have 16 bits, or in a window of a trellis' codes.
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


# Few rows: each row reads the weights in 64-column blocks, split along their depth into enough programs to saturate
# memory.
FEW: dict[str, Launch] = {name: Launch(2, 4) if each.bits == 4 else Launch(4, 3) for name, each in _FORMATS.items()}
# Many rows: tiles of an expert's rows, through the tensor cores.
MANY: dict[str, Launch] = {name: Launch(4, 4) if name == "bf16" else Launch(4, 3) for name in _FORMATS}
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
