"""Checkpoints that another tool has quantized: the values read from them, and their conversion."""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import each_once_quick, every_other_quick
from quantized import (
    KINDS,
    MIXED,
    Tensors,
    change_config,
    exact_values,
    rewrite,
    write_deepseek_v4,
    write_gpt_oss,
    write_quantized,
)
from safetensors.torch import load_file
from tiny_checkpoints import tiny_model

from torch_mesh.config import MeshConfig
from torch_mesh.errors import StoreError
from torch_mesh.models.families import ExpertTensors, find_experts
from torch_mesh.planning.formats import compared_formats
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store.checkpoint import CheckpointExperts, find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert, stored_expert, weights_of_checkpoint
from torch_mesh.store.header import read_header, read_range
from torch_mesh.store.inspect import describe
from torch_mesh.store.manifest import Store, open_store
from torch_mesh.store.sources import layout
from torch_mesh.store.sources.fp8 import ScaledFp8
from torch_mesh.store.sources.layout import MisfitError, scale_values
from torch_mesh.store.verify import read_record

KEPT = [kind for kind in KINDS if KINDS[kind]().kept]
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors]]:
    """A checkpoint of a kind and its values. It is written once; tests copy it instead of changing it."""

    @functools.cache
    def write(kind: str) -> tuple[Path, Tensors]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, write_quantized(folder, KINDS[kind]())

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_format_exactly(kind: str, written: Any) -> None:
    folder, values = written(kind)
    experts = find_checkpoint_experts(folder, meta_model(read_config(folder)))
    for layer in range(experts.shape.layers):
        for expert in range(experts.shape.experts):
            read = experts.read_expert(layer, expert)
            for part, name in PROJECTIONS.items():
                expected = values[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
                assert torch.equal(getattr(read, part), expected), (layer, expert, part)
    with contextlib.nullcontext() if kind in KEPT else pytest.warns(UserWarning, match="auto"):
        assert weights_of_checkpoint(experts, "auto") == KINDS[kind]().nearest


def _expect_records_of(store: Store, values: Callable[[int, int, str], torch.Tensor]) -> None:
    manifest, shape = store.manifest, store.manifest.shape
    sizes = (shape.hidden, shape.intermediate, shape.gated, shape.bias)
    for layer, expert in store.records():
        record = torch.frombuffer(bytearray(read_record(store, layer, expert)), dtype=torch.uint8)
        unpacked = torch.ops.torch_mesh.unpack(record, manifest.weights, manifest.group_size, *sizes)
        gate, up = unpacked[0].split(shape.intermediate)
        for part, found in {"gate": gate, "up": up, "down": unpacked[1]}.items():
            assert torch.equal(found, values(layer, expert, part)), (layer, expert, part)


# Sizes that blocks and groups divide, and sizes that they do not.
@pytest.mark.parametrize(
    ("kind", "sizes"), each_once_quick(KEPT, [{}, {"hidden_size": 384, "moe_intermediate_size": 320}])
)
def test_records_hold_codes_and_scales_as_they_are(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "raw", KINDS[kind](), **sizes)
    store = convert(tmp_path / "raw", tmp_path / "store", "auto").store
    assert store.manifest.weights == KINDS[kind]().nearest[0]
    _expect_records_of(
        store, lambda layer, e, part: values[f"model.layers.{layer}.mlp.experts.{e}.{PROJECTIONS[part]}.weight"]
    )


ALL = KINDS | MIXED


@pytest.mark.parametrize("kind", every_other_quick(ALL, 0))
def test_autos_error_is_at_most_the_stated_one(kind: str, tmp_path: Path) -> None:
    made = ALL[kind]()
    write_quantized(tmp_path / "raw", made)
    exact = exact_values(tmp_path / "raw")
    experts = find_checkpoint_experts(tmp_path / "raw", meta_model(read_config(tmp_path / "raw")))
    choice = experts.nearest()
    assert (choice.weights, choice.group_size) == made.nearest
    assert choice.exact == (made.kept or kind == "fp8_powers_of_two")
    with contextlib.nullcontext() if made.kept else pytest.warns(UserWarning, match="auto") as warned:
        store = convert(tmp_path / "raw", tmp_path / "store", "auto").store
    assert made.kept or any(choice.why in str(each.message) for each in warned)
    stored = ("bf12", 0) if made.nearest == ("bf16", 0) else made.nearest
    assert (store.manifest.weights, store.manifest.group_size) == stored
    for layer, expert in store.records():
        found = stored_expert(store, layer, expert)
        for part, name in PROJECTIONS.items():
            expected = exact[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
            off = getattr(found, part).double() - expected
            if made.kept:
                assert (off.abs() <= 2.0**-22 * expected.abs()).all(), (layer, expert, part)
            else:
                # Rounding to bf16 has an error of at most 2^-8, which all values of fp8 with one scale may reach.
                assert off.norm() <= max(1.4 * choice.error, 2.0**-8) * expected.norm(), (layer, expert, part)


@pytest.mark.parametrize("kind", every_other_quick(ALL, 1))
def test_a_plan_states_what_opening_does(kind: str, tmp_path: Path) -> None:
    made = ALL[kind]()
    write_quantized(tmp_path, made)
    experts = find_checkpoint_experts(tmp_path, meta_model(read_config(tmp_path)))
    choice = experts.nearest()
    with contextlib.nullcontext() if made.kept else pytest.warns(UserWarning, match="auto"):
        sizes = find_sizes(tmp_path, MeshConfig())
    assert (sizes.weights, sizes.group_size or 0) == made.nearest
    assert ("as they are" in sizes.conversion) == made.kept
    assert made.kept or choice.why in sizes.conversion
    if sizes.own_codes is not None:
        assert sizes.own_codes == made.nearest and sizes.own_error == choice.error
        assert compared_formats(sizes, MeshConfig())[made.nearest[0]] == (made.nearest[1], choice.error)
    if made.nearest[0] == "bf16":
        assert compared_formats(sizes, MeshConfig())["bf16"][1] == choice.error


def test_scales_are_repeated_for_a_smaller_group(tmp_path: Path) -> None:
    """A given group size that divides the checkpoint's own keeps its codes too."""
    write_quantized(tmp_path / "raw", MIXED["groups_of_64"]())
    exact = exact_values(tmp_path / "raw")
    store = convert(tmp_path / "raw", tmp_path / "store", "int4", 32).store
    assert store.manifest.group_size == 32
    for layer, expert in store.records():
        found = stored_expert(store, layer, expert)
        for part, name in PROJECTIONS.items():
            expected = exact[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
            assert torch.equal(getattr(found, part), expected.float())


@pytest.mark.parametrize("kind", ["ct_int4", "gptq_bf16_scales", "ct_int8"])
def test_a_checkpoint_in_the_named_format_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    made = ALL[kind]()
    raw = tmp_path / "raw"
    values = write_quantized(raw, made)
    own, groups = made.nearest
    sizes = find_sizes(raw, MeshConfig(weights=own))
    assert (sizes.weights, sizes.group_size) == made.nearest and "as they are" in sizes.conversion
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = convert(raw, tmp_path / "store", own).store
    assert (store.manifest.weights, store.manifest.group_size) == made.nearest
    _expect_records_of(
        store, lambda layer, e, part: values[f"model.layers.{layer}.mlp.experts.{e}.{PROJECTIONS[part]}.weight"]
    )
    with pytest.warns(UserWarning, match=rf"{own} experts in groups of {groups} are rounded again, to groups of 128"):
        others = convert(raw, tmp_path / "others", own, 128).store
    assert others.manifest.group_size == 128


def test_a_format_of_codes_is_only_for_checkpoints_that_have_them(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["ct_mxfp4"]())
    with pytest.raises(ValueError, match=r"weights='nvfp4' holds .* has MXFP4 experts: give one of 'mxfp4', 'bf16'"):
        convert(tmp_path / "raw", tmp_path / "store", "nvfp4")
    by_name = convert(tmp_path / "raw", tmp_path / "by name", "mxfp4").store
    by_itself = convert(tmp_path / "raw", tmp_path / "by itself", "auto").store
    for layer, expert in by_name.records():
        assert read_record(by_name, layer, expert) == read_record(by_itself, layer, expert)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_has_the_rest_unquantized(kind: str, written: Any, tmp_path: Path) -> None:
    folder, values = written(kind)
    convert(folder, tmp_path / "store", "int8")
    config = json.loads((tmp_path / "store" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mesh"
    assert not (tmp_path / "store" / "hf_quant_config.json").exists()
    index = json.loads((tmp_path / "store" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {name for name in values if ".experts." not in name}
    for file in set(index.values()):
        for name, tensor in load_file(tmp_path / "store" / file).items():
            assert torch.equal(tensor, values[name].bfloat16()), name


def test_gpt_oss_in_blocks_is_read_exactly(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    values = write_gpt_oss(raw)
    model = meta_model(read_config(raw))
    experts = find_checkpoint_experts(raw, model)
    for number, layer in enumerate(find_experts(model)):
        own = {name: values[f"{layer.path}.{name}"] for name in layer.parameter_names}
        for expert in range(layer.num_experts):
            read, expected = experts.read_expert(number, expert), layer.expert(expert, own)
            for part, tensor in expected._asdict().items():
                assert torch.equal(getattr(read, part), tensor), part
    assert experts.nearest().weights == "mxfp4" and experts.nearest().exact
    layers = find_experts(model)

    def expected_part(number: int, expert: int, part: str) -> torch.Tensor:
        layer = layers[number]
        own = {name: values[f"{layer.path}.{name}"] for name in layer.parameter_names}
        return getattr(layer.expert(expert, own), part)

    _expect_records_of(convert(raw, tmp_path / "store", "auto").store, expected_part)


def test_fp4_experts_beside_fp8_are_read_exactly(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    values = write_deepseek_v4(raw)
    experts = find_checkpoint_experts(raw, meta_model(read_config(raw)))
    for layer in range(experts.shape.layers):
        for expert in range(experts.shape.experts):
            read = experts.read_expert(layer, expert)
            for part, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
                assert torch.equal(
                    getattr(read, part), values[f"model.layers.{layer}.ffn.experts.{expert}.{name}.weight"]
                )
    assert experts.nearest().weights == "mxfp4" and experts.nearest().exact
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    _expect_records_of(
        convert(raw, tmp_path / "store", "auto").store,
        lambda layer, expert, part: values[f"model.layers.{layer}.ffn.experts.{expert}.{names[part]}.weight"],
    )


def test_blocks_that_a_matrix_cuts_off(tmp_path: Path) -> None:
    """As in DeepSeek: 576 rows in blocks of 128 have five scales; 192 have two, of 128 and 64 rows, not of 96."""
    codes = torch.randn(192, 160).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    values = ScaledFp8((128, 128), powers_of_two=False).values({"codes": codes, "scale": scale}, (192, 160))
    expected = codes.float() * scale.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(values, expected)


def test_blocks_of_compressed_tensors_may_be_a_text(tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "raw", KINDS["fp8_blocks"]())
    renamed = lambda name: name.replace("_scale_inv", "_scale")
    rewrite(tmp_path / "raw", lambda tensors: [tensors.update({renamed(n): tensors.pop(n)}) for n in list(tensors)])
    for given in ([128, 128], "128x128"):
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": given}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
        change_config(tmp_path / "raw", quantization_config=quantization)
        experts = find_checkpoint_experts(tmp_path / "raw", meta_model(read_config(tmp_path / "raw")))
        assert weights_of_checkpoint(experts, "auto") == ("fp8", 128)
        assert torch.equal(experts.read_expert(0, 1).down, values["model.layers.0.mlp.experts.1.down_proj.weight"])


def test_scales_of_one_byte() -> None:
    every = scale_values({"scale": torch.arange(255, dtype=torch.uint8)})
    assert every.dtype == torch.float32
    assert every.double().tolist() == [2.0**exponent for exponent in range(-127, 128)]
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        with pytest.raises(MisfitError, match="255"):
            scale_values({"scale": torch.tensor([127, 255], dtype=torch.uint8).view(dtype)})


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for write in (write_gpt_oss, lambda folder: write_quantized(folder, KINDS["gptq"]())):
        folder = tmp_path / write.__name__.strip("<>")
        write(folder)
        read: list[tuple[int, int]] = []

        def noted(path: Path, offset: int, size: int, read: list = read) -> bytearray:
            read.append((offset, size))
            return read_range(path, offset, size)

        with monkeypatch.context() as patched:
            patched.setattr(layout, "read_range", noted)
            convert(folder, tmp_path / f"store of {folder.name}", "int8")
        assert len(set(read)) == len(read)
        experts = find_checkpoint_experts(folder, meta_model(read_config(folder)))
        stretches = sorted(read)
        assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(stretches))
        assert sum(size for _, size in read) >= experts.all_experts_bytes


def test_a_killed_conversion_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized(tmp_path / "raw", KINDS["awq"]())
    convert(tmp_path / "raw", tmp_path / "whole", "int4")
    read = CheckpointExperts.read_expert

    def interrupted(self: CheckpointExperts, layer: int, expert: int) -> ExpertTensors:
        if layer == 1:
            raise KeyboardInterrupt
        return read(self, layer, expert)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(CheckpointExperts, "read_expert", interrupted)
        convert(tmp_path / "raw", tmp_path / "store", "int4", workers=1)
    again: list[tuple[int, int]] = []

    def noted(self: CheckpointExperts, layer: int, expert: int) -> ExpertTensors:
        again.append((layer, expert))
        return read(self, layer, expert)

    monkeypatch.setattr(CheckpointExperts, "read_expert", noted)
    store = convert(tmp_path / "raw", tmp_path / "store", "int4").store
    assert len(again) < store.manifest.shape.layers * store.manifest.shape.experts
    whole = open_store(tmp_path / "whole")
    for layer, expert in store.records():
        assert read_record(store, layer, expert) == read_record(whole, layer, expert)


def test_another_quantization_config_is_another_source(tmp_path: Path) -> None:
    """The same tensors mean other weights: a zero point less one."""
    write_quantized(tmp_path / "raw", KINDS["gptq"]())
    first = convert(tmp_path / "raw", tmp_path / "first", "int8").store.manifest
    change_config(tmp_path / "raw", quantization_config={**KINDS["gptq"]().config, "checkpoint_format": "gptq_v2"})
    second = convert(tmp_path / "raw", tmp_path / "second", "int8").store.manifest
    assert first.source_fingerprint != second.source_fingerprint


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
ATTENTION = "model.layers.0.self_attn.q_proj"


def _changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[str, Tensors], str]:
    """Return a function that changes or removes one tensor of a weight, and returns its name."""

    def damage(stem: str, tensors: Tensors) -> str:
        name = f"{stem}{suffix}"
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        return name

    return damage


def _filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def _codes(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full(tensor.shape, value, dtype=torch.uint8).view(tensor.dtype)


GONE: Callable[[torch.Tensor], None] = lambda tensor: None
DAMAGE = [
    ("fp8", ".weight_scale_inv", GONE, "there is no"),
    ("fp8", ".weight", GONE, "are missing"),
    ("fp8", ".weight_scale_inv", lambda t: t[:, :1].repeat(1, 3), "does not divide"),
    ("fp8", ".weight_scale_inv", lambda t: t.int(), "is I32, not BF16 or F16 or F32 or U8 or F8_E8M0"),
    ("fp8", ".weight_scale_inv", _filled(torch.nan), "not finite"),
    ("fp8", ".weight", _codes(0x7F), "not a number"),
    ("mxfp8", ".weight_scale_inv", _filled(255), "255"),
    ("ct_fp8_channel", ".weight_scale", lambda t: t[1:], "does not divide"),
    ("ct_int4", ".weight_scale", GONE, "there is no"),
    ("ct_int4", ".weight_packed", GONE, "are missing"),
    ("ct_int4", ".weight_shape", lambda t: t + 1, "but the packed weight"),
    ("ct_int4", ".weight_shape", lambda t: t[:1], "has the shape"),
    ("ct_int4", ".weight_scale", lambda t: t[:, :1].repeat(1, 3), "does not divide"),
    ("ct_int4", ".weight_packed", lambda t: t[0], "not that of a matrix"),
    ("ct_int4_asymmetric", ".weight_zero_point", lambda t: t[:1], "belongs to"),
    ("ct_int4_asymmetric", ".weight_zero_point", lambda t: t.long(), "is I64, not I32"),
    ("ct_mxfp4", ".weight_scale", _filled(255), "255"),
    ("ct_mxfp4", ".weight_scale", lambda t: t[:, 1:], "belongs to"),
    ("ct_nvfp4", ".weight_global_scale", GONE, "there is no"),
    ("ct_nvfp4", ".weight_global_scale", _filled(0), "is 0"),
    ("ct_nvfp4", ".weight_global_scale", lambda t: t.repeat(2), "belongs to"),
    ("modelopt_nvfp4", ".weight_scale_2", _filled(torch.inf), "not finite"),
    ("modelopt_nvfp4", ".weight_scale", _codes(0x7F), "not finite"),
    ("gptq", ".qzeros", GONE, "there is no"),
    ("gptq", ".qzeros", lambda t: t[:, 1:], "belongs to"),
    ("gptq", ".scales", lambda t: t[:, 1:], "has the shape"),
    ("gptq", ".qweight", lambda t: t.float(), "is F32, not I32"),
    ("gptq_ordered", ".g_idx", _filled(99), "names a group"),
    ("gptq_ordered", ".g_idx", lambda t: t[1:], "belongs to"),
    ("awq", ".scales", lambda t: t[:, 1:], "has the shape"),
    ("awq", ".qzeros", lambda t: t[:, 1:], "belongs to"),
    ("bnb_nf4", ".weight.absmax", lambda t: t[1:], "belongs to"),
    ("bnb_nf4", ".weight.quant_map", lambda t: t[1:], "belongs to"),
    ("bnb_nf4", ".weight.quant_state.bitsandbytes__nf4", _filled(0), "is empty"),
    ("bnb_nf4", ".weight.quant_state.bitsandbytes__nf4", _filled(65), "not valid JSON"),
    ("bnb_nf4", ".weight.quant_state.bitsandbytes__nf4", GONE, "there is no"),
    ("bnb_nested", ".weight.nested_quant_map", GONE, "is missing"),
    ("bnb_nested", ".weight.nested_absmax", lambda t: t.repeat(2), "belongs to"),
]


# Damage that concerns records of codes.
DAMAGE_OF_CODES = [
    ("fp8_blocks", ".weight_scale_inv", _filled(torch.nan), "a scale that is not a finite number"),
    ("fp8_blocks", ".weight", _codes(0x7F), "a weight that is not a number"),
    ("mxfp8", ".weight_scale_inv", _filled(255), "a scale that is not a finite number"),
    ("ct_int4", ".weight_scale", _filled(torch.inf), "a scale that is not a finite number"),
    ("ct_nvfp4", ".weight_global_scale", _filled(0), "a factor that is no finite number"),
    ("modelopt_nvfp4", ".weight_scale", _codes(0x81), "a scale below zero"),
    ("gptq", ".qzeros", _filled(0x77777776), "zero points"),
    ("gptq", ".g_idx", lambda t: t.flip(0), "groups in an order of their own"),
]


@pytest.mark.parametrize(("kind", "suffix", "change", "problem"), DAMAGE_OF_CODES)
def test_damaged_codes_are_named(
    kind: str, suffix: str, change: Any, problem: str, written: Any, tmp_path: Path
) -> None:
    shutil.copytree(written(kind)[0], tmp_path / "raw")
    rewrite(tmp_path / "raw", lambda tensors: _changed(suffix, change)(EXPERT, tensors))
    with pytest.raises(StoreError, match=f"expert 2 of layer 1: .* cannot hold {problem}") as caught:
        convert(tmp_path / "raw", tmp_path / "store", "auto")
    assert caught.value.file == str(tmp_path / "raw" / "model.safetensors")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("kind", "suffix", "change", "problem", "stem"),
    [
        pytest.param(*damage, stem, marks=[] if at % 2 == place else [pytest.mark.thorough])
        for at, damage in enumerate(DAMAGE)
        for place, stem in enumerate((EXPERT, ATTENTION))
    ],
)
def test_damaged_weights_are_named(
    kind: str, suffix: str, change: Any, problem: str, stem: str, written: Any, tmp_path: Path
) -> None:
    shutil.copytree(written(kind)[0], tmp_path / "raw")
    names: list[str] = []
    rewrite(tmp_path / "raw", lambda tensors: names.append(_changed(suffix, change)(stem, tensors)))
    with pytest.raises(StoreError, match=re.escape(problem)) as caught:
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    assert caught.value.file == str(tmp_path / "raw" / "model.safetensors")
    assert stem in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_codes_of_fused_experts_are_not_taken_for_values(tmp_path: Path) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path / "raw")

    def quantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
            scale = tensors[name].float().abs().amax(-2, keepdim=True) / 127
            tensors[name] = (tensors[name] / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale

    rewrite(tmp_path / "raw", quantize)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    change_config(tmp_path / "raw", quantization_config=quantization)
    with pytest.raises(StoreError, match=r"experts\.(gate_up|down)_proj' is I8 of .*, but its other parts by comp"):
        convert(tmp_path / "raw", tmp_path / "store", "auto")


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    write_quantized(tmp_path, KINDS["gptq"]())
    experts = find_checkpoint_experts(tmp_path, meta_model(read_config(tmp_path)))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size // 2)
    with pytest.raises(StoreError, match="cut since it was opened"):
        for layer, expert in itertools.product(range(experts.shape.layers), range(experts.shape.experts)):
            experts.read_expert(layer, expert)


@pytest.mark.parametrize("kind", ["fp8", "modelopt_file", "ct_int4"])
def test_headers_alone_describe_it(kind: str, tmp_path: Path) -> None:
    """As for a model on the hub: files of full length with nothing after the header."""
    write_quantized(tmp_path, KINDS[kind]())
    before = describe(tmp_path)
    file = tmp_path / "model.safetensors"
    size, start = file.stat().st_size, read_header(file).data_start
    os.truncate(file, start)
    os.truncate(file, size)
    assert describe(tmp_path) == before
    stored = before["all_experts_bytes"] + before["other_bytes"]
    assert stored == sum(tensor.bytes for tensor in read_header(file).tensors.values())
    sizes = find_sizes(tmp_path, MeshConfig())
    assert sizes.weights == KINDS[kind]().nearest[0] and sizes.conversion
    assert find_sizes(tmp_path, MeshConfig(weights="lut4")).weights == "lut4"
