"""Embedding tables of stores: conversion, rounding, merging, and damaged rows."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from loopback_hub import MODEL, loopback_hub
from peft import PeftModel
from quantized import KINDS, change_config, rewrite
from row_files import decoded
from saved import assert_same_checkpoint
from table_models import FAMILIES, QWEN, embeddings, reopen, save, save_adapter
from tiny_models import TINY_MODELS, inputs_for, output_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import _C, MeshConfig, MeshError, StoreError, merge
from torch_mesh.cli import main
from torch_mesh.formats import TABLE_FORMATS
from torch_mesh.models import tables as finding
from torch_mesh.modules.packed_weight import PackedWeight
from torch_mesh.modules.tables import PackedTableWeight, table_modules, tables_of
from torch_mesh.planning.plan import plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store.convert import convert
from torch_mesh.store.inspect import describe
from torch_mesh.store.table_files import is_table_file
from torch_mesh.store.verify import verify


class Made(TorchDispatchMode):
    """Records the shapes of large matrices with 24 columns, as in the table of QWEN, that are made in its context."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least = at_least
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            ordinary = isinstance(tensor, torch.Tensor) and not isinstance(tensor, PackedWeight) and not tensor.is_meta
            if ordinary and tensor.shape[1:] == (24,) and tensor.numel() >= self.at_least:
                self.shapes.append(tensor.shape)
        return made


def test_saving_a_converted_model_gives_the_original_checkpoint(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    with monkeypatch.context() as small:
        small.setattr(finding, "MIN_VALUES", 1)
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    for tables in (name, "off"):
        reopen(model, tmp_path / "store", tables=tables).save_pretrained(tmp_path / tables)
        assert_same_checkpoint(tmp_path / tables, tmp_path / "raw")


@pytest.mark.parametrize("tables", ["auto", "off"])
def test_the_text_model_of_a_converted_vlm_has_its_tables(
    tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoModelForCausalLM opens another class than the config names, in which tables have other names."""
    text = TINY_MODELS[QWEN].build().config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    vision["out_hidden_size"] = text["hidden_size"]
    config: Any = transformers.Qwen4ExpConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen4ExpForConditionalGeneration(config).bfloat16()
    model.save_pretrained(tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "store", quantization_config=MeshConfig(tables=tables, resident=1.0)
    )
    assert len(embeddings(opened)) == (FAMILIES[QWEN][1] if tables == "auto" else 0)
    opened = torch_mesh.unpatch(opened)
    originals = {name.replace("model.language_model.", "model."): value for name, value in model.named_parameters()}
    for name, value in opened.named_parameters():
        assert torch.equal(value, originals[name]), name


def test_a_table_of_packed_words_is_converted_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(QWEN, tmp_path / "raw")
    kind = KINDS["ct_int4_channel"]()
    expected: dict[str, list[torch.Tensor]] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "ngram_embedding.shard" in name]:
            stem = name.removesuffix(".weight")
            parts, values = kind.quantize(tensors.pop(name).float())
            expected.setdefault(stem.rpartition(".")[0], []).append(values)
            tensors.update({f"{stem}{rest}": part for rest, part in parts.items()})

    rewrite(tmp_path / "raw", quantize)
    change_config(tmp_path / "raw", quantization_config=dict(kind.config))
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    assert describe(tmp_path / "raw")["tables"] == {}
    written = convert(tmp_path / "raw", tmp_path / "store", "bf16")
    assert not [file for file in written.store.manifest.other_files if is_table_file(file.name)]
    for folder, tables, count in (("raw", "auto", 2), ("store", "auto", 2), ("store", "off", 0)):
        opened = reopen(model, tmp_path / folder, tables=tables)
        assert len(embeddings(opened)) == count and len(expected) == 2
        for path, shards in expected.items():
            values = torch.cat(shards).bfloat16()
            assert torch.equal(opened.get_submodule(path)(torch.arange(len(values))), values)


def test_a_table_is_never_materialized(tmp_path: Path) -> None:
    """Its shards are never joined, and no tensor of the table's size is made."""
    model = save(QWEN, tmp_path)
    largest = max(parameter.numel() for name, parameter in model.named_parameters() if "ngram" in name)
    with Made(at_least=largest // 4) as made:
        opened = reopen(model, tmp_path, tables="ngram_embedding")
    assert not made.shapes
    with Made(at_least=largest // 4) as made:
        reopen(model, tmp_path, tables="off")
    assert made.shapes
    for embedding in embeddings(opened):
        weight: Any = embedding.weight
        assert isinstance(weight, PackedWeight)
        assert weight.device.type == "cpu" and weight.shape == (embedding.num_embeddings, embedding.embedding_dim)
        with pytest.raises(MeshError, match="tables='off'"):
            weight + 1


def test_a_conversion_pads_rows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows are written to separate files, and the rest of the checkpoint does not contain them."""
    name, count = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    inputs = inputs_for(model)
    expected = output_of(reopen(model, tmp_path / "raw", tables="off"), inputs)
    with monkeypatch.context() as small:
        small.setattr(finding, "MIN_VALUES", 1)
        store = convert(tmp_path / "raw", tmp_path / "store", "bf16", max_file_bytes=1 << 16).store
    files = [file.name for file in store.manifest.other_files if is_table_file(file.name)]
    assert len(files) >= count
    assert not list(verify(store))
    described = describe(tmp_path / "store")
    assert described["tables"] == {}  # tables of this size are loaded into memory
    for tables, opened_tables in ((name, count), ("off", 0)):
        opened = reopen(model, tmp_path / "store", tables=tables)
        assert len(embeddings(opened)) == opened_tables
        assert torch.equal(output_of(opened, inputs), expected)
    state = torch_mesh.unpatch(opened).state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def rounded(weights: str, table: torch.Tensor) -> torch.Tensor:
    """The values of a table after rounding to the codes of csrc/tables."""
    values = decoded(weights, _C.code_rows(weights, 0, table.detach().float().numpy()), table.size(1))
    return torch.from_numpy(values).to(table.dtype)


def convert_rounded(folder: Path, destination: Path, weights: str, experts: str = "bf16") -> Any:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(finding, "MIN_VALUES", 1)
        return convert(folder, destination, experts, tables=weights, max_file_bytes=1 << 16)


@pytest.mark.parametrize("weights", TABLE_FORMATS)
def test_a_conversion_rounds_rows_if_asked_to(family: str, weights: str, tmp_path: Path) -> None:
    name, count = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    written = convert_rounded(tmp_path / "raw", tmp_path / "store", weights)
    assert not list(verify(written.store)) and written.store.manifest.tables == weights
    assert convert_rounded(tmp_path / "raw", tmp_path / "store", weights).existed
    with pytest.raises(StoreError, match="has another store"):
        convert_rounded(tmp_path / "raw", tmp_path / "store", "exact")
    opened, whole = (reopen(model, tmp_path / "store", tables=tables) for tables in (name, "off"))
    assert len(embeddings(opened)) == count and not embeddings(whole)
    for path, embedding in table_modules(opened):
        original, in_memory = (each.get_submodule(path) for each in (model, whole))
        values = rounded(weights, original.weight)
        assert torch.equal(in_memory.weight, values) and not torch.equal(values, original.weight)
        ids = torch.randint(len(values), (2, 7))
        assert torch.equal(embedding(ids), in_memory(ids))
        assert f"rows from files in {weights}" in repr(embedding)
    inputs = inputs_for(model)
    assert torch.equal(output_of(opened, inputs), output_of(whole, inputs))
    counted = torch_mesh.stats(opened)
    assert counted.tables[0].weights == weights and f"weight in {weights}" in str(counted)


def test_a_whole_table_is_loaded_to_the_device_around_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``device_map="cuda"``: what is around the tables is said to be on another device."""
    name, count = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    convert_rounded(tmp_path / "raw", tmp_path / "store", "int8")
    paths = [path for path, _ in table_modules(reopen(model, tmp_path / "store", tables=name))]
    asked = []

    def device_around(_: nn.Module, path: str) -> torch.device:
        asked.append(path)
        return torch.device("meta")

    monkeypatch.setattr("torch_mesh.patching.unpooled.device_around", device_around)
    whole = reopen(model, tmp_path / "store", tables="off")
    assert asked == paths and len(paths) == count
    on_meta = {
        path for path, weight in whole.named_parameters() if weight.is_meta and not isinstance(weight, PackedWeight)
    }
    assert on_meta == {f"{path}.weight" for path in paths}


@pytest.mark.parametrize("weights", TABLE_FORMATS)
def test_rounded_rows_are_not_taken_for_the_original(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("Gemma4TextExperts", tmp_path / "raw")
    convert_rounded(tmp_path / "raw", tmp_path / "store", weights)
    opened = reopen(model, tmp_path / "store", tables="embed_tokens_per_layer")
    path, embedding = next(table_modules(opened))
    values = rounded(weights, model.get_submodule(path).weight)
    with pytest.raises(MeshError, match=f"rounded to {weights}"):
        pickle.dumps(embedding.weight)
    with pytest.warns(UserWarning, match=f"rows were rounded to {weights}, is saved as an ordinary weight"):
        opened.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved").get_submodule(path).weight
    assert torch.equal(saved, values)
    with pytest.raises(MeshError, match=f"rounded to {weights}"):
        torch_mesh.unpatch(opened)
    assert torch.equal(torch_mesh.unpatch(opened, lossy=True).get_submodule(path).weight, values)
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    save_adapter(reopen(model, tmp_path / "store"), tmp_path / "adapter", target_modules=["q_proj"])
    merged = merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "merged").store
    assert not list(verify(merged)) and merged.manifest.tables == weights
    assert torch.equal(embeddings(reopen(model, tmp_path / "merged"))[0].weight.unpacked(), values)


def test_a_saved_model_has_ordinary_tables_beside_rounded_experts(tmp_path: Path) -> None:
    model = save("Gemma4TextExperts", tmp_path / "raw")
    convert_rounded(tmp_path / "raw", tmp_path / "store", "int4", experts="int8")
    opened = reopen(model, tmp_path / "store", tables="embed_tokens_per_layer")
    with pytest.warns(UserWarning, match="is saved as an ordinary weight"):
        opened.save_pretrained(tmp_path / "saved")
    assert [describe(tmp_path / folder)["table_weights"] for folder in ("store", "saved")] == ["int4", None]


def test_plan_and_inspect_show_rounded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(QWEN, tmp_path / "raw")
    rows = sum(weight.shape[0] for name, weight in model.named_parameters() if "ngram_embedding" in name)
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    sizes = {}
    for weights in ("exact", *TABLE_FORMATS):
        store = tmp_path / weights
        assert main(["convert", str(tmp_path / "raw"), str(store), "--weights", "bf16", "--tables", weights]) == 0
        sizes[weights] = find_sizes(store, MeshConfig()).table_bytes
        capsys.readouterr()
        for command in (["inspect", str(store)], ["plan", str(store), "--memory", "8GiB", "--disk-speed", "1GB/s"]):
            main(command)
            shown = "".join(capsys.readouterr().out.split())
            assert (f"Bin{weights}" in shown or f"bytesin{weights}" in shown) == (weights != "exact")
        assert describe(store)["table_weights"] == (None if weights == "exact" else weights)
    assert sizes == {"exact": rows * 48, "int8": rows * 26, "int4": rows * 14}


def test_tables_of_a_store_on_the_hub_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(QWEN, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    folder = convert(tmp_path / "raw", tmp_path / "store", "bf16").store.folder
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        hub.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert main(["inspect", MODEL, "--json"]) == 0
    held = describe(folder)
    assert held["tables"] and json.loads(capsys.readouterr().out) == held | {"folder": MODEL}


def test_a_table_with_nan_is_not_rounded(tmp_path: Path) -> None:
    model = TINY_MODELS["Gemma4TextExperts"].build().bfloat16()
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight[7, 3] = float("nan")
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(StoreError, match=r"embed_tokens_per_layer\.weight: row 7 has a value that is not finite"):
        convert_rounded(tmp_path / "raw", tmp_path / "store", "int4")
    assert not (tmp_path / "store").exists()
    assert convert_rounded(tmp_path / "raw", tmp_path / "store", "exact").store.manifest.tables == ""


def test_wrong_formats_of_tables_are_refused(tmp_path: Path) -> None:
    save(QWEN, tmp_path / "raw")
    with pytest.raises(ValueError, match=r"tables='int8', and .* has no embedding table that stays in files"):
        convert(tmp_path / "raw", tmp_path / "store", "bf16", tables="int8")
    with pytest.raises(ValueError, match=r"tables='fp8' is unknown; it is one of 'exact', 'int8', 'int4'"):
        convert(tmp_path / "raw", tmp_path / "store", "bf16", tables="fp8")


def test_damaged_rows_of_a_store_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(QWEN, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    store = convert(tmp_path / "raw", tmp_path / "store", "bf16").store
    path = tmp_path / "store" / next(file.name for file in store.manifest.other_files if is_table_file(file.name))
    with path.open("r+b") as file:
        file.seek(4096 + 3 * 64 + 5)
        file.write(b"damage")
    opened = reopen(model, tmp_path / "store")
    with pytest.raises(torch_mesh.ChecksumError, match=r"row 3 of .*ngram_embedding\.weight"):
        embeddings(opened)[0](torch.tensor([3]))
    embeddings(opened)[0](torch.tensor([2, 4]))
    assert [damage.file for damage in verify(store)] == [str(path)]
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StoreError, match="has .* bytes, not"):
        reopen(model, tmp_path / "store")
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        reopen(model, tmp_path / "store")


@pytest.mark.parametrize("base", ["raw", "store"])
def test_a_merged_store_has_the_tables_of_its_base(
    family: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, count = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    save_adapter(reopen(model, tmp_path / base), tmp_path / "adapter", target_modules=["q_proj"])
    merged = merge(tmp_path / base, tmp_path / "adapter", tmp_path / "merged", max_file_bytes=1 << 16).store
    assert any(is_table_file(file.name) for file in merged.manifest.other_files)
    assert not list(verify(merged))
    in_files, in_memory = (reopen(model, tmp_path / "merged", tables=tables) for tables in ("auto", "off"))
    assert len(embeddings(in_files)) == count and not embeddings(in_memory)
    for path, embedding in table_modules(in_files):
        rows = model.get_submodule(path)(torch.arange(embedding.num_embeddings))
        assert torch.equal(embedding(torch.arange(embedding.num_embeddings)), rows)
    inputs = inputs_for(model)
    assert torch.equal(output_of(in_files, inputs), output_of(in_memory, inputs))


def test_an_adapter_on_a_table_is_merged_into_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, family = "embed_tokens_per_layer", "Gemma4TextExperts"
    model = save(family, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    save_adapter(reopen(model, tmp_path / "raw"), tmp_path / "adapter", target_modules=[name])
    merged = merge(tmp_path / "raw", tmp_path / "adapter", tmp_path / "merged").store
    assert not list(verify(merged))
    expected = PeftModel.from_pretrained(copy.deepcopy(model).float(), tmp_path / "adapter").merge_and_unload()
    opened = reopen(model, tmp_path / "merged")
    [embedding] = embeddings(opened)
    ids = torch.arange(embedding.num_embeddings)
    weight = expected.model.embed_tokens_per_layer.weight
    assert torch.equal(torch.nn.functional.embedding(ids, weight.bfloat16()) * embedding.embed_scale, embedding(ids))
    with pytest.raises(StoreError, match="cannot be merged"):
        merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "other")


def test_a_damaged_table_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(QWEN, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    store = convert(tmp_path / "raw", tmp_path / "store", "bf16").store
    save_adapter(reopen(model, tmp_path / "raw"), tmp_path / "adapter", target_modules=["q_proj"])
    path = tmp_path / "store" / next(file.name for file in store.manifest.other_files if is_table_file(file.name))
    with path.open("r+b") as file:
        file.seek(4096 + 5)
        file.write(b"damage")
    with pytest.raises(StoreError, match="was changed since the conversion"):
        merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_inspect_finds_damaged_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(QWEN, tmp_path / "raw")
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    store = convert(tmp_path / "raw", tmp_path / "store", "bf16").store
    assert main(["inspect", "--verify", str(store.folder)]) == 0
    path = store.folder / next(file.name for file in store.manifest.other_files if is_table_file(file.name))
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)  # in the padding of the last row, which no look-up reads
        file.write(b"x")
    assert main(["inspect", "--verify", str(store.folder)]) != 0
    assert path.name in "".join(capsys.readouterr().out.split())


def test_plan_and_inspect_count_the_bytes_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(QWEN, tmp_path)
    weights = [weight for name, weight in model.named_parameters() if "ngram_embedding" in name]
    table_bytes = sum(weight.nbytes for weight in weights)
    whole = find_sizes(tmp_path, MeshConfig(tables="off"))
    sizes = find_sizes(tmp_path, MeshConfig(tables="ngram_embedding"))
    assert (whole.tables, whole.table_bytes, whole.table_memory_bytes) == ("", 0, 0)
    assert sizes.table_bytes == table_bytes == whole.dense_bytes - sizes.dense_bytes
    assert whole.dense_bytes_per_token - sizes.dense_bytes_per_token == table_bytes
    planned = plan(tmp_path, MeshConfig(tables="ngram_embedding", resident=0.5), memory=8 << 30)
    assert planned.to_dict()["sizes"]["table_memory_bytes"] == sizes.table_memory_bytes > 8 << 20
    running = planned.pool_bytes + planned.workspace_bytes + sizes.dense_bytes + sizes.staging_bytes
    assert planned.peak_bytes - planned.process_bytes == running + sizes.table_memory_bytes
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    [tables] = tables_of(opened)
    assert tables.engine.describe()["memory_bytes"] <= sizes.table_memory_bytes
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    held = describe(tmp_path)["tables"]
    assert sum(held.values()) == table_bytes and all(path.endswith("ngram_embedding") for path in held)


def test_a_whole_table_is_read_in_parts() -> None:
    """Parts of at most 64 MiB, for check_room counts only the table itself."""
    rows, dim, dtype = 5000, 14336, torch.bfloat16
    sizes: list[int] = []

    class Rows:
        tables = (SimpleNamespace(name="table", weights="", dtype=dtype),)

        def read(self, table: int, first: int, last: int) -> torch.Tensor:
            sizes.append((last - first) * dim * dtype.itemsize)
            return torch.arange(first, last).to(dtype)[:, None].expand(-1, dim)

    tables: Any = Rows()
    weight = PackedTableWeight(torch.zeros(3, dtype=torch.int64), torch.Size((rows, dim)), dtype, tables, 0)
    whole = tables.read(0, 0, rows)
    for use in (lambda: torch.equal(weight.unpacked(), whole), lambda: weight._equals(whole)):
        sizes.clear()
        assert use()
        assert sum(sizes) == rows * dim * dtype.itemsize and max(sizes) <= 64 << 20
    assert not weight._equals(whole + 1)
