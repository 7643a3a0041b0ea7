"""Claim: ranks that divide the experts reach what ``simulate --nodes`` predicts, in tokens per second, hits and bytes
on the wire.

One, two and four gloo ranks run in one network namespace each. Each has a quarter of its own experts resident, so one
process has as many in all. ``relay.py`` connects the namespaces by links of ``--network``. Ranks and relay share this
machine's cores and disk. So as many processes as there are ranks measure the speeds for the simulation at the same
time: disk, experts, rest of the model, messages. A second prediction without the software's overhead per message is
shown too. Namespaces are removed at the end, also after Ctrl-C. Needs root.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
from harness import Report, Row
from relay import INTERFACE, address, check_machine, delayed_network

SHAPE = synthetic.Shape(layers=6, hidden=1024, intermediate=512, experts=64, heads=16, head_dim=64, vocab=4096)
WEIGHTS, RESIDENT = "int8", 0.25
DISPATCHES, PREFETCH = ("all_reduce", "all_to_all"), ("off", "auto")
SEED, DISTINCT_TOKENS = 20260102, 48  # few tokens of the vocabulary, so that experts repeat as in a text
PORT = 29500
OPENINGS = 5
TIMEOUT_SECONDS = 300  # for one run


def token_ids(warm_up: int, measured: int) -> list[Any]:
    """Return two sequences, for the warm-up and the measurement. They are given, so every run has the same routing."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    vocabulary = torch.randint(SHAPE.vocab, (DISTINCT_TOKENS,), generator=generator)
    return [
        vocabulary[torch.randint(DISTINCT_TOKENS, (length,), generator=generator)] for length in (warm_up, measured)
    ]


# Functions of each rank.


def decode(model: Any, ids: Any) -> float:
    """Return the seconds of a sequence. It begins with a forward of two tokens, which marks a new sequence in a
    trace."""
    import torch

    cache, begin = None, time.perf_counter()
    with torch.inference_mode():
        for part in [ids[:2], *ids[2:].split(1)]:
            cache = model(input_ids=part[None], past_key_values=cache, use_cache=True).past_key_values
    return time.perf_counter() - begin


def open_model(folder: str, resident: float, prefetch: str, ranks: int, dispatch: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    import torch_mesh

    config = torch_mesh.MeshConfig(resident=resident, prefetch=prefetch)
    options: dict[str, Any] = {"quantization_config": config, "dtype": torch.bfloat16}
    if ranks > 1:
        with torch.device("meta"):
            meta_model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        plan = dict.fromkeys(meta_model.tp_plan, "replicate")
        options["distributed_config"] = DistributedConfig(
            tp_size=ranks, ep_size=ranks, tp_plan=plan, ep_implementation=dispatch
        )
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def opening_seconds(folder: str, ranks: int, barrier: Callable[[], None]) -> float:
    """Return the seconds from a cold store to the first token. The first opening is not timed, since transformers
    imports modules in it."""
    import torch

    seconds = []
    for _ in range(1 + OPENINGS):
        if os.environ.get("RANK", "0") == "0":
            isolation.evict([Path(folder)])
        barrier()
        begin = time.perf_counter()
        model = open_model(folder, RESIDENT, "auto", ranks, DISPATCHES[0])
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long))
        seconds.append(time.perf_counter() - begin)
        del model
        gc.collect()
        barrier()
    return statistics.median(seconds[1:])


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def rank(folder: str, out: str, threads: int, warm_up: int, measured: int) -> None:
    """Measure the speeds for the simulation and then the divided model, and write both to a file."""
    import torch

    import torch_mesh
    from torch_mesh.planning.machine import disk_speed, measure_speeds
    from torch_mesh.planning.sizes import find_sizes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the benchmark, even if it is killed
    torch.set_num_threads(threads)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))

    def barrier() -> None:
        if ranks > 1:
            torch.distributed.barrier()

    warm_ids, ids = token_ids(warm_up, measured)
    sizes = find_sizes(Path(folder), torch_mesh.MeshConfig(resident=RESIDENT))
    barrier()
    disk = disk_speed(sizes.files, sizes.expert_bytes)
    assert disk is not None
    barrier()
    speeds = measure_speeds(sizes, torch_mesh.MeshConfig(), disk=disk)
    assert speeds is not None
    results: dict[str, Any] = {"expert_bytes": sizes.expert_bytes, "disk": disk, "experts": speeds.experts, "runs": []}
    results |= small_sums(ranks) if ranks > 1 else {"message_seconds": 0.0, "envelope_bytes": 0.0}
    results["opening_seconds"] = opening_seconds(folder, ranks, barrier)
    for dispatch in DISPATCHES if ranks > 1 else ("whole",):
        model = open_model(folder, 1.0, "auto", ranks, dispatch)
        if ranks == 1:
            with torch_mesh.record_trace(model, Path(out) / "trace.npz", lookahead=True):
                decode(model, warm_ids)
                decode(model, ids)
        else:
            decode(model, ids)
        barrier()
        resident_seconds = decode(model, ids) / measured
        for prefetch in PREFETCH if dispatch != "all_to_all" else PREFETCH[-1:]:
            del model
            gc.collect()
            model = open_model(folder, RESIDENT, prefetch, ranks, dispatch)
            decode(model, warm_ids)
            torch_mesh.reset_stats(model)
            barrier()
            sent = sent_bytes() if ranks > 1 else 0
            seconds = decode(model, ids)
            sent = sent_bytes() - sent if ranks > 1 else 0
            counts = torch_mesh.stats(model).to_dict()
            phases = [counts["prefill"], counts["decode"]]
            results["runs"].append(
                {
                    "dispatch": dispatch,
                    "prefetch": prefetch,
                    "resident_seconds": resident_seconds,
                    "seconds": seconds,
                    "sent": sent,
                    "read": counts["bytes_read"],
                    "hits": sum(phase["hits"] for phase in phases),
                    "accesses": sum(phase["accesses"] for phase in phases),
                }
            )
        del model
        gc.collect()
    (Path(out) / f"{ranks}-{os.environ['RANK']}.json").write_text(json.dumps(results))
    if ranks > 1:
        torch.distributed.destroy_process_group()


def small_sums(ranks: int) -> dict[str, float]:
    """Measure all_reduce of one token's output: the seconds of one of its 2 (N - 1) steps, and the bytes that each rank
    sends in addition to the payload."""
    import torch

    output = torch.zeros(SHAPE.hidden, dtype=torch.bfloat16)
    times, steps, sent = [], 2 * (ranks - 1), sent_bytes()
    for _ in range(300):
        begin = time.perf_counter()
        torch.distributed.all_reduce(output)
        times.append(time.perf_counter() - begin)
    return {
        "message_seconds": statistics.median(times) / steps,
        "envelope_bytes": (sent_bytes() - sent) / len(times) - steps * output.nbytes / ranks,
    }


# Functions of the parent.


def run_ranks(folder: Path, out: Path, names: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """Run the ranks, and return each rank's results."""
    threads = max(1, harness.available_cpus() // len(names))
    request = [str(folder), str(out), str(threads), str(options.warm_up), str(options.tokens)]
    shared = os.environ | {
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    logs = [out / f"{len(names)}-{rank}.log" for rank in range(len(names))]
    try:
        for rank, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", *request]
            with logs[rank].open("wb") as log:
                environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in processes):
            ended = [rank for rank, process in enumerate(processes) if process.poll()]
            if ended or time.monotonic() > deadline:
                outputs = "\n".join(
                    f"rank {rank}: {logs[rank].read_text()[-2000:]}" for rank in ended or range(len(names))
                )
                what = "ended" if ended else f"took more than {TIMEOUT_SECONDS} s"
                raise SystemExit(f"{len(names)} ranks: {what}\n{outputs}")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((out / f"{len(names)}-{rank}.json").read_text()) for rank in range(len(names))]


def predicted(trace: Any, results: list[dict[str, Any]], run: dict[str, Any], given: Any) -> tuple[Any, Any]:
    """Predict a run by ``simulate --nodes`` from the ranks' measured speeds: with the measured message time, and with
    the ``given`` network's."""
    from torch_mesh.routing.cluster_simulation import Cluster, Network, simulate_nodes
    from torch_mesh.routing.simulation import Hardware

    expert, memory = mean(results, "expert_bytes"), mean(results, "experts")
    cluster_options = {"dispatch": run["dispatch"]} if len(results) > 1 else {}

    def simulated(resident: float, disk: float, other_seconds: float, network: Any) -> Any:
        hardware = Hardware(expert, disk, memory, other_seconds=other_seconds)
        lookahead = run["prefetch"] != "off"
        # Prefetch of several ranks from one disk is not simulated: each rank has its fraction of the disk then.
        cluster = Cluster(len(results), SHAPE.hidden, hardware, network, one_disk=not lookahead, **cluster_options)
        return simulate_nodes(trace, "auto", resident, cluster, prompts=slice(1, None), lookahead=lookahead)

    measured = Network(given.bandwidth, mean(results, "message_seconds"))
    # The time besides experts and messages, as measured with all experts in memory. It includes transformers' dispatch.
    alone = 1 / simulated(1.0, 1e15, 0.0, measured).tokens_per_second
    rest = max(0.0, run["resident_seconds"] - alone)
    disk = mean(results, "disk") * (1 if run["prefetch"] != "off" else len(results))
    return simulated(RESIDENT, disk, rest, measured), simulated(RESIDENT, disk, rest, given)


def mean(results: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(rank[name] for rank in results)


def add_rows(report: Report, results: list[dict[str, Any]], trace: Any, network: Any, options: Any) -> None:
    """``report.details`` has two figures of one process: "alone", its tokens per second by prefetch, and "opening", its
    seconds."""
    ranks = len(results)
    alone = report.details.setdefault("alone", {})
    opening = max(rank["opening_seconds"] for rank in results)
    label = f"{ranks} ranks" if ranks > 1 else "one process"
    single_opening = report.details.setdefault("opening", opening)
    report.add(Row(f"{label}: open, and one token", opening, "s", "one process", single_opening))
    for runs in zip(*(rank["runs"] for rank in results), strict=True):
        row, network_prediction = predicted(trace, results, runs[0], network)
        predictions = {"predicted": row.to_dict(), "predicted for the network alone": network_prediction.to_dict()}
        report.details.setdefault("runs", []).append({"measured": runs, **predictions})
        prefetch, dispatch = runs[0]["prefetch"], runs[0]["dispatch"]
        name = f"{label}, {dispatch}" if ranks > 1 else label
        name += ", no prefetch" if prefetch == "off" else ""
        speed = options.tokens / max(run["seconds"] for run in runs)
        hits = 100 * sum(run["hits"] for run in runs) / sum(run["accesses"] for run in runs)
        read = sum(run["read"] for run in runs) / options.tokens / 1e6
        report.add(Row(f"{name}: decode", speed, "tokens/s", "predicted", row.tokens_per_second, 1.3, 0.7))
        # Hits with prefetch depend on timing, so they are no claim. Without prefetch only the pools decide.
        bounds = (1.02, 0.98) if prefetch == "off" else (None, None)
        report.add(Row(f"{name}: hits", hits, "%", "predicted", 100 * row.hit_rate, *bounds))
        report.add(Row(f"{name}: read", read, "MB/token", "predicted, from the start", row.read_bytes_per_token / 1e6))
        if ranks == 1:
            alone[prefetch] = speed
            continue
        sent = sum(run["sent"] for run in runs) / options.tokens / 1e3
        payload = row.sent_bytes_per_token / 1e3
        if dispatch == "all_reduce":
            overhead = sum(rank["envelope_bytes"] for rank in results) * SHAPE.layers / 1e3
            what = f"predicted {payload:.1f} + envelopes"
            report.add(Row(f"{name}: sent", sent, "kB/token", what, payload + overhead, 1.1, 0.9))
        else:
            report.add(Row(f"{name}: sent", sent, "kB/token", "predicted, without envelopes", payload))
        report.add(Row(f"{name}: decode", speed, "tokens/s", options.network, network_prediction.tokens_per_second))
        report.add(Row(f"{name}: decode", speed, "tokens/s", "one process", alone[prefetch]))
        everything = 1 / max(run["resident_seconds"] for run in runs)
        report.add(Row(f"{name}, all in memory: decode", everything, "tokens/s"))


def measure(options: Any) -> Report:
    from torch_mesh.routing.cluster_simulation import Network
    from torch_mesh.routing.traces import load_trace

    network = Network.parse(options.network)
    folder = synthetic.store(options.dir, SHAPE, WEIGHTS)
    report = Report("Ranks in network namespaces, beside what simulate --nodes predicts")
    with tempfile.TemporaryDirectory() as out:
        for ranks in (1, *options.ranks):
            with delayed_network(ranks, network.bandwidth, network.latency) as links:
                begin = time.monotonic()
                results = run_ranks(folder, Path(out), links.names, options)
                relay_percent = 100 * links.relay_seconds() / (time.monotonic() - begin)
            add_rows(report, results, load_trace(Path(out) / "trace.npz"), network, options)
            note = (
                f"{ranks} at once: disk {sum(rank['disk'] for rank in results) / 1e9:.2f} GB/s in all, experts "
                f"{mean(results, 'experts') / 1e9:.1f} GB/s"
            )
            if ranks > 1:
                note += (
                    f", a message {1e6 * mean(results, 'message_seconds'):.0f} µs, a sum "
                    f"{mean(results, 'envelope_bytes'):.0f} bytes from each in addition to its payload"
                )
                note += f", the relay {relay_percent:.1f} % of a core"
            report.notes.append(note)
    return report


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        folder, out, *numbers = sys.argv[2:]
        rank(folder, out, *map(int, numbers))
        return 0
    parser = harness.parser(__doc__)
    harness.add_dir(parser)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, in addition to one process"
    )
    parser.add_argument(
        "--network", default="10Gbit/s,0.2ms", help="bandwidth and delay of each link, in the syntax of simulate"
    )
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before those that are measured")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    check_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # remove the namespaces, as after Ctrl-C
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
