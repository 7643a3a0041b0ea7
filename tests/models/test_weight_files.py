"""from_pretrained of checkpoints whose weights are in unusual files or under unusual names, as transformers opens
them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import KINDS, change_config, exact_values, rewrite, write_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, StoreError, UnsupportedModelError
from torch_mesh.cli import main
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert

IDS = torch.tensor([[5, 9, 17, 33, 2, 64, 5, 71, 90]])
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _in_cache(cache: Path) -> None:
    """Conversions go to the test's cache."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe", num_hidden_layers=2, num_experts=4).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _write(folder: Path, files: Mapping[str, Tensors], index: Mapping[str, str]) -> None:
    """Replace the checkpoint's one file by several."""
    (folder / SINGLE).unlink()
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(index)}))


def _open(folder: Path, given: Mapping[str, Any], **fields: Any) -> PreTrainedModel:
    config = MeshConfig(**{"resident": 0.5, **fields})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config, **given)


def _expect_as_plain(folder: Path, **given: Any) -> None:
    """Check that the raw checkpoint, opened by torch_mesh, has the tensors that plain transformers finds."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **given)
    model = _open(folder, given)
    assert next(patched_modules(model))._mesh_pool.store is None
    found = torch_mesh.unpatch(model).state_dict()
    assert list(found) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], tensor), name


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _split(tensors: Tensors, into: Callable[[str], str]) -> tuple[dict[str, Tensors], dict[str, str]]:
    files: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        files.setdefault(into(name), {})[name] = tensor
    return files, {name: into(name) for name in tensors}


@pytest.mark.parametrize("part", ["layers.1.self_attn.o_proj", "layers.1.mlp.experts.2.up_proj"])
@pytest.mark.parametrize("overlay", ["model-overlay.safetensors", "a-overlay.safetensors"])
def test_an_overlay_file_takes_precedence_as_in_transformers(part: str, overlay: str, folder: Path) -> None:
    """transformers takes a tensor from the last file by name that has it, and not from the one that the index names."""
    tensors = load_file(folder / SINGLE)
    newer = {name: tensor + 1 for name, tensor in tensors.items() if part in name}
    index = dict.fromkeys(tensors, "model-00001-of-00001.safetensors") | dict.fromkeys(newer, overlay)
    _write(folder, {"model-00001-of-00001.safetensors": tensors, overlay: newer}, index)
    _expect_as_plain(folder)
    given = {"weights": "int8", "group_size": 32}
    converted = convert(folder, folder.parent / "store", **given).store.folder
    assert torch.equal(_logits(_open(folder, {}, **given)), _logits(_open(converted, {})))


@pytest.mark.parametrize(
    "first", ["model-00001-of-00002.safetensors", "parts/a.safetensors", "parts/b/model.safetensors"]
)
def test_shards_may_lie_in_a_folder_of_the_checkpoint(first: str, folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    files, index = _split(tensors, lambda name: first if "layers.0" in name else "parts/b/model.safetensors")
    (folder / "parts" / "b").mkdir(parents=True)
    _write(folder, files, index)
    _expect_as_plain(folder)
    _expect_as_plain(folder.parent, subfolder=folder.name)
    logits = _logits(_open(folder, {}, weights="int4"))
    assert main(["convert", str(folder), str(folder.parent / "store"), "--weights", "int4"]) == 0
    assert torch.equal(logits, _logits(_open(folder.parent / "store", {})))
    assert main(["inspect", str(folder)]) == 0


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/model.safetensors", "parts/../../model.safetensors"],
)
def test_an_index_cannot_name_files_outside_the_folder(name: str, folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder.parent / SINGLE).write_bytes((folder / SINGLE).read_bytes())
    (folder / "parts").mkdir()
    _write(folder, {}, dict.fromkeys(tensors, name))
    with pytest.raises(StoreError, match="outside of this folder"):
        _open(folder, {})
    with pytest.raises(StoreError, match="not a plain file name"):
        convert(folder, folder.parent / "store", "int8")


RENAMED = {
    "experts": (".experts.", ".ffn_experts.", {r"\.ffn_experts\.": ".experts."}),
    "all": ("model.layers.", "trunk.blocks.", {r"^trunk\.blocks\.": "model.layers."}),
}


@pytest.mark.parametrize("case", RENAMED)
def test_key_mapping_renames_experts_too(case: str, folder: Path) -> None:
    old, new, key_mapping = RENAMED[case]
    expected = _logits(_open(folder, {}, weights="int4"))
    rewrite(
        folder, lambda tensors: [tensors.update({name.replace(old, new): tensors.pop(name)}) for name in [*tensors]]
    )
    _expect_as_plain(folder, key_mapping=key_mapping)
    given = {"key_mapping": key_mapping}
    assert torch.equal(_logits(_open(folder, given, weights="int4")), expected)
    assert torch.equal(_logits(_open(folder, given, weights="int4")), expected)  # from the cache
    model = _open(folder, given)
    model.save_pretrained(folder.parent / "saved")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **given)
    plain.save_pretrained(folder.parent / "plain")
    saved, own = (load_file(folder.parent / name / SINGLE) for name in ("saved", "plain"))
    assert saved.keys() == own.keys() and all(torch.equal(saved[name], own[name]) for name in own)


def test_another_key_mapping_is_another_checkpoint(folder: Path) -> None:
    """A conversion with one key mapping is not taken for that with another, though the files are the same."""
    swap = {r"\.layers\.0\.": ".layers.9.", r"\.layers\.1\.": ".layers.0.", r"\.layers\.9\.": ".layers.1."}
    _expect_as_plain(folder, key_mapping=swap)
    usual, swapped = (_logits(_open(folder, given, weights="int8")) for given in ({}, {"key_mapping": swap}))
    assert not torch.equal(usual, swapped)


def test_quantized_experts_are_renamed_too(tmp_path: Path) -> None:
    write_quantized(tmp_path, KINDS["ct_int4"]())
    expected = _logits(_open(tmp_path, {}))
    rewrite(
        tmp_path,
        lambda tensors: [tensors.update({name.replace(".mlp.", ".ffn."): tensors.pop(name)}) for name in [*tensors]],
    )
    given = {"key_mapping": {r"\.ffn\.": ".mlp."}}
    assert torch.equal(_logits(_open(tmp_path, given)), expected)
    assert torch.equal(_logits(_open(tmp_path, given, store=str(tmp_path / "store"))), expected)


def test_max_error_and_key_mapping_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ValueError, match="does not work with key_mapping=: give weights= a format"):
        _open(folder, {"key_mapping": {"a": "b"}}, resident="1GiB", max_error=0.1)


@pytest.mark.parametrize("shard", ["50GB", "60KB"])
def test_a_variant_alone_in_its_folder_opens(shard: str, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "variant", variant="fp16", max_shard_size=shard)
    assert not (tmp_path / "variant" / SINGLE).exists()
    _expect_as_plain(tmp_path / "variant", variant="fp16")
    logits = _logits(_open(tmp_path / "variant", {"variant": "fp16"}, weights="int4"))
    store = convert(tmp_path / "variant", tmp_path / "store", "int4").store.folder
    assert not list(store.glob("*fp16*"))
    assert torch.equal(_logits(_open(store, {})), logits)


def test_a_variant_beside_other_weights_is_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder, variant="fp16")
    with pytest.raises(UnsupportedModelError, match=r"model\.fp16\.safetensors .* into a folder of their own"):
        _open(folder, {"variant": "fp16"})
    _expect_as_plain(folder)
    (folder / SINGLE).rename(folder / "model.bf16.safetensors")
    for given in ({"variant": "fp16"}, {"variant": "bf16"}):
        with pytest.raises(UnsupportedModelError, match="several variants .* a folder of their own"):
            _open(folder, given)
    with pytest.raises(StoreError, match="several variants"):
        convert(folder, folder.parent / "store", "int4")


@pytest.mark.parametrize("inner", ["other.safetensors", "parts/other.safetensors"])
def test_config_may_name_the_file(inner: str, folder: Path) -> None:
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / SINGLE).items()}
    (folder / inner).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / inner, {"format": "pt"})
    change_config(folder, transformers_weights=inner)
    _expect_as_plain(folder)
    logits = _logits(_open(folder, {}, weights="int4"))
    assert torch.equal(_logits(_open(convert(folder, folder.parent / "store", "int4").store.folder, {})), logits)


@pytest.mark.parametrize("kind", ["gptq_file", "awq_file"])
def test_a_quantization_tools_own_config_file_is_read(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    write_quantized(tmp_path, made)
    exact = exact_values(tmp_path)
    model = torch_mesh.unpatch(
        AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, quantization_config=MeshConfig(resident=0.5)
        ),
        lossy=True,
    )
    most = 0 if made.kept else 0.005
    for number, layer in enumerate(model.model.layers):
        for expert, found in enumerate(layer.mlp.experts.down_proj):
            expected = exact[f"model.layers.{number}.mlp.experts.{expert}.down_proj.weight"]
            assert (found.double() - expected).norm() <= most * expected.norm()


def test_quantized_weights_without_a_description_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, KINDS["gptq"]())
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(
        UnsupportedModelError, match=r"qweight is I32.* nor any of .*quantize_config\.json.* Use the config"
    ) as caught:
        _open(tmp_path, {})
    assert str(tmp_path) in str(caught.value)


def test_a_quantization_tools_file_beside_plain_weights_is_ignored(folder: Path) -> None:
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "sym": True}))
    _expect_as_plain(folder)
