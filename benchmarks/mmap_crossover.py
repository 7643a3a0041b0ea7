"""Claim: none; it shows where mapping a store (`io="mmap"`) and reading it directly into a pool (`io="uring"`) cross.

A process in a memory group of its own computes the experts of a model token by token, with replayed made-up routing, while the group
leaves it some share of the experts' bytes besides what the process takes for itself. The pool gets that share less a margin; the mapped
store gets the same number of slots ("advice": the policy says what the kernel should give up first) or as many as there
are experts ("kernel": nobody tells it). Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
from contenders import session
from harness import Report, Row
from rich.console import Console

from torch_mesh.store.manifest import open_store

MARGIN = 64 << 20  # for page tables and what a forward allocates
TOP_K = synthetic.Shape.experts_per_token
CONTENDERS = ("uring", "mmap, advice", "mmap, kernel")


def worker(request_path: str, result_path: str) -> None:
    """Prints nothing; leaves the seconds of each token, and what was read from the disk for the measured ones."""
    import torch
    from op_layer import store_engine

    from torch_mesh.routing.synthetic import synthetic_trace

    request = json.loads(Path(request_path).read_text())
    torch.set_num_threads(request["threads"])
    shape = open_store(request["store"]).manifest.shape
    engine = store_engine(
        Path(request["store"]),
        slots=request["slots"],
        policy="auto",
        verify="first",
        io=request["io"],
        workspace=64 << 20,
    )
    tokens = request["warm_up"] + request["measured"]
    trace = synthetic_trace(
        layers=shape.layers, experts=shape.experts, top_k=TOP_K, prompts=1, prompt_tokens=2 * tokens, overlap=0.39
    )
    ids = torch.from_numpy(trace.ids[:tokens]).long()
    if len(ids) < tokens:
        raise SystemExit(f"the trace has {len(ids)} tokens, fewer than {tokens}")
    handles = [torch.tensor([engine.id, layer, engine.generation]) for layer in range(shape.layers)]
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights = torch.full((1, TOP_K), 1 / TOP_K)
    seconds, read = [], 0
    for token in range(tokens):
        if token == request["warm_up"]:
            engine.reset_stats()
            read = session.bytes_read()
        begin = time.perf_counter()
        for layer, handle in enumerate(handles):
            torch.ops.torch_mesh.experts(x, ids[token, layer].unsqueeze(0), weights, handle)
        seconds.append(time.perf_counter() - begin)
    stats = engine.totals()
    result = {
        "seconds": seconds,
        "read": session.bytes_read() - read,
        "hits": stats["hits"] / stats["accesses"],
        "io": engine.describe()["io"],
    }
    Path(result_path).write_text(json.dumps(result))


def run(request: dict[str, Any], limit: int, *, cold: bool = True) -> dict[str, Any]:
    if cold:
        isolation.evict([Path(request["store"])])
    with tempfile.TemporaryDirectory() as folder:
        request_path, result_path = Path(folder) / "request.json", Path(folder) / "result.json"
        request_path.write_text(json.dumps(request))
        command = [sys.executable, __file__, "--worker", str(request_path), str(result_path)]
        peak = isolation.run_limited(command, limit, 600)
        return {**json.loads(result_path.read_text()), "group_peak": peak, "limit": limit}


def session_of(name: str, request: dict[str, Any], every: int, record: int, own: int, share: float) -> dict[str, Any]:
    limit = own + int(share * every * record)
    fitting = min(every, max(TOP_K, (limit - own - MARGIN) // record))
    slots = every if name == "mmap, kernel" else fitting
    return run(request | {"io": name.split(",")[0], "slots": slots}, limit)


def measure(options: Any) -> Report:
    console = Console(stderr=True)
    path = options.store or synthetic.store(options.dir, synthetic.Shape(), "int4")
    manifest = open_store(path).manifest
    every, record = manifest.shape.layers * manifest.shape.experts, manifest.record_bytes
    request = {"store": str(path), "threads": options.threads, "warm_up": options.warm_up, "measured": options.tokens}
    brief = request | {"warm_up": 1, "measured": 1, "io": "uring", "slots": TOP_K}
    own = run(brief, 1 << 40)["group_peak"] - TOP_K * record
    report = Report(f"Experts of {every / 1e3:.3g} thousand records, {every * record / 1e9:.2f} GB, mapped and read")
    runs: dict[str, Any] = {}
    for share in options.shares:
        contenders = {name: partial(session_of, name, request, every, record, own, share) for name in CONTENDERS}
        results = harness.interleave(contenders, options.rounds)
        runs[str(share)] = results
        speed = {
            name: [statistics.median(each["seconds"][options.warm_up :]) for each in results[name]] for name in results
        }
        for name in CONTENDERS:
            mean = statistics.fmean(sum(each["seconds"][options.warm_up :]) / options.tokens for each in results[name])
            read = statistics.median(each["read"] for each in results[name]) / options.tokens / 1e6
            console.print(
                f"{share:.0%} {name}: median {1e3 * statistics.median(speed[name]):.1f} ms, mean {1e3 * mean:.1f} ms, "
                f"{read:.1f} MB read per token, hits {results[name][0]['hits']:.3f}"
            )
            if name != "uring":
                means = [sum(each["seconds"][options.warm_up :]) / options.tokens for each in results[name]]
                uring = [sum(each["seconds"][options.warm_up :]) / options.tokens for each in results["uring"]]
                report.add(harness.paired_row(f"seconds per token, {share:.0%}, {name}", means, "s", "uring", uring))
            report.add(Row(f"read per token, {share:.0%}, {name}", read, "MB"))
            report.add(Row(f"hit rate, {share:.0%}, {name}", 100 * results[name][0]["hits"], "%"))
    # A process that finds the store in the page cache, as after a conversion or another process.
    for file in Path(path).glob("mesh-*"):
        file.read_bytes()
    first = request | {"warm_up": 0, "measured": options.tokens, "slots": every}
    start = {name: run(first | {"io": name}, 1 << 40, cold=False) for name in ("mmap", "uring")}
    seconds = {name: sum(each["seconds"]) / options.tokens for name, each in start.items()}
    report.add(Row("first tokens, store in the page cache, mmap", seconds["mmap"], "s", "uring", seconds["uring"]))
    report.notes += [
        f"limit = {own / 1e6:.0f} MB of the process + share x {every * record / 1e9:.2f} GB; the pool leaves {MARGIN >> 20} MiB of it",
        f"{options.tokens} timed tokens after {options.warm_up}; tokens share 39 % of their experts with the next; no prefetch",
        "read: /proc/self/io's read_bytes; hit: resident when the forward asked, for mmap as mincore says",
    ]
    report.details |= {"runs": runs, "start": start}
    return report


def main() -> int:
    if "--worker" in sys.argv:
        worker(*sys.argv[sys.argv.index("--worker") + 1 :])
        return 0
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument(
        "--store", type=Path, help="a converted folder (default: the 4-layer int4 one, made if need be)"
    )
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.7, 0.9, 1.0, 1.2])
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--tokens", type=int, default=96)
    arguments.add_argument("--warm-up", type=int, default=160, help="tokens that fill the pool")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
