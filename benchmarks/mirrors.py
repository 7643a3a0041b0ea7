"""Claim: with a copy of the store on a second drive that is as fast as the first, the read of one expert takes at most
0.75 of the time, and a decode step that waits for the disk most of the time at most 0.65.

``--mirror`` is a folder on the other drive; the store is copied into it. A loop of direct reads measures each drive.
Replayed synthetic routing, a quarter of the experts resident.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import direct_reads
import harness
import numpy as np
import synthetic
import torch
from harness import Report, Row
from op_layer import store_engine

from torch_mesh import _C
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.store.manifest import open_store

RESIDENT = 0.25
TOP_K = synthetic.Shape.experts_per_token
WARM_UP = 64  # tokens


def read_single(engine: _C.Engine, layers: int, experts: int, draw: np.random.Generator) -> float:
    """Seconds of the read of one cold expert."""
    layer, expert = int(draw.integers(layers)), int(draw.integers(experts))
    torch.ops.torch_mesh.evict(torch.tensor([engine.id, layer]), torch.tensor([expert]))
    begin = time.perf_counter()
    engine.read_record(layer, expert)
    return time.perf_counter() - begin


def decode(engine: _C.Engine, ids: torch.Tensor, hidden: int) -> list[float]:
    """Seconds of each token; ids [tokens, layers, top_k]."""
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights = torch.full((1, TOP_K), 1 / TOP_K)
    handles = [torch.tensor([engine.id, layer]) for layer in range(ids.shape[1])]
    seconds = []
    for token in ids:
        begin = time.perf_counter()
        for layer, handle in enumerate(handles):
            torch.ops.torch_mesh.experts(x, token[layer].unsqueeze(0), weights, handle)
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(options: argparse.Namespace) -> Report:
    store = options.store or synthetic.store(options.dir, synthetic.Shape(), options.weights)
    copy = synthetic.made(options.mirror / store.name, partial(shutil.copytree, store, dirs_exist_ok=True))
    manifest = open_store(store).manifest
    shape = manifest.shape
    every = shape.layers * shape.experts
    speeds = [every * manifest.record_bytes / direct_reads.read_records(folder) for folder in (store, copy)]
    report = Report(f"{manifest.record_bytes / 2**20:.2f} MiB a record, {RESIDENT:.0%} of {every} experts resident")
    for drive, speed in zip(("first", "second"), speeds, strict=True):
        report.add(Row(f"plain reads of the {drive} drive", speed / 1e9, "GB/s"))
    open_engine = partial(
        store_engine, store, slots=int(RESIDENT * every), policy="auto", verify="never", io="auto", workspace=64 << 20
    )
    engines = {"one drive": open_engine(), "two drives": open_engine(mirrors=[str(copy)])}
    trace = synthetic_trace(
        layers=shape.layers,
        experts=shape.experts,
        top_k=TOP_K,
        prompts=1,
        prompt_tokens=2 * (WARM_UP + options.rounds * options.tokens),
        overlap=0.39,
        seed=options.seed,
    )
    ids = torch.from_numpy(trace.ids).long()
    draws = {name: np.random.default_rng(options.seed) for name in engines}
    for engine in engines.values():
        decode(engine, ids[:WARM_UP], shape.hidden)
    parts = ids[WARM_UP:].split(options.tokens)
    turns = {name: iter(parts) for name in engines}

    def tokens(name: str) -> float:
        return statistics.mean(decode(engines[name], next(turns[name]), shape.hidden))

    def single(name: str) -> float:
        engine, draw = engines[name], draws[name]
        return statistics.mean(read_single(engine, shape.layers, shape.experts, draw) for _ in range(options.reads))

    for what, run, at_most in (("seconds per token", tokens, 0.65), ("read of one expert", single, 0.75)):
        contenders: dict[str, Callable[[], float]] = {name: partial(run, name) for name in engines}
        seconds = harness.interleave(contenders, options.rounds)
        row = harness.paired_row(what, seconds["two drives"], "s", "one drive", seconds["one drive"], at_most=at_most)
        report.add(row)
    totals = engines["two drives"].totals()
    report.notes.append(f"hits of decode steps: {totals['hits'] / totals['accesses']:.0%}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    harness.add_rounds(parser, rounds=8)
    harness.add_dir(parser)
    parser.add_argument("--mirror", type=Path, required=True, help="folder on another drive")
    parser.add_argument("--store", type=Path, default=None, help="a converted folder instead of the synthetic one")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--tokens", type=int, default=24, help="of a round")
    parser.add_argument("--reads", type=int, default=15, help="single reads of a round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
