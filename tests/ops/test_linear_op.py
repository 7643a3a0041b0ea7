"""torch.ops.torch_mesh.linear, pack_linear and unpack_linear: layers outside the experts."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_pools import as_bf16, as_bytes, ops, relative_error
from torch import Tensor
from torch.nn import functional as F

from torch_mesh import _C

FORMATS = [("bf16", 0), ("bf12", 0), ("int8", 64), ("int4", 32), ("int4", 128), ("lut4", 32)]
PACKING_ERROR = {"bf16": 0.002, "bf12": 0.002, "int8": 0.008, "int4": 0.11, "lut4": 0.08}
SIZES = [(64, 64), (72, 130), (200, 1), (1, 33), (513, 70)]
ROWS = [(1,), (2,), (5,), (33,), (2, 3), (2, 1, 4)]


def _packed(weight: Tensor, kind: str, group: int) -> tuple[Tensor, tuple[int, int, str, int]]:
    """The packed weight, and the arguments that describe it."""
    return ops.pack_linear(weight, kind, group), (weight.size(1), weight.size(0), kind, group)


@pytest.mark.parametrize("kind,group", FORMATS)
@pytest.mark.parametrize("features,out_features", SIZES)
def test_agrees_with_float64(features: int, out_features: int, kind: str, group: int) -> None:
    packed, about = _packed(torch.randn(out_features, features), kind, group)
    weight = ops.unpack_linear(packed, *about).double()
    bias = torch.randn(out_features)
    for shape in ROWS:
        x = torch.randn(*shape, features).bfloat16().float()
        out = ops.linear(x, packed, bias, *about)
        assert out.shape == (*shape, out_features)
        exact = x.double().flatten(0, -2)
        rounded = as_bf16(exact) if kind in ("bf16", "bf12") else as_bytes(group)(exact)
        error = out.flatten(0, -2) - F.linear(rounded, weight, bias.double())
        # The bound allows for sums in float32, and for operands half way between two bytes, which may become either.
        # It uses the typical norm of products of independent rows, since a single product may be close to zero.
        moved = 2.5 * (rounded - exact).norm() + 1e-5 * exact.norm()
        assert error.norm() <= moved * weight.norm() / features**0.5 + 1e-6 * bias.norm()


@pytest.mark.parametrize("kind,group", FORMATS)
def test_packing_error_is_small_for_any_strides(kind: str, group: int) -> None:
    weight = torch.randn(130, 200)
    packed, about = _packed(weight, kind, group)
    assert relative_error(ops.unpack_linear(packed, *about), weight) < PACKING_ERROR[kind]
    assert torch.equal(ops.pack_linear(weight.t().contiguous().t(), kind, group), packed)


@pytest.mark.parametrize("kind,group", FORMATS)
def test_rows_of_a_long_prompt_do_not_depend_on_their_position(kind: str, group: int) -> None:
    packed, about = _packed(torch.randn(70, 72), kind, group)
    x = torch.randn(4096 + 37, 72)
    out = ops.linear(x, packed, None, *about)
    assert torch.equal(out[4096:], ops.linear(x[4096:], packed, None, *about))
    assert torch.equal(out[:4096], ops.linear(x[:4096], packed, None, *about))


@pytest.mark.parametrize("kind,group", [*FORMATS, ("plain", 0)])
def test_a_decode_rows_bits_do_not_depend_on_other_rows(kind: str, group: int) -> None:
    weight = torch.randn(450, 712).bfloat16()
    if kind == "plain":
        linear = functools.partial(ops.plain_linear, weight=weight, bias=None)
    else:
        packed, about = _packed(weight, kind, group)

        def linear(x: Tensor) -> Tensor:
            return ops.linear(x, packed, None, *about)

    x = torch.randn(_C.MAX_DECODE_ROWS, 712).bfloat16()
    alone = torch.cat([linear(x[[row]]) for row in range(len(x))])
    for rows in range(2, len(x) + 1):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_x_and_any_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    packed, about = _packed(torch.randn(320, 512), "int8", 64)
    x, bias = torch.randn(3, 512).to(dtype), torch.randn(320).to(dtype)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(ops.linear(x, packed, bias, *about))
    finally:
        torch.set_num_threads(threads)
    assert all(out.dtype == dtype and torch.equal(out, outputs[0]) for out in outputs)


def test_inputs_that_are_not_contiguous_and_empty_ones() -> None:
    packed, about = _packed(torch.randn(96, 72), "int8", 64)
    x = torch.randn(72, 6)
    assert torch.equal(ops.linear(x.t(), packed, None, *about), ops.linear(x.t().contiguous(), packed, None, *about))
    wide = torch.randn(4, 144)[:, :72]
    assert torch.equal(ops.linear(wide, packed, None, *about), ops.linear(wide.contiguous(), packed, None, *about))
    assert ops.linear(torch.randn(0, 3, 72), packed, None, *about).shape == (0, 3, 96)
    assert ops.linear(torch.randn(72), packed, None, *about).shape == (96,)


@pytest.mark.parametrize("kind,group", FORMATS)
def test_nan_stays_in_its_row_and_shows_in_its_column(kind: str, group: int) -> None:
    packed, about = _packed(torch.randn(70, 72), kind, group)
    x = torch.randn(3, 72)
    x[1, 7] = float("nan")
    out = ops.linear(x, packed, None, *about)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
    weight = torch.randn(70, 72)
    weight[5, 3] = float("inf")
    out = ops.linear(torch.randn(2, 72), ops.pack_linear(weight, kind, group), None, *about)
    assert not out[:, 5].isfinite().any() and out[:, :5].isfinite().all() and out[:, 6:].isfinite().all()


@pytest.mark.parametrize("kind,group", FORMATS)
def test_gradients_are_those_of_the_packed_weight(kind: str, group: int) -> None:
    packed, about = _packed(torch.randn(70, 72), kind, group)
    weight = ops.unpack_linear(packed, *about)
    x, bias = torch.randn(2, 5, 72, requires_grad=True), torch.randn(70, requires_grad=True)
    grad = torch.randn(2, 5, 70)
    ops.linear(x, packed, bias, *about).backward(grad)
    assert relative_error(x.grad, grad @ weight) < 1e-5
    assert relative_error(bias.grad, grad.sum(dim=(0, 1))) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):  # autocast must not round
        again = torch.autograd.grad(ops.linear(x, packed, bias, *about), (x, bias), grad)
    assert torch.equal(again[0], x.grad) and torch.equal(again[1], bias.grad)
    assert not ops.linear(x.detach(), packed, None, *about).requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled_gradients_agree(backend: str) -> None:
    torch._dynamo.reset()
    packed, about = _packed(torch.randn(70, 72), "int8", 64)

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return ops.linear(x, packed, bias, *about).square().sum()

    gradients = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        torch.manual_seed(3)
        x, bias = torch.randn(4, 72, requires_grad=True), torch.randn(70, requires_grad=True)
        function(x, bias).backward()
        gradients.append((x.grad, bias.grad))
    for eager, compiled in zip(*gradients, strict=True):
        assert relative_error(compiled, eager) < 1e-5


@pytest.mark.parametrize("features,out_features", SIZES)
def test_plain_weights_agree_with_float64(features: int, out_features: int) -> None:
    wide = torch.randn(out_features, features + 5).bfloat16()
    weight, bias = wide[:, 3 : features + 3], torch.randn(out_features).bfloat16()  # unaligned rows
    for shape in [(0,), *ROWS, (3,), (4, 8), (3, 50)]:
        x = torch.randn(*shape, features).bfloat16()
        out = ops.plain_linear(x, weight, bias)
        assert out.shape == (*shape, out_features) and out.dtype == torch.bfloat16
        exact = F.linear(x.double(), weight.double(), bias.double())
        typical = x.double().norm() * weight.double().norm() / features**0.5 + bias.norm()
        # Rounding is relative to the output. With few values the output may be larger than its typical norm.
        assert (out.double() - exact).norm() <= 0.004 * max(typical, exact.norm())


def test_plain_weights_give_the_bits_of_packed_ones_for_many_rows() -> None:
    for features, out_features in SIZES:
        weight, x = torch.randn(out_features, features).bfloat16(), torch.randn(40, features).bfloat16()
        packed, about = _packed(weight, "bf16", 0)
        assert torch.equal(ops.plain_linear(x, weight, None), ops.linear(x, packed, None, *about))


def test_a_non_finite_weight_affects_only_its_own_output() -> None:
    weight = torch.randn(70, 71).bfloat16()
    weight[5, 70] = float("inf")
    for rows in (1, 40):
        out = ops.plain_linear(torch.randn(rows, 71).bfloat16(), weight, None)
        assert not out[:, 5].isfinite().any() and out[:, :5].isfinite().all() and out[:, 6:].isfinite().all()


def test_plain_weights_must_be_bf16_with_contiguous_rows() -> None:
    x, weight = torch.randn(2, 72).bfloat16(), torch.randn(70, 72).bfloat16()
    for wrong in (weight.float(), weight.t().contiguous().t(), weight[0]):
        with pytest.raises(ValueError, match="weight must be a bfloat16 CPU matrix .* with contiguous rows; got"):
            ops.plain_linear(x, wrong, None)
    with pytest.raises(ValueError, match=r"x must be bfloat16 \[\.\.\., in_features=72\]; got Float"):
        ops.plain_linear(x.float(), weight, None)
    with pytest.raises(ValueError, match=r"bias must be \[70\]; got \[71\]"):
        ops.plain_linear(x, weight, torch.randn(71))


def test_wrong_arguments_say_what_was_given_and_what_is_allowed() -> None:
    packed, about = _packed(torch.randn(70, 72), "int8", 64)
    x = torch.randn(2, 72)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., in_features=72\]; got \[2, 71\]"):
        ops.linear(x[:, :71], packed, None, *about)
    with pytest.raises(ValueError, match="packed must be a contiguous uint8 CPU tensor of"):
        ops.linear(x, packed[:-1], None, *about)
    with pytest.raises(ValueError, match=r"bias must be \[70\]; got \[71\]"):
        ops.linear(x, packed, torch.randn(71), *about)
    with pytest.raises(ValueError, match="dtype .*; allowed: bfloat16, float16, float32"):
        ops.linear(x.double(), packed, None, *about)
    with pytest.raises(ValueError, match='unknown weight format "int5"'):
        ops.pack_linear(torch.randn(4, 4), "int5", 64)
    with pytest.raises(ValueError, match="group_size is 48"):
        ops.pack_linear(torch.randn(4, 4), "int8", 48)
    with pytest.raises(ValueError, match="weight must be a CPU matrix"):
        ops.pack_linear(torch.randn(4), "int8", 64)


def test_plain_weights_have_the_derivatives_of_torch() -> None:
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((3, 72), (70, 72), (70,)))
    grad, tangent = torch.randn(3, 70).bfloat16(), torch.randn(3, 72).bfloat16()
    for which in ((x,), (weight,), (bias,), (x, weight, bias)):
        for tensor in which:
            tensor.requires_grad_()
        found = torch.autograd.grad(ops.plain_linear(x, weight, bias), which, grad)
        assert all(map(torch.equal, found, torch.autograd.grad(F.linear(x, weight, bias), which, grad)))
        for tensor in which:
            tensor.requires_grad_(False)
    out, derivative = torch.func.jvp(lambda x: ops.plain_linear(x, weight, bias), (x,), (tangent,))
    assert torch.equal(out, F.linear(x, weight, bias)) and torch.equal(derivative, F.linear(tangent, weight))


def test_packed_weights_refuse_forward_mode_derivatives() -> None:
    packed, about = _packed(torch.randn(70, 72), "int8", 64)
    x = torch.randn(3, 72)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: ops.linear(x, packed, None, *about), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"torch.autograd.grad"):
        ops.linear(torch.autograd.forward_ad.make_dual(x, x), packed, None, *about)
