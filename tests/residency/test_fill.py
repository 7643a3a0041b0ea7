"""residency.fill: experts are read into empty slots before any forward needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.experts import patched_modules
from torch_mesh.pool.expert_pool import ExpertPool


@pytest.fixture(autouse=True)
def _by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_MESH_FILL")


def _open(folder: Path, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(**fields))


def _pool(model: PreTrainedModel) -> ExpertPool:
    return next(iter(patched_modules(model)))._mesh_pool


def _resident(model: PreTrainedModel) -> list[int]:
    """Return the number of resident experts of each layer, after all reads have ended."""
    modules = list(patched_modules(model))
    _pool(model).engine.drain()
    return [int((torch.ops.torch_mesh.residency(module._mesh_handle) == 2).sum()) for module in modules]


@pytest.mark.parametrize("resident", [1.0, 0.5])
def test_a_pool_fills_by_itself_with_an_equal_number_of_each_layer(mesh_tiny: Path, resident: float) -> None:
    model = _open(mesh_tiny, resident=resident)
    there = _resident(model)
    assert sum(there) == _pool(model).slots
    assert max(there) - min(there) <= 1
    with torch.no_grad():
        filled = model(torch.arange(8)[None]).logits
    stats = torch_mesh.stats(model)
    assert stats.hits == stats.accesses or resident < 1
    with torch.no_grad():
        expected = _open(mesh_tiny, resident=resident, residency={"fill": "off"})(torch.arange(8)[None]).logits
    assert torch.equal(filled, expected)


def test_off_reads_only_what_forwards_need(mesh_tiny: Path) -> None:
    model = _open(mesh_tiny, resident=1.0, residency={"fill": "off"})
    assert sum(_resident(model)) == 0
