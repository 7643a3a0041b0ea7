"""Compares checkpoints tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("model*.safetensors")) for name, t in load_file(path).items()}


def assert_same_checkpoint(folder: Path, expected: Path) -> None:
    mine, others = saved_tensors(folder), saved_tensors(expected)
    assert mine.keys() == others.keys()
    assert all(mine[name].dtype == t.dtype and torch.equal(mine[name], t) for name, t in others.items())
    for name in ("config.json", "generation_config.json"):
        if (expected / name).is_file():
            assert json.loads((folder / name).read_text()) == json.loads((expected / name).read_text())
