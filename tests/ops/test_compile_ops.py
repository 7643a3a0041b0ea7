"""torch.compile: the same bits and the same effects on the pool as without it, and one compilation for many layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_pools import OpenPool, Spec, TinyPool, ops, routing, spec_with
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

LAYERS = 12
SPEC = Spec(layers=LAYERS, experts=4, weights="bf16")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(nn.Module):
    """A router and its experts, as a patched model has them, with every hint."""

    def __init__(self, handle: Tensor, next_handle: Tensor) -> None:
        super().__init__()
        self.router = nn.Linear(SPEC.hidden, SPEC.experts)
        self.handle, self.next_handle = handle, next_handle

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, ids = logits.softmax(dim=-1).topk(2)
        ops.prefetch(self.next_handle, ids)
        return F.layer_norm(x + ops.experts(x, ids, weights, self.handle), (SPEC.hidden,))


def _layers(pool: TinyPool) -> list[Layer]:
    return [Layer(pool.handle(i), pool.handle((i + 1) % LAYERS)) for i in range(LAYERS)]


def _snapshot(pool: TinyPool) -> dict[str, list[int]]:
    """Return the counters that do not depend on when a read ends."""
    pool.engine.drain()
    stats = pool.engine.stats()
    names = ("accesses", "hits", "cold_misses", "promoted", "evicted", "prefetches", "bytes_read")
    return {name: stats[name].tolist() for name in names}


def _effects(x: Tensor, handle: Tensor, others: Tensor) -> tuple[Tensor, ...]:
    """A sequence of effects. In any other order the returned residencies differ."""
    ops.evict(handle, torch.arange(SPEC.experts))
    empty = ops.residency(handle) * 1
    ops.promote(handle, others)
    promoted = ops.residency(handle) * 1
    ops.promote(handle, torch.arange(SPEC.experts))
    ops.evict(handle, others)
    evicted = ops.residency(handle) * 1
    ops.evict(handle, others)
    return empty, promoted, evicted


@pytest.mark.parametrize("backend", BACKENDS)
def test_effects_happen_in_order(open_pool: OpenPool, backend: str) -> None:
    x, others = torch.randn(3, SPEC.experts), torch.tensor([1, 3])
    results: list[tuple[tuple[Tensor, ...], Any]] = []
    for run in (_effects, torch.compile(_effects, backend=backend, fullgraph=True)):
        pool = open_pool(SPEC)
        outputs = [run(x, pool.handle(5), others) for _ in range(2)][-1]
        results.append((outputs, _snapshot(pool)))
    (expected, counts), (compiled, compiled_counts) = results
    assert [output.tolist() for output in compiled] == [[0] * 4, [0, 2, 0, 2], [2, 0, 2, 0]]
    for output, same in zip(compiled, expected, strict=True):
        assert torch.equal(output, same)
    assert compiled_counts == counts
    # Two runs; the second starts from the residency that the first left.
    assert counts["promoted"][5] == 2 * 4 and counts["evicted"][5] == 2 * 2 + 2 and counts["hits"][5] == 2 * 2


def _wait(pool: TinyPool, layers: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        pool.engine.drain()
    return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compilation_serves_all_layers(open_pool: OpenPool, backend: str) -> None:
    plain, pool = open_pool(SPEC, policy="lfu"), open_pool(SPEC, policy="lfu")
    layers = _layers(plain)
    compiled_layers = _layers(pool)
    for layer, same in zip(layers, compiled_layers, strict=True):
        same.load_state_dict(layer.state_dict())
    counter = CompileCounterWithBackend(backend)
    compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in compiled_layers]
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(6, SPEC.hidden)
            expected, out = _wait(plain, layers, x), _wait(pool, compiled, x)
            # inductor may fuse code around the op. A difference in the last bit may then change an int8 activation by a
            # step.
            assert (out - expected).norm() <= 0.03 * expected.norm()
    assert counter.frame_count == 1
    assert _snapshot(pool) == _snapshot(plain)
    assert min(pool.count("prefetches", layer) for layer in range(1, LAYERS)) > 0


def test_shapes_may_be_dynamic(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    layer = Layer(pool.handle(0), pool.handle(1))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with torch.no_grad():
        for tokens in (4, 7, 9, 33, 2):
            x = torch.randn(tokens, SPEC.hidden)
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 2  # once for the first shape, once for dynamic shapes


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_bits(open_pool: OpenPool, backend: str) -> None:
    pool = open_pool(SPEC, slots=3)

    def run(x: Tensor, ids: Tensor, weights: Tensor, handle: Tensor, next_handle: Tensor) -> Tensor:
        out = ops.experts(x, ids, weights, handle)
        ops.prefetch(next_handle, ids)
        return ops.experts(out, ids, weights, next_handle)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    ids, weights = routing(SPEC, 6, 2)
    x, grad = torch.randn(2, 6, SPEC.hidden)
    results = []
    for function in (run, compiled):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = function(leaves[0], ids, leaves[1], pool.handle(2), pool.handle(3))
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for value, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(value, expected)


def test_gradients_of_grouped_linear_are_the_same_bits(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=3)
    offsets = torch.tensor([0, 2, 2, 5, 6])

    def run(x: Tensor, handle: Tensor) -> Tensor:
        gate, up = ops.grouped_linear(x, offsets, handle, 0, SPEC.gate_up_features).chunk(2, dim=1)
        return ops.grouped_linear(gate * up, offsets, handle, 1, SPEC.hidden)

    results = []
    x, grad = torch.randn(2, 6, SPEC.hidden)
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, pool.handle())
        results.append((out, torch.autograd.grad(out, leaf, grad)[0]))
    for value, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(value, expected)


def test_deferred_experts_survive_compilation(open_pool: OpenPool) -> None:
    def run(x: Tensor, ids: Tensor, weights: Tensor, handle: Tensor, next_handle: Tensor) -> tuple[Tensor, Tensor]:
        first = ops.experts_deferred(x, ids, weights, handle, 1, False)
        return first, ops.experts_deferred(x, ids, weights, next_handle, 1, True)

    x, (_, weights) = torch.randn(2, SPEC.hidden), routing(SPEC, 2, 2)
    ids = torch.randperm(SPEC.experts).view(2, 2)  # no expert is used by two tokens
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        pool = open_pool(SPEC)  # all cold: each token's choice of smaller weight is deferred
        results.append(function(x, ids, weights, pool.handle(0), pool.handle(1)))
    for value, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(value, expected)
    assert not torch.equal(results[1][0], ops.experts(x, ids, weights, open_pool(SPEC).handle(0)))


def test_fallbacks_survive_compilation(open_pool: OpenPool) -> None:
    """The second call sees what was promoted after the first: both effects stay, in order."""
    low = open_pool(spec_with(SPEC, weights="int4"))

    def run(x: Tensor, ids: Tensor, weights: Tensor, handle: Tensor, promoted: Tensor) -> tuple[Tensor, Tensor]:
        first = ops.experts_fallback(x, ids, weights, handle, low.handle())
        ops.promote(handle, promoted)
        return first, ops.experts_fallback(x, ids, weights, handle, low.handle())

    x = torch.randn(4, SPEC.hidden)
    ids, weights = routing(SPEC, 4, 2)
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        pool = open_pool(SPEC)
        results.append(function(x, ids, weights, pool.handle(), torch.arange(SPEC.experts)))
    for first, second in results:
        assert torch.equal(first, ops.experts(x, ids, weights, low.handle()))  # nothing was resident
        assert torch.equal(second, ops.experts(x, ids, weights, open_pool(SPEC).handle()))


def test_errors_come_out_of_compiled_code(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    compiled = torch.compile(ops.experts, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, SPEC.hidden)
    ids, weights = routing(SPEC, 2, 2)
    compiled(x, ids, weights, pool.handle())
    with pytest.raises(ValueError, match="expert id 4 of token 1, choice 0"):
        compiled(x, torch.tensor([[0, 1], [4, 0]]), weights, pool.handle())
    handle = pool.handle()
    pool.close()
    with pytest.raises(RuntimeError, match="closed") as caught:
        compiled(x, ids, weights, handle)
    assert type(caught.value).__name__ == "PoolClosedError"
