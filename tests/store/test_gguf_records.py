"""Records that hold blocks of GGUF's types: their values, to the bit, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from torch_mesh import _C
from torch_mesh.cli import main
from torch_mesh.config import MeshConfig
from torch_mesh.errors import StoreError
from torch_mesh.formats import FORMATS, format_of_layer, is_format, layer_formats, name_of_layers
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert, stored_expert, weights_of_checkpoint
from torch_mesh.store.gguf import read_gguf

HIDDEN, INTERMEDIATE = 512, 256
TYPES = gguf_files.RECORD_TYPES
# fp16 bits: zeros, subnormals, the smallest normal, ordinary values and the largest, with both signs.
_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x1234, 0x9E21, 0x3C00, 0xC4D1, 0x7BFF, 0xFBFF)


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Return the bytes of a matrix with finite scales. Most blocks are random, some repeat a single byte."""
    values, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // values, size), dtype=np.uint8)
    for byte in (0x00, 0x7F, 0x80, 0xFF, 0x0F, 0xF0):
        blocks[rng.integers(len(blocks))] = byte
    shape_of_scales = gguf_files.scales(kind, blocks).shape
    gguf_files.set_scales(kind, blocks, rng.choice(np.array(_HALVES, np.uint16), shape_of_scales))
    return blocks.reshape(shape[0], -1)


def pack(gate: np.ndarray, up: np.ndarray, down: np.ndarray, weights: str, shape: tuple[int, int]) -> torch.Tensor:
    views = {
        name: {"piece": piece, "offset": 0, "order": "blocks", "row_bytes": data.shape[1]}
        for piece, (name, data) in enumerate((("gate", gate), ("up", up), ("down", down)))
    }
    pieces = [data.reshape(-1) for data in (gate, up, down)]
    return torch.frombuffer(_C.pack_raw(pieces, "bf16", views, weights, 32, *shape, True, False), dtype=torch.uint8)


@pytest.mark.parametrize("kind", TYPES)
def test_records_equal_the_packages_values_to_the_bit(kind: str, rng: np.random.Generator) -> None:
    for down_kind, hidden, intermediate in ((kind, HIDDEN, INTERMEDIATE), ("Q6_K", 256, 512), ("Q4_K", 256, 256)):
        weights = kind.lower() if down_kind == kind else f"{kind.lower()}+{down_kind.lower()}"
        gate, up = (random_blocks(rng, kind, (intermediate, hidden)) for _ in range(2))
        down = random_blocks(rng, down_kind, (hidden, intermediate))
        record = pack(gate, up, down, weights, (hidden, intermediate))
        unpacked = torch.ops.torch_mesh.unpack(record, weights, 0, hidden, intermediate, True, False)
        gate_up = np.concatenate([gguf.dequantize(data, Type[kind]) for data in (gate, up)])
        for found, expected in zip(unpacked, (gate_up, gguf.dequantize(down, Type[down_kind])), strict=False):
            assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", TYPES)
def test_non_finite_scales_are_refused(kind: str, rng: np.random.Generator) -> None:
    size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    for number in range(gguf_files.scales(kind, np.zeros((1, size), np.uint8)).shape[1]):
        for bits in (0x7C00, 0xFC00, 0x7E01, 0xFFFF):
            gate, up, down = (random_blocks(rng, kind, (256, 256)) for _ in range(3))
            blocks = down.reshape(-1, size)
            scales = gguf_files.scales(kind, blocks).view(np.uint16)
            scales[rng.integers(len(blocks)), number] = bits
            gguf_files.set_scales(kind, blocks, scales)
            with pytest.raises(ValueError, match="cannot hold a scale that is not a finite number"):
                pack(gate, up, down, kind.lower(), (256, 256))


# Linear layers outside the experts also take the types whose records have other names.
OF_LINEAR = {**{kind: kind.lower() for kind in TYPES}, "Q8_0": "int8_fp16", "Q4_0": "int4_fp16", "MXFP4": "mxfp4"}
ops = torch.ops.torch_mesh


@pytest.mark.parametrize("kind", OF_LINEAR)
def test_a_linear_layer_of_blocks_equals_the_packages_values(kind: str, rng: np.random.Generator) -> None:
    format, (features, out_features) = OF_LINEAR[kind], (512, 130)
    blocks = random_blocks(rng, kind, (out_features, features))
    if kind == "MXFP4":
        blocks.reshape(-1, 17)[:, 0] = rng.integers(100, 140, blocks.size // 17)
    packed = ops.pack_linear_blocks(torch.from_numpy(blocks), features, format)
    about = (features, out_features, format, FORMATS[format].group_sizes[0])
    weight = gguf.dequantize(blocks, Type[kind])
    assert np.array_equal(ops.unpack_linear(packed, *about).numpy(), weight)
    # With ordinary scales the error is that of rounding the inputs to eight bits, as all formats do.
    data, values = gguf_files.encode(rng.standard_normal((out_features, features)).astype(np.float32), kind)
    packed, weight = ops.pack_linear_blocks(torch.from_numpy(data), features, format), torch.from_numpy(values).double()
    for rows in (1, 40):  # rows per call; the error is over all rows, since that of one row varies
        x = torch.randn(40, features, requires_grad=True)
        out = torch.cat([ops.linear(part, packed, None, *about) for part in x.split(rows)])
        exact = x.double() @ weight.T
        assert (out - exact).norm() <= 0.013 * exact.norm()
        (grad,) = torch.autograd.grad(out, x, out.detach())
        assert torch.allclose(grad.double(), out.detach().double() @ weight, rtol=1e-4, atol=1e-5 * grad.abs().max())


def test_blocks_of_a_linear_layer_have_to_fit() -> None:
    rows = torch.zeros(70, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a row of 512 weights in q4_k has 288 bytes; got 144"):
        ops.pack_linear_blocks(rows, 512, "q4_k")
    with pytest.raises(ValueError, match="int8 holds no blocks of a GGUF file"):
        ops.pack_linear_blocks(rows, 256, "int8")
    with pytest.raises(ValueError, match="in_features is 80, no multiple"):
        ops.pack_linear_blocks(rows[:, :85].contiguous(), 80, "int8_fp16")
    with pytest.raises(ValueError, match="contiguous uint8 CPU matrix"):
        ops.pack_linear_blocks(rows.float(), 256, "q4_k")
    rows[:, 1] = 0x7C
    with pytest.raises(ValueError, match="scale that is not a finite number"):
        ops.pack_linear_blocks(rows, 256, "q4_k")


def test_sizes_that_blocks_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match=r"q4_k has blocks of 256 inputs; in_features is 384, no multiple"):
        _C.record_bytes("q4_k", 0, 512, 384, True, False)
    gate, up, down = (random_blocks(rng, "Q4_K", (256, 256)) for _ in range(3))
    with pytest.raises(ValueError, match="'down' has 36720 bytes on disk; its shape needs 36864"):
        pack(gate, up, down[:-1], "q4_k", (256, 256))
    with pytest.raises(ValueError, match="has blocks of GGUF for int4_fp16"):
        pack(gate, up, down, "q4_k+int4_fp16", (256, 256))
    with pytest.raises(ValueError, match="nothing is rounded to q4_k"):
        weights = torch.zeros(256, 256)
        torch.ops.torch_mesh.pack(weights, weights, weights, None, None, None, "q4_k", 0)


MIXED = {
    "blk.0.ffn_down_exps": "Q6_K",
    "blk.1.ffn_(gate|up)_exps": "IQ4_XS",
    "blk.1.ffn_down_exps": "Q5_0",
    "_exps": "Q4_K",
}
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3}


def test_each_layer_of_a_mixed_file_keeps_its_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", MIXED, **SIZES)
    experts = find_checkpoint_experts(made.path, meta_model(read_config(made.path)))
    weights, group_size = weights_of_checkpoint(experts, "auto")
    assert weights == "q4_k+q6_k|iq4_xs+q5_0|q4_k:012"
    store = convert(made.path, tmp_path / "store", "auto").store
    assert (store.manifest.weights, store.manifest.group_size) == (weights, group_size)
    for layer, expert in store.records():
        found = stored_expert(store, layer, expert)
        for part in ("gate", "up", "down"):
            own = torch.from_numpy(made.tensors[f"blk.{layer}.ffn_{part}_exps.weight"][expert].copy())
            assert torch.equal(getattr(found, part), own), (layer, expert, part)
    sizes = find_sizes(made.path, MeshConfig())
    each = [_C.record_bytes(name, 32, 256, 256, True, False) for name in layer_formats(weights)]
    assert sizes.expert_bytes == max(each) and sizes.unused_bytes == 4 * (3 * max(each) - sum(each)) > 0
    assert main(["plan", str(made.path), "--resident", "0.5", "--disk-speed", "1GB"]) == 0
    assert "unused" in capsys.readouterr().out


def test_types_without_records_are_rounded_with_the_others(tmp_path: Path) -> None:
    types = {"blk.0.ffn_down_exps": "TQ2_0", "_exps": "Q4_K"}
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", types, **SIZES)
    experts = find_checkpoint_experts(made.path, meta_model(read_config(made.path)))
    assert weights_of_checkpoint(experts, "auto") == ("int8", 32)


def test_layers_of_more_formats_than_a_name_has_digits_for_are_rounded(tmp_path: Path) -> None:
    pairs = list(itertools.product(("Q4_K", "Q5_K", "Q6_K", "Q3_K"), repeat=2))[:11]
    types = {
        rf"blk\.{layer}\.ffn_{part}_exps": kind
        for layer, (gate_up, down) in enumerate(pairs)
        for part, kind in (("(gate|up)", gate_up), ("down", down))
    }
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", types, **{**SIZES, "num_hidden_layers": len(pairs)})
    assert convert(made.path, tmp_path / "named", "int4").store.manifest.weights == "int4"
    with pytest.warns(UserWarning, match="int8 in groups of 32, .*no record holds the formats of all of them"):
        store = convert(made.path, tmp_path / "auto", "auto").store
    assert (store.manifest.weights, store.manifest.group_size) == ("int8", 32)


def test_damaged_blocks_name_their_expert(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q4_K"}, **SIZES)
    tensor = read_gguf(made.path).header.tensors["blk.1.ffn_down_exps.weight"]
    data = bytearray(made.path.read_bytes())
    at = tensor.offset + 2 * tensor.bytes // 4  # the first block of expert 2
    data[at : at + 2] = b"\x00\x7c"
    made.path.write_bytes(data)
    with pytest.raises(StoreError, match="expert 2 of layer 1: q4_k cannot hold a scale that is not a finite number"):
        convert(made.path, tmp_path / "store", "auto")


def test_names_of_mixtures() -> None:
    names = ["q4_k+q6_k", "q4_k", "q4_k", "q4_k+q6_k"]
    weights = name_of_layers(names)
    assert weights == "q4_k+q6_k|q4_k:0110" and layer_formats(weights) == names
    assert [format_of_layer(weights, layer) for layer in range(4)] == names
    assert name_of_layers(["q4_k", "q4_k"]) == "q4_k" and format_of_layer("q4_k", 5) == "q4_k"
    good = (weights, "q4_k+q6_k", "q4_k+int8_fp16", "tcq2+tcq3", "int8")
    bad = (
        "q4_k|q6_k",
        "q4_k:01",
        "q4_k|q6_k:02",
        "q4_k|q6_k:0",
        "q4_k+int8",
        "q4_k+q6_k+q4_k",
        "int4|int8:01",
        "",
        "q",
    )
    for name in itertools.chain(good, bad):
        assert is_format(name) == (name in good), name
        if name in good:
            assert _C.record_bytes(name, 32, 256, 256, True, False) > 0
        elif name != "int4|int8:01":  # the extension accepts it, but nothing produces it
            with pytest.raises(ValueError):
                _C.record_bytes(name, 32, 256, 256, True, False)
