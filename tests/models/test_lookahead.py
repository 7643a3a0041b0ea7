"""lookahead in a model: it reads ahead, and the tokens stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.modules import patched_modules


def _generate(folder: Path, **fields: object) -> tuple[torch.Tensor, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=torch_mesh.MeshConfig(resident=0.25, **fields)
    )
    prompt = torch.arange(3, 15).unsqueeze(0)
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    return tokens, torch_mesh.stats(model)


def test_a_loaded_model_looks_ahead_and_gives_the_same_tokens(mesh_tiny: Path) -> None:
    with_hints, hinted = _generate(mesh_tiny)
    without, plain = _generate(mesh_tiny, prefetch="off")
    assert torch.equal(with_hints, without)
    assert hinted.cold_misses < 0.8 * plain.cold_misses
