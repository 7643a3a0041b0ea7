"""Experts with the gate of gpt-oss run on the fused kernels and support all modes of fused experts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from routes import Computed, assert_same_layer
from tiny_models import build
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.plan import plan
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import MANIFEST_NAME, Store, _digest, open_store

FAMILIES = {
    "GptOssExperts": ("alpha", "limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit"),
}


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)]) if tokens else torch.empty(0, 3, dtype=torch.long)
    return torch.randn(tokens, 72).bfloat16(), ids, torch.rand(tokens, 3).bfloat16()


def _call(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(*inputs)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_with_this_gate_are_fused(name: str) -> None:
    model = build(name)
    assert {layer.fused_activation for layer in find_experts(model)} == {"swigluoai"}
    torch_mesh.patch(model)
    assert all(module._mesh_fused for module in patched_modules(model))
    assert {layer.fused_activation for layer in find_experts(model)} == {"swigluoai"}


@pytest.mark.parametrize(("index", "value"), [(0, 1.0), (1, 0.5)])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_other_parameters_are_fused_too(name: str, index: int, value: float) -> None:
    model = build(name)
    for layer in find_experts(model):
        setattr(layer.module, FAMILIES[name][index], value)
    expected = (
        "swiglu(offset=1.0,gate_limit=7.0,up_limit=7.0)",
        "swiglu(alpha=1.702,offset=1.0,gate_limit=0.5,up_limit=0.5)",
    )
    assert {layer.fused_activation for layer in find_experts(model)} == {expected[index].replace("_limit", "")}
    original = copy.deepcopy(find_experts(model)[0].module)
    torch_mesh.patch(model)
    assert_same_layer(find_experts(model)[0].module, original, _inputs(9))


def test_a_subclass_with_another_gate_runs_unfused() -> None:
    model = build("GptOssExperts")
    module: Any = find_experts(model)[0].module
    gate = type(module)._apply_gate
    for layer in find_experts(model):
        halved = type(
            "HalvedExperts", (type(layer.module),), {"_apply_gate": lambda self, value: gate(self, value) / 2}
        )
        layer.module.__class__ = halved
    assert {layer.fused_activation for layer in find_experts(model)} == {None}
    original = copy.deepcopy(module)
    torch_mesh.patch(model)
    assert_same_layer(module, original, _inputs(5))


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_layer_is_that_of_transformers(tokens: int, weights: str) -> None:
    """The weights are so large that about half of the values of gate and up exceed the limit."""
    model = build("GptOssExperts")
    for layer in find_experts(model):
        layer.parameters["gate_up_proj"].data *= 8
    original = copy.deepcopy(find_experts(model)[0].module)
    torch_mesh.patch(model, weights=weights, resident=0.5, io="threads")
    module, inputs = find_experts(model)[0].module, _inputs(tokens)
    out = _call(module, *inputs)
    assert (out.shape, out.dtype) == (inputs[0].shape, inputs[0].dtype)
    if tokens:
        assert_same_layer(module, original, inputs, weights)


def test_infinite_and_nan_gates_are_as_in_transformers() -> None:
    """In each of seven experts, gate or up of one column is infinite or NaN."""
    nan, inf = float("nan"), float("inf")
    cases = ((inf, 1.0), (1.0, inf), (1.0, -inf), (inf, -inf), (-inf, 1.0), (nan, 1.0), (1.0, nan))
    model = build("GptOssExperts")
    for layer in find_experts(model):
        bias = layer.parameters["gate_up_proj_bias"].data
        for expert, case in enumerate(cases):
            bias[expert, 10:12] = torch.tensor(case)
    module: Any = find_experts(model)[0].module
    original = copy.deepcopy(module)
    x, ids, routing = torch.randn(8, 72).bfloat16(), torch.arange(8).unsqueeze(1), torch.ones(8, 1).bfloat16()
    expected = _call(module, x, ids, routing)
    torch_mesh.patch(model, weights="bf16")
    out = _call(module, x, ids, routing)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().all(dim=1).tolist() == [False] * 4 + [True] * 3 + [False]
    finite = ~expected.isnan().any(dim=1)
    assert_same_layer(module, original, (x[finite], ids[finite], routing[finite]))


def test_logits_are_those_of_transformers_and_tokens_do_not_depend_on_residency() -> None:
    original, prompt = build("GptOssExperts"), torch.randint(3, 100, (2, 9))
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False}
    expected = original.generate(prompt, eos_token_id=None, **settings)
    whole, quarter = (torch_mesh.patch(copy.deepcopy(original), resident=part, io="threads") for part in (1.0, 0.25))

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(expected, use_cache=False).logits

    Computed.by(original, logits).assert_same(quarter)
    tokens = quarter.generate(prompt, eos_token_id=None, **settings)
    assert torch.equal(tokens, whole.generate(prompt, eos_token_id=None, **settings))
    assert torch_mesh.stats(quarter).cold_misses > 0 and torch_mesh.stats(quarter).evicted > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"lossy": {"deferred_experts": 1}},
        {"lossy": {"fallback": "int4"}},
        {"lossy": {"routing_bias": 0.2}},
        {"prefetch": "auto"},
    ],
    ids=str,
)
def test_modes_of_fused_experts_work_with_this_gate(fields: dict[str, Any]) -> None:
    model = torch_mesh.patch(build("GptOssExperts"), weights="int8", resident=0.5, io="threads", **fields)
    model.generate(torch.randint(3, 100, (1, 4)), max_new_tokens=16, do_sample=False, eos_token_id=None)
    stats = torch_mesh.stats(model)
    used = {"deferred_experts": stats.deferred, "fallback": stats.fallback_accesses, "routing_bias": stats.rerouted}
    assert used.get(next(iter(fields.get("lossy", fields))), stats.prefetches_used) > 0


def test_gradients_are_those_of_transformers() -> None:
    model = build("GptOssExperts")
    original = copy.deepcopy(find_experts(model)[0].module)
    module = find_experts(torch_mesh.patch(model, weights="bf16", resident=0.5, io="threads").float())[0].module
    x, ids, routing = _inputs(11)
    inputs = x.float().requires_grad_(), ids, routing.float().requires_grad_()
    grad = torch.randn(11, 72)

    def gradients(layer: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        given = (inputs[0].to(dtype), ids, inputs[2].to(dtype))
        return torch.autograd.grad(layer(*given), (inputs[0], inputs[2]), grad.to(dtype))

    rounded, exact = gradients(original, torch.bfloat16), gradients(copy.deepcopy(original).float(), torch.float32)
    for found, theirs, expected in zip(gradients(module, torch.float32), rounded, exact, strict=True):
        assert (found - expected).norm() < (theirs - expected).norm()


def _as_an_earlier_build_wrote_it(store: Store) -> Store:
    """Rewrite the store's manifest without an activation, as when these experts ran unfused."""
    path = store.folder / MANIFEST_NAME
    table = json.loads(path.read_text())
    assert table["shape"]["activation"] == "swigluoai"
    table["shape"]["activation"] = None
    table["digest"] = _digest(table)
    path.write_text(json.dumps(table))
    return open_store(store.folder)


def test_a_store_of_an_earlier_build_is_fused_too(tmp_path: Path) -> None:
    build("GptOssExperts").save_pretrained(tmp_path / "raw")
    store = convert(tmp_path / "raw", tmp_path / "store", "int4").store
    prompt = torch.randint(3, 100, (2, 9))

    def logits() -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(store.folder, quantization_config=MeshConfig(resident=0.5))
        assert all(module._mesh_fused for module in patched_modules(model))
        with torch.no_grad():
            return model(prompt, use_cache=False).logits

    expected, planned = logits(), plan(store.folder, MeshConfig())
    store = _as_an_earlier_build_wrote_it(store)
    assert torch.equal(logits(), expected)
    assert plan(store.folder, MeshConfig()).tokens_per_chunk == planned.tokens_per_chunk is not None
    again = convert(tmp_path / "raw", store.folder, "int4")
    assert again.existed and again.store.manifest.store_id == store.manifest.store_id, "nothing is written"
    with pytest.raises(ValueError, match="names no activation.*Open the model instead, or convert .* again"):
        torch_mesh.Experts.from_store(store.folder, 1)
