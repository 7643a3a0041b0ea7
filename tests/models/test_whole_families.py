"""Families from end to end: the command line's tools on their checkpoints, generation, every format of records.

A few of them each time; ``make test-all`` takes all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import first_quick
from routes import by_token, given_routes, recorded_routes
from tiny_models import TINY_MODELS, draw_routers, inputs_for, output_of
from transformers import AutoModelForImageTextToText, Kimi_K25Config, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.models.families import find_experts

# transformers takes seconds per token for the linear attention of these.
_SLOW_TO_GENERATE = {"BailingHybridExperts", "KimiLinearExperts", "NemotronHExperts"}
_GENERATING = sorted(name for name, tiny in TINY_MODELS.items() if "For" in tiny.model)

# The largest error of an expert layer with Gaussian weights in groups of 32, relative to fp32 products.
_WORST = {"int8": 0.03, "int4": 0.25, "lut4": 0.25}


def _same_values(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(state) == set(expected)
    assert not [key for key in expected if not torch.equal(state[key], expected[key])]


def _check_tools(name: str, folder: Path, output: Callable[[], str]) -> None:
    """Plan, open, convert, inspect and verify a checkpoint; open and save the converted one, and unpatch it."""
    model = TINY_MODELS[name].build()
    cls: Any = type(model)
    inputs = inputs_for(model)
    with recorded_routes(model) as routes:
        expected, state = output_of(model, inputs), model.state_dict()
    model.save_pretrained(folder / "source")
    layers = find_experts(model)

    source, converted = str(folder / "source"), str(folder / "converted")
    speeds = ["--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
    assert main(["plan", source, "--resident", "0.5", "--weights", "bf16", *speeds]) == 0
    assert f"{len(layers)} layers of {layers[0].num_experts}" in output()
    assert main(["convert", source, converted, "--weights", "bf16"]) == 0
    output()
    assert main(["inspect", converted]) == 0
    assert "bf16" in output()
    assert main(["inspect", "--verify", converted]) == 0
    output()

    config = MeshConfig(resident=0.5, io="threads")
    opened = cls.from_pretrained(folder / "source", quantization_config=config)
    read = output_of(opened, inputs)
    with given_routes(opened, routes):
        assert by_token(output_of(opened, inputs), expected).median() < 0.03
    opened = cls.from_pretrained(folder / "converted", quantization_config=config)
    assert torch.equal(output_of(opened, inputs), read)
    opened.save_pretrained(folder / "saved")
    saved = cls.from_pretrained(folder / "saved")
    _same_values(saved.state_dict(), state)
    assert torch.equal(output_of(saved, inputs), expected)
    torch_mesh.unpatch(opened)
    _same_values(opened.state_dict(), state)

    rounded = str(folder / "rounded")
    assert main(["convert", source, rounded, "--weights", "int4", "--group-size", "32"]) == 0
    opened = cls.from_pretrained(rounded, quantization_config=config)
    output()
    before = output_of(opened, inputs)
    opened.save_pretrained(folder / "rounded again")
    assert main(["inspect", "--verify", str(folder / "rounded again")]) == 0
    again = cls.from_pretrained(folder / "rounded again", quantization_config=config)
    assert torch.equal(output_of(again, inputs), before)


def _check_generation(name: str) -> None:
    """Check that, with the unpatched model's choice of experts, logits are its own for as long as tokens are equal."""
    model: Any = TINY_MODELS[name].build()
    draw_routers(model)
    assert isinstance(model, PreTrainedModel) and model.can_generate()
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    inputs = {"input_ids": torch.randint(3, 100, (4, 6)), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    with recorded_routes(model) as routes:
        expected = model.generate(**inputs, **settings, do_sample=False)
    torch_mesh.patch(model, resident=0.3, io="threads")
    with given_routes(model, routes):
        given = model.generate(**inputs, **settings, do_sample=False)
    assert torch_mesh.stats(model).cold_misses > 0
    compared = []
    for row in range(4):
        for step, (ours, theirs) in enumerate(zip(given.logits, expected.logits, strict=True)):
            compared.append(by_token(ours[row].float(), theirs[row].float()).item())
            if expected.sequences[row, 6 + step] != given.sequences[row, 6 + step]:
                break  # a near tie: from the next step on the texts differ
    assert len(compared) >= 4 and np.median(compared) < 0.05, f"{name}: {compared}"


def _check_formats(name: str) -> None:
    """Compare each layer of experts, in each format and with half of the experts resident, with the unpatched layer."""
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    hidden = torch.randn(5, layers[0].hidden).bfloat16()
    ids = torch.stack([torch.randperm(layers[0].num_experts)[: layers[0].top_k] for _ in range(5)])
    weights = torch.rand(ids.shape) + 0.1
    with torch.no_grad():
        expected = [layer.module(hidden, ids, weights.bfloat16()) for layer in layers]
    for format, worst in _WORST.items():
        patched = copy.deepcopy(model)
        torch_mesh.patch(patched, resident=0.5, weights=format, group_size=32, io="threads")
        with torch.no_grad():
            given = [layer.module(hidden, ids, weights.bfloat16()) for layer in find_experts(patched)]
        for ours, theirs in zip(given, expected, strict=True):
            error = (ours - theirs).float().norm() / theirs.float().norm()
            assert error < worst, f"{name} in {format}: {error:.3f}"


# Transposed with biases; without a gate; with weights named w1, w3 and w2.
@pytest.mark.parametrize("name", first_quick("OpenAIPrivacyFilterExperts", "NemotronHExperts", "MiniMaxM2Experts"))
def test_the_tools_take_the_checkpoints_of_some_families(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_tools(name, tmp_path, lambda: capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_tools_take_the_checkpoints_of_every_family(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_tools(name, tmp_path, lambda: capsys.readouterr().out)


def test_experts_of_a_language_model_of_another_family_are_found(tmp_path: Path) -> None:
    """The language model of Kimi K2.5 is a DeepSeek V3 under one more prefix."""
    text = TINY_MODELS["DeepseekV3Experts"].build().config
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Kimi_K25Config(text_config=text.to_dict(), vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    draw_routers(model)
    with torch.no_grad():
        for layer in find_experts(model):
            for parameter in layer.parameters.values():
                parameter.normal_(0, 0.15)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": torch.randint(3, 60, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    with recorded_routes(model) as routes:
        expected = output_of(model, inputs)
    opened = type(model).from_pretrained(tmp_path, quantization_config=MeshConfig(resident=0.5, io="threads"))
    with given_routes(opened, routes):
        assert by_token(output_of(opened, inputs), expected).median() < 0.03
    assert not torch_mesh.stats(opened).lookahead_unsupported_reasons and torch_mesh.stats(opened).cold_misses > 0


def test_some_families_generate_the_same_tokens(rng: np.random.Generator) -> None:
    for name in rng.choice(sorted({*_GENERATING} - _SLOW_TO_GENERATE), 2, replace=False):
        _check_generation(str(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", _GENERATING)
def test_every_family_generates_the_same_tokens(name: str) -> None:
    _check_generation(name)


def test_some_families_run_in_every_format(rng: np.random.Generator) -> None:
    for name in rng.choice(sorted(TINY_MODELS), 3, replace=False):
        _check_formats(str(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_family_runs_in_every_format(name: str) -> None:
    _check_formats(name)
