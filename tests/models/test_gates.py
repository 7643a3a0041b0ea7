"""Families whose own gate or activation the fused kernels compute, given its parameters."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import each_once_quick
from routes import assert_same_layer
from tiny_models import TINY_MODELS
from transformers import activations

import torch_mesh
from torch_mesh import UnsupportedModelError
from torch_mesh.hf.compat import default_apply_gate
from torch_mesh.models.activations import SWIGLUOAI, Gate, gate_named, limit_before_silu
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert


def _set_softcaps(module: Any) -> None:
    module.act_fn.gate_softcap.softcap, module.act_fn.up_softcap.softcap = 0.5, 0.75


# A function that sets limits low enough that many values are beyond them, and the name of the resulting activation.
FAMILIES = {
    "DeepseekV4Experts": (lambda module: setattr(module, "limit", 0.5), "swiglu(gate=0.5,up=0.5)"),
    "Glm5NextTextExperts": (lambda module: setattr(module, "swiglu_limit", 0.5), "swiglu(gate=0.5,up=0.5)"),
    "HYV4Experts": (lambda module: setattr(module, "swiglu_limit", 0.5), "swiglu(gate=0.5,up=0.5)"),
    "Inkling2Experts": (_set_softcaps, "softcap(gate=0.5,up=0.75)"),
    "NemotronHExperts": (lambda module: None, "relu2"),
}


def _model(name: str) -> Any:
    model = TINY_MODELS[name].build()
    for layer in find_experts(model):
        FAMILIES[name][0](layer.module)
    return model


def _inputs(hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(20)])
    return torch.randn(20, hidden).bfloat16(), ids, torch.rand(20, 3)


@pytest.mark.parametrize(("name", "weights"), each_once_quick(sorted(FAMILIES), ["bf16", "int8"]))
def test_a_layer_is_that_of_transformers(name: str, weights: str) -> None:
    model = _model(name)
    layer = find_experts(model)[-1]
    assert layer.fused_activation == FAMILIES[name][1]
    original = copy.deepcopy(layer.module)
    torch_mesh.patch(model, weights=weights, resident=0.5, io="threads")
    assert all(module._mesh_fused for module in patched_modules(model))
    assert_same_layer(layer.module, original, _inputs(layer.hidden), weights)


@pytest.mark.parametrize(("activation", "fused"), [("silu", True), ("relu", False)])
def test_an_id_that_is_no_expert_is_an_error_except_as_a_sentinel(activation: str, fused: bool) -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    for layer in find_experts(model):
        layer.module.act_fn = activations.ACT2FN[activation]  # type: ignore[assignment]
    module: Any = next(patched_modules(torch_mesh.patch(model)))
    assert module._mesh_fused == fused
    x, weights = torch.randn(2, module.hidden_dim), torch.full((2, 2), 0.5)
    beyond = torch.tensor([[0, 1], [2, module.num_experts]])
    with torch.no_grad():
        for ids in (beyond, torch.tensor([[0, 1], [2, -1]])):
            with pytest.raises(ValueError, match=rf"(in|outside) \[0, {module.num_experts}\)"):
                module(x, ids, weights)
        module._is_expert_parallel = True
        skipped = module(x, beyond, weights)
        weights[1, 1] = 0
        torch.testing.assert_close(skipped, module(x, torch.tensor([[0, 1], [2, 3]]), weights))


def test_a_known_gate_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run as plain silu."""
    model = TINY_MODELS["GptOssExperts"].build()
    monkeypatch.delattr(type(find_experts(model)[0].module), "_apply_gate")
    with pytest.raises(UnsupportedModelError, match="GptOssExperts of transformers .* has no gate of its own"):
        find_experts(model)


def test_a_class_of_the_same_name_is_not_taken_for_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["DeepseekV4Experts"].build()
    kind = type(find_experts(model)[0].module)
    monkeypatch.setattr(kind, "__module__", "of_a_program")
    assert {layer.fused_activation for layer in find_experts(model)} == {None}
    monkeypatch.setattr(kind, "_apply_gate", default_apply_gate)
    assert {layer.fused_activation for layer in find_experts(model)} == {"silu"}


def test_another_activation_runs_unfused() -> None:
    model = _model("DeepseekV4Experts")
    for layer in find_experts(model):
        layer.module.act_fn = activations.ACT2FN["relu"]  # type: ignore[assignment]
    assert {layer.fused_activation for layer in find_experts(model)} == {None}
    original = copy.deepcopy(find_experts(model)[0].module)
    torch_mesh.patch(model)
    assert_same_layer(find_experts(model)[0].module, original, _inputs(72))


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_without_a_kernel_runs_unfused(limit: float) -> None:
    model = _model("HYV4Experts")
    for layer in find_experts(model):
        layer.module.swiglu_limit = limit  # type: ignore[assignment]
    assert {layer.fused_activation for layer in find_experts(model)} == {None}


def test_a_layer_of_a_store_has_its_gate(tmp_path: Path) -> None:
    model = _model("Inkling2Experts")
    model.config.mlp_gate_softcap, model.config.mlp_up_softcap = 0.5, 0.75
    model.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    layer = torch_mesh.Experts.from_store(tmp_path / "store", 1, resident=0.5)
    assert_same_layer(layer, find_experts(model)[1].module, _inputs(72))


@pytest.mark.parametrize(
    "gate",
    [SWIGLUOAI, Gate(gate_limit=7.006, up_limit=7.0), Gate("softcap", gate_limit=4.0, up_limit=25.0), Gate(alpha=1e-3)],
)
def test_the_name_of_a_gate_has_all_its_parameters(gate: Gate) -> None:
    assert gate_named(gate.name) == gate


def test_a_gate_without_limits_is_silu() -> None:
    assert Gate().name == "silu" and gate_named("silu") is None


@pytest.mark.parametrize(
    "name",
    ["swiglu", "swiglu(beta=1)", "swiglu(gate=0)", "swiglu(gate=nan)", "swiglu(gate=1.2.3)", "softcap(gate=4)", ""],
)
def test_malformed_names_of_gates_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="activation="):
        gate_named(name)


@pytest.mark.parametrize("limit", [1e-6, 0.1, 1.0, 7.0, 16.0, 500.0])
def test_silu_reaches_its_limit_where_it_is_clamped(limit: float) -> None:
    at = torch.tensor(limit_before_silu(limit), dtype=torch.float64)
    assert torch.nn.functional.silu(at).item() == pytest.approx(limit, rel=1e-14)
