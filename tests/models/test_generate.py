"""generate() on a patched model: every way to decode gives the tokens of the fully resident model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import each_once_quick
from transformers import AutoTokenizer, PreTrainedModel

import torch_mesh

PROMPTS = ["And it came to pass in those days, that", "def main():\n    parser ="]


@pytest.fixture(scope="module")
def inputs(mesh_tiny: Path) -> dict[str, torch.Tensor]:
    """A batch of two prompts of different length."""
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))


def _generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, **settings)


@pytest.mark.parametrize(
    ("options", "weights"),
    each_once_quick(
        [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"cache_implementation": "static"}], ["bf16", "int4"]
    ),
)
def test_tokens_equal_those_of_the_fully_resident_model(
    original: PreTrainedModel, inputs: dict[str, torch.Tensor], weights: str, options: dict[str, Any]
) -> None:
    whole = torch_mesh.patch(copy.deepcopy(original), weights=weights, resident=1.0)
    quarter = torch_mesh.patch(copy.deepcopy(original), weights=weights, resident=0.25)
    tokens = _generate(quarter, inputs, **options)
    assert torch.equal(tokens, _generate(whole, inputs, **options))
    assert torch_mesh.stats(quarter).evicted > 0


def test_greedy_tokens_follow_the_unpatched_model(original: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    """The two models round differently, which may decide a near tie. After that tokens may differ, but not at once."""
    expected = _generate(original, inputs)
    tokens = _generate(torch_mesh.patch(copy.deepcopy(original), resident=0.25), inputs)
    start = inputs["input_ids"].size(1)
    agreeing = (tokens[:, start:] == expected[:, start:]).int().cumprod(dim=1).sum(dim=1)
    assert agreeing.min() >= 4
    assert agreeing.max() >= 8


@pytest.mark.parametrize("assistant_is_patched", [False, True])
def test_assisted_generation_gives_the_greedy_tokens(
    original: PreTrainedModel, inputs: dict[str, torch.Tensor], assistant_is_patched: bool
) -> None:
    one = {name: tensor[:1, -4:] for name, tensor in inputs.items()}
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.25)
    assistant = copy.deepcopy(original)
    if assistant_is_patched:
        torch_mesh.patch(assistant, weights="int4", resident=0.25)
    tokens = _generate(model, one, assistant_model=assistant)
    greedy = _generate(model, one)
    # A row is rounded differently when several rows of one expert are computed together, which may decide a near tie.
    agreeing = (tokens == greedy).int().cumprod(dim=1).sum()
    assert agreeing >= one["input_ids"].size(1) + 4
    assert tokens.shape == greedy.shape


def test_assisted_generation_does_not_depend_on_residency(
    original: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> None:
    one = {name: tensor[:1, -4:] for name, tensor in inputs.items()}
    tokens = [
        _generate(torch_mesh.patch(copy.deepcopy(original), resident=resident), one, assistant_model=original)
        for resident in (1.0, 0.25)
    ]
    assert torch.equal(*tokens)
