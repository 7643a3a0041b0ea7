"""torch.ops.torch_mesh.grouped_linear and its gradient: one projection of all experts over rows sorted by expert."""

from __future__ import annotations

import pytest
import torch
from tiny_pools import (
    FLOAT_PRODUCTS,
    WEIGHTS,
    OpenPool,
    Operands,
    Spec,
    TinyPool,
    assert_rounded,
    cpu_operands,
    ops,
    relative_error,
)
from torch import Tensor

from torch_mesh import _C

SPECS = [
    Spec(weights=weights, bias=bias)
    for weights in ("bf16", "bf12", "int8", "int4", "lut4", "tcq2")
    for bias in (False, True)
]
SPECS.append(Spec(weights="int8", gated=False, activation=None))
SPECS += [
    Spec(weights="fp8", group_size=32),
    Spec(weights="mxfp4", group_size=32, bias=True),
    Spec(weights="nvfp4", group_size=16),
    Spec(weights="tcq3", group_size=128),
    Spec(weights="tcq2+tcq3", group_size=64, bias=True),
]


def _name(spec: Spec) -> str:
    return "-".join([spec.weights] + ["bias"] * spec.bias + ["ungated"] * (not spec.gated))


def _features(spec: Spec, projection: int) -> tuple[int, int]:
    """(in, out) features of a projection."""
    return ((spec.hidden, spec.gate_up_features), (spec.intermediate, spec.hidden))[projection]


def _offsets(*rows: int) -> Tensor:
    """Offsets of experts with these numbers of rows."""
    return torch.tensor([0, *rows]).cumsum(0)


def _reference(
    pool: TinyPool, x: Tensor, offsets: Tensor, projection: int, operands: Operands = lambda rows: rows
) -> Tensor:
    parts = operands(x.double()).split(offsets.diff().tolist())
    return torch.cat([pool.weights.linear(part, expert, projection) for expert, part in enumerate(parts)])


ROWS = [
    (1, 0, 0, 0, 0, 0, 0, 0),
    (0, 3, 0, 40, 1, 0, 0, 2),
    (0, 0, 0, 0, 0, 0, 0, 65),
    (5, 5, 5, 5, 5, 5, 5, 5),
]


@pytest.mark.parametrize("projection", [0, 1])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_decode_tokens_bits_do_not_depend_on_other_tokens(open_pool: OpenPool, weights: str, projection: int) -> None:
    """Every token uses every expert."""
    spec = Spec(weights=weights, hidden=328, intermediate=200)
    pool = open_pool(spec, in_memory=True)
    features, out_features = _features(spec, projection)
    x = torch.randn(_C.MAX_DECODE_ROWS, features)

    def products(tokens: Tensor) -> Tensor:
        """[tokens, experts, out_features]"""
        rows, offsets = tokens.repeat(spec.experts, 1), _offsets(*[len(tokens)] * spec.experts)
        out = ops.grouped_linear(rows, offsets, pool.handle(), projection, out_features, spec.experts)
        return out.view(spec.experts, len(tokens), out_features).transpose(0, 1)

    alone = torch.cat([products(x[[i]]) for i in range(len(x))])
    for count in range(2, len(x) + 1):
        assert torch.equal(products(x[:count]), alone[:count]), count


@pytest.mark.parametrize("projection", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_agrees_with_float64(open_pool: OpenPool, spec: Spec, projection: int) -> None:
    pool = open_pool(spec, slots=3)
    features, out_features = _features(spec, projection)
    for rows in ROWS:
        offsets = _offsets(*rows)
        x = torch.randn(sum(rows), features).bfloat16().float()
        out = ops.grouped_linear(x, offsets, pool.handle(), projection, out_features)
        assert out.shape == (sum(rows), out_features)
        exact = _reference(pool, x, offsets, projection)
        rounded = _reference(pool, x, offsets, projection, cpu_operands(spec))
        assert_rounded(out, rounded, exact, few=x.numel() < 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_x(open_pool: OpenPool, dtype: torch.dtype) -> None:
    pool = open_pool(Spec(), in_memory=True)
    offsets = _offsets(*ROWS[1])
    x = torch.randn(46, 72).to(dtype)
    out = ops.grouped_linear(x, offsets, pool.handle(), 0, 80)
    assert out.dtype == dtype
    assert torch.equal(out, ops.grouped_linear(x.float(), offsets, pool.handle(), 0, 80).to(dtype))
    assert torch.equal(out, ops.grouped_linear(x.t().contiguous().t(), offsets.int(), pool.handle(), 0, 80))


def test_rows_behind_the_last_offset_belong_to_no_expert(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=3)
    for rows in (ROWS[0], ROWS[1], (0,) * 8):
        offsets, last = _offsets(*rows), sum(rows)
        x = torch.randn(last + 7, 72)
        x[last:] = float("nan")
        accesses = pool.count("accesses")
        with pytest.raises(ValueError, match=rf"from 0 to {last} have an expert in \[0, 8\)"):
            ops.grouped_linear(x, offsets, pool.handle(), 0, 80)
        out = ops.grouped_linear(x, offsets, pool.handle(), 0, 80, sentinels=True)
        assert pool.count("accesses") - accesses == sum(map(bool, rows))
        assert torch.equal(out[:last], ops.grouped_linear(x[:last], offsets, pool.handle(), 0, 80))
        grad = torch.randn(last + 7, 80)
        x_grad = ops.grouped_linear_backward(grad, offsets, pool.handle(), 0, 72)
        assert torch.equal(x_grad[:last], ops.grouped_linear_backward(grad[:last], offsets, pool.handle(), 0, 72))
        for behind in (out[last:], x_grad[last:]):
            assert torch.equal(behind, torch.zeros_like(behind))


def test_no_rows(open_pool: OpenPool) -> None:
    pool = open_pool(Spec(), slots=2)
    x = torch.empty(0, 72, requires_grad=True)
    out = ops.grouped_linear(x, _offsets(*[0] * 8), pool.handle(), 0, 80)
    assert out.shape == (0, 80)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 72)
    assert pool.count("accesses") == 0


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_tiny_workspace_and_pool_give_equal_results(open_pool: OpenPool, weights: str) -> None:
    spec = Spec(weights=weights)
    offsets = _offsets(*ROWS[1])
    x = torch.randn(46, spec.hidden)
    features = spec.gate_up_features
    expected = ops.grouped_linear(x, offsets, open_pool(spec, in_memory=True).handle(), 0, features)
    for workspace in (1, 3000):
        out = ops.grouped_linear(x, offsets, open_pool(spec, slots=1, workspace=workspace).handle(), 0, features)
        if weights in FLOAT_PRODUCTS:  # float sums
            assert relative_error(out, expected) < 1e-5
        else:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("projection", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_gradient_agrees_with_autograd_in_float64(open_pool: OpenPool, spec: Spec, projection: int) -> None:
    pool = open_pool(spec, slots=3)
    features, out_features = _features(spec, projection)
    for rows in ROWS:
        offsets = _offsets(*rows)
        x = torch.randn(sum(rows), features, requires_grad=True)
        grad = torch.randn(sum(rows), out_features)
        ops.grouped_linear(x, offsets, pool.handle(), projection, out_features).backward(grad)
        exact = x.detach().double().requires_grad_()
        _reference(pool, exact, offsets, projection).backward(grad.double())
        assert x.grad is not None and exact.grad is not None
        assert relative_error(x.grad, exact.grad) < 1e-5


def test_gradients_have_the_same_bits_at_any_residency_and_under_autocast(open_pool: OpenPool, seed: int) -> None:
    spec = Spec()
    offsets = _offsets(*ROWS[3])
    grad = torch.randn(40, 80)
    whole = open_pool(spec, in_memory=True).handle()
    expected = ops.grouped_linear_backward(grad, offsets, whole, 0, 72)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.grouped_linear_backward(grad, offsets, whole, 0, 72), expected)
    faults = {"seed": seed, "delay": 0.5, "reorder": 0.5, "max_delay": 0.001}
    for slots in (1, 3, 8):
        pool = open_pool(spec, slots=slots, faults=faults)
        assert torch.equal(ops.grouped_linear_backward(grad, offsets, pool.handle(), 0, 72), expected)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.zeros(8, dtype=torch.long), r"offsets must be \[experts \+ 1 = 9\]; got \[8\]"),
        (torch.zeros(9, 1, dtype=torch.long), "offsets must be"),
        (torch.tensor([0, 1, 2, 2, 2, 2, 2, 2, 3]).float(), "offsets has dtype Float"),
        (torch.tensor([0, 1, 2, 2, 2, 2, 2, 2, 4]), "the last offset must be at most the number of rows, 3; got 4"),
        (torch.tensor([1, 1, 2, 2, 2, 2, 2, 2, 3]), "of 3 rows, those from 1 to 3 have an expert"),
        (torch.tensor([0, 2, 1, 2, 2, 2, 2, 2, 3]), r"offsets\[1\] is 2 and the next is 1"),
        (torch.tensor([0, -1, 1, 2, 2, 2, 2, 2, 3]), r"offsets\[0\] is 0 and the next is -1"),
        (torch.tensor([0, 9, 9, 9, 9, 9, 9, 9, 3]), r"offsets\[7\] is 9 and the next is 3"),
    ],
)
def test_wrong_offsets(open_pool: OpenPool, offsets: Tensor, message: str) -> None:
    pool = open_pool(Spec(), slots=2)
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear(torch.randn(3, 72), offsets, pool.handle(), 0, 80)
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear_backward(torch.randn(3, 80), offsets, pool.handle(), 0, 72)


def test_wrong_shapes(open_pool: OpenPool) -> None:
    pool = open_pool(Spec(), slots=2)
    handle, offsets = pool.handle(), _offsets(3, *[0] * 7)
    with pytest.raises(ValueError, match=r"x_sorted must be \[rows, 72\]; got \[3, 40\]"):
        ops.grouped_linear(torch.randn(3, 40), offsets, handle, 0, 80)
    with pytest.raises(ValueError, match="out_features is 72; projection 0 has 80"):
        ops.grouped_linear(torch.randn(3, 72), offsets, handle, 0, 72)
    with pytest.raises(ValueError, match="in_features is 80; projection 0 has 72"):
        ops.grouped_linear_backward(torch.randn(3, 80), offsets, handle, 0, 80)
    with pytest.raises(ValueError, match=r"grad must be \[rows, 80\]; got \[3, 72\]"):
        ops.grouped_linear_backward(torch.randn(3, 72), offsets, handle, 0, 72)
    for projection in (-1, 2):
        with pytest.raises(ValueError, match=rf"projection is {projection}; allowed: 0 \(gate_up\), 1 \(down\)"):
            ops.grouped_linear(torch.randn(3, 72), offsets, handle, projection, 80)
        with pytest.raises(ValueError, match=f"projection is {projection}"):
            ops.grouped_linear_backward(torch.randn(3, 80), offsets, handle, projection, 72)
    with pytest.raises(ValueError, match="x_sorted has dtype Double; allowed: bfloat16, float16, float32"):
        ops.grouped_linear(torch.randn(3, 72).double(), offsets, handle, 0, 80)
