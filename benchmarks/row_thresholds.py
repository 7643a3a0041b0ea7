"""Claim: the numbers of rows from which a product takes another kernel (few rows, panels, the processor's tiles or
torch's brgemm) are well chosen: no number of rows takes more than 1.15 x the time of the faster kernel.

For each format with this processor's instruction set, or those of ``--isa``, on one thread, with a matrix larger than
any cache. The thresholds are constants of the kernel tables (csrc/kernels), since results must not depend on
measurements; change them there if this finds better ones.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import harness
from harness import Report, Row

from torch_mesh import _C, _testing

FORMATS = {
    "bf16": 0,
    "int8": 64,
    "int4": 64,
    "lut4": 64,
    "mxfp4": 32,
    "nvfp4": 16,
    "fp8": 128,
    "tcq2": 128,
    "tcq3": 128,
}
HIDDEN = 2048
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
SLACK = 1.15
NO_ROWS = 2**31 - 1  # the first number of rows of a way that is never taken, kNoRows in csrc/kernels/kernel_table.h


def chosen(ways: Mapping[str, int], rows: int) -> str:
    """The way that the table goes: of those that may begin, gemm or tiles before panels before the rest."""
    return next(way for way in ("tiles", "gemm", "panels", "few") if way in ways and rows >= ways[way])


def best_switch(seconds: Mapping[str, Sequence[float]], way: str) -> int | None:
    """The fewest rows from which on ``way`` loses to no other; None if it never does."""
    others = [min(times) for times in zip(*(seconds[name] for name in seconds if name != way), strict=True)]
    best = None
    for rows, mine, other in reversed(list(zip(ROWS, seconds[way], others, strict=True))):
        if mine > other:
            break
        best = rows
    return best


def measure(options: Any) -> Report:
    report = Report("From how many rows on a product goes another way")
    for isa in options.isa or [_C.features()["isa"]]:
        for weights, group_size in FORMATS.items():
            ways = _testing.product_ways(isa, weights)
            if len(ways) == 1:
                report.notes.append(f"{isa}, {weights}: one way on this machine")
                continue
            columns = (options.megabytes << 20) // (_C.linear_bytes(weights, group_size, HIDDEN, 64)) * 64
            runs: dict[str, list[list[float]]] = {way: [] for way in ways}
            for rows in ROWS:
                run = partial(_testing.product_seconds, isa, weights, group_size, HIDDEN, columns, rows)
                times = harness.interleave({way: partial(run, way) for way in ways}, options.rounds)
                for way in ways:
                    runs[way].append(times[way])
            seconds = {way: [statistics.median(times) for times in runs[way]] for way in ways}
            report.details[f"{isa}, {weights}"] = {"rows": ROWS, "seconds": seconds, "switches": ways}
            add_rows(report, f"{isa}, {weights}", ways, seconds)
    return report


def add_rows(report: Report, name: str, ways: Mapping[str, int], seconds: Mapping[str, Sequence[float]]) -> None:
    taken = [seconds[chosen(ways, rows)][index] for index, rows in enumerate(ROWS)]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    worst = max(range(len(ROWS)), key=lambda index: taken[index] / fastest[index])
    switches = [
        (
            f"{way} {'never' if ways[way] == NO_ROWS else f'from {ways[way]}'} (measured: "
            f"{best_switch(seconds, way) or 'never'})"
        )
        for way in ways
        if way != "few"
    ]
    report.add(
        Row(
            f"{name}: {', '.join(switches)}; worst at {ROWS[worst]} rows",
            1e3 * taken[worst],
            "ms",
            "the faster way",
            1e3 * fastest[worst],
            at_most=SLACK,
        )
    )


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--isa", nargs="*", default=[], help="instruction sets; the one that this processor gets")
    arguments.add_argument("--megabytes", type=int, default=96, help="of weights, more than the caches hold")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
