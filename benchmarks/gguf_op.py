"""Claim: records of GGUF's types compute nearly as fast as int4: one row reads 0.9 of its bytes per second in Q4_K and
Q6_K and 0.7 in the other types, and 512 rows take 0.8 of its rows per second.

As decode_op.py and prefill_op.py: everything is resident and no expert is in a cache, and pairs run alternately. Codes
are random. ``TORCH_MESH_ISA`` chooses the kernels.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import harness
import torch
from decode_op import op_speeds
from harness import Report
from op_layer import HIDDEN, TOP_K, WEIGHTS_PER_EXPERT, ResidentLayer, random_expert, random_routing
from prefill_op import rate

from torch_mesh._C import features
from torch_mesh.formats import FORMATS

REFERENCE = ("int4", 64)
ONE_ROW = {"q4_k": 0.9, "q6_k": 0.9}
OTHERS, ROWS = 0.7, 0.8
TYPES = [name for name, each in FORMATS.items() if each.gguf]


def measure(options: Any) -> Report:
    generator = torch.Generator().manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    expert = random_expert(generator)
    x = torch.randn(options.tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    routing = random_routing(options.tokens, generator)
    operations = 2.0 * options.tokens * TOP_K * WEIGHTS_PER_EXPERT
    reference = ResidentLayer(*REFERENCE, options.threads, [expert])
    report = Report(f"Records of GGUF's types beside {REFERENCE[0]}, {options.threads} threads, everything resident")
    for weights in options.types:
        own = ResidentLayer(weights, FORMATS[weights].group_sizes[0], options.threads, [expert])
        layers = {"own": own, "like": reference}
        op_speeds(layers, options.pairs // 10)
        speeds = op_speeds(layers, options.pairs)
        row = partial(harness.paired_row, f"{weights}, one row", speeds["own"], "GB/s", REFERENCE[0], speeds["like"])
        report.add(row(at_least=ONE_ROW.get(weights, OTHERS)))
        runs = {name: partial(rate, operations, partial(layer, x, *routing)) for name, layer in layers.items()}
        harness.interleave(runs, 1)
        rates = harness.interleave(runs, options.rounds)
        name = f"{weights}, {options.tokens} rows"
        report.add(harness.paired_row(name, rates["own"], "GFLOP/s", REFERENCE[0], rates["like"], at_least=ROWS))
        report.details[weights] = {"one row": speeds, "rows": rates}
    report.notes += [
        f"medians of {options.pairs} and {options.rounds} interleaved pairs; bytes are those of the packed records",
        f"seed {options.seed}, kernels {features()['isa']}",
    ]
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--tokens", type=int, default=512)
    harness.add_rounds(arguments, 5)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
