"""lookahead in a model: it reads ahead, the tokens stay what they were, and a model that cannot says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import NO_LOOKAHEAD, TINY_MODELS, level_routers
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.families import find_experts, find_router, why_no_router
from torch_mesh.modules import patched_modules


def _generate(folder: Path, **fields: object) -> tuple[torch.Tensor, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=torch_mesh.MeshConfig(resident=0.25, **fields)
    )
    prompt = torch.arange(3, 15).unsqueeze(0)
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    return tokens, torch_mesh.stats(model)


def test_a_loaded_model_looks_ahead_and_gives_the_same_tokens(mesh_tiny: Path) -> None:
    with_hints, hinted = _generate(mesh_tiny)
    without, plain = _generate(mesh_tiny, prefetch="off")
    assert torch.equal(with_hints, without)
    assert hinted.cold_misses < 0.8 * plain.cold_misses


@pytest.mark.parametrize("name", sorted(NO_LOOKAHEAD))
def test_a_model_without_lookahead_says_where_and_why(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    expected: dict[str, tuple[int, ...]] = {}
    for index in sorted(NO_LOOKAHEAD[name] - {0}):
        reason = f"of the next layer, {why_no_router(model, layers[index])}"
        expected[reason] = (*expected.get(reason, ()), index - 1)

    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    stats = torch_mesh.stats(model)
    assert stats.no_lookahead == expected
    assert stats.to_dict()["no_lookahead"] == {reason: list(numbers) for reason, numbers in expected.items()}
    for reason in expected:
        assert f"no lookahead: {reason}" in repr(model)
        assert f"no lookahead from layer{'s' if len(layers) > 2 and name != 'DeepseekV4Experts' else ''}" in str(stats)
        assert reason in str(stats)
    torch_mesh.unpatch(model)

    torch_mesh.patch(model, resident=0.5, io="threads", prefetch="off", store=tmp_path / "another")
    assert not torch_mesh.stats(model).no_lookahead and "no lookahead" not in repr(model)


def test_a_fitted_predictor_is_a_lookahead_for_a_model_that_has_none(tmp_path: Path) -> None:
    model = TINY_MODELS["ZayaExperts"].build()
    fitted = torch_mesh.foresight.predictor.fit(model, [torch.randint(3, 100, (40,)) for _ in range(4)])
    torch_mesh.foresight.predictor.save_predictor(fitted, tmp_path / "fitted.safetensors")
    torch_mesh.patch(model, resident=0.5, io="threads", predictor=tmp_path / "fitted.safetensors")
    assert not torch_mesh.stats(model).no_lookahead
    with torch.no_grad():
        for token in range(3, 12):
            model(input_ids=torch.tensor([[token]]), use_cache=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    assert torch_mesh.stats(model).prefetches > 0


@pytest.mark.parametrize(
    "name", ["AfmoeExperts", "DiffusionGemmaTextExperts", "Gemma4TextExperts", "HunYuanMoEV1Experts", "InklingExperts"]
)
def test_routers_that_hide_their_matrix_are_asked(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name].build()
    layers = find_experts(model)
    level_routers(model)
    calls = {layer.path: 0 for layer in layers}
    for layer in layers:
        router = find_router(model, layer)
        assert router is not None

        def count(*_: Any, path: str = layer.path) -> None:
            calls[path] += 1

        router.module.register_forward_hook(count)
    torch_mesh.patch(model, resident=0.5, io="threads", store=tmp_path / "store")
    assert not torch_mesh.stats(model).no_lookahead and "no lookahead" not in repr(model)
    with torch.no_grad():
        for token in range(3, 15):
            model(input_ids=torch.tensor([[token]]), use_cache=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    stats = torch_mesh.stats(model)
    assert all(layer.prefetches > 0 for layer in stats.per_layer[1:]), "some layer is not foretold"
    assert set(calls.values()) == {12}, "a hint must not run the router itself: models count and record what it does"


def test_dense_packs_no_layer_of_a_router() -> None:
    model = TINY_MODELS["ZayaExperts"].build()
    torch_mesh.patch(model, resident=0.5, io="threads", dense="int8")
    packed = [path for path, module in model.named_modules() if hasattr(module, "_mesh_packed")]
    assert packed and not [path for path in packed if ".gate." in path]
