"""Synthetic routing: follows its parameters, is reproducible, and resembles the real trace it is fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from torch_mesh.routing.simulation import simulate
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.routing.traces import Trace


def _overlap(trace: Trace) -> float:
    chosen = np.zeros((trace.tokens, trace.layers, trace.experts), bool)
    np.put_along_axis(chosen, trace.ids, True, 2)
    return float((chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum())


@pytest.mark.parametrize(("experts", "top_k", "overlap"), [(128, 8, 0.39), (64, 6, 0.2), (32, 4, 0.5)])
def test_tokens_overlap_as_requested(seed: int, experts: int, top_k: int, overlap: float) -> None:
    trace = synthetic_trace(
        layers=6, experts=experts, top_k=top_k, prompts=12, prompt_tokens=200, overlap=overlap, seed=seed
    )
    assert (trace.layers, trace.experts, trace.top_k) == (6, experts, top_k)
    assert all(len(set(chosen)) == top_k for chosen in trace.ids[:, 0].tolist())
    assert _overlap(trace) == pytest.approx(overlap, abs=0.03)


def test_a_seed_gives_the_same_trace(seed: int) -> None:
    first, again, other = (
        synthetic_trace(layers=2, experts=16, top_k=2, prompts=3, prompt_tokens=30, seed=draw)
        for draw in (seed, seed, seed + 1)
    )
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.offsets, again.offsets)
    assert first.ids.shape != other.ids.shape or not np.array_equal(first.ids, other.ids)


@pytest.mark.parametrize("wrong", [{"overlap": 0.01}, {"overlap": 0.99}, {"top_k": 65}, {"layers": 0}])
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        synthetic_trace(**wrong)


# Hit rates of the recorded trace of DeepSeek-V2-Lite at 10, 25 and 50 %.
REAL = {"lru": (0.258, 0.452, 0.714), "lfu": (0.250, 0.480, 0.738), "belady": (0.487, 0.719, 0.891)}


@pytest.mark.slow
def test_curves_are_those_of_the_real_trace() -> None:
    trace = synthetic_trace()
    for policy, expected in REAL.items():
        found = tuple(simulate(trace, policy, resident).hit_rate for resident in (0.1, 0.25, 0.5))
        assert found == pytest.approx(expected, abs=0.02), policy
