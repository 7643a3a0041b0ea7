"""Stores of a few kilobytes, made without a model."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_mesh.store.manifest import Shape, Store
from torch_mesh.store.store_plan import NewFile, StorePlan
from torch_mesh.store.writer import write_store

_SHAPE = Shape(layers=1, experts=3, top_k=1, hidden=64, intermediate=32, gated=True, bias=False, activation="silu")


def write(folder: str | Path, weights: str, *, force: bool = False) -> Store:
    """Write a store with one other file besides its records, unless it exists already."""
    plan = StorePlan(_SHAPE, ("layers.0.experts",), weights, 64, source_name="none", source_fingerprint="none")

    def pack(layer: int, expert: int) -> torch.Tensor:
        return torch.full((plan.record_bytes,), expert, dtype=torch.uint8)

    file = NewFile("notes.txt", len(weights), lambda: [weights.encode()])
    return write_store(folder, plan, pack, [file], force=force).store
