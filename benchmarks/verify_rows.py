"""Claim: verification reads weights once. 8 rows of the same experts take at most 1.5 x the time of one row, 22 rows at
most 2.2 x, in each format, on one thread.

Everything is resident. The op goes through the experts in groups, top-8 of 128, so that none is in a cache. Calls of
one row and of more alternate, half a layer apart. All rows of a call have the same experts. Drafts of real text have
more experts, and read more bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from decode_op import GROUP_SIZE, LAG, expert_groups
from harness import Report
from op_layer import BY_WEIGHTS, HIDDEN, TOP_K, ResidentLayer, random_expert

from torch_mesh._C import features

FORMATS = {"bf16": GROUP_SIZE, "int8": GROUP_SIZE, "int4": GROUP_SIZE, "lut4": GROUP_SIZE} | {
    weights: group for weights, group, *_ in BY_WEIGHTS
}
MAX_RATIOS = {4: 1.5, 8: 1.5, 16: 2.2, 22: 2.2}  # relative to one row's time


def call_time(layer: ResidentLayer, rows: int, groups: Iterator[list[int]]) -> Callable[[], float]:
    """Return a function that computes the next group of experts and returns milliseconds."""
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    topk_weights = torch.full((rows, TOP_K), 1 / TOP_K)

    def call() -> float:
        ids = torch.tensor([next(groups)]).expand(rows, TOP_K).contiguous()
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
        for rows, max_ratio in MAX_RATIOS.items():
            calls = {
                "one": call_time(layer, 1, expert_groups(0)),
                "rows": call_time(layer, rows, expert_groups(LAG)),
            }
            harness.interleave(calls, options.pairs // 10)
            times = harness.interleave(calls, options.pairs)
            name = f"{weights}, {rows} rows"
            report.add(harness.paired_row(name, times["rows"], "ms", "one row", times["one"], at_most=max_ratio))
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
