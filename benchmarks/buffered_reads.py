"""Claim: none; shows when reads through the page cache (`io="buffered"`) are faster than direct ones (`io="auto"`).

A process in its own memory group computes the experts of a model token by token, with replayed synthetic routing. Its
pool holds the same experts with both settings. Outside the pool there is memory for none, half or all of the other
records, which only the page cache can use. Needs root.
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

from torch_mesh.store.manifest import open_store

MARGIN = 64 << 20  # for page tables and what a forward allocates
TOP_K = synthetic.Shape.experts_per_token
CONTENDERS = ("auto", "buffered")


def worker(request_path: str, result_path: str) -> None:
    """Write a JSON file with the seconds of each token and the bytes read from the disk for the measured tokens."""
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
    handles = [torch.tensor([engine.id, layer]) for layer in range(shape.layers)]
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


def run_session(
    io: str, request: dict[str, Any], other_bytes: int, process_bytes: int, outside: float
) -> dict[str, Any]:
    return run(request | {"io": io}, process_bytes + MARGIN + int(outside * other_bytes))


def measure(options: Any) -> Report:
    path = options.store or synthetic.store(options.dir, synthetic.Shape(), "int4")
    manifest = open_store(path).manifest
    expert_count, record = manifest.shape.layers * manifest.shape.experts, manifest.record_bytes
    slots = max(TOP_K, int(options.resident * expert_count))
    request = {"store": str(path), "threads": options.threads, "warm_up": options.warm_up, "measured": options.tokens}
    request["slots"] = slots
    process_bytes = run(request | {"warm_up": 1, "measured": 1, "io": "auto"}, 1 << 40)["group_peak"]
    other_bytes = (expert_count - slots) * record
    report = Report(
        f"{slots} of {expert_count} experts in the pool, {other_bytes / 1e9:.2f} GB outside it, read directly and "
        "through the page cache"
    )
    runs: dict[str, Any] = {}
    for outside in options.outside:
        contenders = {io: partial(run_session, io, request, other_bytes, process_bytes, outside) for io in CONTENDERS}
        results = harness.interleave(contenders, options.rounds)
        runs[str(outside)] = results
        seconds = {
            io: [sum(each["seconds"][options.warm_up :]) / options.tokens for each in results[io]] for io in results
        }
        name = f"memory for {outside:.0%} of the rest"
        report.add(
            harness.paired_row(f"seconds per token, {name}", seconds["buffered"], "s", "direct", seconds["auto"])
        )
        for io in CONTENDERS:
            read = statistics.median(each["read"] for each in results[io]) / options.tokens / 1e6
            report.add(Row(f"read from the disk per token, {name}, {io}", read, "MB"))
        report.add(Row(f"hit rate, {name}", 100 * results["buffered"][0]["hits"], "%"))
    report.notes += [
        (
            f"limit = {process_bytes / 1e6:.0f} MB of the process with its pool + {MARGIN >> 20} MiB + the fraction x "
            f"{other_bytes / 1e9:.2f} GB"
        ),
        (
            f"{options.tokens} timed tokens after {options.warm_up}; tokens share 39 % of their experts with the "
            "next; no "
            "prefetch"
        ),
        "read from the disk: /proc/self/io's read_bytes",
    ]
    report.details |= {"runs": runs}
    return report


def main() -> int:
    if "--worker" in sys.argv:
        worker(*sys.argv[sys.argv.index("--worker") + 1 :])
        return 0
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument(
        "--store", type=Path, help="a converted folder (default: the 4-layer int4 store, created if missing)"
    )
    arguments.add_argument("--resident", type=float, default=0.4, help="fraction of the experts in the pool")
    arguments.add_argument(
        "--outside",
        type=float,
        nargs="+",
        default=[0.0, 0.5, 1.0],
        help="fractions of the other records that fit into memory",
    )
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--tokens", type=int, default=96)
    arguments.add_argument("--warm-up", type=int, default=160, help="tokens that fill the pool")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
