"""The lossy modes in models: they compute what their definition says, and leave no state behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY_MODELS, inputs_for, output_of
from torch import Tensor, nn
from training import assert_same_gradients
from transformers import AutoModelForCausalLM, PreTrainedModel
from upstream import JAMBA_HAS_ROUTER

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.lossy.decoding import ROUTING_BIAS_FAMILIES, ResidencyBiasedRouter, kept_choices
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import patched_modules

ops = torch.ops.torch_mesh

# MoE in every layer; in every other layer; after a dense layer, with groups and shared experts; with gpt-oss's biases
# and gate.
FAMILIES = ("Qwen3MoeExperts", "JambaExperts", "DeepseekV3Experts", "GptOssExperts")


@dataclass
class Call:
    """One call of an experts module."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    ready: Tensor  # bool [experts], just before
    out: Tensor


def _patched(model: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    defaults: dict[str, Any] = {"resident": 0.5, "io": "threads", "prefetch": "off", "weights": "bf16"}
    return torch_mesh.patch(model, **defaults | fields)


def _engine(model: nn.Module) -> Any:
    return next(patched_modules(model))._mesh_pool.engine


def _record(model: nn.Module) -> list[list[Call]]:
    """Record the calls of each experts module from now on. Pending reads end before each call, so that the cold experts
    are known."""
    recorded: list[list[Call]] = []
    for module in patched_modules(model):
        calls: list[Call] = []
        recorded.append(calls)

        def before(module: Any, args: Any, kwargs: dict[str, Any], calls: list[Call] = calls) -> None:
            module._mesh_pool.engine.drain()
            ready = ops.residency(module._mesh_handle) == 2
            calls.append(Call(*(tensor.clone() for tensor in (*args, *kwargs.values())), ready, torch.empty(0)))

        def after(_: Any, args: Any, out: Tensor, calls: list[Call] = calls) -> None:
            calls[-1].out = out.clone()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    return recorded


def _products(experts: Any, call: Call) -> Tensor:
    """The weighted outputs [tokens, k, hidden] of the chosen experts in float64, by transformers' module."""

    def project(rows: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name).detach().double()[call.ids]
        out = (rows.unsqueeze(-2) @ (weight if experts.is_transposed else weight.mT)).squeeze(-2)
        return out + getattr(experts, f"{name}_bias").detach().double()[call.ids] if experts.has_bias else out

    x = call.x.double().unsqueeze(1).expand(-1, call.ids.size(1), -1)
    rows = experts._apply_gate(project(x, "gate_up_proj"))
    return project(rows, "down_proj") * call.weights.double().unsqueeze(-1)


def _deferred(call: Call, count: int) -> Tensor:
    """By definition, a mask [tokens, k] of the choices that a call defers to the next layer, unless it is the last."""
    mask = torch.zeros_like(call.ids, dtype=torch.bool)
    for token in range(len(call.ids)):
        by_weight = call.weights[token].float().argsort(stable=True).tolist()
        cold = [choice for choice in by_weight if not call.ready[call.ids[token, choice]]]
        mask[token, cold[:count]] = True
    return mask & ~torch.isin(call.ids, call.ids[~mask])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 3])
def test_deferred_experts_land_one_moe_layer_later(family: str, count: int) -> None:
    model = TINY_MODELS[family].build()
    originals = [copy.deepcopy(layer.module) for layer in find_experts(model)]
    recorded = _record(_patched(model, lossy={"deferred_experts": count}))
    prompt = torch.randint(3, 120, (3, 20))
    model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert {len(calls) for calls in recorded} == {6}
    deferred = 0
    for step in range(6):
        carried = torch.zeros(0)
        for layer, calls in enumerate(recorded):
            call = calls[step]
            products = _products(originals[layer], call)
            late = torch.zeros_like(call.ids, dtype=torch.bool)
            if len(call.ids) == 3 and layer < len(recorded) - 1:
                late = _deferred(call, count)
            expected = products.masked_fill(late.unsqueeze(-1), 0.0).sum(1)
            if layer > 0:
                expected += carried
            carried = products.masked_fill(~late.unsqueeze(-1), 0.0).sum(1)
            error = (call.out.double() - expected).norm() / expected.norm().clamp(min=1e-9)
            assert error < 0.01, (step, layer)
            deferred += len(call.ids[late].unique())
    stats = torch_mesh.stats(model)
    assert stats.deferred == stats.decode.deferred == deferred > 0


@pytest.mark.parametrize("fields", [{"lossy": {"deferred_experts": 3}}, {"lossy": {"routing_bias": 1.0}}], ids=str)
def test_with_all_experts_resident_lossy_modes_are_exact(fields: dict[str, Any]) -> None:
    model = TINY_MODELS["DeepseekV3Experts"].build()
    prompt = torch.randint(3, 120, (2, 5))
    results = []
    for lossy in ({}, fields):
        patched = _patched(copy.deepcopy(model), resident=1.0, **lossy)
        with torch.no_grad():
            results.append(patched(prompt).logits)
    assert torch.equal(*results)


@pytest.fixture
def open_model(int8_store: Path) -> Iterator[Callable[..., PreTrainedModel]]:
    def open_it(**fields: Any) -> PreTrainedModel:
        config = MeshConfig(**{"resident": 0.25, "io": "threads"} | fields)
        return AutoModelForCausalLM.from_pretrained(int8_store, quantization_config=config)

    yield open_it


LOSSY = {"lossy": {"deferred_experts": 2, "routing_bias": 0.3}}


def test_prompts_and_gradients_are_exact(open_model: Callable[..., PreTrainedModel]) -> None:
    exact, lossy = open_model(), open_model(**LOSSY)
    prompt = torch.randint(0, 4000, (1, 40))
    with torch.no_grad():
        assert torch.equal(exact(prompt).logits, lossy(prompt).logits)
    torch_mesh.reset_stats(lossy)
    assert_same_gradients(exact, lossy)
    stats = torch_mesh.stats(lossy)
    assert (stats.deferred, stats.rerouted) == (0, 0) and stats.decode.accesses > 0


@pytest.mark.parametrize("lossy", [{"routing_bias": 1.0}, {"fallback": "int4"}, {"deferred_experts": 2}])
def test_reentrant_checkpointing_is_exact(lossy: dict[str, Any], tmp_path: Path) -> None:
    # Without gradients dense="auto" rounds otherwise than torch where the processor has no products of bf16.
    fields = {"resident": 0.4, "store": tmp_path, "dense": "none"}
    model = _patched(TINY_MODELS["Qwen3MoeExperts"].build(), **fields, lossy=lossy).train()
    ids = inputs_for(model)["input_ids"][:1, :8]
    results: list[tuple[Tensor, ...]] = []
    for options in (None, {"use_reentrant": True}):
        if options:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)))
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    stats = torch_mesh.stats(model)
    assert (stats.deferred, stats.rerouted, stats.fallback_accesses) == (0, 0, 0) and stats.decode.accesses > 0


def test_both_modes_count_and_show_their_accesses(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(**LOSSY)
    prompt = torch.randint(0, 4000, (2, 24))
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert tokens.shape == (2, 48)
    stats = torch_mesh.stats(model)
    assert stats.deferred == stats.decode.deferred > 0 and stats.rerouted == stats.decode.rerouted > 0
    for counters in (stats, stats.prefill, stats.decode, *stats.per_layer):
        parts = (counters.hits, counters.cold_misses, counters.inflight_misses, counters.deferred)
        assert sum(parts) == counters.accesses
    assert stats.per_layer[-1].deferred == 0
    assert stats.lossy == "deferred_experts=2, routing_bias=0.3"
    assert f"lossy: {stats.lossy}" in str(stats) and json.loads(json.dumps(stats.to_dict()))["lossy"] == stats.lossy
    assert f"lossy: {stats.lossy}" in str(model)
    _engine(model).drain()
    _engine(model).validate()


def test_an_exact_model_shows_no_lossy_mode(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    assert (
        "lossy" not in str(model)
        and torch_mesh.stats(model).lossy == ""
        and "lossy" not in str(torch_mesh.stats(model))
    )


@pytest.mark.parametrize(
    "fields",
    [{"lossy": {"deferred_experts": 2}}, pytest.param({"lossy": {"routing_bias": 0.5}}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_compiled_decode_step_equals_an_eager_one(
    open_model: Callable[..., PreTrainedModel], fields: dict[str, Any]
) -> None:
    """Each step starts with the same resident experts: none, or those of even numbers."""
    model = open_model(resident=1.0, prefetch="off", **fields)
    every = torch.arange(32)
    steps = [torch.randint(0, 4000, (rows, 1)) for rows in (2, 2, 2)]

    def run(forward: Callable[..., Any]) -> list[Tensor]:
        logits = []
        for step in steps:
            for module in patched_modules(model):
                ops.evict(module._mesh_handle, every)
                if "routing_bias" in fields["lossy"]:
                    ops.promote(module._mesh_handle, every[::2])
            with torch.no_grad():
                logits.append(forward(input_ids=step, use_cache=False).logits)
            _engine(model).drain()
        return logits

    eager = run(model)
    before = torch_mesh.stats(model)
    torch._dynamo.reset()
    compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    after = torch_mesh.stats(model)
    for value, expected in zip(compiled, eager, strict=True):
        assert torch.equal(value, expected)
    assert after.deferred + after.rerouted == 2 * (before.deferred + before.rerouted) > 0


def test_an_interrupted_forward_leaves_no_deferred_outputs(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(lossy={"deferred_experts": 4}, prefetch="off", resident=1.0)
    modules = list(patched_modules(model))
    token = torch.randint(0, 4000, (1, 1))

    def cold_logits() -> Tensor:
        for module in modules:
            ops.evict(module._mesh_handle, torch.arange(32))
        with torch.no_grad():
            logits = model(input_ids=token, use_cache=False).logits
        _engine(model).drain()
        return logits

    expected = cold_logits()
    for broken in (1, 3):

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = modules[broken].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            cold_logits()
        hook.remove()
        _engine(model).drain()
        assert torch.equal(cold_logits(), expected)
    _engine(model).validate()
    assert _engine(model).pinned() == 0


def test_lossy_routers_are_copied_and_unpatched(open_model: Callable[..., PreTrainedModel], mesh_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    routers = [type(module) for module in model.modules() if "Router" in type(module).__name__]
    prompt = torch.randint(0, 4000, (1, 3))
    with torch.no_grad():
        expected = model(prompt).logits
        _patched(model, resident=0.25, **LOSSY)
        clone = copy.deepcopy(model)
        assert sum(isinstance(module, ResidencyBiasedRouter) for module in clone.modules()) == 6
        clone.generate(prompt, max_new_tokens=3, do_sample=False)
        assert torch_mesh.stats(model).deferred > 0  # the copies share the pool and its statistics
        torch_mesh.unpatch(model)
        assert [type(module) for module in model.modules() if "Router" in type(module).__name__] == routers
        assert not any(name.startswith("_mesh") for module in model.modules() for name in vars(module))
        assert torch.equal(model(prompt).logits, expected)


def test_some_families_select_resident_experts_with_a_routing_bias(rng: np.random.Generator) -> None:
    for name in rng.choice(sorted(TINY_MODELS), 3, replace=False):
        _check_selection(str(name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_selects_resident_experts_with_a_routing_bias(name: str) -> None:
    _check_selection(name)


def _check_selection(name: str) -> None:
    """Check that a family's selection prefers resident experts with a routing bias, or that the bias is refused."""
    model = TINY_MODELS[name].build()
    family = model.config.model_type
    top_k = find_experts(model)[0].top_k
    if top_k == 1:
        with pytest.raises(ValueError, match="a token of this model uses one expert"):
            _patched(model, lossy={"routing_bias": 0.5})
        return
    if family not in ROUTING_BIAS_FAMILIES or (family == "jamba" and not JAMBA_HAS_ROUTER):
        with pytest.raises(torch_mesh.UnsupportedModelError, match=r"Supported model types: .*deepseek_v3.*qwen3_moe"):
            _patched(model, lossy={"routing_bias": 0.5})
        return
    _patched(model, lossy={"routing_bias": 1.0}, resident=0.6)
    recorded = _record(model)
    inputs = {key: value[:1, -8:] for key, value in inputs_for(model).items()}  # few enough rows to be a decode step
    for parity in (0, 1):  # a token's choices cannot be all even and all odd
        for module in patched_modules(model):
            ops.evict(module._mesh_handle, torch.arange(8))
        for module in patched_modules(model):
            ops.promote(module._mesh_handle, torch.arange(parity, 8, 2))
        output_of(model, inputs)
    assert torch_mesh.stats(model).rerouted > 0
    for calls in recorded:
        for call in calls:
            assert all(len(set(row)) == len(row) for row in call.ids.tolist())
            cold = (~call.ready[call.ids]).sum(1)
            # With a bonus of the whole spread of scores only the kept choices may be cold, if enough experts are
            # resident and unmasked.
            if call.ready.sum() >= top_k and "n_group" not in model.config.to_dict():
                assert (cold <= kept_choices(top_k)).all()


def test_a_family_with_groups_and_a_correction_bias_opens_from_a_checkpoint(tmp_path: Path) -> None:
    TINY_MODELS["DeepseekV3Experts"].build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MeshConfig(resident=0.5, **LOSSY))
    assert (
        sum(isinstance(module, ResidencyBiasedRouter) for module in model.modules())
        == len(list(patched_modules(model)))
        == 2
    )
    model.generate(torch.randint(3, 100, (1, 4)), max_new_tokens=60, do_sample=False, eos_token_id=None)
    stats = torch_mesh.stats(model)
    assert stats.deferred > 0 and stats.rerouted > 0 and stats.per_layer[1].deferred == 0


def test_wrong_lossy_values_and_models_are_refused() -> None:
    for field, values in (("deferred_experts", (-1, 1.5, "many", True)), ("routing_bias", (-0.1, 2, "much", True))):
        for value in values:
            with pytest.raises(ValueError, match=f"lossy.{field}="):
                MeshConfig(lossy={field: value})
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    with pytest.raises(ValueError, match="lossy.deferred_experts=4, but a token of this model uses 3 experts"):
        torch_mesh.patch(model, lossy={"deferred_experts": 4})
    with pytest.raises(torch_mesh.UnsupportedModelError, match="its experts run unfused"):
        torch_mesh.patch(TINY_MODELS["MuseSparkExperts"].build(), lossy={"deferred_experts": 1})
    assert next(patched_modules(model), None) is None
    weights = torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    with pytest.raises(ValueError, match="one layer of experts"):
        torch_mesh.Experts(*weights, top_k=2, lossy={"deferred_experts": 1})
    with pytest.raises(torch_mesh.UnsupportedModelError, match="has no router"):
        torch_mesh.Experts(*weights, top_k=2, lossy={"routing_bias": 0.1})


def test_a_checkpoint_cannot_set_lossy_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="sets deferred_experts, routing_bias, which is ignored"):
        stored = MeshConfig.of_checkpoint({"quant_method": "mesh", "deferred_experts": 2, "routing_bias": 0.5})
    assert stored.lossy == MeshConfig().lossy and stored.lossy.modes == ""
    assert not {"deferred_experts", "routing_bias"} & MeshConfig(**LOSSY).to_dict().keys()
    assert MeshConfig(**LOSSY).replace(resident=0.5).lossy.modes == "deferred_experts=2, routing_bias=0.3"
    monkeypatch.setenv("TORCH_MESH_DEFERRED_EXPERTS", "1")
    assert MeshConfig().lossy.modes == "deferred_experts=1"


def test_routing_bias_keeps_a_quarter_of_a_tokens_choices_and_at_least_one() -> None:
    assert [kept_choices(top_k) for top_k in (1, 3, 4, 8, 16)] == [1, 1, 1, 2, 4]
