"""Lookahead in a model: it prefetches and changes no token, and a model without it gives the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import NO_LOOKAHEAD, TINY_MODELS, draw_routers
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

import torch_mesh
from torch_mesh.models.families import Router, find_experts, find_router, router_unsupported_reason
from torch_mesh.modules.experts import patched_modules
from torch_mesh.prefetch.predictor import fit, load_predictor, recall, save_predictor
from torch_mesh.routing.traces import load_trace


def _generate(folder: Path, **fields: object) -> tuple[torch.Tensor, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=torch_mesh.MeshConfig(resident=0.25, **fields)
    )
    prompt = torch.arange(3, 15).unsqueeze(0)
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    return tokens, torch_mesh.stats(model)


def test_lookahead_lowers_misses_and_changes_no_token(mesh_tiny: Path) -> None:
    with_hints, hinted = _generate(mesh_tiny)
    without, plain = _generate(mesh_tiny, prefetch="off")
    assert torch.equal(with_hints, without)
    assert hinted.cold_misses < 0.8 * plain.cold_misses


def test_a_compiled_unfused_forward_keeps_its_gradient_through_the_next(tmp_path: Path) -> None:
    model: Any = TINY_MODELS["MixtralExperts"].build()
    for layer in find_experts(model):
        layer.module.act_fn = ACT2FN["relu"]  # type: ignore[assignment]
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    assert not any(module._mesh_fused for module in patched_modules(model))
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    hidden = torch.randn(1, 4, model.config.hidden_size, dtype=model.dtype, requires_grad=True)
    first, second = (model(inputs_embeds=hidden, use_cache=False).logits.sum() for _ in range(2))
    assert all(torch.autograd.grad(out, hidden)[0].any() for out in (second, first))


def test_an_unfused_layer_whose_pool_is_closed_before_its_hint_returns_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = TINY_MODELS["MixtralExperts"].build()
    for layer in find_experts(model):
        layer.module.act_fn = ACT2FN["relu"]  # type: ignore[assignment]
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    module: Any = next(patched_modules(model))
    compute = module._forward_unfused

    def compute_and_close(*arguments: Any) -> torch.Tensor:
        output = compute(*arguments)
        module._mesh_pool.engine.close()
        return output

    inputs = torch.randn(1, model.config.hidden_size), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]])
    with torch.no_grad():
        expected = module(*inputs)
        monkeypatch.setattr(module, "_forward_unfused", compute_and_close)
        assert torch.equal(module(*inputs), expected)
        with pytest.raises(torch_mesh.PoolClosedError):
            module(*inputs)


@pytest.mark.parametrize("name", sorted(NO_LOOKAHEAD))
def test_a_model_without_lookahead_says_where_and_why(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    expected: dict[str, tuple[int, ...]] = {}
    for index in sorted(NO_LOOKAHEAD[name] - {0}):
        reason = f"of the next layer, {router_unsupported_reason(model, layers[index])}"
        expected[reason] = (*expected.get(reason, ()), index - 1)

    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    stats = torch_mesh.stats(model)
    assert stats.lookahead_unsupported_reasons == expected
    assert stats.to_dict()["lookahead_unsupported_reasons"] == {
        reason: list(numbers) for reason, numbers in expected.items()
    }
    for reason in expected:
        assert f"no lookahead: {reason}" in repr(model)
        assert f"no lookahead from layer{'s' if len(layers) > 2 and name != 'DeepseekV4Experts' else ''}" in str(stats)
        assert reason in str(stats)
    torch_mesh.unpatch(model)

    torch_mesh.patch(model, resident=0.5, io="threads", prefetch="off", store=tmp_path / "another")
    assert not torch_mesh.stats(model).lookahead_unsupported_reasons and "no lookahead" not in repr(model)


def test_a_fitted_predictor_of_layers_on_another_device_says_that_it_is_unused(tmp_path: Path) -> None:
    """The hidden states are on the device of the model's routers, the predictor on the CPU."""
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    fitted = fit(model, [torch.randint(3, 100, (40,)) for _ in range(4)])
    save_predictor(fitted, tmp_path / "fitted.safetensors")
    torch_mesh.patch(model, resident=0.5, prefetch=tmp_path / "fitted.safetensors")
    for layer in model.model.layers:
        layer.mlp.gate.to("meta")
    reasons = torch_mesh.stats(model).lookahead_unsupported_reasons
    layers = tuple(range(len(model.model.layers) - 1))
    assert reasons == {"of the next layer, the router is on meta": layers}
    assert "no lookahead: of the next layer, the router is on meta" in repr(model)


def test_a_fitted_predictor_prefetches_for_a_model_without_lookahead(tmp_path: Path) -> None:
    model = TINY_MODELS["ZayaExperts"].build()
    fitted = fit(model, [torch.randint(3, 100, (40,)) for _ in range(4)])
    save_predictor(fitted, tmp_path / "fitted.safetensors")
    torch_mesh.patch(model, resident=0.5, io="threads", prefetch=tmp_path / "fitted.safetensors")
    assert not torch_mesh.stats(model).lookahead_unsupported_reasons
    with torch.no_grad():
        for token in range(3, 12):
            model(input_ids=torch.tensor([[token]]), use_cache=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    assert torch_mesh.stats(model).prefetches > 0


@pytest.mark.parametrize(
    "name", ["AfmoeExperts", "DiffusionGemmaTextExperts", "Gemma4TextExperts", "HunYuanMoEV1Experts", "InklingExperts"]
)
def test_routers_without_a_plain_matrix_have_lookahead_too(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    draw_routers(model)
    calls = {layer.path: 0 for layer in layers}
    for layer in layers:
        router = find_router(model, layer)
        assert router is not None

        def count(*_: Any, path: str = layer.path) -> None:
            calls[path] += 1

        router.module.register_forward_hook(count)
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    assert not torch_mesh.stats(model).lookahead_unsupported_reasons and "no lookahead" not in repr(model)
    with torch.no_grad():
        for token in range(3, 15):
            model(input_ids=torch.tensor([[token]]), use_cache=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    stats = torch_mesh.stats(model)
    assert all(layer.prefetches > 0 for layer in stats.per_layer[1:]), "some layer is not predicted"
    assert set(calls.values()) == {12}, "a hint must not run the router itself: models count and record what it does"


# Routers with a bias that is part of the logits, one that is added to sigmoids, and one added to probabilities.
_BIASED = ("GptOssExperts", "DeepseekV3Experts", "Ernie4_5_MoeExperts")


@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize("name", _BIASED)
def test_lookahead_includes_the_routers_bias(name: str, predictor: bool, tmp_path: Path) -> None:
    """The bias makes the router choose half of each layer's experts for any hidden state. Only these are
    prefetched."""
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    favoured: list[set[int]] = []
    for layer in layers:
        router = find_router(model, layer)
        assert router is not None and router.bias is not None
        favoured.append(set(torch.randperm(layer.num_experts)[: layer.num_experts // 2].tolist()))
        with torch.no_grad():
            router.bias.fill_(-30)[list(favoured[-1])] = 30
    fields: dict[str, Any] = {}
    if predictor:
        save_predictor(fit(model, [torch.randint(3, 100, (40,)) for _ in range(4)]), tmp_path / "fitted.safetensors")
        fields["prefetch"] = tmp_path / "fitted.safetensors"
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store", **fields)
    with torch.no_grad():
        for token in range(3, 15):
            model(input_ids=torch.tensor([[token]]), use_cache=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    stats = torch_mesh.stats(model)
    assert stats.prefetches > 0
    for layer, chosen in zip(stats.per_layer[1:], favoured[1:], strict=True):
        read = {expert for expert, count in enumerate(layer.experts.prefetches) if count}
        assert read <= chosen


def test_a_compiled_step_uses_the_current_bias(tmp_path: Path) -> None:
    model = TINY_MODELS["GptOssExperts"].build()
    draw_routers(model)
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    token = torch.tensor([[7]])
    with torch.no_grad():
        expected = model(input_ids=token, use_cache=False).logits
        torch_mesh.reset_stats(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(input_ids=token, use_cache=False).logits, expected)
        # A traced graph reads the current bias: the expert that it favours now is prefetched.
        last: Any = list(patched_modules(model))[-1]
        predicted = 0
        for favoured in range(last.num_experts):
            last._mesh_pool.engine.drain()
            torch.ops.torch_mesh.evict(last._mesh_handle, torch.arange(last.num_experts))
            router = find_router(model, find_experts(model)[-1])
            assert router is not None and router.bias is not None
            router.bias.zero_()[favoured] = 100
            torch_mesh.reset_stats(model)
            compiled(input_ids=token, use_cache=False)
            predicted += torch_mesh.stats(model).per_layer[-1].experts.prefetches[favoured]
    assert (
        predicted > find_experts(model)[-1].top_k
    )  # a prediction may come too late; with a stale bias it would be the same top_k experts each time


@pytest.mark.parametrize("name", _BIASED)
def test_recall_includes_the_routers_bias(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS[name].build()
    draw_routers(model)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "correction_bias" in path or path.endswith("router.bias"):
            tensor.data *= 4  # the biases decide most choices, whatever was drawn
    text = [torch.randint(3, 100, (60,)) for _ in range(8)]
    fitted = fit(model, text[:6])
    save_predictor(fitted, tmp_path / "fitted.safetensors")
    with torch_mesh.record_trace(model, tmp_path / "fitted.npz", predictor=tmp_path / "fitted.safetensors"):
        for tokens in text[6:]:
            model(input_ids=tokens.unsqueeze(0))
    rows = recall(model, load_predictor(tmp_path / "fitted.safetensors", find_experts(model)), text[6:])
    # Recall agrees with the predictions that the trace recorded.
    trace = load_trace(tmp_path / "fitted.npz")
    assert trace.lookahead is not None
    for row in rows[1:]:
        predicted = (-trace.lookahead[:, row.layer]).argsort(-1)[:, None, : row.fetched[0]]
        found = (predicted == trace.ids[:, row.layer, :, None]).any(-1).mean()
        assert found == pytest.approx(row.fitted[0], abs=0.02)  # a trace stores scores in 16 bits

    monkeypatch.setattr(Router, "bias", None)
    for row, without in zip(rows[1:], recall(model, fitted, text[6:])[1:], strict=True):
        assert row.lookahead is not None and without.lookahead is not None
        assert row.lookahead[0] > without.lookahead[0] + 0.05
        assert row.fitted[0] > without.fitted[0] + 0.02  # with random routers a fit learns part of the bias by itself


def test_dense_packs_no_layer_of_a_router() -> None:
    model = TINY_MODELS["ZayaExperts"].build()
    torch_mesh.patch(model, resident=0.5, io="threads", dense="int8")
    packed = [path for path, module in model.named_modules() if hasattr(module, "_mesh_packed")]
    assert packed and not [path for path in packed if ".gate." in path]
