"""patch and unpatch: refusals, ownership of the pool, and what works on a patched model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import pkgutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import each_once_quick
from tiny_models import TINY_MODELS, build, logits_of
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, MeshError, PoolClosedError
from torch_mesh.models.families import find_experts
from torch_mesh.modules import packed_weight
from torch_mesh.modules.dense import dense_bytes, packed_linears
from torch_mesh.modules.experts import MeshExperts, patched_modules
from torch_mesh.modules.packed_weight import PackedExpertsWeight, PackedWeight
from torch_mesh.patching import api
from torch_mesh.pool.expert_pool import record_bytes


def test_print_shows_what_was_patched() -> None:
    model = torch_mesh.patch(build(), resident=0.5, weights="int8", policy="lru")
    text = repr(model)
    assert "MeshQwen3MoeExperts" in text
    assert "weights=int8 (group 64), resident=12 of 24 experts, policy=lru" in text


@pytest.mark.parametrize("resident", [0.3, 0.9])
def test_reads_through_the_page_cache_give_the_same_logits(ids: torch.Tensor, resident: float) -> None:
    model = build()
    read, buffered = (
        torch_mesh.patch(copy.deepcopy(model), resident=resident, weights="int8", io=io)
        for io in ("threads", "buffered")
    )
    assert "io=buffered" in repr(buffered) and "io=" not in repr(read)
    for _ in range(3):
        assert torch.equal(logits_of(buffered, ids), logits_of(read, ids))


def test_patch_returns_the_same_model_and_leaves_its_implementation_alone() -> None:
    model = build()
    before = model.config._experts_implementation
    assert torch_mesh.patch(model) is model
    assert model.config._experts_implementation == before
    assert torch_mesh.unpatch(model) is model


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing such a module would replace the public function: ``torch_mesh.stats(model)`` would depend on the order
    of imports."""
    modules = {module.name for module in pkgutil.iter_modules(torch_mesh.__path__)}
    assert not modules & set(torch_mesh.__all__)


def test_patching_or_unpatching_twice_is_refused_with_advice() -> None:
    model = torch_mesh.patch(build())
    with pytest.raises(MeshError, match=r"patched already.*torch_mesh\.unpatch\(model\) first"):
        torch_mesh.patch(model, resident=0.5)
    torch_mesh.unpatch(model)
    with pytest.raises(MeshError, match="is not patched"):
        torch_mesh.unpatch(model)
    for function in (torch_mesh.stats, torch_mesh.reset_stats):
        with pytest.raises(MeshError):
            function(model)


@pytest.mark.parametrize("model", ["folder", Path("folder"), None])
def test_functions_of_models_refuse_anything_else(model: Any, tmp_path: Path) -> None:
    calls: list[Callable[[Any], object]] = [
        torch_mesh.patch,
        torch_mesh.unpatch,
        torch_mesh.stats,
        torch_mesh.reset_stats,
        torch_mesh.describe_training,
        torch_mesh.place_experts,
        torch_mesh.synchronize,
        lambda model: torch_mesh.save_profile(model, tmp_path / "profile"),
        lambda model: torch_mesh.record_trace(model, tmp_path / "trace").__enter__(),
        lambda model: torch_mesh.watch(model).__enter__(),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="not a loaded model.*from_pretrained"):
            call(model)


@pytest.mark.parametrize("config", ["8GiB", {"resident": 0.5}, 0.5])
def test_patch_refuses_a_config_of_another_type(config: Any) -> None:
    model = build()
    with pytest.raises(TypeError, match="is not a MeshConfig.*such as resident=0.5"):
        torch_mesh.patch(model, config)
    with pytest.raises(TypeError, match="is not a MeshConfig"):
        torch_mesh.Experts(torch.ones(2, 64, 64), torch.ones(2, 64, 32), config=config)


def test_a_fraction_below_the_experts_of_a_token_gives_a_warning() -> None:
    least, every = 3, 24
    for resident in (0.0001, 0.1249):
        with pytest.warns(UserWarning, match=rf"resident={resident} of {every} experts.*give at least 0.125"):
            model = torch_mesh.patch(build(), resident=resident)
        assert next(patched_modules(model))._mesh_pool.slots == least
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_mesh.patch(build(), resident=0.125)


class _Wrapper(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model


@pytest.mark.parametrize("dense", ["auto", "bf16"])
def test_unpatch_of_a_module_around_the_model_leaves_nothing_behind(dense: str, ids: torch.Tensor) -> None:
    model = build()
    before = {name: (type(module), list(vars(module))) for name, module in model.named_modules()}
    expected = model.generate(input_ids=ids[:1], max_new_tokens=9, do_sample=False)
    torch_mesh.compile(torch_mesh.patch(model, resident=0.5, speculation="lookup", dense=dense))
    model.generate(input_ids=ids[:1], max_new_tokens=2, do_sample=False, disable_compile=True)  # makes a tally
    torch_mesh.unpatch(_Wrapper(model))
    assert {name: (type(module), list(vars(module))) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks
    assert torch.equal(model.generate(input_ids=ids[:1], max_new_tokens=9, do_sample=False), expected)


@pytest.mark.parametrize("dense", ["auto", "bf16"])
def test_unpatch_of_a_module_around_the_model_ties_its_head_again(dense: str) -> None:
    tiny = TINY_MODELS["Qwen3MoeExperts"]
    model = dataclasses.replace(tiny, fields=tiny.fields | {"tie_word_embeddings": True}).build()
    torch_mesh.patch(model, resident=0.5, dense=dense)
    torch_mesh.unpatch(_Wrapper(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dense", ["none", "int8"])
@pytest.mark.parametrize("resident", [0.5, 1.0])
def test_a_model_patched_in_inference_mode_trains_outside_of_it(dense: str, resident: float, ids: torch.Tensor) -> None:
    model = build()
    with torch.inference_mode():
        torch_mesh.patch(model, resident=resident, dense=dense)
    assert torch.is_grad_enabled()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(layer.mlp.gate.weight.grad.any() for layer in model.model.layers)


@pytest.mark.parametrize("dense", ["none", "bf16"])
@pytest.mark.parametrize("resident", [0.5, 1.0])
def test_a_model_unpatched_in_inference_mode_trains_outside_of_it(
    dense: str, resident: float, ids: torch.Tensor
) -> None:
    model = torch_mesh.patch(build(), resident=resident, dense=dense)
    with torch.inference_mode():
        torch_mesh.unpatch(model)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(layer.mlp.gate.weight.grad.any() for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpatch_restores_exact_weights_and_needs_lossy_for_rounded_ones(dtype: torch.dtype) -> None:
    model = build().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact = dtype == torch.bfloat16
    with contextlib.nullcontext() if exact else pytest.warns(UserWarning, match="rounded to bf16"):
        model = torch_mesh.patch(model, resident=0.5)
    if not exact:
        with pytest.raises(MeshError, match="lossy=True"):
            torch_mesh.unpatch(model)
    model = torch_mesh.unpatch(model, lossy=not exact)
    for name, value in model.state_dict().items():
        rounded = before[name].to(torch.bfloat16).to(dtype)
        assert value.dtype == dtype
        assert torch.equal(value, rounded if ".experts." in name else before[name])
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    assert "torch_mesh.unpatch(model, lossy=True)" in page


def test_wrong_field_leaves_the_model_as_it_was() -> None:
    model = build()
    with pytest.raises(ValueError, match="Did you mean 'weights'"):
        torch_mesh.patch(model, weight="int4")
    with pytest.raises(ValueError, match="every token needs 3"):
        torch_mesh.patch(model, resident=4096)
    assert not any(isinstance(module, MeshExperts) for module in model.modules())
    torch_mesh.patch(model, MeshConfig(weights="int8"), weights="int4")
    assert "weights=int4" in repr(model)


def test_experts_without_weights_are_refused() -> None:
    with torch.device("meta"):
        model = type(build())(build().config)
    with pytest.raises(MeshError, match="layers.0.mlp.experts.gate_up_proj holds no weights"):
        torch_mesh.patch(model)


def test_models_quantized_by_others_are_refused() -> None:
    model = build()
    model.hf_quantizer = type("Other", (), {"quantization_config": type("C", (), {"quant_method": "bitsandbytes"})})()
    with pytest.raises(torch_mesh.UnsupportedModelError, match="bitsandbytes.*bf16, fp16 and fp32"):
        torch_mesh.patch(model)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_output_does_not_depend_on_residency(weights: str, ids: torch.Tensor) -> None:
    model = build()
    expected = logits_of(torch_mesh.patch(copy.deepcopy(model), weights=weights, resident=1.0), ids)
    for resident in (0.75, 0.25, 1e-6):
        patched = torch_mesh.patch(copy.deepcopy(model), weights=weights, resident=resident)
        assert torch.equal(logits_of(patched, ids), expected)
        assert torch.equal(logits_of(patched, ids), expected)


def test_unpatching_rounded_experts_needs_lossy(ids: torch.Tensor) -> None:
    model = build()
    before = model.model.layers[0].mlp.experts.down_proj.clone()
    torch_mesh.patch(model, weights="int8", resident=0.5)
    with pytest.raises(MeshError, match="rounded to int8.*lossy=True"):
        torch_mesh.unpatch(model)
    patched = logits_of(model, ids)
    torch_mesh.unpatch(model, lossy=True)
    after = model.model.layers[0].mlp.experts.down_proj
    assert after.dtype == before.dtype
    assert not torch.equal(after, before)
    assert (after - before).norm() < 0.02 * before.norm()
    by_token = (logits_of(model, ids) - patched).float().norm(dim=-1) / patched.float().norm(dim=-1)
    assert by_token.median() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_rounded_with_one_warning_and_are_not_exact(dtype: torch.dtype, ids: torch.Tensor) -> None:
    model = build().to(dtype)
    with pytest.warns(UserWarning, match="rounded to bf16") as caught:
        torch_mesh.patch(model, resident=0.5)
    assert len(caught) == 1
    assert logits_of(model, ids).dtype == dtype
    with pytest.raises(MeshError, match="lossy=True"):
        torch_mesh.unpatch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_mesh.patch(build().to(dtype), weights="int8")


@pytest.mark.parametrize(("layer", "name"), [(1, "gate_up_proj"), (0, "down_proj")])
def test_one_parameter_of_another_dtype_makes_the_experts_inexact(layer: int, name: str) -> None:
    model = build()
    experts = model.model.layers[layer].mlp.experts
    setattr(experts, name, torch.nn.Parameter(torch.rand_like(getattr(experts, name), dtype=torch.float32)))
    with pytest.warns(UserWarning, match=r"are torch\.bfloat16 and torch\.float32 and are rounded to bf16"):
        torch_mesh.patch(model, resident=0.5)
    with pytest.raises(MeshError, match="lossy=True"):
        torch_mesh.unpatch(model)


def test_wide_biases_are_not_rounded() -> None:
    model = TINY_MODELS["GptOssExperts"].build()
    experts = model.model.layers[0].mlp.experts
    bias = torch.rand_like(experts.down_proj_bias, dtype=torch.float32)
    experts.down_proj_bias = torch.nn.Parameter(bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_mesh.unpatch(torch_mesh.patch(model, resident=0.5))
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj_bias, bias)


def test_unpatch_puts_experts_and_linear_layers_on_the_device_of_what_is_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ``device_map=`` over several devices: of layer 1, the router and a norm are said to be on another."""
    model = build()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch_mesh.patch(model, resident=0.5, dense="bf16")
    layer = model.model.layers[1]
    elsewhere = {layer.mlp.gate.weight, layer.self_attn.q_norm.weight}
    real = packed_weight.device_of

    def device_of(*modules: torch.nn.Module) -> torch.device:
        parameters = (p for module in modules for p in module.parameters() if not isinstance(p, PackedWeight))
        first = next(parameters)
        return torch.device("meta") if first in elsewhere or first.is_meta else real(*modules)

    monkeypatch.setattr(packed_weight, "device_of", device_of)
    torch_mesh.unpatch(model)
    parameters = dict(model.named_parameters())
    moved = {name for name, parameter in parameters.items() if parameter.is_meta}
    attention = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert moved == attention | {f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    assert all(torch.equal(parameters[name], values[name]) for name in parameters.keys() - moved)


@pytest.mark.parametrize(("guard", "dense"), [("on", "none"), ("off", "none"), ("on", "int4")])
def test_unpatch_without_memory_for_the_weights_leaves_the_model_patched(
    guard: str, dense: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guarded pool shrinks while memory fills up, so what it can free counts as free."""
    model = build()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    needed = sum(layer.nbytes for layer in find_experts(model))
    torch_mesh.patch(model, resident=0.25, residency={"guard": guard}, dense=dense)
    needed += sum(linear.weight.nbytes - linear._mesh_packed.nbytes for _, linear in packed_linears(model))
    expected = logits_of(model, ids)
    size = next(patched_modules(model))._mesh_pool.engine.describe_size()
    evictable = size["slot_bytes"] - size["min_slots"] * size["record_bytes"] if guard == "on" else 0
    assert 0 <= evictable < needed and (evictable > 0) == (guard == "on")
    limit = needed - evictable
    with monkeypatch.context() as full:
        full.setattr(api, "shortage", lambda needed: limit - 1 if needed > limit - 1 else None)
        with pytest.raises(MemoryError, match=f"take {needed:,} bytes .* have {needed - 1:,} left"):
            torch_mesh.unpatch(model, lossy=True)
        assert torch.equal(logits_of(model, ids), expected)
        full.setattr(api, "shortage", lambda needed: limit if needed > limit else None)
        torch_mesh.unpatch(model, lossy=True)
    state = model.state_dict()
    exact = [name for name in state if dense == "none" or ".experts." in name]
    assert exact and all(torch.equal(state[name], values[name]) for name in exact)


def test_a_named_store_is_written_and_an_unnamed_one_leaves_no_files(tmp_path: Path, cache: Path) -> None:
    from torch_mesh.store.manifest import open_store

    torch_mesh.patch(build(), weights="int4", group_size=32, store=tmp_path / "store", resident=0.5)
    manifest = open_store(tmp_path / "store").manifest
    assert (manifest.weights, manifest.group_size) == ("int4", 32)
    model = torch_mesh.patch(build(), resident=0.5)
    assert list(cache.iterdir()) == []
    torch_mesh.unpatch(model)  # reads records of a file that is already unlinked


def test_moving_and_casting_do_not_change_the_experts(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.5)
    expected = logits_of(model, ids)
    for moved in (model.to("cpu"), model.cpu(), model.train().eval()):
        assert torch.equal(logits_of(moved, ids), expected)
    model.float()
    assert model.lm_head.weight.dtype == torch.float32
    assert {type(p) for p in model.model.layers[0].mlp.experts.parameters()} == {PackedExpertsWeight}
    assert logits_of(model, ids).dtype == torch.float32


@pytest.mark.parametrize("dense", ["none", "bf16"])
def test_unpatch_after_a_cast_restores_weights_in_the_new_dtype(dense: str) -> None:
    model = build()
    expected = copy.deepcopy(model).float().state_dict()
    torch_mesh.unpatch(torch_mesh.patch(model, resident=0.5, dense=dense).float())
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


def test_unpatch_leaves_what_was_frozen_meanwhile_frozen() -> None:
    model = torch_mesh.patch(build(), resident=0.5, dense="bf16")
    other = copy.deepcopy(model)
    torch_mesh.unpatch(model.requires_grad_(False).float())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    other.model.layers[0].mlp.experts.down_proj.requires_grad = False  # as PEFT does
    torch_mesh.unpatch(other)
    frozen = [name for name, parameter in other.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.layers.0.mlp.experts.down_proj"]


@pytest.mark.parametrize("dense", ["none", "int8"])
def test_an_automatic_pool_fits_beside_the_originals(monkeypatch: pytest.MonkeyPatch, dense: str) -> None:
    model, config = build(), MeshConfig(dense=dense)
    layers = find_experts(model)
    record = record_bytes(layers, "bf16", 0)
    _, packed = dense_bytes(model, layers, dense=dense, group_size=config.group_size)
    left = config.workspace_bytes + packed + 10 * record * 4 // 3  # auto's margin is a quarter of it
    monkeypatch.setattr("torch_mesh.system.memory.available_bytes", lambda: left)
    torch_mesh.patch(model, config, resident="auto")
    assert next(patched_modules(model))._mesh_pool.slots == 10


def test_submodules_of_experts_are_cast() -> None:
    model = torch_mesh.patch(build("MuseSparkExperts"), resident=0.5).float()
    modules = [module for module in model.modules() if isinstance(module, MeshExperts)]
    assert {p.dtype for m in modules for p in m.post_expert_norm.parameters()} <= {torch.float32}
    assert list(modules[0]._parameters) == ["gate_up_proj", "down_proj"]


def test_deep_copy_shares_the_pool_which_outlives_the_original(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.25)
    expected = logits_of(model, ids)
    clone = copy.deepcopy(model)
    pools = {id(m._mesh_pool) for each in (model, clone) for m in each.modules() if isinstance(m, MeshExperts)}
    assert len(pools) == 1
    torch_mesh.unpatch(model)
    del model
    assert torch.equal(logits_of(clone, ids), expected)
    torch_mesh.unpatch(clone)


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_is_refused_with_advice(save) -> None:
    with pytest.raises(MeshError, match="cannot be pickled.*unpatch"):
        save(torch_mesh.patch(build()))


_FIELDS: list[dict[str, Any]] = [{}, {"dense": "int8"}, {"speculation": "lookup"}, {"lossy": {"routing_bias": 0.1}}]


@pytest.mark.parametrize(("fields", "how"), each_once_quick(_FIELDS, ["loaded", "patched"]))
def test_pool_is_closed_with_its_last_model(
    no_collector: None, fields: dict[str, Any], how: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    model = build()
    if how == "loaded":
        model.save_pretrained(tmp_path / "plain")
        config = MeshConfig(resident=0.25, **fields)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    else:
        torch_mesh.patch(model, resident=0.25, **fields)
    model.generate(ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch_mesh.watch(model):
        model(input_ids=ids, labels=ids).loss.backward()
    assert torch_mesh.stats(model).bytes_read and model.get_memory_footprint() and str(model)
    model.save_pretrained(tmp_path / "saved")
    handle = model.model.layers[0].mlp.experts._mesh_handle.clone()
    clone = copy.deepcopy(model)
    x, weights = torch.randn(1, 72).bfloat16(), torch.ones(1, 1)
    del model
    assert torch.ops.torch_mesh.experts(x, torch.zeros(1, 1, dtype=torch.long), weights, handle).shape == (1, 72)
    del clone
    with pytest.raises(PoolClosedError):
        torch.ops.torch_mesh.experts(x, torch.zeros(1, 1, dtype=torch.long), weights, handle)


def test_a_temporary_model_lives_as_long_as_its_method_runs(no_collector: None, tmp_path: Path) -> None:
    torch_mesh.patch(build(), weights="int8").save_pretrained(tmp_path)
    assert torch_mesh.patch(build()).get_memory_footprint() > 0


def test_two_patched_models_are_independent(ids: torch.Tensor) -> None:
    first, second = build(), build("GptOssExperts")
    expected = [logits_of(torch_mesh.patch(copy.deepcopy(model)), ids) for model in (first, second)]
    torch_mesh.patch(first, resident=0.25)
    torch_mesh.patch(second, resident=0.25)
    for _ in range(2):
        assert torch.equal(logits_of(first, ids), expected[0])
        assert torch.equal(logits_of(second, ids), expected[1])
    torch_mesh.unpatch(first)
    assert torch.equal(logits_of(second, ids), expected[1])


def test_two_threads_share_one_small_pool() -> None:
    model = torch_mesh.patch(build(), resident=0.2)
    prompts = [torch.randint(3, 100, (2, 9)) for _ in range(4)]
    expected = [logits_of(model, prompt) for prompt in prompts]
    wrong: list[str] = []

    def work(start: int) -> None:
        for step in range(12):
            index = (start + step) % len(prompts)
            try:
                if not torch.equal(logits_of(model, prompts[index]), expected[index]):
                    wrong.append(f"prompt {index} differs")
            except Exception as error:  # noqa: BLE001  an exception would be lost with the thread
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_gradients_reach_hidden_states_and_router(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.5).float().train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.embed_tokens.weight.grad.norm() > 0
    assert model.model.layers[0].mlp.gate.weight.grad.norm() > 0
    assert all(p.grad is None for m in model.modules() if isinstance(m, MeshExperts) for p in m.parameters())


def test_save_pretrained_writes_the_original_of_an_exact_model(tmp_path: Path, ids: torch.Tensor) -> None:
    model = build()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    torch_mesh.patch(model, resident=0.25)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hasattr(loaded.config, "quantization_config")
    state = loaded.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_stats_count_hits_misses_and_reads(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.25, policy="lru")
    empty = torch_mesh.stats(model)
    assert (empty.hits, empty.cold_misses, empty.hit_rate, len(empty.per_layer)) == (0, 0, None, 3)
    logits_of(model, ids)
    logits_of(model, ids)
    stats = torch_mesh.stats(model)
    assert stats.cold_misses > 0
    assert stats.promoted >= stats.cold_misses
    assert stats.promoted - stats.evicted <= 6
    assert stats.bytes_read > 0
    assert stats.stall_seconds >= 0
    assert stats.hit_rate == stats.hits / (stats.hits + stats.cold_misses + stats.inflight_misses)
    assert sum(layer.cold_misses for layer in stats.per_layer) == stats.cold_misses
    assert stats.to_dict()["per_layer"][0]["hits"] == stats.per_layer[0].hits
    assert [row[0] for row in stats.table()] == ["layer", "0", "1", "2", "prefill", "all"]
    assert f"{stats.hit_rate:.1%}" in str(stats)
    torch_mesh.reset_stats(model)
    assert torch_mesh.stats(model) == dataclasses.replace(empty, resets=1)


def test_stats_of_a_fully_resident_model_are_all_hits(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=1.0)
    logits_of(model, ids)
    stats = torch_mesh.stats(model)
    assert (stats.hit_rate, stats.bytes_read, stats.evicted) == (1.0, 0, 0)
