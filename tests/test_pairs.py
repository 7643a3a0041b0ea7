"""The choice of combinations for the quick tests."""

from __future__ import annotations

import itertools

from pairs import all_but_pairs_thorough, each_once_quick, pairwise


def test_pairs_hold_every_pair_in_few_combinations() -> None:
    axes = ("abcdefg", range(7), (1.0, 0.5), (True, False))
    chosen = pairwise(*axes)
    for first, second in itertools.combinations(range(4), 2):
        held = {(values[first], values[second]) for values in chosen}
        assert held == set(itertools.product(axes[first], axes[second]))
    assert len(chosen) < 60 and len(set(chosen)) == len(chosen)


def test_the_other_combinations_are_thorough() -> None:
    parameters = all_but_pairs_thorough("abc", "de", (1, 2))
    assert [each.values for each in parameters] == list(itertools.product("abc", "de", (1, 2)))
    assert [each.values for each in parameters if not each.marks] == sorted(pairwise("abc", "de", (1, 2)))
    quick = [each.values for each in each_once_quick("abc", "de") if not each.marks]
    assert quick == [("a", "d"), ("b", "e"), ("c", "d")]
