"""transformers' Trainer on patched models: it trains all weights but the experts, saves, resumes and loads the best
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, inputs_for, output_of
from training import STEPS, StopAfter, trainer_for
from transformers import AutoModelForCausalLM, set_seed

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.dense import MeshLinear
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import is_store

QWEN, GPT_OSS = "Qwen3MoeExperts", "GptOssExperts"


class _Model:
    """Opens the same model each time, patched in one of the WAYS."""

    def __init__(self, way: str, folder: Path, name: str = QWEN) -> None:
        self._way, self._folder = way, folder
        set_seed(11)
        TINY_MODELS[name].build().save_pretrained(folder / "plain")
        if way == "converted":
            convert(folder / "plain", folder / "converted", "int8")

    def open(self) -> Any:
        fields = {"patched": {"resident": 0.4}, "raw": {"resident": 0.4}, "converted": {"resident": 0.4}}[self._way]
        if self._way == "patched":
            model = AutoModelForCausalLM.from_pretrained(self._folder / "plain", dtype="auto")
            return torch_mesh.patch(model, MeshConfig(**fields))
        source = "plain" if self._way == "raw" else "converted"
        return AutoModelForCausalLM.from_pretrained(
            self._folder / source, dtype="auto", quantization_config=MeshConfig(**fields)
        )


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


WAYS = ("patched", "raw", "converted")


@pytest.mark.parametrize("way", first_quick(*WAYS))
def test_trainer_trains_and_saves_all_weights_but_experts(way: str, tmp_path: Path) -> None:
    model = _Model(way, tmp_path).open()
    before = _trained(model)
    trainer = trainer_for(model, tmp_path / "out")
    losses = trainer.train()
    assert losses.global_step == STEPS
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < logged[0]
    trainer.save_model()
    after = _trained(model)
    assert all(not torch.equal(before[name], after[name]) for name in before if "norm" not in name)
    assert any("gate" in name for name in after)  # routers
    assert not any("experts" in name for name in after)
    inputs = inputs_for(model)
    expected = output_of(model.eval(), inputs)
    for folder in (tmp_path / "out", tmp_path / "out" / f"checkpoint-{STEPS}"):
        assert is_store(folder) == (way == "converted")
        given = {} if way == "converted" else {"quantization_config": MeshConfig(resident=0.5)}
        again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **given).eval()
        assert torch.equal(output_of(again, inputs), expected)
        assert all(torch.equal(again.get_parameter(name), after[name]) for name in after)


def test_plain_transformers_opens_a_trained_checkpoint(tmp_path: Path) -> None:
    model = _Model("raw", tmp_path).open()
    trainer = trainer_for(model, tmp_path / "out")
    trainer.train()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{STEPS}", dtype="auto")
    assert next(patched_modules(plain), None) is None
    torch_mesh.unpatch(model)
    state, expected = plain.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "way, name, options",
    [
        pytest.param("patched", QWEN, {}, marks=pytest.mark.thorough),
        ("raw", QWEN, {}),
        pytest.param("converted", QWEN, {}, marks=pytest.mark.thorough),
        # gpt-oss's checkpoints name the experts as its modules do.
        pytest.param("raw", GPT_OSS, {}, marks=pytest.mark.thorough),
        pytest.param("converted", GPT_OSS, {}, marks=pytest.mark.thorough),
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    way: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = _Model(way, tmp_path, name)
    whole = source.open()
    trainer_for(whole, tmp_path / "whole", **options).train()
    trainer_for(source.open(), tmp_path / "parts", [StopAfter(2)], **options).train()
    resumed = source.open()
    outcome = trainer_for(resumed, tmp_path / "parts", **options).train(resume_from_checkpoint=True)
    assert outcome.global_step == STEPS
    expected = _trained(whole)
    for key, tensor in _trained(resumed).items():
        assert torch.equal(tensor, expected[key]), key
    assert is_store(tmp_path / "parts" / f"checkpoint-{STEPS}") == (way == "converted")


@pytest.mark.parametrize("dense", first_quick("int8", "bf16"))
def test_a_run_with_packed_linear_layers_resumes(dense: str, tmp_path: Path) -> None:
    source = _Model("converted", tmp_path)
    models = []
    for folder, callbacks, resume in (("whole", [], False), ("parts", [StopAfter(2)], False), ("parts", [], True)):
        model = torch_mesh.patch(torch_mesh.unpatch(source.open(), lossy=True), weights="int8", dense=dense)
        assert isinstance(model.lm_head, MeshLinear)
        trainer_for(model, tmp_path / folder, callbacks).train(resume_from_checkpoint=resume)
        models.append(model)
    expected = _trained(models[0])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _trained(models[2]).items())
    saved = load_file(tmp_path / "parts" / f"checkpoint-{STEPS}" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], models[2].lm_head.unpacked_weight())


@pytest.mark.parametrize("way", first_quick(*reversed(WAYS)))
def test_the_best_checkpoint_is_loaded_at_the_end(way: str, tmp_path: Path) -> None:
    """The learning rate is so high that the model gets worse and an early checkpoint is the best."""
    model = _Model(way, tmp_path).open()
    trainer = trainer_for(
        model,
        tmp_path / "out",
        learning_rate=0.3,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != f"checkpoint-{STEPS}"
    saved = load_file(best / "model.safetensors")
    for name, tensor in _trained(model).items():
        assert torch.equal(tensor, saved[name])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-3)


@pytest.mark.parametrize("way", first_quick("converted", "patched"))
def test_gradient_checkpointing_gives_the_same_training(way: str, tmp_path: Path) -> None:
    source = _Model(way, tmp_path)
    models = [source.open() for _ in range(2)]
    for model, checkpointing in zip(models, (False, True), strict=True):
        trainer = trainer_for(
            model, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing, save_steps=100
        )
        trainer.train()
        assert model.is_gradient_checkpointing == checkpointing
    expected = _trained(models[0])
    for name, tensor in _trained(models[1]).items():
        assert torch.equal(tensor, expected[name]), name


def test_checkpoints_of_rounded_experts_share_their_records(tmp_path: Path) -> None:
    model = _Model("converted", tmp_path).open()
    trainer_for(model, tmp_path / "out", save_steps=1).train()
    records = list(tmp_path.glob("**/mesh-*.safetensors"))
    assert len(records) == 1 + STEPS
    assert len({path.stat().st_ino for path in records}) == 1
    history = json.loads((tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert history["global_step"] == STEPS
