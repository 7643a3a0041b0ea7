"""Claim: one row through a layer's experts takes little longer than reading their bytes: 0.9 of a plain read's speed in
bf16 and int8 and 0.85 in int4 on one thread, 0.8 on all. Records with a checkpoint's codes are as fast as similar
formats: mxfp4 and nvfp4 reach 0.95 of the bytes per second of lut4, fp8 0.85 of those of bf16. bf12 reaches 1.1 of the
weights per second of bf16, tcq2 and tcq3 0.8 of those of int4.

Everything is resident. The op goes through the experts in groups, top-8 of 128, so that none is in a cache. The plain
read sums the same records in the same pages with the same threads. Op and read alternate, half a layer apart, so that
neither finds the other's records in a cache.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from harness import Report, Row
from op_layer import BY_WEIGHTS, CODES, EXPERTS, HIDDEN, TOP_K, WEIGHTS_PER_EXPERT, ResidentLayer, random_expert

from torch_mesh._C import features

GROUP_SIZE = 64
ONE_THREAD = {"bf16": 0.9, "int8": 0.9, "int4": 0.85}
ALL_THREADS = 0.8

# The plain read and the op use a record this many calls apart, so that it is in no cache. Both use the same pages,
# since some memory is faster than other.
LAG = EXPERTS // TOP_K // 2


def expert_groups(start: int) -> Iterator[list[int]]:
    """Yield groups of k experts in an endless cycle. Each round begins one group later than the last. Pairs alternate
    in their order, so every group occurs in both orders."""
    for index in itertools.count(start):
        first = (index + index // (EXPERTS // TOP_K)) * TOP_K
        yield [expert % EXPERTS for expert in range(first, first + TOP_K)]


def op_speed(layer: ResidentLayer, groups: Iterator[list[int]]) -> Callable[[], float]:
    """Return a function that computes the next group of experts and returns GB/s."""
    x = torch.randn(1, HIDDEN).to(torch.bfloat16)
    topk_weights = torch.full((1, TOP_K), 1 / TOP_K)

    def op() -> float:
        ids = torch.tensor([next(groups)])
        begin = time.perf_counter()
        layer(x, ids, topk_weights)
        return TOP_K * layer.record_bytes / 1e9 / (time.perf_counter() - begin)

    return op


def bytes_per_second(layer: ResidentLayer, pairs: int) -> dict[str, list[float]]:
    """GB/s of the op and of the plain read. Each pair reads the same records."""
    gigabytes = TOP_K * layer.record_bytes / 1e9
    read_groups = expert_groups(0)

    def read() -> float:
        experts = next(read_groups)
        begin = time.perf_counter()
        layer.read(experts)
        return gigabytes / (time.perf_counter() - begin)

    speeds = harness.interleave({"op": op_speed(layer, expert_groups(LAG)), "read": read}, pairs + LAG)
    return {"op": speeds["op"][:pairs], "read": speeds["read"][LAG:]}


def op_speeds(layers: dict[str, ResidentLayer], pairs: int) -> dict[str, list[float]]:
    """GB/s of layers that run alternately."""
    return harness.interleave({name: op_speed(layer, expert_groups(0)) for name, layer in layers.items()}, pairs)


def compare_formats(
    own: tuple[str, int],
    reference: tuple[str, int],
    at_least: float,
    threads: int,
    expert: tuple[torch.Tensor, torch.Tensor],
    pairs: int,
    details: dict[str, Any],
    in_weights: bool = False,
) -> Row:
    """Compare a (format, group size) with a reference, in bytes or weights per second."""
    layers = {"own": ResidentLayer(*own, threads, [expert]), "like": ResidentLayer(*reference, threads, [expert])}
    op_speeds(layers, pairs // 10)
    speeds = op_speeds(layers, pairs)
    if in_weights:
        weights = {name: WEIGHTS_PER_EXPERT / layer.record_bytes for name, layer in layers.items()}
        speeds = {name: [speed * weights[name] for speed in each] for name, each in speeds.items()}
    name = f"{own[0]} (group {own[1]}), {threads} thread" + "s" * (threads > 1)
    details[f"{own[0]} {own[1]}, {threads}"] = speeds
    unit = "G weights/s" if in_weights else "GB/s"
    return harness.paired_row(name, speeds["own"], unit, reference[0], speeds["like"], at_least=at_least)


def measure(options: Any) -> Report:
    generator = torch.Generator().manual_seed(options.seed)
    expert = random_expert(generator)
    report = Report(f"One row through top-{TOP_K} of {EXPERTS} experts, everything resident, against a plain read")
    all_threads = harness.available_cpus()
    for threads in sorted({1, all_threads}):
        for weights, one_thread in ONE_THREAD.items():
            layer = ResidentLayer(weights, GROUP_SIZE, threads, [expert])
            bytes_per_second(layer, options.pairs // 10)
            speeds = bytes_per_second(layer, options.pairs)
            report.add(
                harness.paired_row(
                    f"{weights}, {threads} thread" + "s" * (threads > 1),
                    speeds["op"],
                    "GB/s",
                    "plain read",
                    speeds["read"],
                    at_least=one_thread if threads == 1 else ALL_THREADS,
                )
            )
            report.details[f"{weights}, {threads}"] = speeds
        for weights, group_size, reference_format, reference_group, at_least in CODES:
            own, reference = (weights, group_size), (reference_format, reference_group)
            report.add(compare_formats(own, reference, at_least, threads, expert, options.pairs, report.details))
        for weights, group_size, reference_format, reference_group, at_least, _ in BY_WEIGHTS:
            own, reference = (weights, group_size), (reference_format, reference_group)
            report.add(
                compare_formats(
                    own, reference, at_least, threads, expert, options.pairs, report.details, in_weights=True
                )
            )
    report.notes += [
        f"medians of {options.pairs} interleaved pairs; bytes are those of the packed records, scales included",
        f"seed {options.seed}, kernels {features()['isa']}",
    ]
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--pairs", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
