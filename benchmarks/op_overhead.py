"""Claim: with tiny shapes and everything resident, a call of the experts op takes under 15 µs in eager mode.

One row, top-2 of 8 experts, hidden 64, intermediate 64: the arithmetic takes under a microsecond, so the time is the
op's overhead. torch's cheapest op in the same rounds shows the overhead of any call from Python.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import harness
import torch
from harness import Report, Row

import torch_mesh

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 64, 8, 2
LIMIT = 15.0  # microseconds


def experts_call(weights: str, threads: int) -> Callable[[], torch.Tensor]:
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    layer = torch_mesh.Experts(gate_up, down, weights=weights, threads=threads, top_k=TOP_K)
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    ids, routing = torch.tensor([[1, 5]]), torch.tensor([[0.5, 0.5]])
    op, handle = torch.ops.torch_mesh.experts, layer.experts._mesh_handle

    def call(_keep: torch.nn.Module = layer) -> torch.Tensor:
        return op(x, ids, routing, handle)

    return call


def microseconds(call: Callable[[], torch.Tensor], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=41)
    arguments.add_argument("--calls", type=int, default=500, help="calls in a round")
    options = arguments.parse_args()
    torch.manual_seed(0)
    report = Report("Overhead of a call of the experts op")
    row = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    for threads in (1, harness.available_cpus()):
        torch.set_num_threads(threads)
        calls = {weights: experts_call(weights, threads) for weights in ("bf16", "int8", "int4")}
        contenders = {**calls, "relu": lambda: torch.ops.aten.relu(row)}
        with torch.no_grad():
            times = harness.interleave(
                {name: lambda call=call: microseconds(call, options.calls) for name, call in contenders.items()},
                options.rounds,
            )
        report.details[f"threads={threads}"] = times
        relu = statistics.median(times["relu"])
        for weights in calls:
            median = statistics.median(times[weights])
            name = f"{weights}, threads={threads}"
            report.add(Row(name, median, "µs", "limit", LIMIT, at_most=1.0))
            report.add(Row(f"{name}, beside torch.relu of the row", median, "µs", "relu", relu))
    report.notes.append(f"medians of {options.rounds} interleaved rounds of {options.calls} calls, no_grad")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
