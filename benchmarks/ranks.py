"""Claim: ranks that divide the experts reach what ``simulate --nodes`` foretells, in tokens per second, hits and bytes on the wire.

One, two and four gloo ranks, each in a network namespace of its own, a quarter of the experts resident: on each rank of its own, so that one process
has as many in all. Virtual links join the namespaces to a bridge, both ends of each held to ``--bandwidth``; ``--delay`` is added where the kernel
has netem, and said to be missing where it has not. All ranks share this machine's cores and disk: what the simulation is told of disk, experts, the
rest of the model and messages is measured by as many processes at once as there are ranks, in the same run. Everything is undone at the end, after
Ctrl-C, too. Needs root.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row

SHAPE = synthetic.Shape(layers=6, hidden=1024, intermediate=512, experts=64, heads=16, head_dim=64, vocab=4096)
WEIGHTS, RESIDENT = "int8", 0.25
DISPATCHES, PREFETCH = ("all_reduce", "all_to_all"), ("off", "auto")
SEED, FEW_TOKENS = 20260102, 48  # of the vocabulary, so that experts come back as in a text
INTERFACE, PORT = "mesh0", 29500
PATIENCE_SECONDS = 120  # for all ranks of one run


def token_ids(warm_up: int, measured: int) -> list[Any]:
    """Two sequences, given and not chosen by the model: every run routes alike."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    few = torch.randint(SHAPE.vocab, (FEW_TOKENS,), generator=random)
    return [few[torch.randint(FEW_TOKENS, (length,), generator=random)] for length in (warm_up, measured)]


# What runs on each rank.


def decode(model: Any, ids: Any) -> float:
    """Seconds; begins a sequence with a forward of two tokens, by which a trace knows it."""
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
            outline = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        plan = dict.fromkeys(outline.tp_plan, "replicate")
        options["distributed_config"] = DistributedConfig(
            tp_size=ranks, ep_size=ranks, tp_plan=plan, ep_implementation=dispatch
        )
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def rank(folder: str, out: str, threads: int, warm_up: int, measured: int) -> None:
    """Measures what a simulation wants to know, then the divided model, and writes both to a file."""
    import torch

    import torch_mesh
    from torch_mesh.plan import find_sizes
    from torch_mesh.speed import disk_speed, measure_speeds

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive a benchmark that was killed
    torch.set_num_threads(threads)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))

    def together() -> None:
        if ranks > 1:
            torch.distributed.barrier()

    warm_ids, ids = token_ids(warm_up, measured)
    sizes = find_sizes(Path(folder), torch_mesh.MeshConfig(resident=RESIDENT))
    together()
    disk = disk_speed(sizes.files, sizes.expert_bytes)
    assert disk is not None
    together()
    speeds = measure_speeds(sizes, torch_mesh.MeshConfig(), disk=disk)
    assert speeds is not None
    found: dict[str, Any] = {"expert_bytes": sizes.expert_bytes, "disk": disk, "experts": speeds.experts, "runs": []}
    found |= small_sums(ranks) if ranks > 1 else {"message_seconds": 0.0, "envelope_bytes": 0.0}
    for dispatch in DISPATCHES if ranks > 1 else ("whole",):
        model = open_model(folder, 1.0, "auto", ranks, dispatch)
        if ranks == 1:
            with torch_mesh.record_trace(model, Path(out) / "trace.npz", lookahead=True):
                decode(model, warm_ids)
                decode(model, ids)
        else:
            decode(model, ids)
        together()
        resident_seconds = decode(model, ids) / measured
        for prefetch in PREFETCH if dispatch != "all_to_all" else PREFETCH[-1:]:
            del model
            gc.collect()
            model = open_model(folder, RESIDENT, prefetch, ranks, dispatch)
            decode(model, warm_ids)
            torch_mesh.reset_stats(model)
            together()
            sent = sent_bytes() if ranks > 1 else 0
            seconds = decode(model, ids)
            sent = sent_bytes() - sent if ranks > 1 else 0
            counts = torch_mesh.stats(model).to_dict()
            phases = [counts["prefill"], counts["decode"]]
            found["runs"].append(
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
    (Path(out) / f"{ranks}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if ranks > 1:
        torch.distributed.destroy_process_group()


def small_sums(ranks: int) -> dict[str, float]:
    """Of sums of one token's output: seconds of one of their 2 (N - 1) steps, and the bytes that each rank sends besides its payload."""
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


# What starts them.


def tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}. This benchmark makes network namespaces and shapes links between them; a container "
            "may not let it."
        )


@contextmanager
def shaped_network(ranks: int, bandwidth: str, delay: str) -> Iterator[tuple[list[str], bool]]:
    """Names of a namespace for each rank, rank r at 10.77.0.(r + 1), and whether messages are delayed."""
    hub, names = f"mesh-{os.getpid()}-hub", [f"mesh-{os.getpid()}-{rank}" for rank in range(ranks)]
    delayed = False
    try:
        tool("ip", "netns", "add", hub)
        tool("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        tool("ip", "-n", hub, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            tool("ip", "netns", "add", name)
            link = ("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            tool("ip", *link)
            tool("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            tool("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            for where, device in ((name, "lo"), (name, INTERFACE)):
                tool("ip", "-n", where, "link", "set", device, "up")
            for where, device in ((name, INTERFACE), (hub, port)):
                shape = ("root", "handle", "1:", "tbf", "rate", bandwidth, "burst", "1mb", "latency", "50ms")
                tool("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, *shape)
            netem = ("tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:", "netem", "delay", delay)
            done = subprocess.run(["ip", "netns", "exec", name, *netem], capture_output=True, check=False)
            delayed = done.returncode == 0
        yield names, delayed
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave some of them behind
        for name in (*names, hub):  # with its links
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.signal(signal.SIGINT, before)


def run_ranks(folder: Path, out: Path, names: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """What each rank has found."""
    threads = max(1, harness.available_cpus() // len(names))
    request = [str(folder), str(out), str(threads), str(options.warm_up), str(options.tokens)]
    shared = os.environ | {
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": "10.77.0.1",
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
                own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in processes):
            ended = [rank for rank, process in enumerate(processes) if process.poll()]
            if ended or time.monotonic() > deadline:
                said = "\n".join(
                    f"rank {rank}: {logs[rank].read_text()[-2000:]}" for rank in ended or range(len(names))
                )
                what = "ended" if ended else f"took more than {PATIENCE_SECONDS} s"
                raise SystemExit(f"{len(names)} ranks: {what}\n{said}")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((out / f"{len(names)}-{rank}.json").read_text()) for rank in range(len(names))]


def foretold(trace: Any, found: list[dict[str, Any]], run: dict[str, Any], bandwidth: str) -> Any:
    """By ``simulate --nodes``, of what the ranks have measured besides the run itself."""
    from torch_mesh.foresight.nodes import Cluster, Network, simulate_nodes
    from torch_mesh.foresight.simulation import Hardware

    network = Network(Network.parse(f"{bandwidth}/s,0s").bandwidth, mean(found, "message_seconds"))
    expert, memory = mean(found, "expert_bytes"), mean(found, "experts")
    ways = {"dispatch": run["dispatch"]} if len(found) > 1 else {}

    def simulated(resident: float, disk: float, other_seconds: float) -> Any:
        hardware = Hardware(expert, disk, memory, other_seconds=other_seconds)
        ahead = run["prefetch"] != "off"
        # What several read ahead from one disk is not simulated: there each has its share of the disk to itself.
        cluster = Cluster(len(found), SHAPE.hidden, hardware, network, one_disk=not ahead, **ways)
        return simulate_nodes(trace, "auto", resident, cluster, prompts=slice(1, None), lookahead=ahead)

    # What takes time besides experts and messages, the work of transformers' dispatch included: as measured with all experts in memory.
    alone = 1 / simulated(1.0, 1e15, 0.0).tokens_per_second
    rest = max(0.0, run["resident_seconds"] - alone)
    disk = mean(found, "disk") * (1 if run["prefetch"] != "off" else len(found))
    return simulated(RESIDENT, disk, rest)


def mean(found: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(rank[name] for rank in found)


def add_rows(report: Report, found: list[dict[str, Any]], trace: Any, options: Any) -> None:
    """``report.details["alone"]`` has the tokens per second of one process, by prefetch."""
    ranks = len(found)
    alone = report.details.setdefault("alone", {})
    for runs in zip(*(rank["runs"] for rank in found), strict=True):
        row = foretold(trace, found, runs[0], options.bandwidth)
        report.details.setdefault("runs", []).append({"measured": runs, "foretold": row.to_dict()})
        prefetch, dispatch = runs[0]["prefetch"], runs[0]["dispatch"]
        name = f"{ranks} ranks, {dispatch}" if ranks > 1 else "one process"
        name += ", no prefetch" if prefetch == "off" else ""
        speed = options.tokens / max(run["seconds"] for run in runs)
        hits = 100 * sum(run["hits"] for run in runs) / sum(run["accesses"] for run in runs)
        read = sum(run["read"] for run in runs) / options.tokens / 1e6
        report.add(Row(f"{name}: decode", speed, "tokens/s", "foretold", row.tokens_per_second, 1.3, 0.7))
        # What is read ahead in time is the clock's, and no claim; without it hits are the pools' decisions alone.
        bounds = (1.02, 0.98) if prefetch == "off" else (None, None)
        report.add(Row(f"{name}: hits", hits, "%", "foretold", 100 * row.hit_rate, *bounds))
        report.add(Row(f"{name}: read", read, "MB/token", "foretold, from the start", row.read_bytes_per_token / 1e6))
        if ranks == 1:
            alone[prefetch] = speed
            continue
        sent = sum(run["sent"] for run in runs) / options.tokens / 1e3
        payload = row.sent_bytes_per_token / 1e3
        if dispatch == "all_reduce":
            envelopes = sum(rank["envelope_bytes"] for rank in found) * SHAPE.layers / 1e3
            what = f"foretold {payload:.1f} + envelopes"
            report.add(Row(f"{name}: sent", sent, "kB/token", what, payload + envelopes, 1.1, 0.9))
        else:
            report.add(Row(f"{name}: sent", sent, "kB/token", "foretold, without envelopes", payload))
        report.add(Row(f"{name}: decode", speed, "tokens/s", "one process", alone[prefetch]))
        everything = 1 / max(run["resident_seconds"] for run in runs)
        report.add(Row(f"{name}, all in memory: decode", everything, "tokens/s"))


def measure(options: Any) -> Report:
    from torch_mesh.foresight.traces import load_trace

    folder = synthetic.store(options.dir, SHAPE, WEIGHTS)
    report = Report("Ranks in network namespaces, beside what simulate --nodes foretells")
    with tempfile.TemporaryDirectory() as out:
        for ranks in (1, *options.ranks):
            with shaped_network(ranks, options.bandwidth, options.delay) as (names, delayed):
                found = run_ranks(folder, Path(out), names, options)
            add_rows(report, found, load_trace(Path(out) / "trace.npz"), options)
            said = f"{ranks} at once: disk {sum(rank['disk'] for rank in found) / 1e9:.2f} GB/s in all, experts {mean(found, 'experts') / 1e9:.1f} GB/s"
            if ranks > 1:
                said += f", a message {1e6 * mean(found, 'message_seconds'):.0f} µs, a sum {mean(found, 'envelope_bytes'):.0f} bytes from each besides its payload"
            report.notes.append(said)
    if not delayed:
        report.notes.append(
            f"this kernel has no netem: links of {options.bandwidth} without a delay of {options.delay}. Messages take what software takes"
        )
    return report


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        folder, out, *numbers = sys.argv[2:]
        rank(folder, out, *map(int, numbers))
        return 0
    parser = harness.parser(__doc__)
    harness.add_dir(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="besides one process")
    parser.add_argument("--bandwidth", default="10gbit", help="of each link, as tc has it: in gbit or mbit")
    parser.add_argument("--delay", default="200us", help="of each message, as tc has it")
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before those that are measured")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("ranks.py makes network namespaces and shapes links between them: run it as root")
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise SystemExit(
            f"{' and '.join(missing)} not found: ranks.py needs iproute2 (Debian: apt-get install iproute2)"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, everything is undone
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
