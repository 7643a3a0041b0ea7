"""Few combinations of parameters for the quick tests, and all of them for the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations that hold each pair of values of two axes at least once, in a deterministic order.

    The algorithm is greedy: it always takes the combination with the most pairs that are still missing.
    """
    products = list(itertools.product(*(range(len(axis)) for axis in axes)))
    places = list(itertools.combinations(range(len(axes)), 2))
    missing = {(a, b, product[a], product[b]) for product in products for a, b in places}
    chosen: list[tuple[int, ...]] = []
    while missing:
        held = [{(a, b, product[a], product[b]) for a, b in places} & missing for product in products]
        best = max(range(len(products)), key=lambda index: len(held[index]))
        chosen.append(products[best])
        missing -= held[best]
    return [tuple(axis[index] for axis, index in zip(axes, product, strict=True)) for product in chosen]


def all_but_pairs_thorough(*axes: Sequence[Any]) -> list[Any]:
    """All combinations as parameters of a test; those of the quick tests hold each pair of values."""
    quick = pairwise(*axes)
    return [
        pytest.param(*values, marks=[] if values in quick else [pytest.mark.thorough])
        for values in itertools.product(*axes)
    ]


def first_quick(*values: Any) -> list[Any]:
    """All values of one parameter; the quick tests have the first."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.thorough) for value in values[1:])]


def every_other_quick(values: Iterable[Any], first: int) -> list[Any]:
    """All values of one parameter; the quick tests have every other one from ``first`` on, which is 0 or 1."""
    return [
        pytest.param(value, marks=[] if at % 2 == first else [pytest.mark.thorough]) for at, value in enumerate(values)
    ]


def each_once_quick(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All combinations of two axes; those of the quick tests hold each value of ``first`` once, with the values of
    ``second`` in turn."""
    return [
        pytest.param(one, other, marks=[] if index % len(second) == place else [pytest.mark.thorough])
        for index, one in enumerate(first)
        for place, other in enumerate(second)
    ]
