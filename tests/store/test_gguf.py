"""GGUF files: their headers and weights, their conversion, and what is refused."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_files
import mutations
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_files import Written
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError, StoreError, UnsupportedModelError
from torch_mesh.formats import FORMATS, GGUF_FORMATS
from torch_mesh.hf.open_model import open_tokenizer
from torch_mesh.models.families import find_experts
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store import gguf_model
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert, stored_expert, weights_of_checkpoint
from torch_mesh.store.gguf import BLOCK_TYPES, Counted, read_gguf, read_parts
from torch_mesh.store.gguf_families import FAMILIES
from torch_mesh.store.gguf_tokenizer import byte_level_tokenizer
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """A file of an architecture with experts of a type. It is written once; tests copy it instead of changing it."""

    @functools.cache
    def write(architecture: str, kind: str = "F32") -> Written:
        path = tmp_path_factory.mktemp(architecture) / "model.gguf"
        return gguf_files.write(path, architecture, {"_exps.weight": kind})

    return write


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16", "BF16"])
def test_values_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    values = np.random.randn(3, 20, 512).astype(np.float32)
    data, expected = gguf_files.encode(values, kind)
    assert np.isfinite(expected).all() and np.count_nonzero(expected) > expected.size / 16
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("stack", data, raw_dtype=Type[kind])
    _finish(writer)
    weight = gguf_weights([read_gguf(tmp_path / "m.gguf").header])["stack"]
    assert weight.shape == expected.shape and weight.stored_bytes == data.nbytes
    assert np.array_equal(weight.read().numpy(), expected)
    for expert in range(3):
        assert np.array_equal(weight.read(expert).numpy(), expected[expert])
    kept, rounded = weight.codes_as_they_are(), weight.rounded()
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
    _rewrite(apart.path, tmp_path / "fused.gguf", fuse=True)
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
    _rewrite(made.path, tmp_path / "more.gguf", "qwen35moe", metadata=counts, extra=extra)
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
    _finish(writer)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{architecture}'.*qwen3moe, gpt-oss, minimax-m2"):
        convert(made.path, tmp_path / "store", "int8")


@pytest.mark.parametrize("architecture", ["llama", "gemma4"])
def test_dense_models_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    _finish(writer)
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
    _finish(writer)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    with pytest.raises(UnsupportedModelError, match="'gemma4' without experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", quantization_config=MeshConfig(resident=1.0))
    monkeypatch.delitem(GGUF_CONFIG_ARCHS, "gemma4")
    assert config.to_dict() == transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()


@pytest.mark.parametrize("architecture", gguf_files.ARCHITECTURES)
def test_answers_end_at_each_token_that_the_file_states(
    architecture: str, written: Callable[..., Written], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    further = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    gemma = [1, 106, 50] if architecture == "gemma4" else []
    one = read_config(written(architecture).path).eos_token_id
    assert one == ([2, *gemma] if gemma else 2)
    _rewrite(written(architecture).path, path, architecture, metadata=further)
    assert read_config(path).eos_token_id == [2, 5, *gemma]
    if architecture != "llama":  # transformers takes it for a dense model
        assert transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).eos_token_id == [2, 5, *gemma]


def test_answers_of_gpt_oss_end_at_a_tool_call(written: Callable[..., Written]) -> None:
    part = read_gguf(written("gpt-oss").path)
    metadata = {**part.metadata, "tokenizer.ggml.tokens": Counted(201088), "tokenizer.ggml.eos_token_id": 200002}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert table["eos_token_id"] == [200002, 199999, 200012]


@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers does not read qwen35moe")
def test_qwen3_5_scales_positions_as_the_file_says(written: Callable[..., Written], tmp_path: Path) -> None:
    path = written("qwen35moe").path
    scaling = {"type": "yarn", "factor": 4, "original_context_length": 64}
    metadata = {f"qwen35moe.rope.scaling.{key}": value for key, value in scaling.items()}
    _rewrite(path, tmp_path / "m.gguf", "qwen35moe", metadata=metadata)
    expected = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    for config in (
        read_config(tmp_path / "m.gguf"),
        transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf"),
    ):
        assert config.rope_parameters == read_config(path).rope_parameters | expected
    _rewrite(path, tmp_path / "m.gguf", "qwen35moe", metadata={"qwen35moe.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModelError, match="positions scaled by 'longrope'"):
        read_config(tmp_path / "m.gguf")


def test_the_window_of_gpt_oss_is_the_files(written: Callable[..., Written]) -> None:
    assert read_config(written("gpt-oss").path).sliding_window == 32


def test_transformers_reads_no_architectures_that_we_do_not() -> None:
    """Fails when transformers supports another one, which torch_mesh should then read too."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    tables = {name for name, keys in GGUF_TO_TRANSFORMERS_MAPPING["config"].items() if "expert_count" in keys}
    assert tables == set(gguf_model.READ_BY_TABLES.values())
    ours = {name for name, read in GGUF_CONFIG_ARCHS.items() if read is gguf_model.config_table}
    assert ours == {*gguf_model.READ_BY_TABLES, *FAMILIES} - {
        "llama"
    }  # otherwise transformers reads the config of one itself
    assert set(GGUF_CONFIG_ARCHS) - ours <= {"qwen35", "qwen35moe", "lfm2"}


def test_projections_of_linear_attention_may_be_one_tensor(written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("qwen3next", "Q8_0")
    whole = made.model.state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"].numpy()
    parts = r"blk\.0\.attn_(qkv|gate)\.weight"
    older = {"blk.0.ssm_in.weight": whole}
    _rewrite(made.path, tmp_path / "older.gguf", "qwen3next", drop=parts, extra=older)
    assert torch.equal(
        *(
            _stored(path, tmp_path)["model.layers.0.linear_attn.in_proj_qkvz.weight"]
            for path in (made.path, tmp_path / "older.gguf")
        )
    )
    # The right number of values, in tensors of wrong shapes for the parameter.
    tensors = [made.tensors[f"blk.0.attn_{part}.weight"] for part in ("qkv", "gate")]
    moved = np.split(np.concatenate(tensors), [len(tensors[0]) + 1])
    wrong = {f"blk.0.attn_{part}.weight": rows for part, rows in zip(("qkv", "gate"), moved, strict=True)}
    _rewrite(made.path, tmp_path / "wrong.gguf", "qwen3next", drop=parts, extra=wrong)
    with pytest.raises(StoreError, match=r"'blk.0.attn_qkv.weight' \[257, 128\] makes no .*in_proj_qkvz"):
        _stored(tmp_path / "wrong.gguf", tmp_path)


def test_gates_of_shared_experts_are_rows_or_matrices(written: Callable[..., Written], tmp_path: Path) -> None:
    """llama.cpp's converter writes [1, hidden] today, and wrote [hidden]."""
    made = written("qwen2moe", "Q8_0")
    rows = {name: value[None] for name, value in made.tensors.items() if "gate_inp_shexp" in name}
    _rewrite(made.path, tmp_path / "matrix.gguf", "qwen2moe", drop=r".*gate_inp_shexp\.weight", extra=rows)
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    for path in (made.path, tmp_path / "matrix.gguf"):
        assert torch.equal(_stored(path, tmp_path)[gate], made.model.state_dict()[gate])


def _stored(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a conversion writes besides the experts."""
    convert(path, folder / path.stem, "int8")
    return {
        name: value
        for file in sorted((folder / path.stem).glob("model*.safetensors"))
        for name, value in load_file(file).items()
    }


def test_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 9, 16, dtype=np.float32)
    name = "rope_freqs.weight"
    made = gguf_files.write(tmp_path / "m.gguf", "llama", extra={name: divisors})
    rotary = meta_model(read_config(made.path)).model.rotary_emb
    with torch.device("cpu"):
        divided, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](rotary.config)
    usual = rotary.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(divided * torch.from_numpy(divisors), usual)
    for number in (-1.0, np.nan, np.inf):
        wrong = np.where(divisors == 9, np.float32(number), divisors)
        gguf_files.write(tmp_path / "wrong.gguf", "llama", extra={name: wrong})
        with pytest.raises(StoreError, match=f"'{name}' holds what frequencies cannot be divided by"):
            read_config(tmp_path / "wrong.gguf")
    gguf_files.write(tmp_path / "large.gguf", "llama", extra={name: np.ones(5000, np.float32)})
    with pytest.raises(StoreError, match=r"F32 \[5000\]; it must be F32 \[n\] with at most 4096"):
        read_config(tmp_path / "large.gguf")
    gguf_files.write(tmp_path / "twice.gguf", "deepseek2", extra={name: divisors})
    with pytest.raises(UnsupportedModelError, match=f"with {name} beside other scaling"):
        read_config(tmp_path / "twice.gguf")
    gguf_files.write(tmp_path / "gemma.gguf", "gemma4", extra={name: np.ones(32, np.float32) * 2})
    with pytest.raises(UnsupportedModelError, match="are not ones and then 1e30"):
        read_config(tmp_path / "gemma.gguf")


def test_maverick_has_no_norm_of_queries_and_keys(written: Callable[..., Written]) -> None:
    """llama.cpp's files do not state it."""
    part = read_gguf(written("llama4").path)
    for experts, normed in ((16, True), (128, False)):
        metadata = {**part.metadata, "llama4.expert_count": experts}
        assert gguf_model.config_table(metadata, list(part.header.tensors))["use_qk_norm"] == normed


@pytest.mark.parametrize("architecture", ["qwen3next", "llama4", "gemma4", "qwen35moe"])
@pytest.mark.parametrize("value", [7, pytest.param("x", marks=pytest.mark.thorough)])
def test_a_wrong_value_of_any_key_is_a_typed_error_or_a_model(
    architecture: str, value: object, written: Callable[..., Written], tmp_path: Path
) -> None:
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    path = written(architecture).path
    for key in [key for key in read_gguf(path).metadata if key.startswith(f"{architecture}.")]:
        _rewrite(path, tmp_path / "m.gguf", architecture, metadata={key: value})
        with mutations.limits(60, 1 << 30), contextlib.suppress(MeshError):
            gguf_files.read_whole(tmp_path / "m.gguf", tokenizer=False)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("deepseek2", "expert_gating_func", 1),  # softmax, beside normalised weights
        ("deepseek2", "attention.temperature_scale", 1),
        ("llama4", "attention.sliding_window", 0),
        ("gemma4", "rope.dimension_count_swa", 16),
        ("gemma4", "rope.scaling.type", "yarn"),
    ],
)
def test_variants_of_a_family_are_refused(
    architecture: str, key: str, value: object, written: Callable[..., Written], tmp_path: Path
) -> None:
    changed = {f"{architecture}.{key}": value}
    _rewrite(written(architecture).path, tmp_path / "m.gguf", architecture, metadata=changed)
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}'.*Take the model's safetensors"):
        read_config(tmp_path / "m.gguf")


def test_a_softmax_router_that_does_not_normalise_is_deepseek_v2(written: Callable[..., Written]) -> None:
    part = read_gguf(written("deepseek2").path)
    changed = {"expert_gating_func": 1, "expert_weights_norm": False, "attention.temperature_scale": 0.0}
    metadata = part.metadata | {f"deepseek2.{key}": value for key, value in changed.items()}
    names = list(part.header.tensors)
    assert gguf_model.config_table(metadata, names)["model_type"] == "deepseek_v2"
    del metadata["deepseek2.expert_gating_func"], metadata["deepseek2.expert_weights_norm"]  # as in older files
    without_bias = [name for name in names if "exp_probs_b" not in name]
    assert gguf_model.config_table(metadata, without_bias)["model_type"] == "deepseek_v2"


def test_a_router_with_a_bias_is_deepseek_v3(written: Callable[..., Written]) -> None:
    """Files of GLM-4.7-Flash may lack the key that says so."""
    part = read_gguf(written("deepseek2").path)
    metadata = {key: value for key, value in part.metadata.items() if key != "deepseek2.expert_gating_func"}
    assert gguf_model.config_table(metadata, list(part.header.tensors))["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("architecture", "key", "field", "default"),
    [
        ("deepseek2", "expert_weights_norm", "norm_topk_prob", False),
        ("deepseek2", "expert_weights_scale", "routed_scaling_factor", 1.0),
        ("glm4moe", "expert_weights_norm", "norm_topk_prob", False),
        ("glm4moe", "leading_dense_block_count", "first_k_dense_replace", 0),
        ("granitemoe", "attention.scale", "attention_multiplier", 32**-0.5),
        ("minimax-m2", "attention.head_count_kv", "num_key_value_heads", 4),
        ("llama4", "attention.key_length", "head_dim", 32),
        ("llama", "rope.freq_base", "rope_theta", 10000.0),
        ("minimax-m2", "rope.freq_base", "rope_theta", 10000.0),
    ],
)
def test_an_absent_key_has_the_default_of_llama_cpp(
    architecture: str, key: str, field: str, default: object, written: Callable[..., Written]
) -> None:
    """llama.cpp's converter leaves out what is false, 0 or not in config.json."""
    part = read_gguf(written(architecture).path)
    metadata = {name: value for name, value in part.metadata.items() if name != f"{architecture}.{key}"}
    assert gguf_model.config_table(metadata, list(part.header.tensors))[field] == default


def test_routers_of_glm_have_the_files_groups(written: Callable[..., Written]) -> None:
    part = read_gguf(written("glm4moe").path)
    metadata = {**part.metadata, "glm4moe.expert_group_count": 2, "glm4moe.expert_group_used_count": 1}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert (table["n_group"], table["topk_group"]) == (2, 1)


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35moe"])
def test_layers_of_linear_attention_are_those_that_the_file_names(
    architecture: str, written: Callable[..., Written]
) -> None:
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    part = read_gguf(written(architecture).path)
    named = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": [False, True, True, False]}
    metadata = part.metadata | {f"{architecture}.{key}": value for key, value in named.items()}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert table["layer_types"] == ["full_attention", "linear_attention", "linear_attention"]


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
    _rewrite(made.path, tmp_path / "changed.gguf", **change)
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


def test_a_file_without_a_tokenizer_warns(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", vocabulary=False)
    _rewrite(made.path, tmp_path / "changed.gguf", metadata={"qwen3moe.vocab_size": 128})
    with pytest.warns(UserWarning, match="No tokenizer is written"):
        convert(tmp_path / "changed.gguf", tmp_path / "store", "int8")
    assert not (tmp_path / "store" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("architecture", "pre", "together"),
    [
        ("deepseek2", "deepseek-v3", True),
        ("deepseek2", "kimi-k2", True),
        ("deepseek2", "deepseek-llm", False),
        ("glm4moe", "glm4", True),
        ("hunyuan-moe", "hunyuan", True),
        ("granitemoe", "refact", False),
        ("olmoe", "olmo", False),
    ],
)
@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers makes no tokenizer of these")
def test_tokenizers_split_by_the_files_rule_and_keep_control_tokens(
    architecture: str, pre: str, together: bool, tmp_path: Path
) -> None:
    bos = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"  # as DeepSeek's, with characters beyond the byte alphabet
    made = gguf_files.write(tmp_path / "m.gguf", architecture, pre=pre, bos=bos)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=made.path.name)
    (tmp_path / "store").mkdir()
    for name, data in gguf_model.tokenizer_files(made.path).items():
        (tmp_path / "store" / name).write_bytes(data)
    read_config(made.path).save_pretrained(tmp_path / "store")
    for tokenizer in (theirs, AutoTokenizer.from_pretrained(tmp_path / "store")):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 128)
        found = tokenizer.convert_ids_to_tokens(tokenizer.encode(f"{bos}a\n\nhello", add_special_tokens=False))
        assert found == [bos, "a", *(["\u010a\u010a"] if together else ["\u010a", "\u010a"]), "hell", "o"]
        assert tokenizer.decode(tokenizer.encode(f"{bos}hello", add_special_tokens=False)) == f"{bos}hello"


def test_rules_split_texts() -> None:
    text = "Don't if(x): 12345 中文x\r\n\n  y"
    pieces = {
        "gpt-2": "Don|'t| if|(|x|):| 12345| 中文x|\r\n\n | y",
        "refact": "Don|'t| if|(|x|):| |1|2|3|4|5| 中文x|\r\n\n | y",
        "deepseek-llm": "Don|'|t| if|(|x|):| |1|2|3|4|5| |中文|x|\r|\n|\n| | y",
        "deepseek-v3": "Don|'t| if|(x|):| |123|45| |中文|x|\r\n\n| | y",
        "kimi-k2": "Don't| if|(x|):| |123|45| |中文|x|\r\n\n| | y",
    }
    for rule, expected in pieces.items():
        made = byte_level_tokenizer({"tokens": ["a"], "merges": [], "pre_tokenizer_type": rule}, {})
        found = [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)]
        assert "|".join(found) == expected, rule


_CHOOSES_BY_RULE = pytest.mark.skipif(
    not gguf_files.READS_QWEN35MOE, reason="this transformers chooses the rule by the architecture"
)


@_CHOOSES_BY_RULE
def test_no_tokenizer_is_written_for_an_unknown_rule(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", pre="of-next-year")
    with pytest.warns(UserWarning, match="No tokenizer is written.*tokenizer.ggml.pre is 'of-next-year'.*glm4"):
        assert gguf_model.tokenizer_files(made.path) == {}
    with pytest.raises(MeshError, match="tokenizer.ggml.pre is 'of-next-year'"):
        open_tokenizer(made.path)


@_CHOOSES_BY_RULE
def test_no_tokenizer_is_written_with_ids_that_the_model_lacks(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "llama", bos="<\uff5cbegin\uff5c>")
    with pytest.warns(UserWarning, match="No tokenizer is written.*bos_token_id is 1, and 129 in transformers'"):
        assert gguf_model.tokenizer_files(made.path) == {}


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


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rewrite(
    path: Path,
    to: Path,
    architecture: str = "qwen3moe",
    *,
    drop: str = "",
    reshape: str = "",
    fuse: bool = False,
    metadata: dict | None = None,
    extra: dict | None = None,
) -> None:
    """Write a copy of the file with one change. ``drop`` is a pattern of names."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, architecture)
    given = dict(metadata or {})
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in given:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for name, value in given.items():
        writer.add_key_value(
            name, value, gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        )
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, (data, kind) in list(tensors.items()):
        if fuse and "gate_exps" in name:
            up, _ = tensors.pop(name.replace("gate", "up"))
            tensors.pop(name)
            tensors[name.replace("gate", "gate_up")] = np.concatenate([data, up], axis=1), kind
    for name, (data, kind) in tensors.items():
        if name == reshape:
            data = data.reshape(*data.shape[:-2], data.shape[-2] * 2, data.shape[-1] // 2)
        if not re.fullmatch(drop, name):
            writer.add_tensor(name, data, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    _finish(writer)
