"""Statistics of one engine, which models may share: phases of ops, failed prefetches, contents of the dicts."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pools import OpenPool, Spec, routing

import torch_mesh
from torch_mesh import _C, _testing
from torch_mesh.statistics.counters import engine_stats

ops = torch.ops.torch_mesh

SPEC = Spec(layers=2)


def test_an_unfused_layers_phase_depends_on_tokens_and_not_on_rows(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    x = torch.randn(24, SPEC.hidden)
    offsets = torch.arange(SPEC.experts + 1).clamp(max=6) * 4
    for top_k, phase in ((2, "decode"), (1, "prefill")):
        for projection, features in ((0, SPEC.gate_up_features), (1, SPEC.hidden)):
            rows = x if projection == 0 else torch.randn(24, SPEC.intermediate)
            ops.grouped_linear(rows, offsets, pool.handle(), projection, features, top_k)
        assert pool.engine.detailed_stats()[phase]["forwards"][0] == 1
    with pytest.raises(ValueError, match="top_k is 0; allowed: 1 to"):
        ops.grouped_linear(x, offsets, pool.handle(), 0, SPEC.gate_up_features, 0)


def test_a_failed_prefetch_is_shown_and_fails_no_forward(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8, faults={"eio_always": 1.0, "seed": 3})
    ops.prefetch(pool.handle(), torch.tensor([1]))
    pool.engine.drain()
    stats = engine_stats([[pool.engine]])
    error = stats.prefetch_error
    assert isinstance(error, torch_mesh.ReadError)
    assert (error.layer, error.expert, error.errno) == (0, 1, 5)
    assert (stats.prefetches_failed, stats.prefetches_unused) == (1, 1)
    shown = json.loads(json.dumps(stats.to_dict()))["prefetch_error"]
    assert shown["type"] == "ReadError" and shown["file"] == error.file and shown["offset"] == error.offset
    assert f"last failed prefetch: {error}" in str(stats)
    pool.engine.reset_stats()
    assert engine_stats([[pool.engine]]).prefetch_error is None


@pytest.mark.parametrize(("every", "interruption"), [(5, 0), (1, 400_000_000)])
def test_a_fallback_pools_times_are_within_those_of_the_steps(
    every: int, interruption: int, open_pool: OpenPool, rng: np.random.Generator
) -> None:
    """Each step has an exact forward of each layer. In some it is within one of the fallback pool, which goes on
    afterwards, mostly waiting for its reads. Each pool counts the time between its own forwards as outside. The first
    one may be interrupted before its exact part."""
    snapshot = open_pool(SPEC, slots=8).engine.detailed_stats()
    exact, low = copy.deepcopy(snapshot), copy.deepcopy(snapshot)
    inside, stalled, outside, after = 0, 0, 0, 0
    for step in range(100):
        for layer in range(SPEC.layers):
            gap, computing, waiting = (int(n) for n in rng.integers(1_000_000, 3_000_000, 3))
            counts = exact["decode"]
            counts["forwards"][layer] += 1
            counts["expert_nanoseconds"][layer] += computing
            before = interruption if step == layer == 0 else 0
            counts["outside_nanoseconds"][layer] += gap + before + after
            outside, inside, after = outside + gap, inside + before + computing, 0
            if step % every == 0:
                after = waiting + computing // 8
                low["decode"]["expert_nanoseconds"][layer] += before + computing + after
                low["decode"]["stall_nanoseconds"][layer] += waiting
                inside, stalled = inside + after, stalled + waiting
    engines: Any = [SimpleNamespace(id=n, detailed_stats=lambda s=s: s) for n, s in enumerate((exact, low))]
    decode = engine_stats([engines]).decode
    times = decode.time_per_forward()
    assert times is not None and min(times.values()) >= 0
    assert times["waiting"] == pytest.approx(stalled / 1e8)
    # Fallbacks that are computed after the wait are not counted: an eighth of a fifth of the exact forwards' time.
    assert (inside - inside / 40) / 1e9 <= decode.expert_seconds <= inside / 1e9 * (1 + 1e-9)
    assert decode.expert_seconds + decode.outside_seconds == pytest.approx((inside + outside - after) / 1e9, abs=1e-5)


def test_the_dict_is_complete_and_rates_without_accesses_are_none(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8)
    ids, weights = routing(SPEC, 2, 2)
    ops.experts(torch.randn(2, SPEC.hidden), ids, weights, pool.handle(0))
    stats = engine_stats([[pool.engine]])
    table = json.loads(json.dumps(stats.to_dict()))
    assert set(table) == {field for field in vars(stats)} | {
        "hit_rate",
        "early_hit_rate",
        "other_hit_rate",
        "prefetch_accuracy",
    }
    assert table["decode"]["accesses"] == table["accesses"] == len(set(ids.flatten().tolist()))
    assert table["prefill"]["hit_rate"] is None and table["per_layer"][1]["hit_rate"] is None
    assert len(table["per_layer"][0]["experts"]["hits"]) == SPEC.experts
    assert "experts" not in stats.to_dict(experts=False)["per_layer"][0]
    rows = {line.split()[0]: line.split()[1:] for line in str(stats).splitlines()}
    assert set(rows["1"]) == {"-"}
    assert rows["0"][0] == "0.0%" and "prefill" not in rows


class _Dead:
    """A model in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    "ask", ["describe", "describe_size", "stats", "detailed_stats", "model_use", "forwards", "read_record"]
)
def test_garbage_collection_may_close_the_engine_during_a_call(open_pool: OpenPool, ask: str) -> None:
    """The collector may run whenever a Python object is created, and close() waits for an engine's last user."""
    arguments = {"forwards": (0,), "read_record": (0, 1)}.get(ask, ())
    failed: list[Exception] = []
    before = gc.get_threshold()
    for threshold in range(-3, 30):
        engine = open_pool(SPEC, slots=4, timeout=5.0).engine
        call = getattr(engine, ask)

        def close(engine: _C.Engine = engine) -> None:
            try:
                engine.close()
            except torch_mesh.MeshError as error:  # otherwise it would be printed and ignored
                failed.append(error)

        gc.collect()
        gc.disable()
        weakref.finalize(_Dead(), close)
        try:
            gc.set_threshold(gc.get_count()[0] + threshold)
            gc.enable()
            call(*arguments)
        except torch_mesh.PoolClosedError:
            pass  # the engine was closed before the call
        finally:
            gc.enable()
            gc.set_threshold(*before)
    assert not failed


def test_calls_other_than_forwards_are_not_counted_as_forwards(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    pool.engine.read_record(0, 3)
    _testing.sum_records(pool.engine, 0, [1, 2])
    assert (pool.count("accesses"), pool.count("promoted")) == (0, 3)
    x, (ids, weights) = torch.randn(3, SPEC.hidden, requires_grad=True), routing(SPEC, 3, 2)
    out = ops.experts(x, ids, weights, pool.handle())
    counted = pool.count("accesses"), pool.engine.forwards(0), pool.engine.model_use()[0][0]
    assert counted[:2] == (ids.unique().numel(), 1)
    out.sum().backward()
    offsets = torch.arange(SPEC.experts + 1).clamp(max=6)
    ops.grouped_linear_backward(torch.randn(6, SPEC.hidden), offsets, pool.handle(), 1, SPEC.intermediate)
    assert (pool.count("accesses"), pool.engine.forwards(0), pool.engine.model_use()[0][0]) == counted
