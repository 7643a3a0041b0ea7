"""Claim: verification reads weights once: 8 rows of the same experts take at most 1.5 x the time of one row, 22 rows at
most 2.2 x, in each format, on one thread.

Everything is resident. The op takes the experts in turn, top-8 of 128, so that none is in a cache; calls of one row and
of more take turns, half a layer apart. All rows of a call choose the same experts; drafts of other texts choose more,
and read more bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from decode_op import GROUP_SIZE, LAG, experts_in_turn
from harness import Report
from op_layer import BY_WEIGHTS, HIDDEN, TOP_K, ResidentLayer, random_expert

from torch_mesh._C import features

FORMATS = {"bf16": GROUP_SIZE, "int8": GROUP_SIZE, "int4": GROUP_SIZE, "lut4": GROUP_SIZE} | {
    weights: group for weights, group, *_ in BY_WEIGHTS
}
MOST = {4: 1.5, 8: 1.5, 16: 2.2, 22: 2.2}  # times one row's time


def call_time(layer: ResidentLayer, rows: int, turns: Iterator[list[int]]) -> Callable[[], float]:
    """What takes the next run of experts and gives milliseconds."""
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    topk_weights = torch.full((rows, TOP_K), 1 / TOP_K)

    def call() -> float:
        ids = torch.tensor([next(turns)]).expand(rows, TOP_K).contiguous()
        begin = time.perf_counter()
        layer(x, ids, topk_weights)
        return (time.perf_counter() - begin) * 1e3

    return call


def measure(options: Any) -> Report:
    generator = torch.Generator().manual_seed(options.seed)
    expert = random_expert(generator)
    report = Report(f"Rows of the same {TOP_K} experts, everything resident, one thread, against one row")
    for weights in options.weights:
        layer = ResidentLayer(weights, FORMATS[weights], 1, [expert])
        for rows, most in MOST.items():
            calls = {
                "one": call_time(layer, 1, experts_in_turn(0)),
                "rows": call_time(layer, rows, experts_in_turn(LAG)),
            }
            harness.interleave(calls, options.pairs // 10)
            times = harness.interleave(calls, options.pairs)
            name = f"{weights}, {rows} rows"
            report.add(harness.paired_row(name, times["rows"], "ms", "one row", times["one"], at_most=most))
            report.details[name] = times
    report.notes.append(
        f"medians of {options.pairs} interleaved pairs; seed {options.seed}, kernels {features()['isa']}"
    )
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
