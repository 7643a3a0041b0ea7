"""Reads of a backward pass: each expert once, from the last layer to the first, ahead of their use."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyPool, ops, relative_error, routing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SPEC = Spec(layers=3)
ROWS = 30  # more than a decode step has


class Stack:
    """All layers of a pool in sequence, each with a routing that uses all of its experts."""

    def __init__(self, pool: TinyPool, reentrant: bool | None = None) -> None:
        self.pool, self.reentrant = pool, reentrant
        self.routing = [routing(SPEC, ROWS, 4) for _ in range(SPEC.layers)]
        assert all(ids.unique().numel() == SPEC.experts for ids, _ in self.routing)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer, (ids, weights) in enumerate(self.routing):
            x = self._layer(x, ids, weights, layer)
            self.outputs.append(x)
        return x

    def _layer(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        arguments = (x, ids, weights, self.pool.handle(layer))
        if self.reentrant is None:
            return ops.experts(*arguments)
        return checkpoint(ops.experts, *arguments, use_reentrant=self.reentrant)

    def forget(self) -> None:
        """Evict all experts and reset the counters."""
        self.pool.engine.drain()
        for layer in range(SPEC.layers):
            ops.evict(self.pool.handle(layer), torch.arange(SPEC.experts))
        self.pool.engine.reset_stats()

    def counts(self, field: str) -> list[int]:
        """Return the counter ``field`` by layer."""
        self.pool.engine.drain()
        return [self.pool.count(field, layer) for layer in range(SPEC.layers)]


def test_the_layer_below_is_read_while_a_layer_is_computed(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=2 * SPEC.experts)
    stack = Stack(pool)
    out = stack.forward(torch.randn(ROWS, SPEC.hidden, requires_grad=True))
    stack.forget()
    seen: dict[int, list[int]] = {}

    def look(layer: int) -> None:
        pool.engine.drain()
        seen[layer] = [len(pool.ready(each)) for each in range(SPEC.layers)]

    for layer, output in enumerate(stack.outputs):
        output.register_hook(lambda grad, layer=layer: look(layer))
    out.sum().backward()
    every = SPEC.experts
    assert seen[2] == [0, 0, 0]  # before the last layer's backward
    assert seen[1][:2] == [0, every]
    assert seen[0][0] == every
    assert stack.counts("promoted") == [every, every, every]
    assert stack.counts("prefetches") == [every, every, 0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("slots", [SPEC.experts + 4, 2 * SPEC.experts])
def test_checkpointed_layers_are_not_read_twice(open_pool: OpenPool, reentrant: bool, slots: int) -> None:
    """The pool holds one layer and a part of the next."""
    pool = open_pool(SPEC, slots=slots)
    stack = Stack(pool, reentrant)
    out = stack.forward(torch.randn(ROWS, SPEC.hidden, requires_grad=True))
    stack.forget()
    out.sum().backward()
    assert stack.counts("promoted") == [SPEC.experts] * 3


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_an_expert_is_read_once_by_a_layer_that_does_not_fit(open_pool: OpenPool, slots: int) -> None:
    pool = open_pool(Spec(), slots=slots)
    x = torch.randn(ROWS, SPEC.hidden, requires_grad=True)
    ids, weights = routing(SPEC, ROWS, 4)
    out = ops.experts(x, ids, weights, pool.handle())
    pool.engine.drain()
    ops.evict(pool.handle(), torch.arange(SPEC.experts))
    before = pool.count("promoted")
    out.sum().backward()
    pool.engine.drain()
    assert pool.count("promoted") - before == SPEC.experts


def test_threads_that_share_few_slots_get_the_same_bits(open_pool: OpenPool) -> None:
    """No thread has enough slots to keep the experts that it computes with."""
    pool = open_pool(Spec(), slots=2)
    x = torch.randn(ROWS, SPEC.hidden)
    ids, weights = routing(SPEC, ROWS, 4)

    def gradient() -> Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(ops.experts(own, ids, weights, pool.handle()).sum(), own)[0]

    expected = gradient()
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(gradient() for _ in range(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(torch.equal(each, expected) for each in found)


def test_rows_beyond_the_workspace_are_computed_in_parts(open_pool: OpenPool) -> None:
    spec = Spec(bias=True)
    ids, weights = routing(spec, ROWS, 4)
    ids[:, 0] = 5  # one expert has all rows
    x, grad = torch.randn(2, ROWS, spec.hidden)
    a, b = torch.randn(spec.experts, 3, spec.hidden), torch.randn(spec.experts, 3, 2, spec.intermediate)

    def gradients(pool: TinyPool) -> tuple[Tensor, ...]:
        leaves = [each.clone().requires_grad_() for each in (x, weights, a, b)]
        out = ops.experts_adapted(
            leaves[0], ids, leaves[1], pool.handle(), leaves[2], leaves[3], 0.5, None, None, 1.0, False
        )
        return torch.autograd.grad(out, leaves, grad)

    expected = gradients(open_pool(spec, in_memory=True))
    for workspace in (1, 20000):
        for found, same in zip(gradients(open_pool(spec, in_memory=True, workspace=workspace)), expected, strict=True):
            assert relative_error(found, same) < 2e-5
