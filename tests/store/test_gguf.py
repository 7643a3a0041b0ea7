"""GGUF files: their headers and weights, their conversion, and what is refused."""

from __future__ import annotations

import collections
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_files import Written
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_mesh.cli import main
from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError, StoreError, UnsupportedModelError
from torch_mesh.formats import FORMATS, GGUF_FORMATS
from torch_mesh.models.families import find_experts
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert, stored_expert, weights_of_checkpoint
from torch_mesh.store.gguf import BLOCK_TYPES, read_gguf, read_parts
from torch_mesh.store.header import read_range
from torch_mesh.store.inspect import describe
from torch_mesh.store.manifest import open_store
from torch_mesh.store.sources import layout
from torch_mesh.store.sources.gguf import gguf_weights
from torch_mesh.store.verify import read_record

pytestmark = pytest.mark.filterwarnings("ignore:The experts of:UserWarning", "ignore:.*weights='auto':UserWarning")


KEPT = {"Q4_0": ("int4_fp16", 32), "Q8_0": ("int8_fp16", 32), "MXFP4": ("mxfp4", 32)}  # kept as they are
OWN = {
    kind: (kind.lower(), FORMATS[kind.lower()].group_sizes[0]) for kind in BLOCK_TYPES if kind.lower() in GGUF_FORMATS
}


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16", "BF16"])
def test_values_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    values = np.random.randn(3, 20, 512).astype(np.float32)
    data, expected = gguf_files.encode(values, kind)
    assert np.isfinite(expected).all() and np.count_nonzero(expected) > expected.size / 16
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("stack", data, raw_dtype=Type[kind])
    gguf_files.finish(writer)
    weight = gguf_weights([read_gguf(tmp_path / "m.gguf").header])["stack"]
    assert weight.shape == expected.shape and weight.stored_bytes == data.nbytes
    assert np.array_equal(weight.read().numpy(), expected)
    for expert in range(3):
        assert np.array_equal(weight.read(expert).numpy(), expected[expert])
    kept, rounded = weight.passthrough_codes(), weight.rounded()
    held = None
    if kept is not None:
        halves = kept.scales is not None and kept.scales.type == "fp16"
        held = (f"{kept.kind}_fp16" if halves else kept.kind, kept.groups[0])
    assert held == (OWN | KEPT).get(kind)
    assert rounded.weights == ("bf16" if kind in ("MXFP4", "F32", "F16", "BF16") else "int8")
    assert rounded.exact == (kind in ("MXFP4", "BF16"))


def test_experts_are_where_the_file_has_them(written: Callable[..., Written]) -> None:
    for architecture in ("qwen3moe", "gpt-oss"):
        made = written(architecture, "Q4_0")
        experts = find_checkpoint_experts(made.path, meta_model(read_config(made.path)))
        assert experts.format == "Q4_0"
        for layer, expert, part in itertools.product(range(2), range(4), ("gate", "up", "down")):
            own = made.tensors[f"blk.{layer}.ffn_{part}_exps.weight"][expert]
            assert np.array_equal(getattr(experts.read_expert(layer, expert), part).numpy(), own)


def test_a_store_may_be_called_like_a_gguf_file(written: Callable[..., Written], tmp_path: Path) -> None:
    store = str(convert(written("qwen3moe").path, tmp_path / "store.gguf", "int4").store.folder)
    assert main(["inspect", store]) == main(["inspect", "--verify", store]) == main(["plan", store]) == 0


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_experts_of_different_types_become_int8(architecture: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", architecture, {"down_exps.weight": "F16", "_exps.weight": "Q4_0"})
    experts = find_checkpoint_experts(made.path, meta_model(read_config(made.path)))
    assert weights_of_checkpoint(experts, "auto") == ("int8", 32)


@pytest.mark.parametrize("architecture", gguf_files.EACH_ARCHITECTURE)
def test_other_weights_equal_those_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    types = {"_exps.weight": "Q8_0", "ssm_(alpha|beta|conv1d)": "F16", "weight": "Q4_0"}
    made = gguf_files.write(tmp_path / "m.gguf", architecture, types)
    convert(made.path, tmp_path / "store", "bf16")
    stored = {}
    for file in (tmp_path / "store").glob("model*.safetensors"):
        stored |= load_file(file)
    own = {f"{layer.path}.{name}" for layer in find_experts(made.model) for name in layer.parameter_names}
    expected = {name: value for name, value in made.model.state_dict().items() if name not in own}
    assert set(stored) == set(expected)
    if architecture in gguf_files.READ_BY_TRANSFORMERS:
        read = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="m.gguf", config=made.model.config, dtype=torch.float32
        ).state_dict()
        assert all(torch.equal(stored[name].float(), read[name].to(stored[name].dtype).float()) for name in stored)
    for name, value in stored.items():
        # Parameters that the file stores as a function of themselves do not round-trip exactly in fp32.
        assert torch.allclose(value.float(), expected[name], rtol=5e-3, atol=2e-6), name
    assert "norm.weight" in " ".join(stored) and stored["model.norm.weight"].dtype == torch.float32


def test_a_store_is_a_whole_checkpoint(written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("qwen3moe", "Q8_0")
    assert not convert(made.path, tmp_path / "store", "int8", 32).existed
    assert convert(made.path, tmp_path / "store", "int8", 32).existed
    manifest = open_store(tmp_path / "store").manifest
    assert (manifest.source_name, manifest.shape.experts, manifest.shape.layers) == ("model", 4, 2)
    config = json.loads((tmp_path / "store" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["moe_intermediate_size"] == 64 and config["quantization_config"]["weights"] == "int8"
    theirs = AutoTokenizer.from_pretrained(made.path.parent, gguf_file=made.path.name)
    ours = AutoTokenizer.from_pretrained(tmp_path / "store")
    if gguf_files.READS_QWEN35MOE:
        text, padding = "hello hell</s> low", "<pad>"
    else:  # older versions of transformers find no special tokens in a text, and no padding
        text, padding = "hello hell low", None
    assert ours(text)["input_ids"] == theirs(text)["input_ids"] != []
    assert (ours.eos_token, ours.pad_token, ours.chat_template) == ("</s>", padding, theirs.chat_template)
    assert ours.chat_template


@pytest.mark.parametrize("kind", KEPT)
def test_records_hold_the_values_of_the_file(kind: str, written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("gpt-oss", kind)
    store = convert(made.path, tmp_path / "store", "auto").store
    format, group_size = KEPT[kind]
    assert (store.manifest.weights, store.manifest.group_size) == KEPT[kind]
    for layer in range(2):
        record = torch.frombuffer(bytearray(read_record(store, layer, 3)), dtype=torch.uint8)
        gate_up, down, _, down_bias = torch.ops.torch_mesh.unpack(record, format, group_size, 128, 64, True, True)
        for part, unpacked in (("gate", gate_up[:64]), ("up", gate_up[64:]), ("down", down)):
            own = torch.from_numpy(made.tensors[f"blk.{layer}.ffn_{part}_exps.weight"][3].copy())
            assert torch.equal(unpacked.float(), own)
        own = made.tensors[f"blk.{layer}.ffn_down_exps.bias"][3]
        assert torch.allclose(down_bias.float(), torch.from_numpy(own.copy()), rtol=4e-3)


def _exact(kind: str, data: np.ndarray) -> torch.Tensor:
    """Decode blocks of 32 weights in fp64, by llama.cpp's description of them."""
    size = {"Q4_0": 18, "Q8_0": 34, "MXFP4": 17}[kind]
    blocks = torch.from_numpy(data.copy()).view(-1, size)
    if kind == "MXFP4":
        scale, codes = torch.exp2(blocks[:, :1].double() - 127), blocks[:, 1:]
    else:
        scale, codes = blocks[:, :2].contiguous().view(torch.float16).double(), blocks[:, 2:]
    if kind == "Q8_0":
        return scale * codes.contiguous().view(torch.int8).double()
    nibbles = torch.cat([codes & 15, codes >> 4], dim=1).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    fp4 = torch.cat([magnitudes, -magnitudes])
    return scale * (fp4[nibbles] if kind == "MXFP4" else nibbles.double() - 8)


@pytest.mark.parametrize("kind", KEPT)
def test_records_hold_the_exact_values_of_blocks(kind: str, written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("qwen3moe", kind)
    store = convert(made.path, tmp_path / "store", "auto").store
    tensors = read_gguf(made.path).header.tensors
    for layer, expert in store.records():
        found = stored_expert(store, layer, expert)
        for part in ("gate", "up", "down"):
            tensor = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            data = read_range(made.path, tensor.offset, tensor.bytes).reshape(4, -1)[expert]
            assert torch.equal(getattr(found, part).double().view(-1, 32), _exact(kind, data))


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    apart = gguf_files.write(tmp_path / "apart.gguf", "qwen3moe", {"_exps": "Q4_0"})
    gguf_files.rewrite(apart.path, tmp_path / "fused.gguf", fuse=True)
    one, two = (
        find_checkpoint_experts(path, meta_model(read_config(path))) for path in (apart.path, tmp_path / "fused.gguf")
    )
    assert one.reads_per_expert == 3 and two.reads_per_expert == 2
    for part in ("gate", "up", "down"):
        assert torch.equal(getattr(one.read_expert(1, 2), part), getattr(two.read_expert(1, 2), part))


def test_inspect_and_plan_read_headers(written: Callable[..., Written]) -> None:
    made = written("qwen2moe", "Q5_1")
    held = describe(made.path)
    assert (held["weights"], held["model_type"], held["experts"], held["source"]) == ("Q5_1", "qwen2_moe", 4, "model")
    assert held["expert_bytes"] == 3 * 128 * 64 // 32 * 24 and held["all_experts_bytes"] == 8 * held["expert_bytes"]
    sizes = find_sizes(made.path, MeshConfig(weights="auto"))
    assert (sizes.weights, sizes.group_size) == ("q5_1", 32)


def test_every_byte_is_read_once_and_kept_codes_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "gpt-oss", {"_exps.weight": "MXFP4", "attn": "Q8_0"}, parts=3)
    read = []

    def recorded(path: Path, offset: int, size: int) -> bytearray:
        read.append((path, offset, size))
        return read_range(path, offset, size)

    monkeypatch.setattr(layout, "read_range", recorded)
    convert(made.path, tmp_path / "store", "int4")
    tensors = [(part.header.path, t) for part in read_parts(made.path) for t in part.header.tensors.values()]
    codes = [tensor for _, tensor in tensors if tensor.dtype == "Q8_0"]
    assert codes and sum(size for *_, size in read) == sum(tensor.bytes for _, tensor in tensors) + sum(
        tensor.bytes for tensor in codes
    )
    twice = collections.Counter(read)
    assert sum(size for (*_, size), times in twice.items() if times == 2) == sum(tensor.bytes for tensor in codes)
    assert max(twice.values()) == 2 and max(size for *_, size in read) < sum(t.bytes for _, t in tensors) / 4


@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers does not read qwen35moe")
def test_multi_token_prediction_layers_are_left_out(written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("qwen35moe", "Q8_0")
    extra = {
        f"blk.2.{name}.weight": np.ones((32, 32), np.float32) for name in ("nextn.eh_proj", "attn_q", "ffn_up_exps")
    }
    counts = {"qwen35moe.block_count": 3, "qwen35moe.nextn_predict_layers": 1}
    gguf_files.rewrite(made.path, tmp_path / "more.gguf", "qwen35moe", metadata=counts, extra=extra)
    convert(tmp_path / "more.gguf", tmp_path / "more", "int8")
    convert(made.path, tmp_path / "store", "int8")
    names = [json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("more", "store")]
    assert names[0]["weight_map"] == names[1]["weight_map"]


@pytest.mark.parametrize("parts", [2, 5])
def test_a_model_in_parts_is_one(parts: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = gguf_files.write(tmp_path / "whole.gguf", "qwen3moe", {"_exps": "Q8_0"})
    torch.manual_seed(0)
    split = gguf_files.write(tmp_path / "split.gguf", "qwen3moe", {"_exps": "Q8_0"}, parts=parts)
    assert len(read_parts(split.path)) == parts
    config = read_config(split.path)
    assert not config.tie_word_embeddings  # output.weight and the metadata are in different parts
    one, two = (find_checkpoint_experts(path, meta_model(read_config(path))) for path in (whole.path, split.path))
    assert torch.equal(one.read_expert(1, 3).up, two.read_expert(1, 3).up)
    convert(split.path, tmp_path / "store", "int8")
    files = sorted(tmp_path.glob("split-*.gguf"))
    first, second, last = files[0], files[1], files[-1]
    with pytest.raises(StoreError, match="is part 2 of .* name the first"):
        describe(second)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(StoreError, match="says that it is part 1 of"):
        read_parts(first)
    first.write_bytes(data)
    last.unlink()
    with pytest.raises(StoreError, match=f"{last.name}: there is no such file.* one of the {parts} parts"):
        describe(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(StoreError, match="keep the names that they were given"):
        describe(renamed)


def test_a_cut_file_is_named_with_its_offset(
    written: Callable[..., Written], tmp_path: Path, rng: np.random.Generator
) -> None:
    data = written("qwen3moe", "Q4_0").path.read_bytes()
    path = tmp_path / "cut.gguf"
    start = read_gguf(written("qwen3moe", "Q4_0").path).header.data_start
    for end in [0, 3, 4, 23, *rng.integers(24, start, 40), *rng.integers(start, len(data) - 32, 10)]:
        path.write_bytes(data[:end])
        with pytest.raises(StoreError) as raised:
            describe(path)
        assert raised.value.file == str(path) and raised.value.offset is not None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (139, r"the type 139 \(IQ4_K, of ik_llama.cpp alone\)"),
        (212, r"the type 212 \(Q4_K_R4, of ik_llama.cpp alone\)"),
        (9, "the type 9. "),
        (5000, "the type 5000. "),
    ],
)
def test_other_types_are_refused_by_number_and_name(kind: int, message: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"blk.0.ffn_up_exps": "Q4_0"})
    data = made.path.read_bytes()
    at = data.index(b"blk.0.ffn_up_exps.weight") + 24 + 4 + 3 * 8
    made.path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    with pytest.raises(UnsupportedModelError, match=f"'blk.0.ffn_up_exps.weight' is of {message}.*MXFP4"):
        describe(made.path)


@pytest.mark.parametrize("architecture", ["bailingmoe2", "qwen3"])
def test_other_architectures_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe")
    writer = gguf.GGUFWriter(made.path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    gguf_files.finish(writer)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{architecture}'.*qwen3moe, gpt-oss, minimax-m2"):
        convert(made.path, tmp_path / "store", "int8")


@pytest.mark.parametrize("architecture", ["llama", "gemma4"])
def test_dense_models_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    gguf_files.finish(writer)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{architecture}' without experts"):
        convert(tmp_path / "m.gguf", tmp_path / "store", "int8")


@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="an older transformers reads other fields of Gemma 4")
def test_a_dense_gemma_4_opens_as_without_torch_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(32)
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "a"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    gguf_files.finish(writer)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    with pytest.raises(UnsupportedModelError, match="'gemma4' without experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", quantization_config=MeshConfig(resident=1.0))
    monkeypatch.delitem(GGUF_CONFIG_ARCHS, "gemma4")
    assert config.to_dict() == transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()


def test_block_types_are_those_that_the_package_decodes() -> None:
    """Fails when the package can dequantize more types."""
    decoded = set()
    for kind in Type:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        decoded.add(kind.name)
    assert decoded - {"F32", "F16", "BF16"} == set(BLOCK_TYPES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"extra": {"blk.0.attn_scale.weight": np.ones((4, 4), np.float32)}},
            "'blk.0.attn_scale.weight' belongs to nothing",
        ),
        (
            {"extra": {"blk.0.ffn_up_exps.scale": np.ones(4, np.float32)}},
            "'blk.0.ffn_up_exps.scale' is a second scale of NVFP4",
        ),
        (
            {"drop": "blk.1.ffn_up_exps.weight", "extra": {"blk.1.ffn_up.0.weight": np.ones((64, 128), np.float32)}},
            "'blk.1.ffn_up_exps.weight', which .*: each expert is a tensor of its own",
        ),
        ({"drop": "blk.1.attn_q.weight"}, "no tensor holds model.layers.1.self_attn.q_proj.weight: incomplete"),
        ({"drop": "blk.1.ffn_up_exps.weight"}, "'blk.1.ffn_up_exps.weight', which model.layers.1.mlp.experts needs"),
        ({"reshape": "blk.0.ffn_up_exps.weight"}, r"has the shape \[4, 128, 64\], .* needs \[4, 64, 128\]"),
        ({"reshape": "token_embd.weight", "drop": "output.weight"}, "has the shape"),
        ({"metadata": {"qwen3moe.block_count": 1 << 30}}, "block_count is 1073741824, .* 1 to 1024 layers"),
        ({"metadata": {"qwen3moe.embedding_length": 1 << 31}}, "an integer from 0 to the largest side"),
        ({"metadata": {"qwen3moe.attention.head_count": 0}}, "transformers makes no config|describes no causal"),
        ({"metadata": {"qwen3moe.rope.scaling.type": "longrope"}}, "positions scaled by 'longrope'"),
    ],
)
def test_inconsistent_files_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe")
    gguf_files.rewrite(made.path, tmp_path / "changed.gguf", **change)
    with pytest.raises(MeshError, match=message):
        convert(tmp_path / "changed.gguf", tmp_path / "store", "int8")
    assert not (tmp_path / "store").exists()


def test_non_finite_scales_are_refused(tmp_path: Path) -> None:
    for kind, broken in (("Q8_0", b"\x00\x7c"), ("MXFP4", b"\xff")):
        made = gguf_files.write(tmp_path / f"{kind}.gguf", "qwen3moe", {"_exps": kind})
        tensor = read_gguf(made.path).header.tensors["blk.1.ffn_down_exps.weight"]
        data = bytearray(made.path.read_bytes())
        data[tensor.offset : tensor.offset + len(broken)] = broken
        made.path.write_bytes(data)
        with pytest.raises(StoreError, match="'blk.1.ffn_down_exps.weight' holds") as raised:
            convert(made.path, tmp_path / f"store-{kind}", "int8")
        assert raised.value.offset == tensor.offset


def test_a_missing_gguf_package_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_mesh.store import gguf as headers

    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe")
    headers._types.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install torch_mesh\[gguf\]"):
        describe(made.path)


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", tied=True)
    convert(made.path, tmp_path / "store", "int8")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "store").tie_word_embeddings
