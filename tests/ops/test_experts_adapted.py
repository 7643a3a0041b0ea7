"""Experts with low-rank adapters: values and gradients against float64, and the properties of experts without
adapters."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tiny_pools import (
    ACTIVATIONS,
    OpenPool,
    Operands,
    Spec,
    TinyPool,
    assert_rounded,
    cpu_operands,
    ops,
    relative_error,
    routing,
)
from torch import Tensor

SPECS = [
    Spec(weights="bf16"),
    Spec(weights="bf12"),
    Spec(weights="int8"),
    Spec(weights="lut4"),
    Spec(weights="bf16", activation="softcap(gate=1.5,up=2)"),
    Spec(weights="mxfp4", group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="fp8", group_size=128),
    Spec(weights="int8", gated=False, activation="relu2"),
    Spec(weights="bf16", hidden=200, intermediate=136),
]


def _name(spec: Spec) -> str:
    return "-".join([spec.weights, str(spec.activation)] + ["bias"] * spec.bias + ["ungated"] * (not spec.gated))


class Adapters(NamedTuple):
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    gate_up_scaling: float
    down_a: Tensor | None
    down_b: Tensor | None
    down_scaling: float

    def map(self, change) -> Adapters:
        return Adapters(*(change(each) if isinstance(each, Tensor) else each for each in self))

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self if isinstance(each, Tensor)]


def _adapters(spec: Spec, ranks: tuple[int, int] = (5, 3)) -> Adapters:
    """Adapters whose terms are about as large as what they are added to. Rank 0: none."""
    halves = 2 if spec.gated else 1

    def pair(rank: int, inner: int, *outer: int) -> tuple[Tensor | None, Tensor | None]:
        if rank == 0:
            return None, None
        a = torch.randn(spec.experts, rank, inner) * inner**-0.5
        return a, torch.randn(spec.experts, rank, *outer) * rank**-0.5

    gate_up = pair(ranks[0], spec.hidden, halves, spec.intermediate)
    return Adapters(*gate_up, 0.75, *pair(ranks[1], spec.intermediate, spec.hidden), 1.5)


def _run(
    pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, adapters: Adapters, sentinels: bool = False
) -> Tensor:
    return ops.experts_adapted(x, ids, weights, pool.handle(), *adapters, sentinels)


def _reference(
    pool: TinyPool,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    adapters: Adapters,
    operands: Operands = lambda rows: rows,
) -> Tensor:
    """The result in float64. ``operands`` rounds the operands of products with the pool's weights."""
    spec, adapters = pool.spec, adapters.map(Tensor.double)
    x, weights = x.double(), weights.double()
    out = torch.zeros_like(x)
    assert spec.activation is not None
    for expert in range(spec.experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        rows = x[token]
        gate_up = pool.weights.linear(operands(rows), expert, 0)
        if adapters.gate_up_a is not None and adapters.gate_up_b is not None:
            inner = rows @ adapters.gate_up_a[expert].T
            gate_up = gate_up + adapters.gate_up_scaling * inner @ adapters.gate_up_b[expert].flatten(1)
        gate, *up = gate_up.split(spec.intermediate, dim=1)
        hidden = ACTIVATIONS[spec.activation](gate, up[0] if up else 1)
        product = pool.weights.linear(operands(hidden), expert, 1)
        if adapters.down_a is not None and adapters.down_b is not None:
            product = product + adapters.down_scaling * (hidden @ adapters.down_a[expert].T) @ adapters.down_b[expert]
        out = out.index_add(0, token, product * weights[token, choice].unsqueeze(1))
    return out


def _assert_agrees(value: Tensor, pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, adapters: Adapters) -> None:
    exact = _reference(pool, x, ids, weights, adapters)
    rounded = _reference(pool, x, ids, weights, adapters, cpu_operands(pool.spec))
    assert_rounded(value, rounded, exact, few=ids.numel() * pool.spec.intermediate < 1000)


def _leaves(x: Tensor, weights: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor, Adapters]:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    return leaf(x), leaf(weights), adapters.map(leaf)


def _gradients(
    pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, adapters: Adapters, grad: Tensor, run=_run
) -> tuple[Tensor, ...]:
    x, weights, adapters = _leaves(x, weights, adapters)
    out = run(pool, x, ids, weights, adapters)
    return torch.autograd.grad(out, [x, weights, *adapters.tensors], grad.to(out.dtype))


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_values_and_gradients_agree_with_float64(open_pool: OpenPool, spec: Spec) -> None:
    pool = open_pool(spec, slots=3)
    for tokens, top_k, ranks in ((1, 2, (5, 3)), (40, 3, (16, 0)), (9, 2, (0, 1))):
        adapters = _adapters(spec, ranks)
        x, grad = torch.randn(2, tokens, spec.hidden)
        ids, weights = routing(spec, tokens, top_k)
        _assert_agrees(_run(pool, x, ids, weights, adapters), pool, x, ids, weights, adapters)
        gradients = _gradients(pool, x, ids, weights, adapters, grad)
        references = _gradients(pool, x.double(), ids, weights.double(), adapters, grad, _reference)
        for gradient, reference in zip(gradients, references, strict=True):
            assert relative_error(gradient, reference) < 1e-4  # terms of a routing weight's may cancel


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_adapters_of_zeros_change_no_bit(open_pool: OpenPool, weights: str, tokens: int) -> None:
    spec = Spec(weights=weights)
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(tokens, spec.hidden)
    ids, routed = routing(spec, tokens, 3)
    adapters = _adapters(spec)
    zeros = adapters._replace(gate_up_b=torch.zeros_like(adapters.gate_up_b), down_b=torch.zeros_like(adapters.down_b))
    assert torch.equal(_run(pool, x, ids, routed, zeros), ops.experts(x, ids, routed, pool.handle()))


def test_bits_do_not_depend_on_residency_or_chunks(open_pool: OpenPool, seed: int) -> None:
    spec = Spec()
    adapters = _adapters(spec)
    x, grad = torch.randn(2, 30, spec.hidden)
    ids, weights = routing(spec, 30, 4)
    whole = open_pool(spec, in_memory=True)
    expected = _run(whole, x, ids, weights, adapters)
    expected_gradients = _gradients(whole, x, ids, weights, adapters, grad)
    faults = {"seed": seed, "delay": 0.5, "reorder": 0.5, "max_delay": 0.001}
    for slots, policy in ((1, "lru"), (2, "heat"), (5, "heat"), (8, "lru")):
        pool = open_pool(spec, slots=slots, policy=policy, faults=faults)
        assert torch.equal(_run(pool, x, ids, weights, adapters), expected)
        for gradient, same in zip(_gradients(pool, x, ids, weights, adapters, grad), expected_gradients, strict=True):
            assert torch.equal(gradient, same)
        assert pool.count("cold_misses") > 0
    # Calls of few rows use no tiles, whose bits would depend on the number of rows.
    alone = torch.cat([_run(whole, x[i : i + 1], ids[i : i + 1], weights[i : i + 1], adapters) for i in range(30)])
    chunked = open_pool(spec, in_memory=True, workspace=1)
    assert torch.equal(_run(chunked, x, ids, weights, adapters), alone)


def test_factors_of_any_strides(open_pool: OpenPool) -> None:
    spec = Spec(bias=True)
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, 12, spec.hidden)
    ids, weights = routing(spec, 12, 3)
    adapters = _adapters(spec)
    expected = _run(pool, x, ids, weights, adapters)
    expected_gradients = _gradients(pool, x, ids, weights, adapters, grad)

    def rank_first(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    def last_first(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    for lay_out in (rank_first, last_first):
        assert torch.equal(_run(pool, x, ids, weights, adapters.map(lay_out)), expected)
        laid_out = adapters.map(lambda tensor, lay_out=lay_out: lay_out(tensor).detach().requires_grad_())
        out = _run(pool, x, ids, weights, laid_out)
        for gradient, same in zip(
            torch.autograd.grad(out, laid_out.tensors, grad), expected_gradients[2:], strict=True
        ):
            assert relative_error(gradient, same) < 1e-5
    for dtype in (torch.bfloat16, torch.float16):
        rounded = adapters.map(lambda tensor, dtype=dtype: tensor.to(dtype))
        same = _run(pool, x, ids, weights, rounded.map(Tensor.float))
        assert torch.equal(_run(pool, x, ids, weights, rounded), same)
        for gradient, factor in zip(_gradients(pool, x, ids, weights, rounded, grad)[2:], rounded.tensors, strict=True):
            assert gradient.dtype == dtype and gradient.shape == factor.shape


def test_autocast_around_the_backward_changes_no_bit(open_pool: OpenPool) -> None:
    spec = Spec(bias=True)
    pool = open_pool(spec, slots=4)
    x, grad = torch.randn(2, 12, spec.hidden)
    ids, weights = routing(spec, 12, 3)
    adapters = _adapters(spec)
    expected = _gradients(pool, x, ids, weights, adapters, grad)
    with torch.autocast("cpu", torch.bfloat16):
        found = _gradients(pool, x, ids, weights, adapters, grad)
    assert all(torch.equal(gradient, same) for gradient, same in zip(found, expected, strict=True))


def test_experts_that_are_not_chosen_are_not_read_and_have_zero_gradient(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=4)
    x, grad = torch.randn(2, 7, spec.hidden)
    ids = torch.tensor([[1, 6]] * 7)
    weights = torch.rand(7, 2)
    adapters = _adapters(spec).map(lambda tensor: tensor.index_fill(0, torch.tensor([0, 2, 3, 4, 5, 7]), torch.nan))
    assert _run(pool, x, ids, weights, adapters).isfinite().all()
    for gradient in _gradients(pool, x, ids, weights, adapters, grad)[2:]:
        assert gradient.isfinite().all() and gradient[[1, 6]].abs().amax((-1, -2)).all()
        assert not gradient[[0, 2, 3, 4, 5, 7]].any()
    assert pool.count("promoted") == 2


def test_sentinels_and_no_tokens(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=2)
    adapters = _adapters(spec)
    x = torch.randn(12, spec.hidden)
    ids, weights = routing(spec, 12, 4, sentinels=True)
    value = _run(pool, x, ids, weights, adapters, sentinels=True)
    _assert_agrees(value, pool, x, ids, weights, adapters)
    ids, weights = routing(spec, 0, 2)
    for gradient in _gradients(pool, x[:0], ids, weights, adapters, x[:0]):
        assert not gradient.any()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a._replace(down_b=None), "down_a and down_b belong together"),
        (lambda a: a._replace(gate_up_a=a.gate_up_a[:-1]), r"gate_up_a must be \[experts=8"),
        (lambda a: a._replace(gate_up_b=a.gate_up_b.flatten(2)), "gate_up_b must be"),
        (lambda a: a._replace(down_a=a.down_a[:, :2]), "down_a has rank 2 and down_b has rank 3"),
        (lambda a: a._replace(down_a=a.down_a.long()), "down_a has dtype"),
        (lambda a: a._replace(down_a=a.down_a[:, :0], down_b=a.down_b[:, :0]), "rank 0; allowed: 1 to 1024"),
    ],
)
def test_wrong_factors_are_named(open_pool: OpenPool, change, message: str) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    ids, weights = routing(spec, 2, 2)
    with pytest.raises(ValueError, match=message):
        _run(pool, torch.randn(2, spec.hidden), ids, weights, change(_adapters(spec)))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_training_step_compiles_as_one_graph(open_pool: OpenPool, backend: str) -> None:
    spec = Spec(weights="bf16")
    pool = open_pool(spec, slots=4)
    adapters = _adapters(spec)
    x, grad = torch.randn(2, 9, spec.hidden)
    ids, weights = routing(spec, 9, 2)
    compiled = torch.compile(_run, backend=backend, fullgraph=True)
    expected = _gradients(pool, x, ids, weights, adapters, grad)
    for gradient, same in zip(_gradients(pool, x, ids, weights, adapters, grad, compiled), expected, strict=True):
        assert torch.equal(gradient, same)
    torch._dynamo.reset()


def test_grouped_low_rank_agrees_with_float64() -> None:
    rows, experts = torch.randn(11, 6, dtype=torch.float64), 5
    offsets = torch.tensor([0, 0, 4, 4, 10, 11])
    a, b = torch.randn(experts, 3, 6, dtype=torch.float64), torch.randn(experts, 3, 7, dtype=torch.float64)
    expert_of = torch.repeat_interleave(torch.arange(experts), offsets.diff())

    def expected(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        inner = torch.einsum("ni,nri->nr", rows, a[expert_of])
        return torch.einsum("nr,nro->no", inner, b[expert_of])

    leaves = [each.float().requires_grad_() for each in (rows, a, b)]
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    value = ops.grouped_low_rank(leaves[0], offsets, *leaves[1:])
    reference = expected(*doubles)
    assert relative_error(value, reference) < 1e-6
    grad = torch.randn(11, 7)
    pairs = zip(
        torch.autograd.grad(value, leaves, grad), torch.autograd.grad(reference, doubles, grad.double()), strict=True
    )
    assert all(relative_error(gradient, same) < 1e-6 for gradient, same in pairs)
    expected_gradients = torch.autograd.grad(ops.grouped_low_rank(leaves[0], offsets, *leaves[1:]), leaves, grad)
    with torch.autocast("cpu", torch.bfloat16):
        again = ops.grouped_low_rank(leaves[0], offsets, *leaves[1:])
        gradients = torch.autograd.grad(again, leaves, grad)
    assert torch.equal(again, value)
    assert all(torch.equal(gradient, same) for gradient, same in zip(gradients, expected_gradients, strict=True))
    torch.library.opcheck(ops.grouped_low_rank, (leaves[0], offsets, *leaves[1:]))


def test_grouped_low_rank_of_rows_behind_the_last_offset() -> None:
    offsets = torch.tensor([0, 2, 4])
    leaves = [
        torch.randn(7, 6).requires_grad_(),
        torch.randn(2, 3, 6).requires_grad_(),
        torch.randn(2, 3, 5).requires_grad_(),
    ]
    value = ops.grouped_low_rank(leaves[0], offsets, *leaves[1:])
    first = ops.grouped_low_rank(leaves[0][:4], offsets, *leaves[1:])
    assert torch.equal(value, torch.cat([first, torch.zeros(3, 5)]))
    grad = torch.randn(7, 5)
    gradients = torch.autograd.grad(value, leaves, grad)
    expected = torch.autograd.grad(first, leaves, grad[:4])
    assert all(torch.equal(own, same) for own, same in zip(gradients, expected, strict=True))
