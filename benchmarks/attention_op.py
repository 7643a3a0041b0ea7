"""Claim: attention of a decode step over a cache of 2,048 tokens is at least 3 x as fast as transformers' attention
under torch.compile, in bf16 and fp32.

The heads are those of Qwen3-30B-A3B: 32 query heads and 4 key heads of 128 values. torch's
``scaled_dot_product_attention`` is called as in transformers: under torch.compile keys and values are repeated for each
query head; in eager mode query heads that share a key head are packed into rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import harness
import torch
from harness import Report
from torch import Tensor
from torch.nn import functional as F

import torch_mesh  # noqa: F401  registers the op

HEADS, SHARED, DIM = 32, 4, 128
CONTEXTS = (64, 512, 2048, 8192)
CLAIMED = 2048


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query.reshape(1, SHARED, HEADS // SHARED, DIM), key, value)


def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (
        each[:, :, None].expand(-1, -1, HEADS // SHARED, -1, -1).reshape(1, HEADS, -1, DIM) for each in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value)


def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.torch_mesh.attention(query, key, value, None, DIM**-0.5)


def calls_per_second(call: Callable[[], Tensor], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return calls / (time.perf_counter() - begin)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=21)
    options = arguments.parse_args()
    torch.manual_seed(0)
    threads = harness.available_cpus()
    torch.set_num_threads(threads)
    report = Report(f"Attention of one decode step, {HEADS} heads over {SHARED}, {DIM} wide, {threads} threads")
    for dtype in (torch.bfloat16, torch.float32):
        for context in CONTEXTS:
            query = torch.randn(1, HEADS, 1, DIM).to(dtype)
            key, value = (torch.randn(1, SHARED, context, DIM).to(dtype) for _ in range(2))
            calls = max(2, 4096 // context)
            contenders = {
                each.__name__: lambda each=each, inputs=(query, key, value), calls=calls: calls_per_second(
                    partial(each, *inputs), calls
                )
                for each in (own, packed, repeated)
            }
            with torch.no_grad():
                speeds = harness.interleave(contenders, options.rounds)
            name = f"{str(dtype).removeprefix('torch.')}, {context} tokens"
            report.details[name] = speeds
            row = partial(harness.paired_row, name, speeds["own"], "1/s")
            report.add(row("torch, keys repeated", speeds["repeated"], at_least=3.0 if context == CLAIMED else None))
            report.add(row("torch, heads packed", speeds["packed"]))
    report.notes.append(f"medians of {options.rounds} interleaved rounds")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
