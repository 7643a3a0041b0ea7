"""Trainer and custom loops with adapters on experts: ways to save memory do not change the training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import TINY_MODELS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from training import ROWS, STEPS, StopAfter, trainer_for
from transformers import Trainer, TrainerState, set_seed

import torch_mesh

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _model(resident: float = 0.3, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> PeftModel:
    set_seed(7)
    model = torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build().to(dtype), resident=resident, **fields)
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=TARGETS)
    return get_peft_model(model, config)


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_the_log_describes_the_training_and_its_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model()
    trainer = trainer_for(model, tmp_path, [torch_mesh.MeshTrainerCallback()], eval_strategy="epoch")
    trainer.train()
    assert torch_mesh.describe_training(model) in capsys.readouterr().out
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS and logged[-1]["loss"] < logged[0]["loss"]
    for entry in logged:
        assert 0 <= entry["mesh_hit_rate"] <= 1 and entry["mesh_read_gb"] >= 0 and entry["mesh_wait_seconds"] >= 0
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    stats = torch_mesh.stats(model)
    read = sum(entry["mesh_read_gb"] for entry in trainer.state.log_history if "mesh_read_gb" in entry) * 1e9
    assert abs(read - stats.bytes_read) < 1e5 * len(trainer.state.log_history)  # each entry is rounded


@pytest.mark.parametrize("after", [1, 5])
def test_counters_are_logged_from_zero_after_a_reset(after: int) -> None:
    model = _model()
    callback = torch_mesh.MeshTrainerCallback()
    ids = torch.stack(ROWS[:2])
    for _ in range(3):
        model(input_ids=ids)
    state = TrainerState(is_world_process_zero=False)
    callback.on_train_begin(None, state, None, model=model)
    torch_mesh.reset_stats(model)
    for _ in range(after):
        model(input_ids=ids)
    stats, logs = torch_mesh.stats(model), {}
    callback.on_log(None, state, None, model=model, logs=logs)
    assert stats.bytes_read > 0 and abs(logs["mesh_read_gb"] - stats.bytes_read / 1e9) < 1e-4
    assert abs(logs["mesh_hit_rate"] - stats.hits / stats.accesses) < 1e-4 and logs["mesh_wait_seconds"] >= 0


def test_the_callback_refuses_a_model_that_is_not_patched(tmp_path: Path) -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    with pytest.raises(torch_mesh.MeshError):
        trainer_for(model, tmp_path, [torch_mesh.MeshTrainerCallback()]).train()


def test_residency_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    trained = []
    for resident in (1.0, 0.25):
        model = _model(resident, store=tmp_path / f"store-{resident}")
        trainer = trainer_for(model, tmp_path / str(resident), save_strategy="no")
        trainer.train()
        trained.append((_losses(trainer), _trained(model)))
    assert trained[0][0] == trained[1][0]
    assert all(torch.equal(trained[1][1][name], value) for name, value in trained[0][1].items())


@pytest.mark.parametrize("reentrant", first_quick(True, False))
def test_checkpointed_activations_give_the_same_training(reentrant: bool, tmp_path: Path) -> None:
    runs = []
    for checkpointing in (False, True):
        model = _model()
        if checkpointing and reentrant:
            model.enable_input_require_grads()
        trainer = trainer_for(
            model,
            tmp_path / str(checkpointing),
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
            gradient_accumulation_steps=2,
            save_strategy="no",
        )
        trainer.train()
        runs.append(_losses(trainer))
    assert runs[0] == runs[1]


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = _model()
    trainer_for(whole, tmp_path / "whole").train()
    trainer_for(_model(), tmp_path / "parts", [StopAfter(2)]).train()
    resumed = _model()
    trainer_for(resumed, tmp_path / "parts").train(resume_from_checkpoint=True)
    expected = _trained(whole)
    assert expected.keys() == _trained(resumed).keys()
    for name, value in _trained(resumed).items():
        assert torch.equal(value, expected[name]), name


def _optimizer(model: PeftModel) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def _step(model: PeftModel, optimizer: torch.optim.AdamW) -> None:
    """A step by gradients that do not depend on the parameters."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def test_an_optimizers_state_of_plain_peft_is_continued(tmp_path: Path) -> None:
    """torch's fused optimizers pair the elements of parameters and moments by their places in memory."""
    set_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=TARGETS)
    plain = get_peft_model(TINY_MODELS["Qwen3MoeExperts"].build().to(torch.bfloat16), config)
    model = _model()
    optimizer = _optimizer(plain)
    _step(plain, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    trained = [p for p in plain.parameters() if p.requires_grad]
    for own, parameter in zip((p for p in model.parameters() if p.requires_grad), trained, strict=True):
        own.data.copy_(parameter.data)
    _step(plain, optimizer)
    ours = _optimizer(model)
    ours.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    _step(model, ours)
    expected = _trained(plain)
    assert expected.keys() == _trained(model).keys()
    for name, value in _trained(model).items():
        assert torch.equal(value, expected[name]), name


class _EightBits(torch.Tensor):
    pass


def test_moments_in_a_type_of_the_optimizers_own_stay_as_they_are() -> None:
    model = _model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    [parameter, *_] = [p for p in model.parameters() if p.requires_grad and not p.is_contiguous()]
    moment = torch.zeros(parameter.shape).as_subclass(_EightBits)
    optimizer.state[parameter]["exp_avg"] = moment
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"] is moment


def test_a_loop_with_autocast_and_router_losses_learns() -> None:
    model = _model(dtype=torch.float32)
    model.base_model.model.router_aux_loss_coef = 0.01
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.stack(ROWS[:4])
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        assert output.aux_loss > 0
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_trains_and_leaves_packed_weights_alone() -> None:
    model = _model()
    ids = torch.stack(ROWS[:2])
    gradients = []
    for forward in (model, DistributedDataParallel(model)):
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        model.zero_grad()
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def test_the_parameters_that_train_can_be_averaged() -> None:
    model = _model()
    with pytest.raises(torch_mesh.MeshError, match="ParameterList of the parameters that train"):
        whole = AveragedModel(model)
        for _ in range(2):
            whole.update_parameters(model)
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    average = AveragedModel(trained)
    first = [p.detach().clone() for p in trained]
    average.update_parameters(trained)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(1)
    average.update_parameters(trained)
    for mean, begin in zip(average.parameters(), first, strict=True):
        torch.testing.assert_close(mean, begin + 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_training_step_gives_the_gradients_of_an_eager_one() -> None:
    model = _model(
        1.0, dtype=torch.float32
    )  # without files, for torch keeps a model whose training step it has compiled
    ids = torch.stack(ROWS[:2])
    gradients = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        model.zero_grad()
    for name, gradient in gradients[1].items():
        assert torch.allclose(gradient, gradients[0][name], rtol=1e-3, atol=1e-6), name
