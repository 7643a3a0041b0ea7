"""Continuous batching of transformers on patched models: each of several requests gets the tokens that it would get
alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.store.convert import convert

TEXTS = [
    "And it came to pass in those days, that",
    "def main():\n    parser =",
    "In the beginning",
    "And the LORD said unto Moses, Go in unto Pharaoh, and tell him, Thus saith the LORD God of the Hebrews, Let my",
    "import os\n",
    "class",
]
GREEDY = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=4095, pad_token_id=0)
# Batches of 16 tokens: longer prompts are cut, and their parts share forwards with decode steps of other requests.
BATCHES = {"num_blocks": 24, "max_batch_tokens": 16}


@pytest.fixture(scope="module")
def prompts(mesh_tiny: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    return [tokenizer(text).input_ids for text in TEXTS]


def _alone(model: Any, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()


def _batched(model: Any, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
    batching = ContinuousBatchingConfig(**(BATCHES | options))
    return list(
        model.generate_batch(
            list(prompts), generation_config=GREEDY, continuous_batching_config=batching, warmup=False
        ).values()
    )


@torch.no_grad()
def _assert_follow(model: Any, original: Any, prompts: list[list[int]], tokens: list[list[int]]) -> None:
    """Check that each token is the greedy choice of ``model`` after the tokens before it, up to a near tie.

    Rounding depends on the rows of a forward. It moves a logit at most as far as bf16 is from float32, and the
    difference of two logits twice as far. ``original`` is the model whose weights ``model`` has, or rounds.
    """
    exact = copy.deepcopy(original).float()
    assert len(tokens) == len(prompts)
    for prompt, mine in zip(prompts, tokens, strict=True):
        assert len(mine) == GREEDY.max_new_tokens
        text, first = torch.tensor([prompt + mine]), len(prompt) - 1
        logits, wide = (each(text).logits[0, first:-1].float() for each in (model, exact))
        moved = (original(text).logits[0, first:-1].float() - wide).abs().max()
        chosen = logits.gather(1, torch.tensor(mine)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen <= 2 * moved).all(), (prompt, mine)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"resident": 0.25}, marks=pytest.mark.thorough),
        pytest.param({"resident": 0.05}, marks=pytest.mark.thorough),  # little more than one token needs
        {"resident": 0.25, "dense": "bf16"},
        pytest.param({"resident": 0.25, "policy": "lru", "prefetch": "off"}, marks=pytest.mark.thorough),
        pytest.param({"resident": 1.0}, marks=pytest.mark.thorough),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_tokens_are_those_of_the_unpatched_model(
    fields: dict[str, Any], original: Any, prompts: list[list[int]]
) -> None:
    model = torch_mesh.patch(copy.deepcopy(original), **fields)
    results = _batched(model, prompts)
    assert [result.error for result in results] == [None] * len(prompts)
    _assert_follow(original, original, prompts, [result.generated_tokens for result in results])
    stats = torch_mesh.stats(model)
    assert stats.decode.forwards > 0 and (stats.evicted > 0) == (fields["resident"] < 1)
    _assert_follow(
        original, original, prompts, [_alone(model, prompt) for prompt in prompts]
    )  # generate works as before


@pytest.mark.parametrize("way", first_quick("converted", "raw"))
def test_loaded_models_batch_requests(
    way: str, mesh_tiny: Path, prompts: list[list[int]], original: Any, tmp_path: Path
) -> None:
    folder = mesh_tiny
    if way == "converted":
        convert(mesh_tiny, tmp_path / "store", "int8")
        folder = tmp_path / "store"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=MeshConfig(resident=0.2)
    )
    results = _batched(model, prompts)
    reference = original if way == "raw" else model
    _assert_follow(reference, original, prompts, [result.generated_tokens for result in results])


def test_requests_may_arrive_while_others_run(original: Any, prompts: list[list[int]]) -> None:
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.1)
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=ContinuousBatchingConfig(**BATCHES), warmup=False
    ) as manager:
        first = [manager.add_request(prompt, streaming=True) for prompt in prompts[:2]]
        later: list[str] = []
        while len(found) < len(prompts):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None
            if not later:  # the first ones have begun
                later = [manager.add_request(prompt) for prompt in prompts[2:]]
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
    _assert_follow(original, original, prompts, [found[name] for name in first + later])


def test_an_expert_that_cannot_be_read_fails_its_requests_and_no_others(
    original: Any, mesh_tiny: Path, prompts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = convert(mesh_tiny, tmp_path / "store", "int8").store
    records = tmp_path / "store" / written.manifest.record_files[0].name
    whole = records.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "store", dtype=torch.bfloat16, quantization_config=MeshConfig(resident=0.1, io="threads")
    )
    with records.open("r+b") as file:
        file.truncate(written.manifest.record_files[0].data_start)
    failed = _batched(model, prompts[:2])
    assert len(failed) == 2
    assert all("cannot read expert" in result.error and str(records) in result.error for result in failed)
    caplog.clear()  # log records hold the error's frames, and these the model
    with records.open("r+b") as file:  # the pool has this file open
        file.write(whole)
    results = _batched(model, prompts)
    _assert_follow(model, original, prompts, [result.generated_tokens for result in results])
