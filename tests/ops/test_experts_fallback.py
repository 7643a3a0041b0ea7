"""experts_fallback: cold experts are computed from another pool's records, and the main pool counts their use."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from tiny_pools import LOADING, READY, OpenPool, Spec, TinyPool, ops, routing, spec_with
from torch import Tensor

import torch_mesh
from torch_mesh import _C

SPEC = Spec(layers=2, experts=24)
# The fallbacks have other weights, so that a product shows which pool it is from.
LOW = spec_with(SPEC, weights="int4")
TOKENS, TOP_K = 6, 4
EVERY = torch.arange(SPEC.experts)


def _inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(tokens, SPEC.hidden), *routing(SPEC, tokens, TOP_K))


@pytest.fixture
def pool(open_pool: OpenPool) -> TinyPool:
    return open_pool(SPEC)


@pytest.fixture
def low(open_pool: OpenPool) -> TinyPool:
    return open_pool(LOW)


def _call(pool: TinyPool, low: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, *more: object) -> Tensor:
    return ops.experts_fallback(x, ids, weights, pool.handle(), low.handle(), *more)


def _mixed(pool: TinyPool, low: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, fallbacks: Tensor) -> Tensor:
    """The expected output, with a mask [tokens, k] of the choices that fallbacks compute."""
    exact = ops.experts(x, ids.masked_fill(fallbacks, SPEC.experts), weights, pool.handle(), True)
    return ops.experts(x, ids.masked_fill(~fallbacks, SPEC.experts), weights, low.handle(), True) + exact


def test_resident_experts_are_exact(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs()
    ops.promote(pool.handle(), EVERY)
    assert torch.equal(_call(pool, low, x, ids, weights), ops.experts(x, ids, weights, pool.handle()))
    assert low.count("accesses") == low.count("forwards") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cold_experts_are_computed_by_fallbacks(pool: TinyPool, low: TinyPool, dtype: torch.dtype) -> None:
    x, ids, weights = _inputs()
    x = x.bfloat16().to(dtype)
    resident = torch.tensor([0, 3, 5, 8, 9, 17])
    ops.promote(pool.handle(), resident)
    ops.promote(low.handle(), EVERY[::2])
    pool.engine.reset_stats()
    low.engine.reset_stats()
    out = _call(pool, low, x, ids, weights)
    used, cold = set(ids.flatten().tolist()), ~torch.isin(ids, resident)
    counts = {name: (pool.count(name), low.count(name)) for name in ("accesses", "hits", "cold_misses", "forwards")}
    apart = set(ids[cold].tolist())
    warm = {expert for expert in apart if expert % 2 == 0}
    assert counts == {
        "accesses": (len(used - apart), len(apart)),
        "hits": (len(used - apart), len(warm)),
        "cold_misses": (0, len(apart - warm)),
        "forwards": (1, 1),
    }
    # The two sums are added in fp32 and rounded once.
    assert torch.equal(out, _mixed(pool, low, x.float(), ids, weights, cold).to(dtype))


def test_a_fallback_has_its_expert_read_for_the_next_time(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs()
    _call(pool, low, x, ids, weights)
    pool.engine.drain()
    used = set(ids.flatten().tolist())
    assert pool.ready() == low.ready() == used
    assert pool.count("prefetches") == len(used) and pool.count("cold_misses") == pool.count("stall_nanoseconds") == 0
    out = _call(pool, low, x, ids, weights)
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle()))
    assert pool.count("prefetches_used") == len(used)


def test_an_expert_in_both_pools_is_evicted_from_the_fallbacks(open_pool: OpenPool, pool: TinyPool) -> None:
    """A call evicts an expert that it finds in both pools from the pool of fallbacks."""
    low = open_pool(LOW, slots=2 * SPEC.experts - 1)
    x, ids, weights = _inputs(1)
    ops.promote(pool.handle(), torch.tensor([ids[0, 0], ids[0, 1]]))
    ops.promote(low.handle(), EVERY)
    out = _call(pool, low, x, ids, weights)
    assert low.ready() == set(EVERY.tolist()) - set(ids[0, :2].tolist())
    assert torch.equal(out, _mixed(pool, low, x, ids, weights, torch.arange(TOP_K).unsqueeze(0) >= 2))


def test_a_pool_that_holds_every_fallback_evicts_none(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs(1)
    ops.promote(pool.handle(), torch.tensor([ids[0, 0], ids[0, 1]]))
    ops.promote(low.handle(), EVERY)
    _call(pool, low, x, ids, weights)
    assert low.ready() == set(EVERY.tolist())


def test_pending_reads_are_waited_for_only_without_a_fallback(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, faults={"seed": 1, "delay": 1.0, "max_delay": 0.3})
    low = open_pool(LOW)
    x, weights = torch.randn(1, SPEC.hidden), torch.rand(1, 2)
    ids = torch.tensor([[1, 2]])
    ops.promote(low.handle(), torch.tensor([2]))
    ops.prefetch(pool.handle(), ids[0])
    assert pool.residency()[1:3] == [LOADING, LOADING]
    out = _call(pool, low, x, ids, weights)
    assert torch.equal(out, _mixed(pool, low, x, ids, weights, ids == 2))
    assert low.count("cold_misses") == 1 and pool.count("inflight_misses") + pool.count("hits") >= 1


def test_heat_gives_slots_to_experts_that_are_used_often(open_pool: OpenPool) -> None:
    """One use of an expert does not evict one that is used all the time; many uses do."""
    pool, low = open_pool(SPEC, slots=4, policy="heat"), open_pool(LOW)
    ids, weights = torch.tensor([[0, 1, 2, 3]]), torch.rand(1, TOP_K)

    def step(ids: Tensor) -> None:
        _call(pool, low, torch.randn(1, SPEC.hidden), ids, weights)
        pool.engine.drain()

    for _ in range(50):
        step(ids)
    assert pool.ready() == {0, 1, 2, 3}
    other = torch.tensor([[0, 1, 2, 7]])
    step(other)
    assert pool.ready() == {0, 1, 2, 3}
    for _ in range(50):
        step(other)
    assert pool.ready() == {0, 1, 2, 7}
    pool.engine.validate()


def test_predicted_experts_are_read_as_fallbacks(open_pool: OpenPool, low: TinyPool) -> None:
    pool = open_pool(SPEC, slots=40)
    x, ids, weights = _inputs(1)
    router = torch.randn(SPEC.experts, SPEC.hidden)
    likely = (x @ router.T).topk(5).indices[0]
    ops.promote(pool.handle(1), likely[:2])
    _call(pool, low, x, ids, weights, False, router, pool.handle(1), 5)
    for engine in (pool.engine, low.engine):
        engine.drain()
    assert pool.ready(1) == set(likely[:2].tolist()) and low.ready(1) == set(likely[2:].tolist())


def test_prompts_are_exact(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs(_C.MAX_DECODE_ROWS + 1)
    assert torch.equal(_call(pool, low, x, ids, weights), ops.experts(x, ids, weights, pool.handle()))
    assert low.count("accesses") == 0


def test_no_tokens_and_sentinels(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs()
    assert _call(pool, low, x[:0], ids[:0], weights[:0]).shape == (0, SPEC.hidden)
    ids[:, 1] = SPEC.experts + torch.arange(TOKENS)
    out = _call(pool, low, x, ids, weights, True)
    assert torch.equal(out, ops.experts(x, ids, weights, low.handle(), True))
    assert not _call(pool, low, x, torch.full_like(ids, SPEC.experts), weights, True).any()


def test_a_failed_read_of_a_fallback_raises_and_the_next_call_succeeds(open_pool: OpenPool, pool: TinyPool) -> None:
    low = open_pool(LOW, faults={"eio_always": 1.0, "seed": 5})
    x, ids, weights = _inputs()
    with pytest.raises(torch_mesh.ReadError) as caught:
        _call(pool, low, x, ids, weights)
    assert caught.value.layer == 0 and caught.value.expert in ids
    for engine in (pool.engine, low.engine):
        engine.drain()
        engine.validate()
        assert engine.pinned() == 0
    out = _call(pool, low, x, ids, weights)  # the main pool has read the experts meanwhile
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle()))


def test_a_failed_read_ahead_reaches_no_forward(open_pool: OpenPool, low: TinyPool) -> None:
    pool = open_pool(SPEC, faults={"eio_always": 1.0, "seed": 5})
    x, ids, weights = _inputs()
    for _ in range(3):
        assert torch.equal(_call(pool, low, x, ids, weights), ops.experts(x, ids, weights, low.handle()))
        pool.engine.drain()
    assert pool.engine.detailed_stats()["prefetch_error"] is not None


def test_two_forwards_at_once_on_small_pools(open_pool: OpenPool) -> None:
    """Each choice is computed by one pool or the other, and no forward waits for ever."""
    pool, low = open_pool(SPEC, slots=4, timeout=20.0), open_pool(LOW, slots=4, timeout=20.0)
    exact, fallbacks = open_pool(SPEC, in_memory=True), open_pool(LOW, in_memory=True)
    done: list[int] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(40):
            layer = step % SPEC.layers
            x = torch.randn(1, SPEC.hidden, generator=generator)
            weights, ids = torch.rand(1, SPEC.experts, generator=generator).topk(2)
            out = ops.experts_fallback(x, ids, weights, pool.handle(layer), low.handle(layer))
            ways = [
                ops.experts(x, ids.masked_fill(mask, SPEC.experts), weights, exact.handle(layer), True)
                + ops.experts(x, ids.masked_fill(~mask, SPEC.experts), weights, fallbacks.handle(layer), True)
                for mask in (torch.tensor([chosen]) for chosen in itertools.product((False, True), repeat=2))
            ]
            assert any(torch.equal(out, way) for way in ways)
            done.append(step)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in torch.randint(2**31, (3,)).tolist()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 120
    for engine in (pool.engine, low.engine):
        engine.drain()
        engine.validate()
        assert engine.pinned() == 0


def test_wrong_arguments(open_pool: OpenPool, pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs()
    with pytest.raises(
        ValueError, match=r"fallback must be layer 0 of 24 experts of hidden size 72 in another pool; got layer 1"
    ):
        ops.experts_fallback(x, ids, weights, pool.handle(0), low.handle(1))
    other = open_pool(spec_with(LOW, experts=8), slots=4)
    with pytest.raises(ValueError, match=r"fallback must be .* got layer 0 of 8 experts"):
        _call(pool, other, x, ids, weights)
    wrong = ids.clone()
    wrong[3, 2] = SPEC.experts
    with pytest.raises(ValueError, match=r"expert id 24 of token 3, choice 2 is outside \[0, 24\)"):
        _call(pool, low, x, wrong, weights)
    assert pool.count("accesses") == low.count("accesses") == 0
    low.close()
    with pytest.raises(torch_mesh.PoolClosedError):
        _call(pool, low, x, ids, weights)
    assert READY not in pool.residency()


def test_there_is_no_gradient(pool: TinyPool, low: TinyPool) -> None:
    x, ids, weights = _inputs()
    with pytest.raises(RuntimeError, match="experts_fallback has no gradient"):
        _call(pool, low, x.requires_grad_(), ids, weights)
    with torch.no_grad():
        assert not _call(pool, low, x, ids, weights).requires_grad
