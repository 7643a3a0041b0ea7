"""The perplexity of the small trained model when patched, compared with the unpatched model in the same dtype."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import torch_mesh

TEXTS = Path(__file__).parents[1] / "data" / "text"


@pytest.fixture(scope="module", params=["prose", pytest.param("code", marks=pytest.mark.slow)])
def documents(request: pytest.FixtureRequest, mesh_tiny: Path) -> list[torch.Tensor]:
    """The first ten documents, with at most 512 tokens of each."""
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    lines = (TEXTS / f"{request.param}.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    return [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[:, :512] for line in lines]


def _perplexity(model: PreTrainedModel, documents: list[torch.Tensor]) -> float:
    loss, count = 0.0, 0
    for ids in documents:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.size(1) - 1
    return math.exp(loss / count)


@pytest.fixture(scope="module")
def expected(original: PreTrainedModel, documents: list[torch.Tensor]) -> float:
    perplexity = _perplexity(original, documents)
    assert 10 < perplexity < 25  # the model has learned something
    return perplexity


@pytest.mark.parametrize(
    ("weights", "tolerance"),
    [
        pytest.param("bf16", 0.001, marks=pytest.mark.thorough),  # torch's products differ as much between processors
        pytest.param("int8", 0.002, marks=pytest.mark.thorough),
        ("int4", 0.01),
        pytest.param("lut4", 0.01, marks=pytest.mark.thorough),
        pytest.param("tcq3", 0.1, marks=pytest.mark.thorough),
        pytest.param("tcq2", 0.5, marks=pytest.mark.thorough),
    ],
)
def test_perplexity_stays_within_a_tolerance_for_each_format(
    original: PreTrainedModel, documents: list[torch.Tensor], expected: float, weights: str, tolerance: float
) -> None:
    model = torch_mesh.patch(copy.deepcopy(original), weights=weights, resident=0.25)
    assert _perplexity(model, documents) == pytest.approx(expected, rel=tolerance)
