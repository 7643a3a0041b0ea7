"""accelerate with patched models: saving and loading its state."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from tiny_models import TINY_MODELS
from transformers import PreTrainedModel

import torch_mesh

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def _prepared(model: PreTrainedModel) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
    return accelerator, model, optimizer


def _step(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> float:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("dense", ["none", "bf16"])
def test_a_saved_state_is_complete_and_restores_the_model(dense: str, safe_serialization: bool, tmp_path: Path) -> None:
    original = TINY_MODELS["Qwen3MoeExperts"].build()
    values = copy.deepcopy(original.state_dict())
    ids = torch.randint(3, 100, (2, 9))
    accelerator, model, optimizer = _prepared(torch_mesh.patch(original, resident=0.3, dense=dense))
    _step(accelerator, model, optimizer, ids)
    saved = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe_serialization)
    expected = _step(accelerator, model, optimizer, ids)
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(model.get_parameter(name), parameter) for name, parameter in saved.items())
    assert _step(accelerator, model, optimizer, ids) == expected
    [file] = (tmp_path / "state").glob("model*" if safe_serialization else "pytorch_model*")
    if safe_serialization:
        from safetensors.torch import load_file

        state = load_file(file)
    else:
        state = torch.load(file, weights_only=True)
    assert state.keys() == values.keys()
    assert torch.equal(state[EXPERTS], values[EXPERTS])  # the frozen experts are saved too


def test_saving_a_state_of_rounded_experts_is_refused_unless_a_hook_leaves_them_out(tmp_path: Path) -> None:
    ids = torch.randint(3, 100, (2, 9))
    accelerator, model, optimizer = _prepared(torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), weights="int8"))
    with pytest.raises(
        torch_mesh.MeshError, match=r"experts\.gate_up_proj was rounded to int8.*save_pretrained.*finetuning.md#files"
    ):
        accelerator.save_state(str(tmp_path / "state"))

    def leave_out(models: list, weights: list[dict], folder: str) -> None:
        for state in weights:
            for name in [name for name, value in state.items() if isinstance(value, torch_mesh.PackedWeight)]:
                del state[name]

    accelerator.register_save_state_pre_hook(leave_out)
    accelerator.save_state(str(tmp_path / "trained"))
    expected = _step(accelerator, model, optimizer, ids)
    accelerator.load_state(str(tmp_path / "trained"))
    assert _step(accelerator, model, optimizer, ids) == expected
