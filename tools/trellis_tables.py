#!/usr/bin/env python3
"""Makes tables for csrc/store/trellis.h, and says what error those that stand there have.

    python tools/trellis_tables.py tcq2 --seeds 24

Lloyd's algorithm: Viterbi's algorithm finds the codes of Gaussian weights, least squares the tables for these codes, in
turn. Sums of both tables are then brought into 0 ... 63 and rounded. It ends in a local minimum, so many seeds are
tried; each takes minutes. What it prints is the root mean square of what is left, of weights whose own is 1, without
the rounding of scales.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HEADER = Path(__file__).parent.parent / "csrc/store/trellis.h"
ZERO, MOST = 32, 63


def _pair(codes: Tensor) -> Tensor:
    return (codes & 3) << 2 | (codes >> 2 & 3)


@dataclass(frozen=True)
class Trellis:
    """``next`` [states, codes]: the state that a code leads to; ``first`` and ``second``: the indices into the two
    tables."""

    next: Tensor
    first: Tensor
    second: Tensor


def tcq2() -> Trellis:
    state, code = torch.meshgrid(torch.arange(1024), torch.arange(4), indexing="ij")
    window = state << 2 | code
    return Trellis(window & 1023, _pair(window) ^ _pair(window >> 8), _pair(window >> 4))


def tcq3() -> Trellis:
    state, code = torch.meshgrid(torch.arange(512), torch.arange(8), indexing="ij")
    upper, lowest = state >> 3 << 2 | code >> 1, (state & 7) << 1 | (code & 1)
    turned = (lowest & 1) << 3 | (lowest & 2) << 1 | (lowest & 4) >> 1 | lowest >> 3
    return Trellis((upper & 63) << 3 | (lowest & 7), _pair(upper), turned ^ _pair(upper >> 4))


def codes_of(trellis: Trellis, weights: Tensor, values: Tensor) -> tuple[Tensor, float]:
    """The indices [steps, streams] into ``values`` [states * codes] of the sequence nearest to ``weights`` of that
    shape, and the mean squared error."""
    states, codes = trellis.next.shape
    order = trellis.next.flatten().argsort(stable=True).view(states, codes)  # by the state that is reached
    source = order // codes
    cost = torch.zeros(states, weights.shape[1])
    chosen = []
    for row in weights:
        apart = (values[order.flatten(), None] - row).square_().view(states, codes, -1)
        cost, which = (cost[source.flatten()].view_as(apart) + apart).min(1)
        cost -= cost.min(0).values
        chosen.append(which)
    state = cost.argmin(0)
    places = torch.empty(weights.shape, dtype=torch.int64)
    for step in range(len(weights) - 1, -1, -1):
        places[step] = order[state, chosen[step].gather(0, state[None])[0]]
        state = places[step] // codes
    return places, (values[places] - weights).square().mean().item()


def fit(trellis: Trellis, weights: Tensor, places: Tensor, tables: list[Tensor]) -> None:
    """Fit the tables with the least squared error for these codes, alternately and in place."""
    target, which = weights.flatten(), [index.flatten()[places.flatten()] for index in (trellis.first, trellis.second)]
    for _ in range(30):
        for own, other in ((0, 1), (1, 0)):
            rest = target - tables[other][which[other]]
            sums = torch.zeros(16).index_add_(0, which[own], rest)
            counts = torch.bincount(which[own], minlength=16)
            tables[own] = torch.where(counts > 0, sums / counts.clamp(min=1), tables[own])


def rounded(tables: list[Tensor]) -> tuple[list[Tensor], float] | None:
    """Integer tables with sums in 0 ... 63 and zero at ``ZERO``, and the integers per unit of weight; None if they do
    not fit."""
    first, second = tables
    gain = (MOST - 1) / float(first.max() - first.min() + second.max() - second.min())
    shift = -second.min() * gain
    whole = [(first * gain + ZERO - shift).round(), (second * gain + shift).round()]
    fits = all(table.min() >= 0 for table in whole) and sum(float(table.max()) for table in whole) <= MOST
    return (whole, gain) if fits else None


def error(trellis: Trellis, tables: list[Tensor], gain: float, generator: torch.Generator) -> float:
    first, second = tables
    values = (first[trellis.first] + second[trellis.second] - ZERO).flatten() / gain
    return float(codes_of(trellis, torch.randn(256, 128, generator=generator), values)[1] ** 0.5)


def in_header(name: str) -> list[Tensor]:
    body = HEADER.read_text().partition(f"struct {name.capitalize()}")[2]
    found = re.findall(r"k(?:First|Second)\[16\] = \{([^}]*)\}", body)[:2]
    return [torch.tensor([float(level) for level in table.split(",")]) for table in found]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("format", choices=("tcq2", "tcq3"))
    arguments.add_argument("--seeds", type=int, default=0, help="how many tables are made (default: none)")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    trellis = {"tcq2": tcq2, "tcq3": tcq3}[options.format]()
    generator = torch.Generator().manual_seed(0)
    there = in_header(options.format)
    least = min(error(trellis, there, gain, generator.manual_seed(0)) for gain in (10.6, 10.8, 11.0, 11.2))
    print(f"in the header: {least:.4f}")
    for seed in range(options.seeds):
        generator.manual_seed(seed + 1)
        weights = torch.randn(128, 128, generator=generator)
        tables = [torch.randn(16, generator=generator) / 2**0.5 for _ in range(2)]
        for _ in range(options.rounds):
            values = (tables[0][trellis.first] + tables[1][trellis.second]).flatten()
            fit(trellis, weights, codes_of(trellis, weights, values)[0], tables)
        result = rounded(tables)
        if result is None:
            print(f"seed {seed}: no sums in 0 ... {MOST}")
            continue
        whole, gain = result
        print(
            f"seed {seed}: {error(trellis, whole, gain, generator.manual_seed(0)):.4f}, {gain:.2f} levels for a "
            "weight of 1"
        )
        for table in whole:
            print("   ", ", ".join(f"{level:.0f}" for level in table))


if __name__ == "__main__":
    main()
