import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny, tiny_model
from transformers import conversion_mapping, core_model_loading
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import torch_mesh
from torch_mesh.errors import StoreError, UnsupportedModelError
from torch_mesh.models.families import find_experts
from torch_mesh.store.checkpoint import (
    CheckpointExperts,
    checkpoint_fingerprint,
    find_checkpoint_experts,
    meta_model,
    read_config,
)
from torch_mesh.store.header import read_header
from torch_mesh.store.hub import local_folder, outline_folder
from torch_mesh.store.inspect import describe
from torch_mesh.store.manifest import open_store

PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")

# One family for each way in which checkpoints differ: names of the experts module and projections, fused or separate
# tensors, transposed, interleaved, biased, without a gate, dense layers first or in between, shared experts.
KINDS = (
    "aria_text",
    "deepseek_v3",
    "deepseek_v4",
    "gpt_oss",
    "granitemoe",
    *(["inkling2_loop_text"] if "inkling2_loop_text" in CONFIG_MAPPING_NAMES else []),  # transformers 5.24
    "inkling2_text",
    "jamba",
    "kimi_linear",
    "minimax",
    "mixtral",
    "nemotron_h",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
OTHERS = (
    "afmoe",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling_text",
    "kolibri1",
    "laguna",
    *(["lara_mini"] if "lara_mini" in CONFIG_MAPPING_NAMES else []),
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "olmoe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "solar_open",
)


def find(folder: Path) -> CheckpointExperts:
    return find_checkpoint_experts(folder, meta_model(read_config(folder)))


def assert_equal_experts(found: CheckpointExperts, model: torch.nn.Module) -> None:
    layers = find_experts(model)
    assert found.modules == tuple(layer.path for layer in layers)
    for number, layer in enumerate(layers):
        for expert in range(layer.num_experts):
            read, loaded = found.read_expert(number, expert), layer.expert(expert)
            for part in PARTS:
                mine, theirs = getattr(read, part), getattr(loaded, part)
                assert (mine is None) == (theirs is None), part
                assert mine is None or torch.equal(mine, theirs), (number, expert, part)


@pytest.mark.parametrize("family", [*KINDS, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_experts_read_from_disk_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    found = find(tmp_path)
    assert_equal_experts(found, model)
    other = {tensor.name for _, tensors in found.other_tensors for tensor in tensors}
    assert other.isdisjoint(found.names)
    assert other | found.names == {name for header in found.headers for name in header.tensors}
    assert not any("expert" in name and "shared" not in name and "bias" not in name for name in other)


def test_experts_spread_over_shards(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    found = find(tmp_path)
    assert len(found.files) > 3
    assert_equal_experts(found, model)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.float32, "fp32")])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    model = tiny_model("mixtral", dtype)
    model.save_pretrained(tmp_path)
    found = find(tmp_path)
    assert found.dtype == name
    assert_equal_experts(found, model)


def test_base_model_checkpoint_is_found_for_the_model_with_a_head(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.model.save_pretrained(tmp_path)
    model.config.architectures = [type(model).__name__]
    assert_equal_experts(find_checkpoint_experts(tmp_path, meta_model(model.config)), model)


def test_extents_lie_in_their_files_and_apart(tmp_path: Path) -> None:
    found = find(save_tiny(tmp_path, "gpt_oss"))
    spans = sorted(tuple(extent) for extent in found.extents.reshape(-1, 3).tolist())
    for file, offset, size in spans:
        assert offset > 0 and offset + size <= found.files[file][1]
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in itertools.pairwise(spans))


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_missing_expert_is_a_store_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.experts.7.up_proj.weight"))
    with pytest.raises(StoreError, match=r"layers\.2\.mlp\.experts\.gate_up_proj .* 11 of 12 experts"):
        find(tmp_path)


def test_missing_layer_is_a_store_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(StoreError, match=r"has model\.layers\.1\.mlp\.experts\.down_proj"):
        find(tmp_path)


def test_experts_of_another_shape_are_a_store_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    config["moe_intermediate_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoreError, match="has the shape"):
        find(tmp_path)


def test_mixed_dtypes_are_refused_with_examples(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].float()}))
    with pytest.raises(UnsupportedModelError, match="different dtypes") as caught:
        find(tmp_path)
    assert name in str(caught.value) and "bf16, fp16, fp32" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "problem"), [(torch.float8_e4m3fn, "describes its quantization"), (torch.int8, "bf16, fp16, fp32")]
)
def test_quantized_tensors_are_refused(tmp_path: Path, dtype: torch.dtype, problem: str) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    rewrite(tmp_path, lambda t: t.update({n: w.to(dtype) for n, w in t.items() if ".experts." in n}))
    with pytest.raises(UnsupportedModelError, match=problem):
        find(tmp_path)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "torchao"},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down_proj": {"bits": 3}}},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 3}}}},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
    ],
    ids=lambda table: ",".join(map(str, table.values())),
)
def test_quantizations_that_cannot_be_read_are_refused(tmp_path: Path, quantization: dict[str, Any]) -> None:
    config = tiny_model("qwen3_moe").config
    config.quantization_config = quantization
    model = meta_model(config)
    with pytest.raises(UnsupportedModelError, match="bf16, fp16 and fp32") as caught:
        find_checkpoint_experts(tmp_path, model)
    assert quantization["quant_method"] in str(caught.value)


def test_fp8_without_a_config_that_says_so_is_refused(tmp_path: Path) -> None:
    """Also for weights besides the experts, which transformers would load unscaled."""
    save_tiny(tmp_path, "qwen3_moe")
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} is F8_E4M3.*quantization_config"):
        find(tmp_path)


def test_a_quantized_kv_cache_alone_is_no_quantization(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert find(tmp_path).quantization is None


def test_mapping_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "qwen3_moe")

    class Scale(core_model_loading.ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            return {key: 2 * value for key, value in input_dict.items()}

    mapping = [
        core_model_loading.WeightConverter(
            "mlp.experts.*.down_proj.weight",
            "mlp.experts.down_proj",
            operations=[core_model_loading.MergeModulelist(dim=0), Scale()],
        ),
        core_model_loading.WeightConverter(
            ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            "mlp.experts.gate_up_proj",
            operations=[core_model_loading.MergeModulelist(dim=0), core_model_loading.Concatenate(dim=1)],
        ),
    ]
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda name: {"qwen3_moe": mapping, "legacy": []}.get(name),
    )
    with pytest.raises(UnsupportedModelError, match="made by Scale"):
        find(tmp_path)


def test_damaged_shard_is_a_store_error(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "qwen3_moe") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="truncated"):
        find(tmp_path)


def test_file_cut_after_it_was_opened_is_a_store_error(tmp_path: Path) -> None:
    found = find(save_tiny(tmp_path, "qwen3_moe"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(StoreError, match="was cut"):
        found.read_expert(2, 11)


def test_fingerprint_tells_checkpoints_apart(tmp_path: Path) -> None:
    a, b = (save_tiny(tmp_path / name, "qwen3_moe") / "model.safetensors" for name in "ab")
    assert checkpoint_fingerprint([a]) == checkpoint_fingerprint([a])
    assert checkpoint_fingerprint([a]) != checkpoint_fingerprint([b])  # the same header with another modification time
    content, times = bytearray(a.read_bytes()), (a.stat().st_atime_ns, a.stat().st_mtime_ns)
    before = checkpoint_fingerprint([a])
    data = read_header(a).data_start
    content[data:] = (byte ^ 1 for byte in content[data:])
    a.write_bytes(content)
    os.utime(a, ns=times)
    assert checkpoint_fingerprint([a]) != before  # other weights with the same name, size, header and time


def test_a_missing_shard_is_a_store_error_for_all(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3_moe")
    part = (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = read_header(part).tensors
    index = {"weight_map": dict.fromkeys(names, part.name) | {next(iter(names)): "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for attempt in (lambda: find(folder), lambda: torch_mesh.convert(folder, tmp_path / "store", "int4")):
        with pytest.raises(StoreError, match=r"absent\.safetensors"):
            attempt()
    assert not (tmp_path / "store").exists()


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.3.up_proj.weight"))
    tensors[name] = tensors[name][:, :5].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StoreError, match=rf"{re.escape(name)} has the shape .*, 5\].*equal shapes"):
        find(folder)


def test_paths_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    folder = save_tiny(odd, "qwen3_moe")
    with pytest.raises(StoreError, match=r"x\\xff.*is not valid UTF-8"):
        find(folder).source_arguments()
    with pytest.raises(StoreError, match="is not valid UTF-8"):
        torch_mesh.convert(save_tiny(tmp_path / "plain", "qwen3_moe"), odd / "store", "int4")


def test_sources_that_are_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    paths = {
        "/does/not/exist": "there is no such folder",
        "./absent": "there is no such folder",
        "~/absent": "there is no such folder",
        "a/b/c": "there is no such folder",
        "models--a--b": "there is no such folder",
        "file": "is a file",
        str(tmp_path / "file"): "is a file",
        "link": "is a link to .*absent, which does not exist",
        "loop": "cannot be looked at: Too many levels of symbolic links",
    }
    readers = (local_folder, open_store, read_config, describe, lambda path: outline_folder(path).__enter__())
    for path, message in paths.items():
        for read in readers:
            with pytest.raises(StoreError, match=message) as caught:
                read(path)
            assert "repo" not in str(caught.value).lower()


def test_experts_as_linear_layers_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        for expert, matrix in enumerate(tensors.pop(name)):
            tensors[f"{name}s.{expert}.weight"] = matrix.t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"down_projs\.0\.weight is an expert as a linear layer .* Use openai/gpt-oss-20b"
    ):
        find(tmp_path)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run the checkpoint's code"))
    config = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "configuration.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration.py").write_text("raise AssertionError")
    with pytest.raises(UnsupportedModelError, match="'OwnForCausalLM' is code of the checkpoint"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"'])
def test_a_config_that_is_no_object_is_named(content: str, mesh_tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(mesh_tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StoreError, match="config.json: is not a config: .* is not an object"):
        read_config(tmp_path)
