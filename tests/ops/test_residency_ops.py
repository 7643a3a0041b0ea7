"""promote, prefetch, evict and residency, and their counters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pools import EMPTY, READY, OpenPool, Spec, TinyExperts, TinyPool, engine_options, ops, routing

from torch_mesh import _C, _testing

SPEC = Spec(layers=2)


def _use(pool: TinyPool, *experts: int, layer: int = 0) -> torch.Tensor:
    x = torch.ones(1, SPEC.hidden)
    return ops.experts(x, torch.tensor([experts]), torch.ones(1, len(experts)), pool.handle(layer))


def _ids(*experts: int) -> torch.Tensor:
    return torch.tensor(experts, dtype=torch.long)


def test_residency_is_int8_per_expert(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    states = ops.residency(pool.handle())
    assert states.dtype == torch.int8 and states.tolist() == [EMPTY] * 8
    ops.promote(pool.handle(1), _ids(2))
    assert pool.residency(0) == [EMPTY] * 8
    assert pool.residency(1) == [EMPTY, EMPTY, READY] + [EMPTY] * 5


def test_promote_returns_when_experts_are_ready(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 1, "delay": 1.0, "max_delay": 0.05})
    ops.promote(pool.handle(), _ids(1, 6, 1, 3))
    assert pool.ready() == {1, 3, 6}
    assert pool.count("cold_misses") == pool.count("promoted") == 3  # a repeated id is one expert
    ops.promote(pool.handle(), _ids(6, 3))
    assert pool.count("hits") == 2 and pool.count("promoted") == 3
    assert pool.count("bytes_read") == 3 * pool.engine.describe()["record_bytes"]


def test_promote_takes_more_experts_than_there_are_slots(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=3)
    ops.promote(pool.handle(), torch.arange(8))
    assert len(pool.ready()) == 3 and pool.count("promoted") == 8 and pool.count("evicted") == 5


def test_ids_of_any_shape_and_integer_dtype(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    ops.promote(pool.handle(), torch.tensor([[0], [2]], dtype=torch.int32))
    ops.promote(pool.handle(), torch.tensor(4, dtype=torch.uint8))
    ops.promote(pool.handle(), torch.arange(8)[5::2])
    ops.promote(pool.handle(), torch.empty(0, dtype=torch.int16))
    assert pool.ready() == {0, 2, 4, 5, 7}


def test_prefetch_does_not_wait_and_does_not_count_as_a_use(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8, faults={"seed": 1, "delay": 1.0, "max_delay": 0.3})
    ops.prefetch(pool.handle(), _ids(1, 2, 3))
    assert pool.count("prefetches") == 3 and pool.count("accesses") == 0 and len(pool.ready()) < 3
    pool.engine.drain()
    assert pool.ready() == {1, 2, 3} and pool.count("promoted") == 3
    _use(pool, 1, 2, 4)
    assert pool.count("hits") == 2 and pool.count("cold_misses") == 1


def test_a_forward_joins_a_prefetch_under_way(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8, faults={"seed": 1, "delay": 1.0, "max_delay": 0.3})
    ops.prefetch(pool.handle(), _ids(1))
    _use(pool, 1, 2)
    counts = {name: pool.count(name) for name in ("inflight_misses", "cold_misses", "hits", "accesses", "promoted")}
    assert counts == {"inflight_misses": 1, "cold_misses": 1, "hits": 0, "accesses": 2, "promoted": 2}
    assert pool.count("stall_nanoseconds") > 0


def test_prefetch_takes_half_of_the_slots_at_most(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=6, faults={"seed": 1, "delay": 1.0, "max_delay": 0.2})
    ops.prefetch(pool.handle(), torch.arange(8))
    assert pool.count("prefetches") == 3
    pool.engine.drain()
    assert pool.ready() == {0, 1, 2}


def test_prefetch_does_not_evict_experts_that_it_names(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=2)
    ops.promote(pool.handle(), _ids(0, 1))
    ops.prefetch(pool.handle(), _ids(1, 5, 0, 6))
    pool.engine.drain()
    assert pool.ready() == {0, 1} and pool.count("prefetches") == 0


def test_lookahead_prefetches_what_the_router_would_choose(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=12)
    router = torch.randn(8, SPEC.hidden)
    x = torch.randn(2, SPEC.hidden)
    chosen = (x @ router.t()).topk(2, dim=1).indices
    ops.lookahead(x, router, pool.handle(1), 2)
    assert pool.count("prefetches", 1) == len(chosen.unique()) and pool.count("accesses", 1) == 0
    pool.engine.drain()
    assert pool.ready(1) == set(chosen.flatten().tolist()) and pool.ready(0) == set()
    ops.lookahead(x.bfloat16(), router.half(), pool.handle(0), 1)
    pool.engine.drain()
    assert 1 <= len(pool.ready(0)) <= 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("router_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_lookahead_takes_every_dtype_and_layout(
    open_pool: OpenPool, dtype: torch.dtype, router_dtype: torch.dtype, transposed: bool
) -> None:
    pool = open_pool(SPEC, slots=8)
    router, x = torch.eye(8, SPEC.hidden, dtype=router_dtype), torch.zeros(2, SPEC.hidden, dtype=dtype)
    x[0, [2, 5]] = torch.tensor([3.0, 1.0], dtype=dtype)
    x[1, [5, 7]] = torch.tensor([2.0, 4.0], dtype=dtype)
    ops.lookahead(x, router.t().contiguous().t() if transposed else router, pool.handle(1), 2)
    pool.engine.drain()
    assert pool.ready(1) == {2, 5, 7}


def test_lookahead_of_an_expert_range_drops_experts_outside_it(tmp_path: Path, seed: int) -> None:
    experts = TinyExperts(SPEC, seed)
    arguments = experts.store(tmp_path / "store").source_arguments()
    own = slice(3, 6)
    arguments |= {name: arguments[name][:, own].copy() for name in ("extents", "checksums")}
    source = _C.Source(**arguments, first_expert=own.start, routed_experts=SPEC.experts)
    options = engine_options(SPEC, experts=3, slots=5)
    pool = TinyPool(experts, _C.Engine(**options, source=source))
    try:
        router, x = torch.eye(8, SPEC.hidden), torch.zeros(1, SPEC.hidden)
        x[0, [2, 3, 5, 6]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
        ops.lookahead(x, router, pool.handle(1), 4)
        pool.engine.drain()
        assert pool.ready(1) == {0, 2} and pool.count("prefetches_failed", 1) == 0
        with pytest.raises(ValueError, match=r"router_weight \[experts=8, hidden\]"):
            ops.lookahead(x, router[:3], pool.handle(1), 1)
    finally:
        pool.close()


SCORINGS = {
    "logits": lambda logits: logits,
    "sigmoid": lambda logits: logits.sigmoid(),
    "softmax": lambda logits: logits.softmax(-1),
    "sqrtsoftplus": lambda logits: (1 + logits.exp()).log().sqrt(),
}


@pytest.mark.parametrize("scoring", sorted(SCORINGS))
def test_a_routers_bias_is_added_to_its_scores(open_pool: OpenPool, scoring: str) -> None:
    pool = open_pool(SPEC, slots=12)
    x, router = torch.randn(1, SPEC.hidden), torch.randn(8, SPEC.hidden) / SPEC.hidden**0.5
    score = SCORINGS[scoring]
    # The bias reverses the order of the scores, except that one expert stays first.
    bias = -1.5 * score(x @ router.t())[0]
    bias[3] += 10
    chosen = (score(x @ router.t()) + bias).topk(3).indices[0].tolist()
    assert chosen[0] == 3 and not set(chosen[1:]) & set((x @ router.t()).topk(3).indices[0].tolist())
    ops.lookahead(x, router, pool.handle(0), 3, None, bias, scoring)
    routing_of_one = routing(SPEC, 1, 2)
    for op, between in ((ops.experts, ()), (ops.experts_deferred, (0, False))):
        ops.evict(pool.handle(1), _ids(*range(8)))
        op(x, *routing_of_one, pool.handle(0), *between, False, router, pool.handle(1), 3, bias, scoring)
        pool.engine.drain()
        assert pool.ready(1) == set(chosen)
    assert set(chosen) <= pool.ready(0)


def test_a_routers_bias_must_fit(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=12)
    x, router = torch.randn(1, SPEC.hidden), torch.randn(8, SPEC.hidden)
    for bias in (torch.zeros(7), torch.zeros(1, 8)):
        with pytest.raises(ValueError, match=r"the router's bias must be \[experts=8\]; got \["):
            ops.lookahead(x, router, pool.handle(), 2, None, bias)
    with pytest.raises(ValueError, match="scoring is 'relu'; allowed: logits, sigmoid, softmax, sqrtsoftplus"):
        ops.lookahead(x, router, pool.handle(), 2, None, torch.zeros(8), "relu")
    with pytest.raises(ValueError, match="scoring is 'relu'"):
        ops.experts(x, *routing(SPEC, 1, 2), pool.handle(0), False, router, pool.handle(1), 2, None, "relu")


def test_experts_looks_ahead_behind_its_own_reads_and_gives_the_same_bits(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=12)
    router = torch.randn(8, SPEC.hidden)
    x, (ids, weights) = torch.randn(2, SPEC.hidden), routing(SPEC, 2, 2)
    out = ops.experts(x, ids, weights, pool.handle(0), False, router, pool.handle(1), 2)
    chosen = (x @ router.t()).topk(2, dim=1).indices
    assert pool.count("prefetches", 1) == len(chosen.unique()) and pool.count("prefetches", 0) == 0
    pool.engine.drain()
    assert pool.ready(1) == set(chosen.flatten().tolist())
    assert torch.equal(out, ops.experts(x, ids, weights, pool.handle(0)))

    with pytest.raises(ValueError, match="next_router and next_handle belong together"):
        ops.experts(x, ids, weights, pool.handle(0), False, router)
    with pytest.raises(ValueError, match="top_k is 0; allowed: 1 to 8"):
        ops.experts(x, ids, weights, pool.handle(0), False, router, pool.handle(1), 0)
    pool.engine.validate()


def test_lookahead_reads_nothing_for_prompts_and_complete_pools(open_pool: OpenPool) -> None:
    router = torch.randn(8, SPEC.hidden)
    small, whole = open_pool(SPEC, slots=12), open_pool(SPEC)
    ops.lookahead(torch.randn(17, SPEC.hidden), router, small.handle(), 2)
    ops.lookahead(torch.randn(0, SPEC.hidden), router, small.handle(), 2)
    ops.lookahead(torch.randn(1, SPEC.hidden), router, whole.handle(), 2)
    assert small.count("prefetches") == whole.count("prefetches") == 0
    for top_k in (0, 9):
        with pytest.raises(ValueError, match=f"top_k is {top_k}; allowed: 1 to 8"):
            ops.lookahead(torch.randn(1, SPEC.hidden), router, small.handle(), top_k)
    for x, weight in ((torch.randn(1, 71), router), (torch.randn(72), router), (torch.randn(1, 72), router[:7])):
        with pytest.raises(ValueError, match=r"x must be \[tokens, hidden\] and router_weight \[experts=8, hidden\]"):
            ops.lookahead(x, weight, small.handle(), 2)


def test_evict_removes_only_named_resident_experts(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=6)
    for layer in (0, 1):
        ops.promote(pool.handle(layer), _ids(0, 1, 2))
    ops.evict(pool.handle(0), _ids(1, 2, 2, 7))
    assert pool.ready(0) == {0} and pool.ready(1) == {0, 1, 2}
    assert pool.count("evicted", 0) == 2 and pool.count("evicted", 1) == 0
    _use(pool, 1)
    assert pool.count("cold_misses", 0) == 4


def test_wrong_ids_change_nothing(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    for op in (ops.promote, ops.prefetch, ops.evict):
        with pytest.raises(ValueError, match=r"expert id 8 at position 1 is outside \[0, 8\)"):
            op(pool.handle(), _ids(1, 8))
        with pytest.raises(ValueError, match="expert id -1 at position 0"):
            op(pool.handle(), _ids(-1))
        with pytest.raises(ValueError, match="expert ids have dtype Float; allowed: an integer dtype"):
            op(pool.handle(), torch.tensor([1.0]))
    assert pool.ready() == set() and pool.count("accesses") == 0


def test_every_access_is_a_hit_or_a_miss(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    used = {0: 0, 1: 0}
    for step in range(30):
        layer = step % 2
        chosen = torch.randperm(8)[: 1 + step % 4].tolist()
        _use(pool, *chosen, layer=layer)
        used[layer] += len(chosen)
    for layer, uses in used.items():
        misses = pool.count("cold_misses", layer) + pool.count("inflight_misses", layer)
        assert pool.count("accesses", layer) == pool.count("hits", layer) + misses == uses
        assert pool.count("promoted", layer) == pool.count("cold_misses", layer)
        assert pool.count("failed", layer) == 0
    promoted = sum(pool.count("promoted", layer) for layer in used)
    evicted = sum(pool.count("evicted", layer) for layer in used)
    assert promoted - evicted == len(pool.ready(0)) + len(pool.ready(1)) == 5
    totals = {name: counts.sum() for name, counts in pool.engine.stats().items()}
    assert pool.engine.totals() == totals | {"resets": 0}
    pool.engine.reset_stats()
    assert pool.engine.totals() == dict.fromkeys(totals, 0) | {"resets": 1}
    assert len(pool.ready(0)) + len(pool.ready(1)) == 5


def test_a_pool_in_memory_has_everything_and_keeps_it(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, in_memory=True)
    assert pool.residency() == [READY] * 8
    ops.promote(pool.handle(), torch.arange(8))
    ops.prefetch(pool.handle(), torch.arange(8))
    assert pool.count("hits") == 8 and pool.count("bytes_read") == 0 and pool.count("prefetches") == 0
    with pytest.raises(ValueError, match="cannot evict: its records exist nowhere else"):
        ops.evict(pool.handle(), _ids(0))
    assert pool.residency() == [READY] * 8
    assert pool.engine.describe()["io"] == "memory"


def test_records_read_back_are_those_that_were_stored(open_pool: OpenPool) -> None:
    for pool in (open_pool(SPEC, slots=1), open_pool(SPEC, in_memory=True)):
        for layer in range(SPEC.layers):
            for expert in range(SPEC.experts):
                record = torch.from_numpy(pool.engine.read_record(layer, expert))
                assert torch.equal(record, pool.weights.records[layer][expert])
        for layer, expert in ((2, 0), (-1, 0), (0, 8), (0, -1)):
            with pytest.raises(ValueError, match=rf"layer {layer}, expert {expert} is outside \[0, 2\) x \[0, 8\)"):
                pool.engine.read_record(layer, expert)


def test_sum_records_reads_every_byte_and_pins_nothing_afterwards(open_pool: OpenPool) -> None:
    experts = [6, 0, 3]
    for pool in (open_pool(SPEC, slots=3), open_pool(SPEC, in_memory=True, threads=1)):
        words = [pool.weights.records[1][expert].numpy().view(np.uint64) for expert in experts]
        assert (
            _testing.sum_records(pool.engine, 1, experts)
            == sum(int(word) for record in words for word in record) % 2**64
        )
        assert pool.engine.pinned() == 0
        pool.engine.validate()


def test_sum_records_refuses_experts_that_it_cannot_pin_at_once(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=2)
    for experts, message in (
        ([1, 2, 3], "no slot is left"),
        ([1, 1], "must be distinct"),
        ([8], r"expert 8 of layer 0 is not in \[0, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            _testing.sum_records(pool.engine, 0, experts)
        assert pool.engine.pinned() == 0
