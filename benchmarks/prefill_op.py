"""Claim: 512 tokens through a layer's experts reach 0.85 of torch's rate for a square product in bf16, 1.15 in int8
with groups of 64, 1.35 with groups of 128, and 1.0 in int4. Records with a checkpoint's codes are as fast as similar
formats: mxfp4 and nvfp4 reach 0.95 of the rate of lut4, fp8 0.85 of that of bf16, bf12 0.95 of it, tcq2 and tcq3 0.9 of
that of int4.

Everything is resident, and every token has 8 random experts of 128. The square products have as many operations as the
layer. They are in bf16, or in fp32 if the processor has no bf16 arithmetic, which torch emulates at a hundredth of the
rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
from harness import Report
from op_layer import (
    BY_WEIGHTS,
    CODES,
    EXPERTS,
    HIDDEN,
    TOP_K,
    WEIGHTS_PER_EXPERT,
    ResidentLayer,
    random_expert,
    random_routing,
)

from torch_mesh.hf.torch_compat import multiplies_bf16


@dataclass(frozen=True)
class Format:
    weights: str
    group_size: int
    at_least: float  # of torch's square product

    @property
    def name(self) -> str:
        return self.weights if self.weights == "bf16" else f"{self.weights}, group {self.group_size}"


FORMATS = (Format("bf16", 64, 0.85), Format("int8", 64, 1.15), Format("int8", 128, 1.35), Format("int4", 64, 1.0))


def rate(operations: float, run: Callable[[], object]) -> float:
    """GFLOP/s of one run."""
    begin = time.perf_counter()
    run()
    return operations / 1e9 / (time.perf_counter() - begin)


def square_product(operations: float, dtype: torch.dtype) -> Callable[[], float]:
    """Return a function that measures the rate of a square product with about this many operations."""
    side = round((operations / 2) ** (1 / 3) / 64) * 64
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    return partial(rate, 2 * side**3, partial(torch.mm, left, right))


def measure(options: Any) -> Report:
    generator = torch.Generator().manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    x = torch.randn(options.tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    routing = random_routing(options.tokens, generator)
    operations = 2.0 * options.tokens * TOP_K * WEIGHTS_PER_EXPERT
    expert = random_expert(generator)

    def layer_rate(weights: str, group_size: int) -> Callable[[], float]:
        layer = ResidentLayer(weights, group_size, options.threads, [expert])
        return partial(rate, operations, partial(layer, x, *routing))

    contenders = {form.name: layer_rate(form.weights, form.group_size) for form in FORMATS}
    native = torch.bfloat16 if multiplies_bf16() else torch.float32
    contenders["torch"] = square_product(operations, native)
    harness.interleave(contenders, 1)
    rates = harness.interleave(contenders, options.rounds)
    report = Report(f"{options.tokens} tokens through top-{TOP_K} of {EXPERTS} experts, against torch's square product")
    for form in FORMATS:
        product = "fp32 product" if native == torch.float32 else "bf16 product"
        row = partial(harness.paired_row, form.name, rates[form.name], "GFLOP/s")
        report.add(row(product, rates["torch"], at_least=form.at_least))
    report.details["rates"] = rates
    by_weights = [(*row[:4], row[5]) for row in BY_WEIGHTS]
    for weights, group_size, reference_format, reference_group, at_least in (*CODES, *by_weights):
        pair = {"codes": layer_rate(weights, group_size), "like": layer_rate(reference_format, reference_group)}
        harness.interleave(pair, 1)
        rates = harness.interleave(pair, options.rounds)
        name = f"{weights}, group {group_size}"
        report.add(
            harness.paired_row(name, rates["codes"], "GFLOP/s", reference_format, rates["like"], at_least=at_least)
        )
        report.details[name] = rates
    report.notes.append(
        f"medians of {options.rounds} interleaved rounds, {options.threads} threads, seed {options.seed}"
    )
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=512)
    harness.add_rounds(arguments, 9)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
