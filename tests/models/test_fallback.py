"""lossy={"fallback": ...} in models: only cold experts of decode steps are computed from fewer bits."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from tiny_models import TINY_MODELS, logits_of
from torch import Tensor, nn
from training import assert_same_gradients
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh
from torch_mesh import _C, MeshConfig
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.lossy.fallback import check_fallback_format, split_slots
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.plan import plan
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store

ops = torch.ops.torch_mesh
EVERY = torch.arange(32)  # all experts of a layer of mesh-tiny
OpenModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def store(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(mesh_tiny, tmp_path_factory.mktemp("fallback") / "int8", "int8").store.folder


@pytest.fixture
def open_model(store: Path) -> OpenModel:
    def open_it(**fields: Any) -> PreTrainedModel:
        config = MeshConfig(resident=0.25, io="threads", lossy={"fallback": "int4"}).replace(**fields)
        return AutoModelForCausalLM.from_pretrained(store, quantization_config=config)

    return open_it


def _pool(model: nn.Module) -> ExpertPool:
    return next(patched_modules(model))._mesh_pool


def _engines(model: nn.Module) -> tuple[_C.Engine, _C.Engine]:
    pool = _pool(model)
    assert pool.fallback is not None
    return pool.engine, pool.fallback.engine


def _settle(model: nn.Module) -> None:
    for engine in _engines(model):
        engine.drain()
        engine.validate()
        assert engine.pinned() == 0


def _generate(model: PreTrainedModel, tokens: int = 24) -> Tensor:
    prompt = torch.randint(0, 4000, (2, 24))
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)


def test_fallback_accesses_are_counted_and_shown(open_model: OpenModel) -> None:
    model = open_model()
    assert _generate(model).shape == (2, 48)
    stats = torch_mesh.stats(model)
    assert stats.fallback_accesses == stats.decode.fallback_accesses > 0
    for counters in (stats, stats.prefill, stats.decode, *stats.per_layer):
        assert counters.hits + counters.cold_misses + counters.inflight_misses == counters.accesses
        assert counters.fallback_accesses <= counters.accesses
        assert counters.forwards in (0, 1, 23, 24)
    assert sum(layer.fallback_accesses for layer in stats.per_layer) == stats.fallback_accesses
    for layer in stats.per_layer:
        assert sum(layer.experts.accesses) == layer.accesses
    assert (
        stats.lossy == "fallback=int4"
        and f"{stats.fallback_accesses} of {stats.accesses} accesses were to fallback experts" in str(stats)
    )
    table = json.loads(json.dumps(stats.to_dict()))
    assert (table["lossy"], table["decode"]["fallback_accesses"]) == ("fallback=int4", stats.fallback_accesses)
    shown = str(model)
    assert "lossy: fallback=int4, fallback: weights=int4 (group 64), resident=" in shown
    assert shown.count("experimental: lossy (docs/lossy.md)") == shown.count("experimental") == 1
    _settle(model)
    torch_mesh.reset_stats(model)
    assert torch_mesh.stats(model).fallback_accesses == torch_mesh.stats(model).bytes_read == 0


def test_the_times_of_both_pools_are_within_that_of_the_steps(open_model: OpenModel) -> None:
    model = open_model()
    with torch.no_grad():
        cache = model(torch.randint(0, 4000, (1, 20)), use_cache=True)[CACHE_NAME]
        model(torch.tensor([[5]]), **{CACHE_NAME: cache})
        torch_mesh.reset_stats(model)  # time before the next step is not counted
        begin = time.perf_counter()
        for token in torch.randint(0, 4000, (20, 1, 1)):
            model(token, **{CACHE_NAME: cache})
        seconds = time.perf_counter() - begin
    decode = torch_mesh.stats(model).decode
    times = decode.time_per_forward()
    assert decode.fallback_accesses > 0 and times is not None and min(times.values()) >= 0
    assert 0 < 20 * sum(times.values()) <= 1e3 * seconds
    exact, low = (engine.detailed_stats()["decode"]["expert_nanoseconds"].sum() / 1e9 for engine in _engines(model))
    assert decode.expert_seconds >= max(exact, low) * (1 - 1e-9)


def test_the_two_pools_share_the_memory_of_one(open_model: OpenModel, store: Path) -> None:
    model = open_model()
    exact, low = (engine.describe() for engine in _engines(model))
    taken = [about["slots"] * about["record_bytes"] for about in (exact, low)]
    budget = 48 * exact["record_bytes"]
    assert budget - exact["record_bytes"] < sum(taken) <= budget
    assert 0 <= budget * 3 // 4 - taken[1] < low["record_bytes"]
    planned = plan(store, MeshConfig(resident=0.25, lossy={"fallback": "int4"}))
    assert (planned.slots, planned.fallback_slots, planned.pool_bytes) == (exact["slots"], low["slots"], sum(taken))
    assert planned.to_dict()["fallback_slots"] == low["slots"]


def test_with_all_experts_resident_there_is_no_fallback_pool(open_model: OpenModel, cache: Path) -> None:
    model, plain = open_model(resident=1.0), open_model(resident=1.0, lossy={"fallback": "none"})
    assert _pool(model).fallback is None and "lossy" not in str(model)
    assert not cache.exists()
    ids = torch.randint(0, 4000, (2, 4))
    assert torch.equal(logits_of(model, ids), logits_of(plain, ids))
    assert torch_mesh.stats(model).lossy == "" and torch_mesh.stats(model).fallback_accesses == 0


def test_a_step_whose_experts_are_resident_is_exact(open_model: OpenModel) -> None:
    model, plain = (open_model(lossy={"fallback": name}, resident=0.8, prefetch="off") for name in ("int4", "none"))
    ids = torch.randint(0, 4000, (1, 1))
    expected = logits_of(plain, ids)
    for _ in range(7):  # each step reads the exact experts it missed, which may change the choice of later layers
        logits_of(model, ids)
        _settle(model)
    torch_mesh.reset_stats(model)
    assert torch.equal(logits_of(model, ids), expected) and torch_mesh.stats(model).fallback_accesses == 0


def test_prompts_and_gradients_are_exact(open_model: OpenModel) -> None:
    exact, lossy = open_model(lossy={"fallback": "none"}), open_model()
    prompt = torch.randint(0, 4000, (1, 40))
    assert torch.equal(logits_of(exact, prompt), logits_of(lossy, prompt))
    assert_same_gradients(exact, lossy)
    assert torch_mesh.stats(lossy).fallback_accesses == 0


@pytest.mark.slow
def test_perplexity_stays_close(open_model: OpenModel, mesh_tiny: Path) -> None:
    """A document of prose, a token at a time. Averaged over many documents, int4 throughout costs at most 1 %. A
    single document may cost more."""
    [text] = (Path(__file__).parents[1] / "data" / "text" / "prose.jsonl").read_text("utf-8").splitlines()[:1]
    ids = AutoTokenizer.from_pretrained(mesh_tiny)(json.loads(text)["text"], return_tensors="pt").input_ids[:, :160]
    losses = []
    for model in (open_model(lossy={"fallback": "none"}), open_model()):
        past, logits = None, []
        with torch.no_grad():
            for token in ids[0, :-1]:
                step = model(input_ids=token.view(1, 1), past_key_values=past, use_cache=True)
                past = step.past_key_values
                logits.append(step.logits[0, -1].float())
        losses.append(torch.nn.functional.cross_entropy(torch.stack(logits), ids[0, 1:]).item())
    assert losses[1] != losses[0] and abs(losses[1] - losses[0]) < 0.03


def test_a_compiled_decode_step_equals_an_eager_one(open_model: OpenModel) -> None:
    """Each step starts with the same resident experts, every fourth one, and no fallback experts."""
    model = open_model(resident=0.8, prefetch="off")
    steps = [torch.randint(0, 4000, (2, 1)) for _ in range(3)]

    def run(forward: Callable[..., Any]) -> list[Tensor]:
        logits = []
        for step in steps:
            for module in patched_modules(model):
                assert module._mesh_fallback is not None
                ops.evict(module._mesh_handle, EVERY)
                ops.evict(module._mesh_fallback, EVERY)
            for module in patched_modules(model):
                ops.promote(module._mesh_handle, EVERY[::4])
            with torch.no_grad():
                logits.append(forward(input_ids=step, use_cache=False).logits)
            _settle(model)
        return logits

    eager = run(model)
    before = torch_mesh.stats(model).fallback_accesses
    torch._dynamo.reset()
    compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    for value, expected in zip(compiled, eager, strict=True):
        assert torch.equal(value, expected)
    assert torch_mesh.stats(model).fallback_accesses == 2 * before > 0


def test_a_damaged_fallback_record_is_an_error_until_it_is_repaired(open_model: OpenModel, cache: Path) -> None:
    _generate(open_model(), 2)  # writes the store
    [fallbacks] = [open_store(folder) for folder in (cache / "stores").iterdir()]
    file = fallbacks.folder / fallbacks.manifest.record_files[0].name
    whole = file.read_bytes()
    start = fallbacks.manifest.record_files[0].data_start
    file.write_bytes(whole[:start] + bytes(len(whole) - start))
    model = open_model(verify="always", prefetch="off")
    step = torch.randint(0, 4000, (1, 1))
    with pytest.raises(torch_mesh.ChecksumError) as caught:
        logits_of(model, step)
    assert caught.value.layer == 0 and str(file) in str(caught.value)
    _settle(model)
    with file.open("r+b") as stream:
        stream.write(whole)
    assert logits_of(model, step).isfinite().all()
    _settle(model)


def test_both_pools_are_closed_with_the_last_model(open_model: OpenModel) -> None:
    model = open_model()
    engines = _engines(model)
    clone = copy.deepcopy(model)
    del model
    _generate(clone, 4)  # with the pools that both models shared
    assert torch_mesh.stats(clone).accesses > 0
    del clone
    for engine in engines:
        with pytest.raises(torch_mesh.PoolClosedError):
            engine.describe()


@pytest.mark.parametrize("source", first_quick("int8 from a checkpoint", "checkpoint", "store"))
def test_fallbacks_are_converted_once(source: str, mesh_tiny: Path, store: Path, cache: Path) -> None:
    folder = store if source == "store" else mesh_tiny
    weights = {"checkpoint": "bf16", "store": "auto"}.get(source, "int8")

    def open_it() -> PreTrainedModel:
        config = MeshConfig(resident=0.25, lossy={"fallback": "lut4"}, weights=weights)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    def stamps() -> dict[str, int]:
        return {str(file): file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}

    _generate(open_it(), 4)
    first = stamps()
    formats = sorted(open_store(folder).manifest.weights for folder in (cache / "stores").iterdir())
    assert formats == (["int8", "lut4"] if source.startswith("int8") else ["lut4"])
    model = open_it()
    assert stamps() == first
    assert _pool(model).fallback.weights == "lut4"


def test_the_fallback_store_is_beside_a_named_store(mesh_tiny: Path, tmp_path: Path) -> None:
    config = MeshConfig(
        resident=0.25, lossy={"fallback": "int4"}, weights="int8", store=f"{tmp_path}/experts/"
    )  # the path ends with a slash
    AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    assert [open_store(tmp_path / name).manifest.weights for name in ("experts", "experts-int4")] == ["int8", "int4"]


@pytest.mark.parametrize("family", ["Qwen3MoeExperts", "JambaExperts", "DeepseekV3Experts"])
def test_patch_and_unpatch(family: str, cache: Path) -> None:
    model = TINY_MODELS[family].build()
    prompt = torch.randint(3, 100, (1, 3))
    expected = logits_of(model, prompt)
    torch_mesh.patch(model, weights="bf16", lossy={"fallback": "int8"}, resident=0.9, io="threads")
    model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    stats = torch_mesh.stats(model)
    assert stats.fallback_accesses > 0 and stats.lossy == "fallback=int8"
    assert [entry for entry in os.listdir(cache) if "unnamed" in entry] == []
    torch_mesh.unpatch(model)
    assert not any(name.startswith("_mesh") for module in model.modules() for name in vars(module))
    assert torch.equal(logits_of(model, prompt), expected)


def test_save_pretrained_writes_the_original(tmp_path: Path) -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch_mesh.patch(model, lossy={"fallback": "int4"}, resident=0.9).save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


def test_statistics_in_a_file_count_both_pools(open_model: OpenModel, tmp_path: Path) -> None:
    model = open_model(stats={"file": tmp_path / "stats.jsonl", "every": 4})
    _generate(model, 12)
    whole = torch_mesh.stats(model)
    sizes = [engine.describe_size() for engine in _engines(model)]
    del model
    lines = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    assert (
        0 < lines[-1]["decode"]["fallback_accesses"] <= whole.fallback_accesses
        and lines[-1]["lossy"] == "fallback=int4"
    )
    assert lines[-1]["memory"]["pool"] == sum(size["slots"] * size["record_bytes"] for size in sizes)


def test_fallback_works_with_routing_bias(open_model: OpenModel) -> None:
    model = open_model(lossy={"routing_bias": 0.1})
    _generate(model)
    stats = torch_mesh.stats(model)
    assert stats.fallback_accesses > 0 and stats.rerouted > 0
    assert stats.lossy == "routing_bias=0.1, fallback=int4"
    _settle(model)


def test_wrong_fallback_formats_and_combinations_are_refused(open_model: OpenModel, store: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"lossy.fallback='int2' .* 'none', 'int8', 'int4', 'lut4', 'tcq3', 'tcq2\+tcq3', 'tcq2'",
    ):
        MeshConfig(lossy={"fallback": "int2"})
    with pytest.raises(
        ValueError,
        match=r"lossy.fallback='int8' .* int8: give one of 'int4', 'lut4', 'tcq3', 'tcq2\+tcq3', 'tcq2'\.",
    ):
        open_model(lossy={"fallback": "int8"})
    with pytest.raises(
        ValueError,
        match=r"has no fewer bits than the experts' fp8: give one of 'int4', 'lut4', 'tcq3', 'tcq2\+tcq3', 'tcq2'\.",
    ):
        check_fallback_format("fp8", fallback="int8", deferred_experts=0)
    with pytest.raises(
        ValueError,
        match=r"has no fewer bits than the experts' mxfp4: give one of 'tcq3', 'tcq2\+tcq3', 'tcq2'\.",
    ):
        check_fallback_format("mxfp4", fallback="int4", deferred_experts=0)
    with pytest.raises(ValueError, match="has no fewer bits than the experts' tcq2: leave lossy.fallback at 'none'"):
        check_fallback_format("tcq2", fallback="int4", deferred_experts=0)
    build = TINY_MODELS["Qwen3MoeExperts"].build
    with pytest.raises(
        ValueError,
        match=r"lossy.fallback='lut4' .* int4: give one of 'tcq3', 'tcq2\+tcq3', 'tcq2'",
    ):
        torch_mesh.patch(build(), weights="int4", lossy={"fallback": "lut4"})
    with pytest.raises(ValueError, match="lossy.deferred_experts=1 exclude each other"):
        open_model(lossy={"deferred_experts": 1})
    with pytest.raises(ValueError, match=r"resident=0.02 holds 4 experts: give at least 8"):
        open_model(resident=0.02)
    with pytest.raises(torch_mesh.UnsupportedModelError, match="its experts run unfused"):
        torch_mesh.patch(TINY_MODELS["MuseSparkExperts"].build(), lossy={"fallback": "int4"})
    with pytest.raises(ValueError, match="lossy.fallback: for whole models, not for one layer"):
        torch_mesh.Experts.from_store(store, lossy={"fallback": "int4"})


def test_a_checkpoint_cannot_set_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="sets fallback, which is ignored"):
        assert MeshConfig.of_checkpoint({"quant_method": "mesh", "fallback": "int4"}).lossy.modes == ""
    assert "fallback" not in MeshConfig(lossy={"fallback": "int4"}).to_dict()
    monkeypatch.setenv("TORCH_MESH_FALLBACK", "lut4")
    assert MeshConfig().lossy.modes == "fallback=lut4"


def test_memory_is_split_between_the_two_pools() -> None:
    def split(slots: int) -> tuple[int, int]:
        sizes = {"experts": 100, "top_k": 4, "record_bytes": 40960, "fallback_bytes": 20480}
        return split_slots(slots, fallback="int4", resident=slots / 100, **sizes)

    assert split(40) == (10, 60)
    assert split(41) == (10, 61)
    assert split(80) == (30, 100)  # all fallback experts
    assert split(99) == (49, 100) and split(100) == (100, 0)
    assert split(8) == (4, 8)  # each pool holds at least the experts of a token
    assert split(6) == (4, 4)
    with pytest.raises(ValueError, match="the 4 experts of a token.* holds 5 experts: give at least 8"):
        split(5)
    none = split_slots(40, fallback="none", resident=0.4, experts=100, top_k=4, record_bytes=4096, fallback_bytes=0)
    assert none == (40, 0)
