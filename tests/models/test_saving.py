"""``save_pretrained`` of patched models: the files are complete, have the weights that the model computes with, and are
written with little memory."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import warm
from pairs import each_once_quick, first_quick
from safetensors.torch import load_file
from saved import assert_same_checkpoint, saved_tensors
from tiny_models import TINY_MODELS, inputs_for, output_of
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils
from upstream import loads_adapters

import torch_mesh
from torch_mesh import MeshConfig, MeshError, StoreError, merge
from torch_mesh.hf import saving
from torch_mesh.hf import streaming_save as shards
from torch_mesh.hf.streaming_save import PackedPart, Unpacking
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.store.convert import convert
from torch_mesh.store.dense_weights import WITHOUT_TORCH_MESH
from torch_mesh.store.manifest import MANIFEST_NAME, is_store, open_store
from torch_mesh.store.verify import verify
from torch_mesh.store.weight_files import variant_in
from torch_mesh.system.atomic_files import scratch_folder

QWEN, MIXTRAL, GPT_OSS = "Qwen3MoeExperts", "MixtralExperts", "GptOssExperts"


def _open(folder: Path, **fields: Any) -> Any:
    given = {"quantization_config": MeshConfig(**fields)} if fields else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **given).eval()


def _train(model: Any) -> None:
    """Change every weight that is not frozen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." not in name and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.02)


WAYS = ("converted", "raw", "patched", "in memory")


def _rounded(way: str, tmp_path: Path) -> Any:
    """A model with rounded experts, made in one of the WAYS."""
    source = TINY_MODELS[MIXTRAL].build()
    if way in ("converted", "raw"):
        source.save_pretrained(tmp_path / "source")
        if way == "raw":
            return _open(tmp_path / "source", weights="int8", resident=0.4, store=str(tmp_path / "store"))
        convert(tmp_path / "source", tmp_path / "store", "int8")
        return _open(tmp_path / "store", resident=0.4)
    return torch_mesh.patch(source, weights="int8", resident=0.4 if way == "patched" else 1.0)


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_of_an_exact_model_respect_the_maximum_size(
    original_format: bool, variant: str | None, tmp_path: Path
) -> None:
    model = TINY_MODELS[MIXTRAL].build()
    model.save_pretrained(tmp_path / "plain", save_original_format=original_format, variant=variant)
    torch_mesh.patch(model, resident=0.25)
    model.save_pretrained(
        tmp_path / "patched", max_shard_size="60KB", save_original_format=original_format, variant=variant
    )
    shards = sorted((tmp_path / "patched").glob("model*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 60_000
    assert_same_checkpoint(tmp_path / "patched", tmp_path / "plain")
    (index,) = (tmp_path / "patched").glob("*.index*.json")
    total = sum(t.nbytes for t in saved_tensors(tmp_path / "plain").values())
    assert json.loads(index.read_text())["metadata"]["total_size"] == total
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", variant=variant)
    assert torch.equal(again.state_dict()["model.layers.1.mlp.experts.down_proj"], _unpatched(model, 1))


def _unpatched(model: Any, layer: int) -> torch.Tensor:
    return torch_mesh.unpatch(model).state_dict()[f"model.layers.{layer}.mlp.experts.down_proj"]


@pytest.mark.parametrize("way", WAYS)
def test_rounded_experts_are_saved_without_further_rounding(way: str, tmp_path: Path) -> None:
    rounded = _rounded(way, tmp_path)
    assert rounded.hf_quantizer.is_serializable()
    _train(rounded)
    inputs = inputs_for(rounded)
    expected = output_of(rounded, inputs)
    rounded.save_pretrained(tmp_path / "saved")
    store = open_store(tmp_path / "saved")
    assert list(verify(store)) == []
    listed = {file.name for file in (*store.manifest.record_files, *store.manifest.other_files)}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == listed | {MANIFEST_NAME}
    assert not any("experts" in name for name in saved_tensors(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "mesh", "weights": "int8", "group_size": 64}
    assert (
        config["transformers_weights"] == WITHOUT_TORCH_MESH
    )  # without this, transformers alone would draw random experts
    again = _open(tmp_path / "saved", resident=0.3)
    assert torch.equal(output_of(again, inputs), expected)
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(output_of(_open(tmp_path / "twice"), inputs), expected)


def test_saved_records_are_hard_links_that_outlive_the_store(tmp_path: Path) -> None:
    source = TINY_MODELS[QWEN].build()
    model = torch_mesh.patch(source, weights="int4", store=str(tmp_path / "store"), resident=0.5)
    model.save_pretrained(tmp_path / "saved")
    for file in open_store(tmp_path / "store").manifest.record_files:
        assert os.path.samefile(tmp_path / "store" / file.name, tmp_path / "saved" / file.name)
    inputs = inputs_for(model)
    expected = output_of(model, inputs)
    shutil.rmtree(tmp_path / "store")
    assert torch.equal(output_of(_open(tmp_path / "saved"), inputs), expected)
    model.save_pretrained(tmp_path / "without")  # the pool has the files open, though they are unlinked
    assert torch.equal(output_of(_open(tmp_path / "without"), inputs), expected)


def test_another_store_at_the_same_path_is_not_saved(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int4", store=str(tmp_path / "store"), resident=0.5)
    shutil.rmtree(tmp_path / "store")
    torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int4", store=str(tmp_path / "store"), resident=0.5)
    model.save_pretrained(tmp_path / "saved")
    inputs = inputs_for(model)
    assert torch.equal(output_of(_open(tmp_path / "saved"), inputs), output_of(model, inputs))


@pytest.mark.parametrize("refused", ["links", "links and copies in the kernel"])
def test_records_are_copied_where_they_cannot_be_linked(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8", store=str(tmp_path / "store"), resident=0.5)
    monkeypatch.setattr(os, "link", refuse)
    if "kernel" in refused:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    model.save_pretrained(tmp_path / "saved")
    for file in open_store(tmp_path / "saved").manifest.record_files:
        assert not os.path.samefile(tmp_path / "store" / file.name, tmp_path / "saved" / file.name)
    assert list(verify(open_store(tmp_path / "saved"))) == []


def test_a_store_of_symbolic_links_is_saved_as_files(tmp_path: Path) -> None:
    """A store in the hub's cache consists of symbolic links."""
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "blobs", "int8")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    _open(tmp_path / "snapshot").save_pretrained(tmp_path / "saved")
    assert not any(path.is_symlink() for path in (tmp_path / "saved").iterdir())
    assert list(verify(open_store(tmp_path / "saved"))) == []


def test_a_saved_folder_is_not_taken_for_a_conversion_of_its_source(tmp_path: Path) -> None:
    """Its dense weights may have been trained. So converting the source must not take the folder for its conversion."""
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "store", "int8")
    model = _open(tmp_path / "store")
    for folder in ("saved", "again"):
        model.save_pretrained(tmp_path / folder)
        with pytest.raises(StoreError):
            convert(tmp_path / "source", tmp_path / folder, "int8")
        model = _open(tmp_path / folder)
    assert open_store(tmp_path / "saved").manifest.source_fingerprint == model_fingerprint(tmp_path / "again")


def model_fingerprint(folder: Path) -> str:
    return open_store(folder).manifest.source_fingerprint


@pytest.mark.parametrize(("way", "change"), each_once_quick(WAYS, ["first removed", "last removed", "swapped"]))
def test_layers_that_were_moved_or_removed_keep_their_records(change: str, way: str, tmp_path: Path) -> None:
    model = _rounded(way, tmp_path)
    layers = model.model.layers
    if change == "swapped":
        layers[0], layers[1] = layers[1], layers[0]
    else:
        del layers[0 if "first" in change else -1]
        model.config.num_hidden_layers = len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    inputs = inputs_for(model)
    expected = output_of(model, inputs)
    model.save_pretrained(tmp_path / "saved")
    again = _open(tmp_path / "saved")
    assert torch.equal(output_of(again, inputs), expected)
    store = open_store(tmp_path / "saved")
    assert list(verify(store)) == [] and store.manifest.shape.layers == len(layers)
    adapted = peft.get_peft_model(again, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge(tmp_path / "saved", tmp_path / "adapter", tmp_path / "merged").store
    assert list(verify(merged)) == [] and merged.manifest.shape == store.manifest.shape


@pytest.mark.parametrize("way", ["converted", "in memory"])
def test_a_part_of_a_model_can_be_saved(way: str, tmp_path: Path) -> None:
    rounded = _rounded(way, tmp_path)
    rounded.model.save_pretrained(tmp_path / "part")
    assert is_store(tmp_path / "part")
    again = _open(tmp_path / "part").model
    inputs = inputs_for(rounded)
    assert torch.equal(output_of(again, inputs), output_of(rounded.model, inputs))


@pytest.mark.parametrize("weights, dense", [("auto", "int8"), ("int8", "lut4")])
def test_rounded_linear_layers_are_saved_with_their_rounded_values(weights: str, dense: str, tmp_path: Path) -> None:
    original = TINY_MODELS[QWEN].build()
    plain = {name: tensor.clone() for name, tensor in original.named_parameters()}
    model = torch_mesh.patch(original, weights=weights, dense=dense, resident=0.5)
    with pytest.warns(UserWarning, match=f"dense= rounded to {dense} are saved as ordinary weights"):
        model.save_pretrained(tmp_path)
    assert is_store(tmp_path) == (weights == "int8")
    saved = saved_tensors(tmp_path)
    again = _open(tmp_path, resident=0.5, dense=dense)
    for path, linear in packed_linears(model):
        rounded = linear.unpacked_weight()
        assert torch.equal(saved[f"{path}.weight"], rounded)
        changed = (rounded - plain[f"{path}.weight"]).float().norm()
        changed_again = (again.get_submodule(path).unpacked_weight() - rounded).float().norm()
        assert changed_again < changed / 2  # groups whose scale rounds in the same way stay as they are


def test_a_tied_head_is_not_saved_beside_the_embedding(tmp_path: Path) -> None:
    model = TINY_MODELS[QWEN].build()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    torch_mesh.patch(model, weights="int8", dense="bf16")
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in saved_tensors(tmp_path)
    again = _open(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_weights_rounded_to_bf16_are_saved_as_a_store(tmp_path: Path) -> None:
    source = TINY_MODELS[QWEN].build().float()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn(parameter.shape) * 1e-4)
    source.save_pretrained(tmp_path / "source")
    with pytest.warns(UserWarning, match="rounded to bf16"):
        model = _open(tmp_path / "source", resident=0.5)
    model.save_pretrained(tmp_path / "saved")
    assert open_store(tmp_path / "saved").manifest.weights == "bf16"
    again = _open(tmp_path / "saved")
    assert again.dtype == torch.float32
    inputs = inputs_for(model)
    assert torch.equal(output_of(again, inputs), output_of(model, inputs))


@pytest.mark.parametrize("first, second", [("int8", "auto"), ("auto", "int8"), ("int4", "int8")])
def test_a_save_replaces_an_earlier_one(first: str, second: str, tmp_path: Path) -> None:
    earlier = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=first, resident=0.5)
    earlier.save_pretrained(tmp_path, max_shard_size="20KB")
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=second, resident=0.5)
    inputs = inputs_for(model)
    model.save_pretrained(tmp_path)
    assert is_store(tmp_path) == (second == "int8")
    assert len(list(tmp_path.glob("model*.safetensors"))) == 1 and not list(tmp_path.glob("*.index.json"))
    assert len(list(tmp_path.glob("mesh-*"))) == int(second == "int8")
    again = _open(tmp_path) if second == "int8" else _open(tmp_path, resident=1.0)
    assert torch.equal(output_of(again, inputs), output_of(model, inputs))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_model_is_saved_over_what_it_was_opened_from(weights: str, tmp_path: Path) -> None:
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path / "model")
    if weights == "int8":
        convert(tmp_path / "model", tmp_path / "model-int8", weights)
        (tmp_path / "model-int8").rename(tmp_path / "store")
    folder = tmp_path / ("store" if weights == "int8" else "model")
    model = _open(folder, resident=0.3)
    _train(model)
    inputs = inputs_for(model)
    expected = output_of(model, inputs)
    model.save_pretrained(folder)
    assert torch.equal(output_of(model, inputs), expected)
    assert torch.equal(output_of(_open(folder, resident=0.3), inputs), expected)


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_failed_save_leaves_the_folder_unchanged(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=weights, resident=0.5)
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _train(model)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch_mesh.hf.streaming_save._write_tensor", full)
    with pytest.raises(StoreError) as caught:
        model.save_pretrained(tmp_path)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(StoreError, match="1 MB free.*choose another folder"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("earlier", first_quick("auto", "int8"))
def test_a_save_that_fails_while_moving_files_is_rolled_back(
    earlier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail at any step, before or after the step takes effect."""
    torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=earlier).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "mine.txt").write_text("kept")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    steps = 0

    def failing(name: str) -> Any:
        original = getattr(os, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            own = moving and str(args[0]).startswith(str(tmp_path))
            steps += own
            if own and steps == fails_at and not afterwards:
                raise OSError(errno.EIO, "Input/output error")
            result = original(*args, **kwargs)
            if own and steps == fails_at:
                raise KeyboardInterrupt
            return result

        return step

    def move(*args: Any) -> Any:
        nonlocal moving
        moving = True
        try:
            return into_place(*args)
        finally:
            moving = False

    into_place, moving = saving._move_into_place, False
    monkeypatch.setattr(saving, "_move_into_place", move)
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, failing(name))
    failed = 0
    for afterwards in (False, True):  # noqa: B007  # the nested functions read both
        for fails_at in range(1, 100):  # noqa: B007
            steps = 0
            try:
                model.save_pretrained(tmp_path)
            except (OSError, KeyboardInterrupt):
                failed += 1
                assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
                continue
            break
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert failed > 8 and is_store(tmp_path) and (tmp_path / "mine.txt").read_text() == "kept"
    assert len(list(tmp_path.glob("model*.safetensors"))) == len(list(tmp_path.glob("mesh-*"))) == 1


def test_files_that_cannot_be_moved_back_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _rounded("converted", tmp_path)
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    original, failing = Path.rename, ""

    def rename(self: Path, target: Path) -> Path:
        nonlocal failing
        if self.parent != folder and target.name == MANIFEST_NAME:  # the last step of the save; undo all others
            failing = "config.json"
            raise OSError(errno.EIO, "Input/output error")
        if self.parent != folder and target.name == failing:
            raise OSError(errno.EACCES, "Permission denied")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with (
        pytest.warns(UserWarning, match=f"Files of {folder} could not be moved back: they are in {folder}/"),
        pytest.raises(OSError, match="Input/output error"),
    ):
        model.save_pretrained(folder)
    (aside,) = (path for path in folder.iterdir() if path.is_dir())
    assert {path.name for path in aside.iterdir()} == {"config.json", MANIFEST_NAME}
    moved = {path.name: path.read_bytes() for path in aside.iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | moved == before
    shutil.rmtree(aside)


@pytest.mark.parametrize("variants", [("v", None), (None, "v")])
def test_variants_of_one_store_open_and_those_of_another_are_replaced(
    variants: tuple[str | None, str | None], tmp_path: Path
) -> None:
    model = _rounded("converted", tmp_path)
    folder, inputs = tmp_path / "saved", inputs_for(model)
    expected = {}
    for variant, shard in zip(variants, ("20KB", "50GB"), strict=True):
        _train(model)
        expected[variant] = output_of(model, inputs)
        model.save_pretrained(folder, variant=variant, max_shard_size=shard)
    assert list(verify(open_store(folder))) == []
    for variant in variants:
        again = AutoModelForCausalLM.from_pretrained(folder, variant=variant).eval()
        assert torch.equal(output_of(again, inputs), expected[variant])
    first, last = variants
    shutil.copytree(
        folder, tmp_path / "part", ignore=lambda _, names: [n for n in names if variant_in(n) == (first or "")]
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "part", variant=last)  # as a download of one variant
    for weights in ("int8", "auto"):
        torch_mesh.patch(TINY_MODELS[MIXTRAL].build(), weights=weights).save_pretrained(folder, variant=last)
        assert {variant_in(path.name) for path in folder.iterdir()} == {None, last or ""}
        AutoModelForCausalLM.from_pretrained(folder, variant=last)


def test_a_save_does_not_remove_a_foreign_file_named_in_a_manifest(tmp_path: Path) -> None:
    """The manifest names a file that torch_mesh would not write, so it may be someone's own."""
    torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8").save_pretrained(tmp_path)
    manifest = open_store(tmp_path).manifest
    (file,) = manifest.record_files
    (tmp_path / file.name).rename(tmp_path / "thesis.safetensors")
    renamed = replace(manifest, record_files=(replace(file, name="thesis.safetensors"),))
    (tmp_path / MANIFEST_NAME).write_text(renamed.to_json())
    torch_mesh.patch(TINY_MODELS[QWEN].build(), resident=0.5).save_pretrained(tmp_path)
    assert not is_store(tmp_path) and (tmp_path / "thesis.safetensors").is_file()


@pytest.mark.parametrize("name", first_quick(GPT_OSS, MIXTRAL, QWEN, "MiniMaxM2Experts"))
def test_an_exact_store_is_saved_as_an_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    """The layout is the family's own, though loading found no experts whose conversion could be reversed."""
    TINY_MODELS[name].build().save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "store", "bf16")
    _open(tmp_path / "store", resident=0.4).save_pretrained(tmp_path / "saved")
    assert not is_store(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", tmp_path / "source")


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_model_with_modules_offloaded_by_accelerate_is_saved(weights: str, tmp_path: Path) -> None:
    """transformers then converts shard by shard, and looks for weights without memory in accelerate's hooks."""
    model = TINY_MODELS[MIXTRAL].build()
    model.save_pretrained(tmp_path / "plain")
    torch_mesh.patch(model, resident=0.4, weights=weights)
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "saved")
    if weights == "auto":
        assert_same_checkpoint(tmp_path / "saved", tmp_path / "plain")
    inputs = inputs_for(model)
    given = {"resident": 0.4} if weights == "auto" else {}
    assert torch.equal(output_of(_open(tmp_path / "saved", **given), inputs), output_of(model, inputs))


@loads_adapters
def test_saving_a_model_with_adapters_saves_only_these(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert all("lora" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_the_next_save_removes_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    (tmp_path / ".torch_mesh-saving-killed").mkdir()
    (tmp_path / ".torch_mesh-saving-killed" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".torch_mesh-saving-killed.lock").touch()
    with scratch_folder(tmp_path, saving._STAGING_PREFIX) as other:  # the folder of a running process
        (other / "kept").touch()
        model.save_pretrained(tmp_path)
        assert (other / "kept").is_file()
    assert not list(tmp_path.glob(".torch_mesh*"))
    assert is_store(tmp_path)


def test_saving_works_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving needs no locks, but writing a named store does, for other processes may write it too."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for weights in ("auto", "int8"):
        model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=weights, resident=0.5)
        model.save_pretrained(tmp_path / weights)
        assert is_store(tmp_path / weights) == (weights == "int8")
    with pytest.raises(StoreError, match="cannot be written.*not implemented"):
        torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8", resident=0.5, store=str(tmp_path / "store"))


def test_a_given_state_dict_is_saved(tmp_path: Path) -> None:
    model = TINY_MODELS[QWEN].build()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch_mesh.patch(model, resident=0.5)
    mine = {name: tensor for name, tensor in model.state_dict().items() if "layers.0" not in name}
    mine["model.norm.weight"] = torch.full_like(mine["model.norm.weight"], 3)
    down = "model.layers.1.mlp.experts.down_proj"
    mine[down] = plain[down] * 2
    model.save_pretrained(tmp_path / "saved", state_dict=mine, save_original_format=False)
    saved = saved_tensors(tmp_path / "saved")
    assert saved.keys() == mine.keys()
    assert (saved["model.norm.weight"] == 3).all()
    assert torch.equal(saved[down], plain[down] * 2)
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(saved[gate_up], plain[gate_up])

    torch_mesh.patch(torch_mesh.unpatch(model), weights="int8")
    with pytest.raises(MeshError, match=r"state_dict has values of model\.layers\.0\.mlp"):
        model.save_pretrained(tmp_path / "rounded", state_dict=plain)
    model.save_pretrained(tmp_path / "rounded", state_dict={n: t for n, t in plain.items() if "experts" not in n})
    assert is_store(tmp_path / "rounded")


def test_weights_that_are_saved_separately_are_not_joined_with_others() -> None:
    """Such a tensor would be dropped, and the other weights in it would be lost."""
    like = torch.empty(2, 4, device="meta")
    packed = PackedPart({"layers.0.packed": like}, dict)
    unpacking = Unpacking(None, {}, [packed], original_format=True, separate={"layers.0.rounded": like})
    rounded = unpacking.state["layers.0.rounded"]
    assert torch.cat([rounded, rounded.transpose(0, 1).reshape(2, 4)]).shape == (4, 4)
    for other in (torch.ones(2, 4), unpacking.state["layers.0.packed"]):
        with pytest.raises(MeshError, match=r"in one tensor.*unpatch\(model, lossy=True\)"):
            torch.cat([rounded, other])
    assert unpacking.nbytes == like.nbytes


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not list((tmp_path / "saved").iterdir())


def test_copies_save_their_own_weights_and_unpatched_models_save_as_before(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    twin = copy.deepcopy(model)
    _train(twin)
    inputs = inputs_for(model)
    twin.save_pretrained(tmp_path / "twin")
    assert torch.equal(output_of(_open(tmp_path / "twin"), inputs), output_of(twin, inputs))
    torch_mesh.unpatch(model, lossy=True)
    assert "save_pretrained" not in vars(model) | vars(model.model)
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(output_of(_open(tmp_path / "plain"), inputs), output_of(model, inputs))


def test_a_loaded_model_inside_another_is_saved_as_well(tmp_path: Path) -> None:
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path / "source")
    model = _open(tmp_path / "source", resident=0.5)
    model.model.save_pretrained(tmp_path / "part")
    plain = TINY_MODELS[QWEN].build().model
    plain.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / "source").model.state_dict())
    plain.save_pretrained(tmp_path / "expected")
    mine, expected = saved_tensors(tmp_path / "part"), saved_tensors(tmp_path / "expected")
    assert {name.removeprefix("model.") for name in mine} == {name.removeprefix("model.") for name in expected}
    again = _open(tmp_path / "part")
    inputs = inputs_for(model)
    assert torch.equal(output_of(again.model, inputs), output_of(torch_mesh.unpatch(model).model, inputs))


def test_transformers_own_save_pretrained_is_refused_with_advice(tmp_path: Path) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights="int8")
    PreTrainedModel.save_pretrained(model, tmp_path / "saved")
    assert is_store(tmp_path / "saved")
    with pytest.raises(MeshError, match=r"save it with model\.save_pretrained\(folder\)"):
        PreTrainedModel.save_pretrained.__wrapped__(model, tmp_path / "refused")


def test_two_threads_save_two_models(tmp_path: Path) -> None:
    models = [torch_mesh.patch(TINY_MODELS[name].build(), resident=0.5) for name in (QWEN, GPT_OSS)]
    threads = [
        threading.Thread(target=model.save_pretrained, args=(tmp_path / str(number),))
        for number, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number, model in enumerate(models):
        torch_mesh.unpatch(model).save_pretrained(tmp_path / "plain")
        assert_same_checkpoint(tmp_path / str(number), tmp_path / "plain")


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), resident=0.5)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, main in ((1, True), (0, False), (0, True)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        model.save_pretrained(tmp_path / "saved", is_main_process=main)
        assert bool(list((tmp_path / "saved").iterdir())) == (rank == 0 and main)


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("way", ["save_pretrained", "push_to_hub"])
def test_push_to_hub_uploads_all_that_was_saved(
    weights: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[tuple[str, set[str]]] = []

    def create_repo(self: Any, repo_id: str, **_: Any) -> Any:
        assert not uploads
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self: Any, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **_: Any) -> None:
        uploads.append((repo_id, {name for name in os.listdir(folder_path) if name in allow_patterns}))

    def create_commit(self: Any, repo_id: str, operations: list[Any], **_: Any) -> None:
        uploads.append((repo_id, {operation.path_in_repo for operation in operations}))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    for module in (saving, sys.modules["transformers.utils.hub"]):
        monkeypatch.setattr(
            module, "create_and_tag_model_card", lambda *_, **__: huggingface_hub.ModelCard("---\n---\n")
        )

    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), weights=weights, resident=0.5)
    model.save_pretrained(tmp_path / "local")
    expected = {path.name for path in (tmp_path / "local").iterdir()} | {"README.md"}
    if way == "push_to_hub":
        model.push_to_hub("someone/model")
    else:
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "private.txt").touch()
        model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/model")
    assert uploads == [("someone/model", expected)]


_MEASURED = """
import resource, sys, threading, time, torch, transformers
from transformers import AutoModelForCausalLM
import torch_mesh

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

def peak():
    global highest
    while not done.is_set():
        highest = max(highest, resident())
        time.sleep(0.002)

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, quantization_config=torch_mesh.MeshConfig(resident=0.1, dense="bf16")
)
model(torch.ones(1, 4, dtype=torch.long))
before = highest = resident()
done = threading.Event()
watcher = threading.Thread(target=peak)
watcher.start()
model.save_pretrained(sys.argv[2])
done.set()
watcher.join()
print(highest - before)
"""


@pytest.mark.thorough
def test_saving_an_exact_model_takes_the_memory_of_a_few_layers(tmp_path: Path) -> None:
    """This holds though the whole model goes into one file."""
    config = TINY_MODELS[QWEN].build().config
    config.update({"num_hidden_layers": 16, "hidden_size": 256, "moe_intermediate_size": 384})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    experts = sum(t.nbytes for layer in model.model.layers for t in layer.mlp.experts.parameters())
    assert experts > 70e6
    run = warm.run(_MEASURED, tmp_path / "source", tmp_path / "saved")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < 0.6 * experts  # all experts at once would take more than that, twice over
    assert_same_checkpoint(tmp_path / "saved", tmp_path / "source")


def test_transformers_writes_its_shards_with_the_function_that_is_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes shards with a function that is not public. If it changed, saving would need the memory of a
    shard, or fail."""
    written: list[tuple[str, set[str], str]] = []

    def watched(kind: str, function: Any) -> Any:
        def save(tensors: dict[str, torch.Tensor], filename: str, *args: Any, **kwargs: Any) -> None:
            written.append((kind, set(tensors), Path(filename).name))
            function(tensors, filename, *args, **kwargs)

        return save

    monkeypatch.setattr(modeling_utils, "safe_save_file", watched("plain", modeling_utils.safe_save_file))
    monkeypatch.setattr(shards, "_write", watched("patched", shards._write))
    model = TINY_MODELS[GPT_OSS].build()
    plain, patched = copy.deepcopy(model), torch_mesh.patch(model, resident=0.5)
    for kind, each in (("patched", patched), ("plain", plain), ("patched", patched)):
        each.save_pretrained(tmp_path / kind)
    names = set(saved_tensors(tmp_path / "plain"))
    assert written == [(kind, names, "model.safetensors") for kind in ("patched", "plain", "patched")]
    assert not any(isinstance(module, MeshExperts) for module in torch_mesh.unpatch(model).modules())


@pytest.fixture(autouse=True)
def _no_staging_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.torch_mesh-*"))
