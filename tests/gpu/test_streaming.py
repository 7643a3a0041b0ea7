"""The choice of the experts of a prompt that are copied to the device."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
from torch_mesh.ops.streaming import Costs, choose_streamed

SECONDS = st.floats(0, 10, allow_nan=False)


def _time(rows: list[int], streamed: set[int], costs: Costs) -> float:
    host = sum(
        costs.expert + count * costs.row for expert, count in enumerate(rows) if count and expert not in streamed
    )
    return max(len(streamed) * costs.copy, host)


@hypothesis.given(rows=st.lists(st.integers(0, 50), max_size=7), seconds=st.tuples(SECONDS, SECONDS, SECONDS))
def test_the_chosen_experts_give_the_shortest_time(rows: list[int], seconds: tuple[float, float, float]) -> None:
    costs = Costs(*seconds)
    chosen = choose_streamed(rows, *costs)
    routed = [expert for expert, count in enumerate(rows) if count]
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(routed)
    every = itertools.chain.from_iterable(itertools.combinations(routed, n) for n in range(len(routed) + 1))
    best = min(_time(rows, set(streamed), costs) for streamed in every)
    assert _time(rows, set(chosen), costs) <= best + 1e-9
    assert [rows[expert] for expert in chosen] == sorted((rows[expert] for expert in chosen), reverse=True)
    assert choose_streamed(rows, *costs) == chosen


def test_the_choice_balances_copies_and_the_cpu() -> None:
    rows = [5, 0, 40, 10, 40, 1]
    assert choose_streamed(rows, 1e9, 1, 1) == [], "a copy that takes longer than all the rest"
    assert choose_streamed(rows, 0, 1, 1) == [2, 4, 3, 0, 5], "copies that cost nothing"
    assert choose_streamed(rows, 0, 0, 0) == [], "nor does the CPU"
    assert choose_streamed(rows, 10, 1, 0) == [2, 4], "20 beside 16; a third copy would take 30"
    assert choose_streamed([], 1, 1, 1) == []
