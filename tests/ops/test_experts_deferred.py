"""experts_deferred: cold experts of least weight are added one layer later, exactly once, and counted apart."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyPool, ops, relative_error, routing
from torch import Tensor

import torch_mesh
from torch_mesh import _C
from torch_mesh.statistics.counters import engine_stats

SPEC = Spec(layers=3, experts=24)
TOKENS, TOP_K = 6, 4


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(TOKENS, SPEC.hidden), *routing(SPEC, TOKENS, TOP_K))


def _without(pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, left_out: Tensor) -> Tensor:
    """The first layer's output without the choices of the mask ``left_out``."""
    return ops.experts(x, ids.masked_fill(left_out, SPEC.experts), weights, pool.handle(), True)


def _left_out(ids: Tensor, weights: Tensor, cold: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` cold choices of least weight per token, except experts that some token needs now."""
    ranked = weights.masked_fill(~cold, 2.0).argsort(dim=1)[:, :count]
    least = torch.zeros_like(cold).scatter(1, ranked, True) & cold
    return least & ~torch.isin(ids, ids[~least])


def _make_cold(pool: TinyPool) -> None:
    pool.engine.drain()
    ops.evict(pool.handle(), torch.arange(SPEC.experts))


@pytest.fixture
def pool(open_pool: OpenPool) -> TinyPool:
    return open_pool(SPEC)


def test_nothing_deferred_is_exact(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    for layer in range(SPEC.layers):
        out = ops.experts_deferred(x, ids, weights, pool.handle(layer), 0, layer == SPEC.layers - 1)
        assert torch.equal(out, ops.experts(x, ids, weights, pool.handle(layer)))


def test_resident_experts_are_never_deferred(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    ops.promote(pool.handle(), torch.arange(SPEC.experts))
    out = ops.experts_deferred(x, ids, weights, pool.handle(), TOP_K, False)
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle()))


@pytest.mark.parametrize("deferred", [1, 2, TOP_K])
def test_cold_experts_of_least_weight_are_added_in_the_next_layer(pool: TinyPool, deferred: int) -> None:
    x, ids, weights = _inputs()
    resident = torch.tensor([0, 3, 5])
    ops.promote(pool.handle(), resident)
    first = ops.experts_deferred(x, ids, weights, pool.handle(0), deferred, False)
    pool.engine.drain()  # the deferred experts are being read meanwhile
    assert set(ids.flatten().tolist()) <= pool.ready()

    left_out = _left_out(ids, weights, ~torch.isin(ids, resident), deferred)
    assert torch.equal(first, _without(pool, x, ids, weights, left_out))

    next_x, next_ids, next_weights = _inputs()
    ops.promote(pool.handle(1), torch.arange(SPEC.experts))
    second = ops.experts_deferred(next_x, next_ids, next_weights, pool.handle(1), deferred, False)
    late = _without(pool, x, ids, weights, ~left_out)
    assert torch.equal(second, ops.experts(next_x, next_ids, next_weights, pool.handle(1)) + late)

    third = ops.experts_deferred(next_x, next_ids, next_weights, pool.handle(2), 0, True)
    assert torch.equal(third, ops.experts(next_x, next_ids, next_weights, pool.handle(2)))


def test_all_layers_together_give_the_whole_sum(pool: TinyPool) -> None:
    inputs = [_inputs() for _ in range(SPEC.layers)]
    total = torch.zeros(TOKENS, SPEC.hidden)
    for layer, (x, ids, weights) in enumerate(inputs):
        total += ops.experts_deferred(x, ids, weights, pool.handle(layer), 2, layer == SPEC.layers - 1)
    exact = [ops.experts(x, ids, weights, pool.handle(layer)) for layer, (x, ids, weights) in enumerate(inputs)]
    assert relative_error(total, torch.stack(exact).sum(0)) < 1e-6


def test_a_handle_may_have_any_strides(open_pool: OpenPool) -> None:
    inputs = [_inputs() for _ in range(SPEC.layers)]
    outputs = []
    for stride in (1, 2):
        pool = open_pool(SPEC)
        for layer, (x, ids, weights) in enumerate(inputs):
            handle = pool.handle(layer).repeat_interleave(stride)[::stride]
            assert handle.stride() == (stride,)
            outputs.append(ops.experts_deferred(x, ids, weights, handle, 2, layer == SPEC.layers - 1))
    for packed, spread in zip(outputs[: SPEC.layers], outputs[SPEC.layers :], strict=True):
        assert torch.equal(packed, spread)


def test_the_last_layer_defers_nothing(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    out = ops.experts_deferred(x, ids, weights, pool.handle(2), TOP_K, True)
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle(2)))
    ops.promote(pool.handle(0), torch.arange(SPEC.experts))
    again = ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False)
    assert torch.equal(again, ops.experts(x, ids, weights, pool.handle(0)))


def test_the_remainder_of_an_aborted_forward_is_dropped(pool: TinyPool, open_pool: OpenPool) -> None:
    x, ids, weights = _inputs()
    other = open_pool(SPEC, in_memory=True)
    followers = {
        "the same layer again": (pool, 0, x, ids, weights),
        "a layer that is not the next": (pool, 2, x, ids, weights),
        "the next layer with other tokens": (pool, 1, x[:4], ids[:4], weights[:4]),
        "the next layer of another pool": (other, 1, x, ids, weights),
    }
    for how, (after, layer, *arguments) in followers.items():
        _make_cold(pool)
        ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False)
        out = ops.experts_deferred(*arguments, after.handle(layer), 0, False)
        assert torch.equal(out, ops.experts(*arguments, after.handle(layer))), how
        late = ops.experts_deferred(x, ids, weights, pool.handle(1), 0, False)
        assert torch.equal(late, ops.experts(x, ids, weights, pool.handle(1))), how


def test_threads_do_not_get_each_others_remainder(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    first = ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False)
    outputs: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: outputs.append(ops.experts_deferred(x, ids, weights, pool.handle(1), 0, False))
    )
    thread.start()
    thread.join()
    second = ops.experts(x, ids, weights, pool.handle(1))
    assert torch.equal(outputs[0], second)
    here = ops.experts_deferred(x, ids, weights, pool.handle(1), 0, False)
    assert not first.any()
    assert torch.equal(here, second + ops.experts(x, ids, weights, pool.handle(0)))


def test_deferred_experts_are_counted_apart(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    resident = torch.arange(0, SPEC.experts, 3)
    ops.promote(pool.handle(), resident)
    pool.engine.reset_stats()
    ops.experts_deferred(x, ids, weights, pool.handle(0), 2, False)
    ops.experts_deferred(*_inputs(), pool.handle(1), 0, False)
    left_out = _left_out(ids, weights, ~torch.isin(ids, resident), 2)
    layer, following, _ = engine_stats([[pool.engine]]).per_layer
    assert layer.deferred == layer.decode.deferred == len(set(ids[left_out].tolist())) > 0
    assert layer.accesses == len(set(ids.flatten().tolist())) == layer.promoted + layer.hits
    assert (layer.hits + layer.cold_misses + layer.deferred, layer.inflight_misses) == (layer.accesses, 0)
    assert sum(layer.experts.deferred) == layer.deferred and sum(layer.experts.accesses) == layer.accesses
    assert (layer.forwards, following.forwards, following.deferred) == (1, 1, 0)
    assert layer.prefetches == following.prefetches == 0  # reads of deferred experts are demand reads


def test_deferred_experts_are_read_once_in_a_small_pool(open_pool: OpenPool) -> None:
    """The next layer evicts its own earlier experts for its reads, not the deferred ones it still needs."""
    pool = open_pool(SPEC, slots=12, policy="heat")
    for layer in (0, 1, 0, 1, 0, 1):
        x, weights = torch.randn(1, SPEC.hidden), torch.rand(1, 4)
        ids = torch.randperm(SPEC.experts)[:4].unsqueeze(0)
        ops.experts_deferred(x, ids, weights, pool.handle(layer), 2 if layer == 0 else 0, layer == 1)
        pool.engine.drain()
    for layer in range(2):
        assert pool.count("promoted", layer) == pool.count("cold_misses", layer) + pool.count("deferred", layer)


def test_prompts_are_exact(pool: TinyPool) -> None:
    rows = _C.MAX_DECODE_ROWS + 1
    x, (ids, weights) = torch.randn(rows, SPEC.hidden), routing(SPEC, rows, TOP_K)
    out = ops.experts_deferred(x, ids, weights, pool.handle(), TOP_K, False)
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle()))
    assert pool.count("deferred") == 0


def test_sentinels_are_neither_used_nor_deferred(pool: TinyPool) -> None:
    x, (ids, weights) = torch.randn(TOKENS, SPEC.hidden), routing(SPEC, TOKENS, TOP_K)
    ids[:, 1] = SPEC.experts + torch.arange(TOKENS)
    first = ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False, True)
    second = ops.experts_deferred(x, ids, weights, pool.handle(1), 0, True, True)
    assert not first.any()
    assert torch.equal(
        second, ops.experts(x, ids, weights, pool.handle(1), True) + ops.experts(x, ids, weights, pool.handle(), True)
    )


def test_a_failed_deferred_read_raises_in_the_next_layer(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, faults={"eio_always": 1.0, "seed": 5})
    x, ids, weights = _inputs()
    first = ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False)  # waits for nothing
    assert not first.any()
    with pytest.raises(torch_mesh.ReadError) as caught:
        ops.experts_deferred(x, ids, weights, pool.handle(1), 0, False)
    assert caught.value.layer == 1  # its own reads fail first
    pool.engine.drain()
    pool.engine.validate()
    assert pool.engine.pinned() == 0


def test_an_error_drops_the_remainder(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    for break_it in (
        lambda: ops.experts_deferred(x, ids + SPEC.experts, weights, pool.handle(1), 0, False),
        lambda: ops.experts_deferred(x[:, 1:], ids, weights, pool.handle(1), 0, False),
    ):
        _make_cold(pool)
        ops.experts_deferred(x, ids, weights, pool.handle(0), TOP_K, False)
        with pytest.raises(ValueError, match="expert id|x must be"):
            break_it()
        out = ops.experts_deferred(x, ids, weights, pool.handle(1), 0, False)
        assert torch.equal(out, ops.experts(x, ids, weights, pool.handle(1)))


def test_two_forwards_at_once(open_pool: OpenPool) -> None:
    """On a pool too small for both, each forward gets the complete sums of its own layers."""
    pool = open_pool(SPEC, slots=10)
    errors: list[float] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            total, exact = torch.zeros(2, SPEC.hidden), torch.zeros(2, SPEC.hidden)
            for layer in range(SPEC.layers):
                x = torch.randn(2, SPEC.hidden, generator=generator)
                scores = torch.rand(2, SPEC.experts, generator=generator)
                weights, ids = scores.topk(TOP_K)
                total += ops.experts_deferred(x, ids, weights, pool.handle(layer), 2, layer == SPEC.layers - 1)
                exact += ops.experts(x, ids, weights, pool.handle(layer))
            errors.append(relative_error(total, exact))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in torch.randint(2**31, (2,)).tolist()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40 and max(errors) < 1e-5
    pool.engine.validate()


def test_wrong_arguments(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    for deferred in (-1, TOP_K + 1):
        with pytest.raises(ValueError, match=f"deferred is {deferred}; allowed: 0 to k = {TOP_K}"):
            ops.experts_deferred(x, ids, weights, pool.handle(), deferred, False)
    ids[3, 2] = SPEC.experts
    with pytest.raises(ValueError, match=r"expert id 24 of token 3, choice 2 is outside \[0, 24\)"):
        ops.experts_deferred(x, ids, weights, pool.handle(), 1, False)
    assert pool.count("accesses") == 0


def test_there_is_no_gradient(pool: TinyPool) -> None:
    x, ids, weights = _inputs()
    with pytest.raises(RuntimeError, match="experts_deferred has no gradient"):
        ops.experts_deferred(x.requires_grad_(), ids, weights, pool.handle(), 1, False)
    with torch.no_grad():
        out = ops.experts_deferred(x, ids, weights, pool.handle(), 0, False)
    assert not out.requires_grad
