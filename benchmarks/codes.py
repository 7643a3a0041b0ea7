"""Pack experts of random codes and scales, as in other tools' checkpoints, into records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_mesh import _C
from torch_mesh.formats import FORMATS

FP4_RMS = math.sqrt(sum(value * value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
SCALES = {
    "int8_fp16": ("fp16", torch.float16),
    "int4_fp16": ("fp16", torch.float16),
    "mxfp4": ("e8m0", torch.uint8),
    "nvfp4": ("e4m3", torch.float8_e4m3fn),
    "fp8": ("fp32", torch.float32),
}


def pack_random_codes(
    weights: str,
    group_size: int,
    hidden: int,
    intermediate: int,
    generator: torch.Generator,
    *,
    std: float | tuple[float, float],
    gated: bool = True,
    biases: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return one record, uint8. ``std`` is the approximate standard deviation of the weights, or a pair: of gate and
    up, and of down. ``biases`` (fp32) have the keys 'gate_bias', 'up_bias' and 'down_bias'."""
    input_std, down_std = std if isinstance(std, tuple) else (std, std)
    if FORMATS[weights].gguf:
        return _pack_gguf(weights, hidden, intermediate, generator, (input_std, down_std))
    pieces: list[bytes] = []
    views: dict[str, Any] = {}
    for part in ("gate", "up", "down") if gated else ("up", "down"):
        rows, columns = (hidden, intermediate) if part == "down" else (intermediate, hidden)
        size = down_std if part == "down" else input_std
        views[part] = _add_codes(pieces, weights, group_size, rows, columns, size, generator)
    for part, values in (biases or {}).items():
        views[part] = {"piece": len(pieces), "offset": 0, "row_stride": 1, "column_stride": 1}
        pieces.append(values.float().numpy().tobytes())
    record = _C.pack_raw(pieces, "fp32", views, weights, group_size, hidden, intermediate, gated, biases is not None)
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)


def _pack_gguf(
    weights: str, hidden: int, intermediate: int, generator: torch.Generator, stds: tuple[float, float]
) -> torch.Tensor:
    from gguf_blocks import random_blocks  # needs torch_mesh[gguf]

    numbers = np.random.default_rng(int(torch.randint(1 << 31, (), generator=generator)))
    pieces: list[bytes] = []
    views: dict[str, Any] = {}
    for part in ("gate", "up", "down"):
        rows, columns = (hidden, intermediate) if part == "down" else (intermediate, hidden)
        each = 32 if weights in ("iq4_nl", "q5_1", "q5_0", "q4_1") else 256
        blocks = random_blocks(weights.upper(), rows * columns // each, stds[part == "down"], numbers)
        views[part] = {"piece": len(pieces), "offset": 0, "order": "blocks", "row_bytes": blocks.nbytes // rows}
        pieces.append(blocks.tobytes())
    (group,) = FORMATS[weights].group_sizes
    record = _C.pack_raw(pieces, "fp32", views, weights, group, hidden, intermediate, True, False)
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)


def _add_codes(
    pieces: list[bytes], weights: str, group_size: int, rows: int, columns: int, std: float, generator: torch.Generator
) -> dict[str, Any]:
    nibbles = weights in ("int4_fp16", "mxfp4", "nvfp4")
    group = {"mxfp4": 32, "nvfp4": 16, "fp8": group_size or columns}.get(weights, group_size)
    blocks = weights == "fp8" and group_size == 128
    grid = (math.ceil(rows / 128) if blocks else rows, math.ceil(columns / group))
    if weights == "fp8":
        codes = (torch.randn(rows, columns, generator=generator) * 32).to(torch.float8_e4m3fn).view(torch.uint8)
        unit = std / 32
    else:
        width = math.ceil(columns / 2) if nibbles else columns
        codes = torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8)
        unit = std / (FP4_RMS if weights in ("mxfp4", "nvfp4") else 4.6 if nibbles else 74)
    kind, dtype = ("e8m0", torch.uint8) if weights == "fp8" and group_size == 32 else SCALES[weights]
    factors = torch.rand(grid, generator=generator) + 0.5
    if kind == "e8m0":
        scales = (127 + torch.log2(factors * unit)).round().to(dtype)
    else:
        scales = (factors * (1 if kind == "e4m3" else unit)).to(dtype)
    row_bytes = codes.shape[1]
    view: dict[str, Any] = {
        "piece": len(pieces),
        "offset": 0,
        "order": "pairs" if nibbles else "bytes",
        "run": 8 * math.ceil(columns / 8),
        "run_bytes": row_bytes,
        "row_bytes": row_bytes,
        "scales": {
            "piece": len(pieces) + 1,
            "offset": 0,
            "type": kind,
            "rows": 128 if blocks else 1,
            "columns": group,
            "row_bytes": grid[1] * dtype.itemsize,
            "column_bytes": dtype.itemsize,
        },
    }
    pieces += [codes.numpy().tobytes(), scales.view(torch.uint8).numpy().tobytes()]
    if weights == "nvfp4":
        view["factor"] = {"piece": len(pieces), "offset": 0}
        pieces.append(torch.tensor([unit], dtype=torch.float32).numpy().tobytes())
    return view
