"""Damaged files of every format that is read give a typed error or succeed, quickly and in little memory."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import gguf_files
import mutations
import numpy as np
import pytest
import torch
from quantized import KINDS
from safetensors.torch import save_file

from torch_mesh.errors import MeshError
from torch_mesh.formats import FORMATS
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.gguf import BLOCK_TYPES, read_gguf
from torch_mesh.store.header import read_header
from torch_mesh.store.sources import own_quantization, source_of
from torch_mesh.store.sources.gguf import gguf_weights

_EXTRA_BYTES = 512 << 20  # address space: libraries' threads and arenas take some of it, a wrong count exceeds it


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if possible, since every mutation writes a file."""
    in_memory = Path("/dev/shm")
    if not in_memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=in_memory) as made:
        yield Path(made)


def _runs(quick: int, whole: int) -> pytest.MarkDecorator:
    """Parametrize the number of mutations for normal and slow runs."""
    return pytest.mark.parametrize("count", [quick, pytest.param(whole, marks=pytest.mark.slow)])


def _fuzz(seed: int, count: int, run: Callable[[random.Random], None], least: int = 1) -> None:
    """Call ``run`` ``count`` times. Any exception but a typed error fails the test and names the draw. So does it if
    fewer than ``least`` calls succeed."""
    succeeded = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(rng)
            succeeded += 1
        except MeshError:
            continue
        except BaseException as problem:  # noqa: BLE001
            where = "".join(traceback.format_exception(problem)[-6:])
            pytest.fail(f"mutation {number} of seed {seed}: {type(problem).__name__}\n{where}")
    print(f"{count} mutations, {succeeded} of them read")
    assert succeeded >= least


def _written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_seeds(folder: Path) -> list[bytes]:
    """Small headers with every type of value and of tensor."""
    seeds = []
    for number in range(4):
        writer = gguf.GGUFWriter(folder / "seed.gguf", "qwen3moe")
        writer.add_block_count(2)
        writer.add_rope_freq_base(1e6)
        if number % 2:
            writer.add_token_list(["a", "bc", "<s>"])
            writer.add_token_scores([0.5, 1.5, -1.0])
            writer.add_add_bos_token(True)
            writer.add_array("qwen3moe.rope.dimension_sections", [1, 2, 3])
        if number > 1:
            writer.add_custom_alignment(64)
            writer.add_uint16("split.count", 1)
        for kind in random.Random(number).sample(BLOCK_TYPES, 2):
            data, _ = gguf_files.encode(np.ones((2, 1, 256), np.float32), kind)
            writer.add_tensor(f"blk.{kind}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.add_tensor("norm", np.ones(3, np.float32))
        _written(writer)
        seeds.append((folder / "seed.gguf").read_bytes())
    return seeds


@_runs(2500, 1_000_000)
def test_gguf_headers(count: int, seed: int, gguf_seeds: list[bytes], folder: Path) -> None:
    path = folder / "mutated.gguf"

    def run(rng: random.Random) -> None:
        path.write_bytes(mutations.mutate(gguf_seeds, rng))
        weights = gguf_weights([read_gguf(path).header])
        if rng.random() < 0.05:
            for weight in weights.values():
                weight.read()

    with mutations.limits(60 + count // 200, _EXTRA_BYTES):
        _fuzz(seed, count, run)


@_runs(40, 20_000)
def test_gguf_models(count: int, seed: int, folder: Path) -> None:
    """Reads everything, from the metadata to the values of every tensor. Slow runs cover every architecture."""
    sizes = {"hidden_size": 32, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    sizes |= {"intermediate_size": 32, "vocab_size": 40, "num_local_experts": 2, "num_experts": 2}
    seeds = {}
    few = ("qwen3moe", "gpt-oss", "qwen35moe", "deepseek2")
    for architecture in [name for name in gguf_files.ARCHITECTURES if count > 1000 or name in few]:
        types = {"_exps.weight": "Q8_0", "attn_q.weight": "Q4_0"}
        made = gguf_files.write(folder / f"{architecture}.gguf", architecture, types, **sizes)
        seeds[made.path.read_bytes()] = read_gguf(made.path).header.data_start
        gguf_files.read_whole(made.path)
    path = folder / "mutated.gguf"

    def run(rng: random.Random) -> None:
        data = rng.choice(list(seeds))
        header = mutations.mutate([data[: seeds[data]]], rng, in_place=True)
        path.write_bytes(header + data[seeds[data] :])
        gguf_files.read_whole(path)

    with mutations.limits(60 + count, _EXTRA_BYTES):
        _fuzz(seed, count, run, least=count // 100)  # about one in fourteen succeeds; among few perhaps none


def _with_length(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@_runs(30, 100_000)
def test_gguf_blocks(count: int, seed: int, folder: Path) -> None:
    """Random bytes of blocks give a record or an error."""
    sizes = {"hidden_size": 256, "head_dim": 16, "moe_intermediate_size": 256, "num_experts": 2, "vocab_size": 40}
    types = {"blk.0.ffn_down_exps": "Q6_K", "blk.1.ffn_down_exps": "IQ4_XS", "_exps.weight": "Q4_K"}
    made = gguf_files.write(folder / "blocks.gguf", "qwen3moe", types, **sizes)
    whole = made.path.read_bytes()
    header = read_gguf(made.path).header
    experts = find_checkpoint_experts(made.path, meta_model(read_config(made.path)))
    assert experts.kept is not None
    stacks = [tensor for name, tensor in header.tensors.items() if "_exps" in name]

    def run(rng: random.Random) -> None:
        data = bytearray(whole)
        for tensor in rng.sample(stacks, 2):
            part = data[tensor.offset : tensor.offset + tensor.bytes]
            data[tensor.offset : tensor.offset + tensor.bytes] = mutations.mutate([bytes(part)], rng, in_place=True)
        made.path.write_bytes(data)
        for layer in range(2):
            experts.pack_kept(layer, rng.randrange(2), experts.kept.group_size)

    with mutations.limits(60 + count // 20, _EXTRA_BYTES):
        _fuzz(seed, count, run)


@_runs(100, 32_000)
def test_gguf_blocks_of_every_type(count: int, seed: int) -> None:
    """In each run one or all of 64 blocks are damaged. A non-finite scale is an error; otherwise the values equal the
    package's, to the bit."""
    ops = torch.ops.torch_mesh
    rows = 64
    refused = [0]

    def run(rng: random.Random) -> None:
        kind = rng.choice(gguf_files.RECORD_TYPES)
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        drawn = np.random.default_rng(rng.getrandbits(64))
        blocks = drawn.integers(0, 256, (rows, size), dtype=np.uint8)
        gguf_files.set_scales(kind, blocks, drawn.integers(0, 0x7C00, (rows, 1), dtype=np.uint16))
        for row in range(rows) if rng.random() < 0.5 else [rng.randrange(rows)]:
            mutated = mutations.mutate([blocks[row].tobytes(), bytes(size), b"\xff" * size], rng, in_place=True)
            blocks[row] = np.frombuffer(mutated, np.uint8)
        rows_of_blocks = torch.from_numpy(blocks.reshape(rows * values // 256, -1))
        finite = bool(np.isfinite(gguf_files.scales(kind, blocks)).all())
        try:
            packed = ops.pack_linear_blocks(rows_of_blocks, 256, kind.lower())
        except ValueError as problem:
            assert not finite and "cannot hold a scale that is not a finite number" in str(problem), (kind, problem)
            refused[0] += 1
            return
        assert finite, kind
        group = FORMATS[kind.lower()].group_sizes[0]
        found = ops.unpack_linear(packed, 256, len(rows_of_blocks), kind.lower(), group).numpy()
        expected = gguf.dequantize(rows_of_blocks.numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(found.view(np.int32), expected.view(np.int32)), kind

    with mutations.limits(60 + count // 20, _EXTRA_BYTES):
        _fuzz(seed, count, run)
    assert 0 < refused[0] < count


@_runs(1500, 1_000_000)
def test_safetensors_headers(count: int, seed: int, folder: Path) -> None:
    path = folder / "mutated.safetensors"
    tensors = {"a": torch.ones(2, 3), "b.weight": torch.ones(4, dtype=torch.float8_e4m3fn), "c": torch.ones(0, 2)}
    save_file(tensors, path, {"format": "pt"})
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    text, data = whole[8 : 8 + length], whole[8 + length :]

    def run(rng: random.Random) -> None:
        as_text = rng.random() < 0.7
        mutated = mutations.mutate([text], rng, text=True) if as_text else b""
        path.write_bytes(_with_length(mutated, data) if as_text else mutations.mutate([whole], rng))
        read_header(path)

    with mutations.limits(60 + count // 200, _EXTRA_BYTES):
        _fuzz(seed, count, run)


def _kinds(folder: Path) -> Sequence[tuple[bytes, bytes, bytes]]:
    """Return header, data and config of a small checkpoint of every quantized format."""
    found = []
    for name in KINDS:
        made = KINDS[name]()
        tensors = {"model.norm.weight": torch.ones(4)}
        for expert in range(2):
            parts, _ = made.quantize(torch.randn(64, 128))
            stem = f"model.layers.0.mlp.experts.{expert}.up_proj.weight".removesuffix(made.suffix)
            tensors |= {f"{stem}{rest}": part.contiguous() for rest, part in parts.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        whole = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        config = json.dumps({"quantization_config": dict(made.config)} if made.config else {}).encode()
        if made.config:
            found.append((whole[8 : 8 + length], whole[8 + length :], config))
    return found


@_runs(1500, 1_000_000)
def test_quantized_checkpoints(count: int, seed: int, folder: Path) -> None:
    kinds = _kinds(folder)

    def run(rng: random.Random) -> None:
        text, data, config = rng.choice(kinds)
        what = rng.randrange(3)
        if what == 0:
            config = mutations.mutate([config], rng, text=True)
        elif what == 1:
            text = mutations.mutate([text], rng, text=True)
        else:
            data = mutations.mutate([data], rng, in_place=True)
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(_with_length(text, data))
        quantization = own_quantization(folder)
        if quantization is None:
            return
        weights = source_of(quantization, str(folder)).weights([read_header(folder / "model.safetensors")])
        for weight in rng.sample(sorted(weights.values(), key=lambda weight: weight.name), min(2, len(weights))):
            weight.rounded()
            weight.passthrough_codes()
            weight.read()

    with mutations.limits(60 + count // 50, _EXTRA_BYTES):
        _fuzz(seed, count, run)
