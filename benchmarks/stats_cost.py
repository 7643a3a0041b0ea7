"""Claim: watching a model and writing its statistics take under 1 % of decode time.

Reading and drawing the counters hold Python's lock, so they delay a decode by their own time at most. The claim is on
that time for a pool of Qwen3-30B-A3B's 48 layers of 128 experts, every two seconds. The tokens per second of a small
model with and without the view are shown too, interleaved. Its decode is nearly all Python, which the lock slows most.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import harness
import torch
from harness import Report, Row
from rich.console import Console
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import _C
from torch_mesh.planning.machine import pool_of_zeros
from torch_mesh.statistics.counters import Stats, engine_stats
from torch_mesh.statistics.snapshot import take_snapshot
from torch_mesh.statistics.watch import render
from torch_mesh.store.manifest import Shape

LAYERS, EXPERTS, TOP_K, HIDDEN = 48, 128, 8, 64


def large_pool() -> _C.Engine:
    """Return a pool with as many experts as Qwen3-30B-A3B, of minimum size, each used once."""
    shape = Shape(LAYERS, EXPERTS, TOP_K, HIDDEN, HIDDEN, gated=True, bias=False, activation="silu")
    engine = pool_of_zeros(shape, "int4", 64)
    for layer in range(LAYERS):
        ids = torch.arange(EXPERTS).view(-1, TOP_K)
        handle = torch.tensor([engine.id, layer])
        for row in ids:
            torch.ops.torch_mesh.experts(torch.zeros(1, HIDDEN), row.view(1, -1), torch.ones(1, TOP_K), handle)
    return engine


def milliseconds(call: Callable[[], object], calls: int = 5) -> float:
    begin = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begin) / calls * 1e3


def add_display_times(report: Report, rounds: int) -> None:
    engine = large_pool()
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    earlier: tuple[float, Stats] = (0.0, engine_stats([[engine]], experts=False))

    def draw() -> None:
        console.print(render(earlier, (1.0, engine_stats([[engine]], experts=False))))

    def line() -> str:
        counted = engine_stats([[engine]], experts=False).to_dict(experts=False)
        return json.dumps(take_snapshot([engine], LAYERS, {}).to_dict() | counted)

    times = harness.interleave({"look": lambda: milliseconds(draw), "line": lambda: milliseconds(line)}, rounds)
    interval = 2e3
    name = "one look of watch, 48 layers of 128, in its interval"
    report.add(Row(name, statistics.median(times["look"]), "ms", "two seconds", interval, at_most=0.01))
    report.add(Row("one line of stats.file, likewise", statistics.median(times["line"]), "ms", "two seconds", interval))
    engine.close()


def tokens_per_second(model: torch.nn.Module, ids: torch.Tensor, watched: bool, tokens: int) -> float:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    view = torch_mesh.watch(model, console=console) if watched else nullcontext()
    with torch.no_grad(), view:
        past = model(input_ids=ids, use_cache=True).past_key_values
        begin = time.perf_counter()
        for _ in range(tokens):
            past = model(input_ids=ids[:, -1:], past_key_values=past, use_cache=True).past_key_values
        return tokens / (time.perf_counter() - begin)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--tokens", type=int, default=100, help="decoded tokens in a round")
    options = arguments.parse_args()
    report = Report("What statistics cost")
    add_display_times(report, options.rounds)
    config = torch_mesh.MeshConfig(resident=0.5)
    folder = Path(__file__).resolve().parents[1] / "examples" / "mesh-tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    ids = torch.randint(0, 200, (1, 16), generator=torch.Generator().manual_seed(0))
    speeds = harness.interleave(
        {
            "watched": lambda: tokens_per_second(model, ids, True, options.tokens),
            "alone": lambda: tokens_per_second(model, ids, False, options.tokens),
        },
        options.rounds,
    )
    report.add(harness.paired_row("mesh-tiny decoding, watched", speeds["watched"], "tok/s", "alone", speeds["alone"]))
    report.details["tokens_per_second"] = speeds
    report.notes.append(f"medians of {options.rounds} interleaved rounds")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
