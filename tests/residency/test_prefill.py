"""The prefill window in a model: reads of a prompt, hit rates of decoding after it, and unchanged tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh
from torch_mesh.modules.experts import patched_modules

SETTINGS = ("auto", "window", "off")
PROMPT, DECODED = 384, 32


@pytest.fixture(scope="module")
def ids(mesh_tiny: Path) -> torch.Tensor:
    lines = (Path(__file__).parents[1] / "data" / "text" / "prose.jsonl").read_text().splitlines()
    tokens = AutoTokenizer.from_pretrained(mesh_tiny)(json.loads(lines[0])["text"], return_tensors="pt").input_ids
    assert tokens.size(1) >= PROMPT + DECODED
    return tokens[:, : PROMPT + DECODED]


@pytest.fixture
def open_model(int8_store: Path) -> Callable[..., PreTrainedModel]:
    def open_it(**fields: Any) -> PreTrainedModel:
        config = torch_mesh.MeshConfig(**{"resident": 0.25, "io": "threads"} | fields)
        return AutoModelForCausalLM.from_pretrained(int8_store, quantization_config=config)

    return open_it


def drain(model: PreTrainedModel) -> None:
    next(patched_modules(model))._mesh_pool.engine.drain()


def forward(model: PreTrainedModel, ids: torch.Tensor, past: Any = None) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=past, use_cache=True)


def test_no_setting_changes_the_logits(open_model: Callable[..., PreTrainedModel], ids: torch.Tensor) -> None:
    logits = [
        forward(open_model(prefill=prefill, workspace=workspace), ids[:, :PROMPT]).logits
        for prefill in SETTINGS
        for workspace in ("256MiB", "256KiB")
    ]
    resident = forward(open_model(resident=1.0), ids[:, :PROMPT]).logits
    for other in logits:
        assert torch.equal(other, resident)


@pytest.mark.parametrize("prefill", ["auto", "window"])
def test_a_prompt_reads_each_expert_at_most_once(
    open_model: Callable[..., PreTrainedModel], ids: torch.Tensor, prefill: str
) -> None:
    model = open_model(prefill=prefill)
    for prompts in (1, 2):
        forward(model, ids[:, :PROMPT])
        drain(model)
        stats = torch_mesh.stats(model)
        assert max(max(layer.experts.promoted) for layer in stats.per_layer) <= prompts
    assert stats.prefetches > 0
    assert stats.prefill.prefetches == stats.prefetches
    assert stats.per_layer[0].prefetches == 0


def test_off_reads_nothing_ahead(open_model: Callable[..., PreTrainedModel], ids: torch.Tensor) -> None:
    model = open_model(prefill="off")
    forward(model, ids[:, :PROMPT])
    assert torch_mesh.stats(model).prefetches == 0


def test_a_prompt_of_few_experts_does_not_use_the_window(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    forward(model, torch.full((1, 24), 7))  # the same token repeated
    assert torch_mesh.stats(model).prefetches == 0


def hits_of_decode(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> float | None:
    """Return the hit rate of the last DECODED tokens, after a prompt of ``prompt`` tokens and single steps."""
    past = forward(model, ids[:, :prompt]).past_key_values if prompt else None
    for token in range(prompt, ids.size(1)):
        if token == PROMPT:
            drain(model)
            torch_mesh.reset_stats(model)
        past = forward(model, ids[:, token : token + 1], past).past_key_values
    return torch_mesh.stats(model).decode.hit_rate


def test_decode_starts_with_the_prompts_most_used_experts(
    open_model: Callable[..., PreTrainedModel], ids: torch.Tensor
) -> None:
    rates = {
        "prefilled": hits_of_decode(open_model(prefetch="off"), ids, PROMPT),
        "without": hits_of_decode(open_model(prefetch="off", prefill="off"), ids, PROMPT),
        "warmed": hits_of_decode(open_model(prefetch="off"), ids, 0),
    }
    assert rates["prefilled"] > rates["without"] - 0.01, rates
    assert rates["prefilled"] > rates["warmed"] - 0.02, rates


def test_a_single_layer_of_a_store_prefetches_no_other_layer(int8_store: Path) -> None:
    layer = torch_mesh.Experts.from_store(int8_store, 1, resident=0.25)
    hidden = layer.experts._mesh_pool.geometry.hidden
    ids = torch.rand(64, 32).topk(4).indices
    layer(torch.randn(64, hidden), ids, torch.rand(64, 4))
    assert [counters.prefetches > 0 for counters in torch_mesh.stats(layer).per_layer].count(True) == 0
