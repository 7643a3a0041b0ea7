"""Experts read from a checkpoint's safetensors: packed after each read, with the bits of a converted store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_pools import Spec, engine_options, ops, routing

from torch_mesh import _C

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATRICES = ("gate", "up", "down")


def _extents(path: Path, experts: int) -> np.ndarray:
    """int64 [1, experts, 3, 3] of (file, offset, bytes); offsets in a safetensors file are not aligned."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    extents = np.zeros((1, experts, len(MATRICES), 3), dtype=np.int64)
    for expert in range(experts):
        for piece, name in enumerate(MATRICES):
            begin, end = header[f"{expert}.{name}"]["data_offsets"]
            extents[0, expert, piece] = (0, 8 + length + begin, end - begin)
    return extents


def _views(spec: Spec) -> dict[str, _C.RawView]:
    rows = {"gate": spec.hidden, "up": spec.hidden, "down": spec.intermediate}
    return {
        name: {"piece": piece, "offset": 0, "row_stride": rows[name], "column_stride": 1}
        for piece, name in enumerate(MATRICES)
    }


@pytest.mark.parametrize("raw", sorted(DTYPES))
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_bits_are_those_of_packed_records(tmp_path: Path, weights: str, raw: str) -> None:
    spec = Spec(weights=weights)
    shapes = {"gate": (40, 72), "up": (40, 72), "down": (72, 40)}
    tensors = {
        f"{expert}.{name}": torch.randn(shape).to(DTYPES[raw])
        for expert in range(spec.experts)
        for name, shape in shapes.items()
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    files = [(str(path), path.stat().st_size)]
    source = _C.Source(files, _extents(path, spec.experts), None, b"\0" * 16, raw, [_views(spec)])
    engine = _C.Engine(**engine_options(spec, slots=3), source=source)
    packed = _C.Engine(**engine_options(spec), source=None)
    try:
        for expert in range(spec.experts):
            matrices = (tensors[f"{expert}.{name}"] for name in MATRICES)
            record = ops.pack(*matrices, None, None, None, weights, spec.group_size)
            packed.fill(0, expert, record.numpy())
            assert torch.equal(torch.from_numpy(engine.read_record(0, expert)), record)
        x = torch.randn(9, spec.hidden)
        ids, gates = routing(spec, 9, 3)
        handles = [torch.tensor([each.id, 0]) for each in (engine, packed)]
        out, expected = (ops.experts(x, ids, gates, handle) for handle in handles)
        assert torch.equal(out, expected)
        engine.validate()
    finally:
        engine.close()
        packed.close()
