"""from_pretrained: raw and converted checkpoints whose experts are never materialized."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import warm
from routes import by_token, given_routes, recorded_routes
from tiny_models import TINY_MODELS, inputs_for, logits_of, output_of
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AwqConfig, GPTQConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

import torch_mesh
from torch_mesh import _C, MeshConfig, StoreError, UnsupportedModelError
from torch_mesh.hf.wrapping import wrap
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import MeshExperts, patched_modules
from torch_mesh.modules.packed_weight import PackedWeight
from torch_mesh.patching import checkpoint_source, quantizer
from torch_mesh.patching.checkpoint_source import CheckpointSource, HubFiles, find_source
from torch_mesh.statistics.snapshot import take_snapshot
from torch_mesh.store.checkpoint import meta_model, read_config
from torch_mesh.store.convert import convert
from torch_mesh.store.folders import OtherStoreError
from torch_mesh.store.manifest import open_store
from torch_mesh.store.verify import verify
from torch_mesh.store.writer import Written
from torch_mesh.system import memory

RAW = ["Qwen3MoeExperts", "MixtralExperts", "GptOssExperts", "DeepseekV3Experts"]


def _save(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = TINY_MODELS[name].build().to(dtype)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _open(folder: Path | str, **fields: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(**fields))


def _patched(model: PreTrainedModel) -> list[MeshExperts]:
    return [module for module in model.modules() if isinstance(module, MeshExperts)]


@pytest.mark.parametrize("name", RAW)
def test_raw_checkpoint_equals_the_patched_model(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    reference = _save(name, tmp_path / "raw")
    model = _open(tmp_path / "raw", resident=0.3)
    packed = {name for name, parameter in model.named_parameters() if isinstance(parameter, PackedWeight)}
    assert packed == {name for name, _ in model.named_parameters() if ".experts." in name}
    assert torch.equal(logits_of(model, ids), logits_of(torch_mesh.patch(reference), ids))
    assert torch_mesh.stats(model).cold_misses > 0
    torch_mesh.unpatch(model)
    torch_mesh.unpatch(reference)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    assert all(torch.equal(state[key], value) for key, value in reference.state_dict().items())


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_experts_that_their_parent_module_initializes_are_loaded(weights: str, tmp_path: Path) -> None:
    """transformers has that module initialize them, though none of its weights is missing."""
    model = TINY_MODELS["Qwen3OmniMoeThinkerTextExperts"].build()
    model.save_pretrained(tmp_path / "raw")
    inputs = inputs_for(model)
    expected = output_of(torch_mesh.patch(model, weights=weights), inputs)
    convert(tmp_path / "raw", tmp_path / "converted", weights)
    for folder, fields in (("raw", {"weights": weights}), ("converted", {})):
        config = MeshConfig(resident=0.5, **fields)
        opened = type(model).from_pretrained(tmp_path / folder, quantization_config=config)
        assert torch.equal(output_of(opened, inputs), expected)
        assert not set(vars(_patched(opened)[0])) & {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_converted_folder_opens_by_itself(name: str, weights: str, tmp_path: Path, ids: torch.Tensor) -> None:
    reference = torch_mesh.patch(_save(name, tmp_path / "raw"), weights=weights)
    convert(tmp_path / "raw", tmp_path / "store", weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "store")
    assert f"weights={weights}" in repr(model)
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_given_fields_override_those_of_the_converted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "int8", 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = _open(tmp_path / "store", resident=0.4, policy="lfu")
    assert "weights=int8 (group 32), resident=9 of 24 experts, policy=lfu" in repr(model)
    monkeypatch.setenv("TORCH_MESH_RESIDENT", "0.2")
    assert "resident=4 of 24" in repr(AutoModelForCausalLM.from_pretrained(tmp_path / "store"))
    assert "resident=12 of 24" in repr(_open(tmp_path / "store", resident=0.5))


def test_converted_folder_keeps_its_format(tmp_path: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    with pytest.raises(ValueError, match="weights='int4', but the experts in .* are int8"):
        _open(tmp_path / "store", weights="int4")
    with pytest.raises(ValueError, match="group_size=32, but .* groups of 64"):
        _open(tmp_path / "store", group_size=32)


def test_quantized_weights_of_a_raw_checkpoint_are_converted_once(
    tmp_path: Path, cache: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"), weights="int8")
    first = _open(tmp_path / "raw", weights="int8", resident=0.3)
    assert torch.equal(logits_of(first, ids), logits_of(reference, ids))
    [store] = [path for path in (cache / "stores").iterdir() if path.is_dir()]
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    assert torch.equal(logits_of(_open(tmp_path / "raw", weights="int8"), ids), logits_of(reference, ids))
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before
    _open(tmp_path / "raw", weights="int8", group_size=32)
    os.utime(tmp_path / "raw" / "model.safetensors")  # the file counts as changed
    _open(tmp_path / "raw", weights="int8")
    assert len([path for path in (cache / "stores").iterdir() if path.is_dir()]) == 3


@pytest.mark.parametrize("converted", [False, True])
def test_a_conversion_in_the_cache_outlives_an_edit_of_the_config(
    converted: bool, tmp_path: Path, cache: Path, ids: torch.Tensor
) -> None:
    """The number of experts per token changes no record; a layer more needs records of its own."""
    model = _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    fields = {"resident": 0.7, "lossy": {"fallback": "int8"}} if converted else {"weights": "int8"}
    folder = tmp_path / ("store" if converted else "raw")

    def edit(**changed: int) -> None:
        for each in ("raw", "store"):
            path = tmp_path / each / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        if converted:
            convert(tmp_path / "raw", folder, "bf16", force=True)

    def made() -> list[str]:
        return [open_store(path).manifest.store_id.hex() for path in (cache / "stores").iterdir() if path.is_dir()]

    layers = model.config.num_hidden_layers
    edit(num_hidden_layers=layers - 1)
    _open(folder, **fields)
    before = made()
    edit(num_experts_per_tok=2)
    _open(folder, **fields)
    assert made() == before and len(before) == 1
    edit(num_hidden_layers=layers)
    opened = _open(folder, **fields)
    assert made() != before and len(made()) == 1, "the records of the added layer were made"
    if not converted:
        model.config.num_experts_per_tok = 2
        reference = torch_mesh.patch(AutoModelForCausalLM.from_pretrained(folder), weights="int8")
        assert torch.equal(logits_of(opened, ids), logits_of(reference, ids))


def test_a_damaged_conversion_in_the_cache_is_made_again(tmp_path: Path, cache: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    _open(tmp_path / "raw", weights="int8")
    [folder] = [path for path in (cache / "stores").iterdir() if path.is_dir()]
    before = open_store(folder)
    file = folder / before.manifest.record_files[0].name
    os.truncate(file, file.stat().st_size - 1)
    _open(tmp_path / "raw", weights="int8")
    assert open_store(folder).manifest.store_id != before.manifest.store_id
    assert next(verify(open_store(folder)), None) is None


def test_processes_that_need_a_conversion_again_make_it_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that another process has just made and opened must not be replaced."""
    _save("Qwen3MoeExperts", tmp_path / "raw")
    path = tmp_path / "raw" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    _open(tmp_path / "raw", weights="int8")
    path.write_text(json.dumps(config))
    both_were_refused, forced = threading.Barrier(2), []

    def watched(*given: Any, force: bool = False, **named: Any) -> Written:
        forced.extend([1] * force)
        try:
            return convert(*given, force=force, **named)
        except OtherStoreError:
            both_were_refused.wait(60)
            raise

    monkeypatch.setattr(checkpoint_source, "convert", watched)

    def source() -> CheckpointSource:
        model = meta_model(read_config(tmp_path / "raw"))
        files = HubFiles([str(tmp_path / "raw" / "model.safetensors")], {})
        return find_source(model, find_experts(model), files, MeshConfig(weights="int8"), None)

    sources = [source(), source()]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: each.prepare(), sources))
    [folder] = [path for path in (cache / "stores").iterdir() if path.is_dir()]
    ids = {each._records.store.manifest.store_id for each in sources}
    assert len(forced) == 1 and ids == {open_store(folder).manifest.store_id}


def test_store_field_says_where_to_convert_to(tmp_path: Path, cache: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    model = _open(tmp_path / "raw", weights="int4", store=tmp_path / "store")
    assert "weights=int4" in repr(model)
    assert "weights=int4" in repr(AutoModelForCausalLM.from_pretrained(tmp_path / "store"))
    assert not cache.exists()


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
@pytest.mark.parametrize("converted", [False, True])
def test_device_map(device_map: object, converted: bool, tmp_path: Path, ids: torch.Tensor) -> None:
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"))
    if converted:
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    folder = tmp_path / ("store" if converted else "raw")
    config = MeshConfig(resident=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, quantization_config=config)
    assert torch.equal(logits_of(model, ids.to(model.device)).cpu(), logits_of(reference, ids))


def test_a_default_device_moves_no_handle(mesh_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(resident=0.25))
    pool = next(patched_modules(model))._mesh_pool
    with torch.device("meta"):
        assert pool.handle(0).is_cpu
        assert take_snapshot([pool.engine], pool.layers, {}).experts == pool.geometry.num_experts


def test_model_without_a_head_opens_the_same_store(tmp_path: Path, ids: torch.Tensor) -> None:
    reference = _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    model = AutoModel.from_pretrained(tmp_path / "store", quantization_config=MeshConfig(resident=0.3))
    with torch.no_grad():
        states = model(input_ids=ids).last_hidden_state
        expected = torch_mesh.patch(reference).model(input_ids=ids).last_hidden_state
    assert torch.equal(states, expected)


def test_a_checkpoint_of_a_model_without_a_head_has_no_unexpected_tensors(tmp_path: Path) -> None:
    model = _save("Qwen3MoeExperts", tmp_path)
    model.model.save_pretrained(tmp_path)
    _, report = type(model).from_pretrained(
        tmp_path, quantization_config=MeshConfig(resident=0.3), output_loading_info=True
    )
    assert report["missing_keys"] == {"lm_head.weight"} and not report["unexpected_keys"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_raw_fp16_and_fp32_are_rounded(dtype: torch.dtype, tmp_path: Path, ids: torch.Tensor) -> None:
    reference = _save("Qwen3MoeExperts", tmp_path / "raw", dtype)
    with pytest.warns(UserWarning, match="rounded to bf16"):
        model = _open(tmp_path / "raw", resident=0.3)
    assert model.dtype == dtype
    with recorded_routes(reference) as routes:
        expected = logits_of(reference, ids).float()
    with given_routes(model, routes):
        assert by_token(logits_of(model, ids).float(), expected).median() < 0.03
    with pytest.raises(torch_mesh.MeshError, match="lossy=True"):
        torch_mesh.unpatch(model)


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes", "modelopt", "of tomorrow"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_checkpoints_quantized_by_others_are_refused(method: str, weights: str, tmp_path: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path)
    plain = AutoConfig.from_pretrained(tmp_path)
    others = {"load_in_8bit": True} if method == "bitsandbytes" else {}
    _change_config(tmp_path, quantization_config={"quant_method": method} | others)
    with pytest.raises(UnsupportedModelError, match=f"{method}.*bf16, fp16 and fp32"):
        _open(tmp_path, weights=weights)
    config = MeshConfig(weights=weights)
    with pytest.raises(UnsupportedModelError, match=f"{method}.*bf16, fp16 and fp32"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=plain, quantization_config=config)


@pytest.mark.parametrize("passed", [AwqConfig(bits=4), GPTQConfig(bits=4)])
def test_other_quantizers_keep_their_warnings(passed: AwqConfig | GPTQConfig) -> None:
    stored = {"quant_method": passed.quant_method.value, "bits": 4}
    with pytest.warns(UserWarning, match="You passed `quantization_config`"):
        assert AutoHfQuantizer.merge_quantization_configs(stored, passed).bits == 4


def test_a_plain_function_of_another_library_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """unsloth replaces the class method so."""
    monkeypatch.setattr(AutoHfQuantizer, "merge_quantization_configs", lambda stored, given: (stored, given))
    wrap("transformers.quantizers.auto.AutoHfQuantizer", "merge_quantization_configs", quantizer._merged)
    stored, config = {"quant_method": "gptq", "bits": 4}, MeshConfig()
    assert AutoHfQuantizer.merge_quantization_configs(stored, None) == (stored, None)
    ours = {"quant_method": "mesh", "weights": "int8"}
    assert AutoHfQuantizer.merge_quantization_configs(ours, config)[1] is config


FILE_FIELDS = {"resident": 1e-6, "threads": 7, "workspace": "1MiB", "timeout": 0.5, "verify": "never", "io": "buffered"}


def test_a_checkpoint_cannot_set_paths_or_resources(tmp_path: Path, cache: Path, ids: torch.Tensor) -> None:
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"), weights="int8")
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    table = {"quant_method": "mesh", "policy": "lfu", "store": str(tmp_path / "written"), "dense": "int4"}
    _change_config(tmp_path / "store", quantization_config=table | FILE_FIELDS)
    with pytest.warns(UserWarning, match="config.json sets store, dense, resident, threads.* ignored"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "store")
    assert "policy=lfu" in repr(model) and "resident=24 of 24" in repr(model) and "io=" not in repr(model)
    pool = next(patched_modules(model))._mesh_pool
    assert (pool.threads, pool.timeout, pool.workspace) == (0, 30.0, 256 << 20)
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))
    given = MeshConfig(resident=0.5, lossy={"fallback": "int4"})
    with pytest.warns(UserWarning, match="ignored"):  # fallback writes a store of its own
        AutoModelForCausalLM.from_pretrained(tmp_path / "store", quantization_config=given)
    assert list((cache / "stores").iterdir())
    assert not (tmp_path / "written").exists() and not (tmp_path / "written-int4").exists()


@pytest.mark.parametrize("converted", [False, True])
def test_a_dict_is_taken_for_a_config(
    converted: bool, tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"))
    if converted:
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    monkeypatch.setenv("TORCH_MESH_RESIDENT", "0.9")
    given = {"quant_method": "mesh", "resident": 0.5, "policy": "lru"}
    folder = tmp_path / ("store" if converted else "raw")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=given)
    assert "resident=12 of 24 experts, policy=lru" in repr(model)
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor) -> None:
    """transformers does not know the model type of its published config, whose code is DeepSeek's."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run the checkpoint's code"))
    reference = _save("DeepseekV3Experts", tmp_path / "raw")
    path = tmp_path / "raw" / "config.json"
    code = {"AutoConfig": "configuration_deepseek.C", "AutoModelForCausalLM": "modeling_deepseek.M"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2", "auto_map": code}))
    (tmp_path / "raw" / "configuration_deepseek.py").write_text("raise AssertionError")
    torch_mesh.patch(reference, resident=1.0)
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    assert json.loads((tmp_path / "store" / "config.json").read_text())["model_type"] == "deepseek_v3"
    for folder in ("raw", "store"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, quantization_config=MeshConfig(resident=0.5))
        assert model.config.model_type == "deepseek_v3"
        assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_unsupported_family_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    import transformers

    small = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=32)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'llama'.*Supported families"):
        _open(tmp_path)


def test_damaged_store_is_a_typed_error(tmp_path: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    [records] = (tmp_path / "store").glob("mesh-*.safetensors")
    os.truncate(records, records.stat().st_size - 4096)
    with pytest.raises(StoreError, match=records.name):
        AutoModelForCausalLM.from_pretrained(tmp_path / "store")
    records.unlink()
    with pytest.raises(StoreError, match=records.name):
        AutoModelForCausalLM.from_pretrained(tmp_path / "store")


def _as_hub_snapshot(folder: Path, hub: Path, name: str) -> None:
    """Move ``folder`` into ``hub``, laid out as a download in the hub's cache."""
    commit = "0" * 40
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
def test_hub_id_offline(converted: bool, tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"))
    if converted:
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    _as_hub_snapshot(tmp_path / ("store" if converted else "raw"), tmp_path / "hub", "someone/tiny-moe")
    model = AutoModelForCausalLM.from_pretrained(
        "someone/tiny-moe",
        cache_dir=tmp_path / "hub",
        local_files_only=True,
        quantization_config=MeshConfig(resident=0.3),
    )
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


@pytest.mark.parametrize(
    "missing", ["mesh_manifest.json", pytest.param("mesh-00001-of-00001.safetensors", marks=pytest.mark.thorough)]
)
def test_missing_files_of_a_converted_folder_are_fetched_from_the_hub(
    missing: str, tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the records, if an earlier download was interrupted after the manifest."""
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"))
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    (tmp_path / "store" / missing).rename(tmp_path / missing)
    _as_hub_snapshot(tmp_path / "store", tmp_path / "hub", "someone/tiny-moe")
    # Even so transformers looks for an adapter on the hub, and retries without a network.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fetched = []

    def fetch(name: str, file: str, *, cache_dir: Path, revision: str, **given: Any) -> None:
        fetched.append((name, file, given))
        (tmp_path / file).rename(cache_dir / "models--someone--tiny-moe" / "snapshots" / revision / file)

    monkeypatch.setattr(checkpoint_source, "cached_file", fetch)
    given = {"token": "hf_of_the_caller", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained("someone/tiny-moe", cache_dir=tmp_path / "hub", **given)
    assert fetched == [("someone/tiny-moe", missing, {"proxies": None, **given})]
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_a_converted_folder_within_a_repository_is_fetched(
    tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch_mesh.patch(_save("Qwen3MoeExperts", tmp_path / "raw"))
    convert(tmp_path / "raw", tmp_path / "repository" / "store", "bf16")
    missing = [path.name for path in (tmp_path / "repository" / "store").iterdir() if path.name.startswith("mesh")]
    for file in missing:
        (tmp_path / "repository" / "store" / file).rename(tmp_path / file)
    _as_hub_snapshot(tmp_path / "repository", tmp_path / "hub", "someone/tiny-moe")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def fetch(name: str, file: str, *, cache_dir: Path, revision: str, **given: Any) -> None:
        folder, _, name_there = file.partition("/")
        assert (name, folder, cache_dir) == ("someone/tiny-moe", "store", tmp_path / "hub")
        (tmp_path / name_there).rename(cache_dir / "models--someone--tiny-moe" / "snapshots" / revision / file)

    monkeypatch.setattr(checkpoint_source, "cached_file", fetch)
    model = AutoModelForCausalLM.from_pretrained(
        "someone/tiny-moe", subfolder="store", cache_dir=tmp_path / "hub", local_files_only=True
    )
    assert len(missing) == 2 and not any((tmp_path / file).exists() for file in missing)
    assert torch.equal(logits_of(model, ids), logits_of(reference, ids))


def test_dense_codes_are_fetched_from_the_hub_only_if_asked_for(
    tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    import gguf_files

    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps": "Q8_0", "attn": "Q8_0"})
    convert(made.path, tmp_path / "store", "auto")
    codes = "mesh-dense-00001-of-00001.safetensors"
    (tmp_path / "store" / codes).rename(tmp_path / codes)
    _as_hub_snapshot(tmp_path / "store", tmp_path / "hub", "someone/tiny-moe")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fetched = []

    def fetch(name: str, file: str, *, cache_dir: Path, revision: str, **given: Any) -> None:
        fetched.append(file)
        shutil.copy(tmp_path / file, cache_dir / "models--someone--tiny-moe" / "snapshots" / revision / file)

    monkeypatch.setattr(checkpoint_source, "cached_file", fetch)
    for dense, expected in (("auto", []), ("codes", [codes])):
        model = AutoModelForCausalLM.from_pretrained(
            "someone/tiny-moe",
            cache_dir=tmp_path / "hub",
            local_files_only=True,
            quantization_config=MeshConfig(dense=dense),
        )
        assert fetched == expected and torch.isfinite(logits_of(model, ids)).all()
    assert "weights=int8_fp16" in repr(model.model.layers[0].self_attn.q_proj)


_PEAK = """
import sys, torch, torch_mesh
from transformers import AutoModelForCausalLM

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

before = kilobytes("VmRSS")
config = torch_mesh.MeshConfig(resident="16MiB", workspace="1MiB")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config)
model(input_ids=torch.arange(3, 6)[None])
print(kilobytes("VmHWM") - before)
"""


def test_experts_are_never_materialized(tmp_path: Path) -> None:
    from dataclasses import replace

    tiny = TINY_MODELS["Qwen3MoeExperts"]
    large = replace(
        tiny, fields={"num_experts": 64, "num_local_experts": 64, "hidden_size": 256, "moe_intermediate_size": 1024}
    )
    model = large.build()
    model.save_pretrained(tmp_path)
    bytes_of_experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert bytes_of_experts > 250 << 20
    peak = warm.run(_PEAK, tmp_path)
    assert peak.returncode == 0, peak.stderr
    assert int(peak.stdout.split()[-1]) << 10 < bytes_of_experts / 2


@pytest.mark.parametrize("folder", ["/nvme/does-not-exist", "./does-not-exist", "does/not/exist"])
def test_a_missing_folder_is_explained(folder: str) -> None:
    """transformers fails with an error about hub ids before calling torch_mesh. docs/troubleshooting.md explains it."""
    with pytest.raises(OSError, match="Repo id must") as caught:
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig())
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"`(Repo id must [^`]*)`", page)
    assert any(str(caught.value).startswith(quote) for quote in quoted)


def test_auto_leaves_room_for_the_buffers_of_raw_records(mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _C.record_bytes("bf16", 0, 192, 64, True, False)
    config = MeshConfig(workspace="64MiB", io="threads", residency={"guard": "off"})
    left = (
        50 * record * 4 // 3
    )  # besides the workspace: memory for experts, their buffers, and auto's margin of a quarter
    monkeypatch.setattr(memory, "available_bytes", lambda: (64 << 20) + left)
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    held = next(patched_modules(model))._mesh_pool.engine.describe()
    assert 0 < held["slots"] < 50
    assert 49 * record < held["pool_bytes"] <= left - held["slots"] * record // 3


def test_a_store_is_refused_for_experts_of_another_shape(tmp_path: Path) -> None:
    """Experts of 40 and of 24 columns are padded to records of one size."""
    _save("Qwen3MoeExperts", tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    config = AutoConfig.from_pretrained(tmp_path / "store")
    config.moe_intermediate_size = 24
    with pytest.raises(StoreError, match=r"intermediate=40.* but the model's are .*intermediate=24"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "store", config=config)


def test_a_variant_is_refused_if_experts_would_come_from_other_files(tmp_path: Path) -> None:
    model = _save("Qwen3MoeExperts", tmp_path / "raw")
    model.save_pretrained(tmp_path / "raw", variant="other")
    with pytest.raises(
        UnsupportedModelError, match=r"model\.other\.safetensors .*but torch_mesh reads model\.safetensors"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "raw", variant="other", quantization_config=MeshConfig())


@pytest.mark.parametrize(
    "nested", [{"quantization_config": {"quant_method": "modelopt"}}, {"quantization_config": [1]}]
)
def test_a_quantization_config_nested_in_a_config_is_found(nested: dict, tmp_path: Path) -> None:
    _save("Qwen3MoeExperts", tmp_path / "raw")
    path = tmp_path / "raw" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"some_config": {"text_config": nested}}))
    with pytest.raises((UnsupportedModelError, StoreError), match=r"modelopt|is not an object"):
        _open(tmp_path / "raw", resident=0.5)


def test_only_the_hubs_cache_has_snapshots(tmp_path: Path) -> None:
    assert checkpoint_source._snapshot_of(tmp_path / "snapshots" / "mine" / "model.safetensors") is None
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    assert checkpoint_source._snapshot_of(snapshot / "Q8" / "model.gguf") == snapshot
