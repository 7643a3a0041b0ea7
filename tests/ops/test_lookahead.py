"""lookahead: the next layer's router says what to read, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pools import OpenPool, Spec, ops
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.modules import patched_modules

SPEC = Spec(layers=2)


def _router(*ranked: int) -> torch.Tensor:
    """A router that ranks these experts first, in this order, for a row of ones."""
    weight = torch.zeros(SPEC.experts, SPEC.hidden)
    for rank, expert in enumerate(ranked):
        weight[expert] = SPEC.experts - rank
    return weight


def test_reads_what_the_router_ranks_first(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    ops.lookahead(torch.ones(1, SPEC.hidden), _router(6, 1, 3), pool.handle(1), 2)
    pool.engine.drain()
    assert pool.ready(1) == {1, 6} and pool.ready(0) == set()
    assert pool.count("prefetches", 1) == 2 and pool.count("accesses", 1) == 0


def test_a_router_may_have_another_dtype(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    ops.lookahead(torch.ones(2, SPEC.hidden, dtype=torch.bfloat16), _router(5), pool.handle(1), 1)
    pool.engine.drain()
    assert pool.ready(1) == {5}


def test_prompts_are_left_alone(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    ops.lookahead(torch.ones(64, SPEC.hidden), _router(6), pool.handle(1), 2)
    ops.lookahead(torch.ones(0, SPEC.hidden), _router(6), pool.handle(1), 2)
    assert pool.count("prefetches", 1) == 0


@pytest.mark.parametrize(
    ("shape", "top_k", "message"),
    [((SPEC.experts + 1, SPEC.hidden), 1, "router_weight"), ((SPEC.experts, SPEC.hidden), 9, "top_k is 9")],
)
def test_what_does_not_fit_is_refused(open_pool: OpenPool, shape: tuple[int, int], top_k: int, message: str) -> None:
    pool = open_pool(SPEC, slots=8)
    with pytest.raises(ValueError, match=message):
        ops.lookahead(torch.ones(1, SPEC.hidden), torch.ones(shape), pool.handle(1), top_k)


def test_opcheck(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    torch.library.opcheck(
        ops.lookahead.default, (torch.ones(1, SPEC.hidden), _router(6), pool.handle(1), 2), raise_exception=True
    )


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
