"""Claim: the numbers of rows from which a product uses another kernel (few rows, panels, the processor's tiles)
are well chosen: no number of rows takes more than 1.15 x the time of the faster kernel.

Each format is measured with this processor's instruction set, or those of ``--isa``, on one thread, with a matrix
larger than any cache. The thresholds are constants of the kernel tables (csrc/kernels), since results must not depend
on measurements. If this benchmark finds better ones, change them there.
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


def selected_kernel(thresholds: Mapping[str, int], rows: int) -> str:
    """Return the kernel that the table selects. Of those whose threshold is reached, tiles come before panels, and
    panels before few."""
    return next(kernel for kernel in ("tiles", "panels", "few") if kernel in thresholds and rows >= thresholds[kernel])


def measured_threshold(seconds: Mapping[str, Sequence[float]], kernel: str) -> int | None:
    """Return the smallest number of rows from which ``kernel`` is the fastest; None if there is none."""
    others = [min(times) for times in zip(*(seconds[name] for name in seconds if name != kernel), strict=True)]
    best = None
    for rows, own_time, other_time in reversed(list(zip(ROWS, seconds[kernel], others, strict=True))):
        if own_time > other_time:
            break
        best = rows
    return best


def measure(options: Any) -> Report:
    report = Report("Numbers of rows from which a product uses another kernel")
    for isa in options.isa or [_C.features()["isa"]]:
        for weights, group_size in FORMATS.items():
            thresholds = _testing.product_ways(isa, weights)
            if len(thresholds) == 1:
                report.notes.append(f"{isa}, {weights}: one kernel on this machine")
                continue
            columns = (options.megabytes << 20) // (_C.linear_bytes(weights, group_size, HIDDEN, 64)) * 64
            runs: dict[str, list[list[float]]] = {kernel: [] for kernel in thresholds}
            for rows in ROWS:
                run = partial(_testing.product_seconds, isa, weights, group_size, HIDDEN, columns, rows)
                times = harness.interleave({kernel: partial(run, kernel) for kernel in thresholds}, options.rounds)
                for kernel in thresholds:
                    runs[kernel].append(times[kernel])
            seconds = {kernel: [statistics.median(times) for times in runs[kernel]] for kernel in thresholds}
            report.details[f"{isa}, {weights}"] = {"rows": ROWS, "seconds": seconds, "switches": thresholds}
            add_rows(report, f"{isa}, {weights}", thresholds, seconds)
    return report


def add_rows(report: Report, name: str, thresholds: Mapping[str, int], seconds: Mapping[str, Sequence[float]]) -> None:
    taken = [seconds[selected_kernel(thresholds, rows)][index] for index, rows in enumerate(ROWS)]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    worst = max(range(len(ROWS)), key=lambda index: taken[index] / fastest[index])
    descriptions = [
        (f"{kernel} from {thresholds[kernel]} (measured: {measured_threshold(seconds, kernel) or 'never'})")
        for kernel in thresholds
        if kernel != "few"
    ]
    report.add(
        Row(
            f"{name}: {', '.join(descriptions)}; worst at {ROWS[worst]} rows",
            1e3 * taken[worst],
            "ms",
            "the faster way",
            1e3 * fastest[worst],
            at_most=SLACK,
        )
    )


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--isa", nargs="*", default=[], help="instruction sets (default: this processor's)")
    arguments.add_argument("--megabytes", type=int, default=96, help="megabytes of weights, more than the caches have")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
