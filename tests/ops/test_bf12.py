"""bf12 keeps every bf16 weight exactly, and results computed from it have bf16's bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyExperts, ops, routing
from torch import Tensor

from torch_mesh import _C

TILE = 64
NAMES = 16  # size of a tile's table of upper bytes


def _unpacked(weight: Tensor) -> Tensor:
    """Return the bits of a bf16 matrix after packing and unpacking."""
    packed = ops.pack_linear(weight, "bf12", 0)
    assert packed.numel() == _C.linear_bytes("bf12", 0, weight.size(1), weight.size(0))
    floats = ops.unpack_linear(packed, weight.size(1), weight.size(0), "bf12", 0)
    bits = floats.view(torch.int32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).short()


def _tiled(values: Tensor, rows: int) -> Tensor:
    """int16 [rows, columns] made of tiles of 64 x 64, each with 4096 of the values."""
    return values.view(rows // TILE, -1, TILE, TILE).transpose(1, 2).reshape(rows, -1).contiguous()


def _assert_exact(bits: Tensor) -> None:
    assert torch.equal(_unpacked(bits.view(torch.bfloat16)), bits)


def test_every_bf16_value() -> None:
    _assert_exact(_tiled(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short(), 256))


def _random_patterns(tiles: int) -> Tensor:
    """Random bits with 16 random upper bytes in each tile."""
    upper = torch.rand(tiles, 256).argsort(1)[:, :NAMES].gather(1, torch.randint(NAMES, (tiles, TILE * TILE)))
    return (((upper - 128) << 8) | torch.randint(256, upper.shape)).short()


def test_random_patterns() -> None:
    _assert_exact(_tiled(_random_patterns(128), 256))


@pytest.mark.thorough
def test_a_hundred_million_random_patterns() -> None:
    for _ in range(25):
        _assert_exact(_tiled(_random_patterns(1024), 2048))


@pytest.mark.parametrize("name", ["normal", "uniform", "student", "sparse", "zero", "constant"])
def test_weights_of_many_kinds_fit(name: str) -> None:
    size = 192, 320
    weight = {
        "normal": lambda: torch.randn(size) * 0.02,
        "uniform": lambda: torch.rand(size) - 0.5,
        "student": lambda: torch.distributions.StudentT(3.0).sample(size),
        "sparse": lambda: torch.randn(size) * (torch.rand(size) < 0.3),
        "zero": lambda: torch.zeros(size),
        "constant": lambda: torch.full(size, -0.1),
    }[name]().bfloat16()
    _assert_exact(weight.view(torch.int16))


def test_weights_whose_exponents_differ_too_much_are_refused() -> None:
    weight = torch.randint(-(1 << 15), 1 << 15, (64, 64)).short().view(torch.bfloat16)
    with pytest.raises(ValueError, match="exceptions.*Use bf16"):
        ops.pack_linear(weight, "bf12", 0)


def test_every_upper_byte_in_one_tile() -> None:
    """The table has 16 of 256; the other 240 are exceptions. 22 tiles have room for them, 21 do not."""
    bits = torch.zeros(TILE, 22 * TILE, dtype=torch.int16)
    bits[:4, :TILE] = (torch.arange(-128, 128).view(4, TILE) << 8).short()
    _assert_exact(bits)
    with pytest.raises(ValueError, match="room for 231 exceptions"):
        ops.pack_linear(bits[:, : 21 * TILE].view(torch.bfloat16), "bf12", 0)


def test_a_matrix_of_a_single_weight() -> None:
    _assert_exact(torch.tensor([[-1]]).short())


def _with_exceptions(size: tuple[int, ...]) -> Tensor:
    """Normally distributed weights, one in 2000 of them tiny or huge."""
    weight = torch.randn(size) * 0.05
    return torch.where(torch.rand(size) < 5e-4, weight * 2.0 ** torch.randint(-40, 8, size), weight).bfloat16()


@pytest.mark.parametrize("shape", [(64, 64), (200, 130), (321, 700)])
def test_linear_layers_have_the_bits_of_bf16(shape: tuple[int, int]) -> None:
    weight = _with_exceptions(shape)
    packed = {kind: ops.pack_linear(weight, kind, 0) for kind in ("bf16", "bf12")}
    for rows in (1, 2, 3, 5, 8, 33, 100):
        x = torch.randn(rows, shape[1]).bfloat16()
        grad = torch.randn(rows, shape[0])
        out, same = (ops.linear(x, packed[kind], None, shape[1], shape[0], kind, 0) for kind in packed)
        assert torch.equal(out, same)
        back, same = (ops.linear_backward(grad, packed[kind], shape[1], shape[0], kind, 0) for kind in packed)
        assert torch.equal(back, same)


def _in_bf12(record: Tensor, spec: Spec) -> Tensor:
    """The expert of a bf16 record, packed in bf12."""
    gate_up, down, gate_up_bias, down_bias = ops.unpack(record, "bf16", *spec.record_layout[1:])
    (gate, up), (gate_bias, up_bias) = gate_up.chunk(2), gate_up_bias.chunk(2)
    return ops.pack(gate, up, down, gate_bias, up_bias, down_bias, "bf12", 0)


@pytest.mark.parametrize("resident", [3, 8])
def test_experts_and_their_gradients_have_the_bits_of_bf16(
    open_pool: OpenPool, experts_of: Callable[[Spec], TinyExperts], resident: int
) -> None:
    spec = Spec(weights="bf12", hidden=200, intermediate=130, bias=True)
    plain = dataclasses.replace(spec, weights="bf16")
    experts_of(spec).records = [[_in_bf12(record, spec) for record in layer] for layer in experts_of(plain).records]
    pools = [open_pool(each, slots=resident) for each in (spec, plain)]
    for tokens in (1, 4, 50):
        x, grad = torch.randn(2, tokens, spec.hidden)
        ids, weights = routing(spec, tokens, 2)
        results = []
        for pool in pools:
            inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = ops.experts(inputs[0], ids, inputs[1], pool.handle())
            results.append((out, *torch.autograd.grad(out, inputs, grad)))
        assert all(torch.equal(of_bf12, of_bf16) for of_bf12, of_bf16 in zip(*results, strict=True))
