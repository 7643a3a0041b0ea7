"""``torch-mesh routing simulate``: hit rates of policies and pool sizes on recorded routing."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from torch_mesh.cli.options import below
from torch_mesh.routing.cluster_simulation import DISPATCHES, PLACEMENTS, Cluster, Network, NodesRow, simulate_nodes
from torch_mesh.routing.profiles import load_profile
from torch_mesh.routing.simulation import BOUND, Hardware, Row, policy_names, simulate
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.routing.traces import Trace, load_trace
from torch_mesh.system.atomic_files import check_results, new_file
from torch_mesh.validators import early_experts, parse_size

_RECALL = 0.75
_INT32 = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Replays traces (torch_mesh.record_trace) through the policies of the pool."
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="an .npz file")
    parser.add_argument(
        "--synthetic",
        metavar="SHAPE",
        help="synthetic routing of LAYERS,EXPERTS,TOP_K[,OVERLAP], such as 48,128,8,0.39 (OVERLAP: with the next "
        "token)",
    )
    parser.add_argument(
        "--resident",
        default="0.1,0.25,0.5",
        help="fractions of all experts, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        help="all, belady (the bound without --prefetch), or policies of MeshConfig (default: auto, and belady without "
        "--prefetch)",
    )
    parser.add_argument("--prompts", help="FIRST:END, the sequences whose hits count; all are replayed (default: all)")
    parser.add_argument(
        "--prefetch",
        default="off",
        help="predictor of the next layer: lookahead or simulated (default: %(default)s)",
    )
    parser.add_argument(
        "--fetch",
        type=below(_INT32),
        help="experts to predict for each layer (default: as many as a token uses)",
    )
    parser.add_argument("--recall", type=float, help=f"recall of the simulated predictor (default: {_RECALL})")
    parser.add_argument(
        "--seed",
        type=below(2**64),
        default=0,
        help="seed of the simulated predictor and of --synthetic (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="file of torch_mesh.save_profile or torch-mesh routing profile, for a warm start",
    )
    parser.add_argument(
        "--early-experts",
        default="off",
        metavar="LAYERS,EXPERTS",
        help="experts that stay resident in the first layers, as in MeshConfig: 1,32 (default: %(default)s)",
    )
    parser.add_argument("--as-decode", action="store_true", help="replay each token of a prompt as a decode step")
    parser.add_argument(
        "--prefill",
        default="auto",
        choices=("auto", "window", "off"),
        help="how prompts read experts, as in MeshConfig",
    )
    parser.add_argument(
        "--deferred-experts",
        type=below(_INT32),
        default=0,
        help="cold experts of a token that are deferred by a layer",
    )
    parser.add_argument("--expert-bytes", help="size of one packed expert; with both speeds it gives tokens/s")
    parser.add_argument("--other-bytes", help="size of all weights but the experts")
    parser.add_argument(
        "--other-seconds", type=float, help="measured time of a token besides its experts, instead of --other-bytes"
    )
    parser.add_argument("--disk-speed", help="bytes per second, such as 1.5GB")
    parser.add_argument("--memory-speed", help="bytes per second, such as 30GB")
    _add_machines(parser)
    parser.add_argument("--json", metavar="OUT", help='write {"rows": [...]} to this file')
    parser.set_defaults(run=run)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group("several machines", "one rank each, with a part of every layer's experts")
    several.add_argument(
        "--nodes",
        metavar="N",
        help="numbers of machines, separated by commas, such as 1,2,4; sizes and speeds are those of one",
    )
    several.add_argument(
        "--network",
        metavar="BANDWIDTH,LATENCY",
        help="each machine's link, such as 10Gbit/s,0.2ms; the latency includes the software's",
    )
    several.add_argument("--hidden-size", type=int, help="size of a token's hidden state, which is exchanged in bf16")
    several.add_argument(
        "--placement",
        help=f"placement of experts, separated by commas: {', '.join(PLACEMENTS)} (by what sequences before --prompts "
        "use together; default: contiguous)",
    )
    several.add_argument("--one-disk", action="store_true", help="the ranks are on one machine, and share its disk")
    several.add_argument(
        "--dispatch", help=f"dispatch of tokens, separated by commas: {', '.join(DISPATCHES)} (default: all_reduce)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.fetch is not None and arguments.prefetch == "off":
        raise ValueError("--fetch is for a predictor: name one with --prefetch, or leave --fetch out")
    if arguments.recall is not None and arguments.prefetch != "simulated":
        raise ValueError("--recall is of the simulated predictor: give --prefetch simulated, or leave --recall out")
    check_results((arguments.json, '{\n "rows": '))
    policies = _policies(arguments)
    hardware = _hardware(arguments)
    if arguments.nodes is not None:
        on_nodes = _simulate_nodes(arguments, policies, hardware)
        _print_nodes(on_nodes)
        _write_json(arguments, on_nodes)
        return 0
    if given := [
        option
        for option in ("network", "hidden_size", "placement", "dispatch", "one_disk")
        if (value := getattr(arguments, option)) is not None and value is not False
    ]:
        raise ValueError(f"--{given[0].replace('_', '-')} is for several machines: give their number with --nodes")
    profile = None if arguments.profile is None else load_profile(arguments.profile)
    rows = [
        simulate(
            trace,
            policy,
            resident,
            prompts=parse_prompts(arguments.prompts),
            predictor=arguments.prefetch,
            prefetch=arguments.fetch,
            recall=_RECALL if arguments.recall is None else arguments.recall,
            seed=arguments.seed,
            hardware=hardware,
            profile=profile,
            early_experts=early_experts.check("--early-experts", arguments.early_experts),
            as_decode=arguments.as_decode,
            prefill=arguments.prefill,
            deferred_experts=arguments.deferred_experts,
        )
        for trace in _traces(arguments)
        for resident in _fractions(arguments.resident)
        for policy in policies
    ]
    _print_table(rows)
    _write_json(arguments, rows)
    return 0


def _policies(arguments: argparse.Namespace) -> list[str]:
    if arguments.policy is None:
        policies = ["auto", BOUND]
    else:
        policies = policy_names() if arguments.policy == "all" else arguments.policy.split(",")
    if arguments.prefetch != "off" and BOUND in policies:
        if arguments.policy not in (None, "all"):
            raise ValueError(
                f"--policy is '{arguments.policy}', and {BOUND} is the bound without prefetch: leave it out, or "
                f"--prefetch {arguments.prefetch}"
            )
        policies.remove(BOUND)
    return policies


def _write_json(arguments: argparse.Namespace, rows: Sequence[Row | NodesRow]) -> None:
    if arguments.json:
        with new_file(arguments.json, "w") as file:
            file.write(json.dumps({"rows": [row.to_dict() for row in rows]}, indent=1) + "\n")


# Options that expert parallelism does not support, with their defaults.
_OF_ONE_PROCESS = {"profile": None, "early_experts": "off", "deferred_experts": 0}


def _simulate_nodes(
    arguments: argparse.Namespace, policies: Sequence[str], hardware: Hardware | None
) -> list[NodesRow]:
    for name, left_out in _OF_ONE_PROCESS.items():
        if getattr(arguments, name) != left_out:
            raise ValueError(f"--{name.replace('_', '-')} is for one process: leave it out with --nodes")
    if arguments.prefetch not in ("off", "lookahead"):
        raise ValueError(f"--prefetch is '{arguments.prefetch}'; allowed with --nodes: lookahead or off")
    placements = _choices(arguments.placement, PLACEMENTS, "--placement")
    dispatches = _choices(arguments.dispatch, DISPATCHES, "--dispatch")
    if arguments.hidden_size is not None and arguments.hidden_size < 1:
        raise ValueError(f"--hidden-size must be 1 or more; got {arguments.hidden_size}")
    if hardware is None or arguments.network is None or arguments.hidden_size is None:
        raise ValueError(
            "--nodes needs --network and --hidden-size, and --expert-bytes, --disk-speed and --memory-speed of one "
            "machine"
        )
    network = Network.parse(arguments.network)
    return [
        simulate_nodes(
            trace,
            policy,
            resident,
            Cluster(nodes, arguments.hidden_size, hardware, network, placement, dispatch, arguments.one_disk),
            prompts=parse_prompts(arguments.prompts),
            lookahead=arguments.prefetch == "lookahead",
            prefetch=arguments.fetch,
            prefill=arguments.prefill,
            as_decode=arguments.as_decode,
        )
        for trace in _traces(arguments)
        for resident in _fractions(arguments.resident)
        for policy in policies
        for nodes in _counts(arguments.nodes)
        # One machine has all experts and exchanges nothing.
        for placement in (placements if nodes > 1 else PLACEMENTS[:1])
        for dispatch in (dispatches if nodes > 1 else DISPATCHES[:1])
    ]


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--nodes is '{text}'; allowed: numbers of machines such as 1,2,4") from None


def _choices(text: str | None, allowed: tuple[str, ...], option: str) -> list[str]:
    parts = [allowed[0]] if text is None else text.split(",")
    if set(parts) <= set(allowed):
        return parts
    raise ValueError(f"{option} is '{text}'; allowed: {', '.join(allowed)}, separated by commas")


def _print_nodes(rows: list[NodesRow]) -> None:
    names = ("resident", "policy", "nodes", "placement", "dispatch", "hits", "busiest", "read MB", "sent kB")
    table = Table("trace", *names, "stalled", "network", "tokens/s")
    for row in rows:
        cells = [row.trace, f"{row.resident:g}", row.policy, str(row.nodes), row.placement, row.dispatch]
        cells += [f"{row.hit_rate:.1%}", f"{row.busiest:.2f}"]
        cells += [f"{row.read_bytes_per_token / 1e6:.1f}", f"{row.sent_bytes_per_token / 1e3:.1f}"]
        cells += [f"{row.stall_fraction:.1%}", f"{row.network_fraction:.1%}", f"{row.tokens_per_second:.2f}"]
        table.add_row(*cells)
    Console(width=140).print(table, markup=False)


def _traces(arguments: argparse.Namespace) -> list[Trace]:
    traces = [load_trace(path) for path in arguments.traces]
    if arguments.synthetic is not None:
        traces.append(_synthetic(arguments.synthetic, arguments.seed))
    if not traces:
        raise ValueError("nothing to simulate: name a trace, or a shape with --synthetic")
    return traces


def _synthetic(shape: str, seed: int) -> Trace:
    layers, experts, top_k, *overlap = parts if len(parts := shape.split(",")) in (3, 4) else ["?"] * 3
    try:
        sizes = {"layers": int(layers), "experts": int(experts), "top_k": int(top_k)}
        given = float(overlap[0]) if overlap else None
    except ValueError:
        raise ValueError(f"--synthetic is '{shape}'; allowed: LAYERS,EXPERTS,TOP_K[,OVERLAP]") from None
    return synthetic_trace(**sizes, overlap=given, seed=seed)


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--resident is '{text}'; allowed: fractions such as 0.1,0.25,0.5") from None


def parse_prompts(text: str | None) -> slice | None:
    if text is None:
        return None
    try:
        first, end = (int(part) if part else None for part in text.split(":"))
    except ValueError:
        raise ValueError(f"--prompts is '{text}'; allowed: FIRST:END, such as 35:70") from None
    return slice(first, end)


def _hardware(arguments: argparse.Namespace) -> Hardware | None:
    given = [arguments.expert_bytes, arguments.disk_speed, arguments.memory_speed]
    if all(each is None for each in (*given, arguments.other_bytes, arguments.other_seconds)):
        return None
    if not all(given):
        raise ValueError("tokens/s needs --expert-bytes, --disk-speed and --memory-speed, all three")
    names = ["--expert-bytes", "--disk-speed", "--memory-speed"]
    expert, disk, memory = (parse_size(text, name) for text, name in zip(given, names, strict=True))
    if min(expert, disk, memory) <= 0:
        raise ValueError("--expert-bytes, --disk-speed and --memory-speed must be positive")
    other, seconds = arguments.other_bytes, arguments.other_seconds
    if other is not None and seconds is not None:
        raise ValueError("--other-bytes and --other-seconds exclude each other: leave one out")
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"--other-seconds must be 0 or more; got {seconds}")
    return Hardware(expert, disk, memory, 0 if other is None else parse_size(other, "--other-bytes"), seconds)


def _print_table(rows: list[Row]) -> None:
    from torch_mesh.statistics.counters import percent

    ahead = any(row.prefetch != "off" for row in rows)
    deferred = any(row.deferred_rate > 0 for row in rows)
    early = any(row.early_hit_rate is not None for row in rows)
    timed = any(row.tokens_per_second is not None for row in rows)
    table = Table("trace", "resident", "policy", "hits", "reads/token", "ns/access")
    for name in ["waits", "stalled", "recall", "prefetched", "unused"] if ahead else []:
        table.add_column(name)
    for name in ["deferred"] if deferred else []:
        table.add_column(name)
    for name in ["early", "others"] if early else []:
        table.add_column(name)
    for name in ["MB/token", "tokens/s"] if timed else []:
        table.add_column(name)
    for row in rows:
        cells = [row.trace, f"{row.resident:g}", row.policy, f"{row.hit_rate:.1%}"]
        cells += [f"{row.reads_per_token:.1f}", f"{row.decision_ns:.0f}"]
        if ahead:
            cells += [f"{row.wait_rate:.1%}", f"{row.stall_fraction:.1%}"]
            cells += ["-" if row.recall is None else f"{row.recall:.1%}"]
            cells += [str(row.prefetched), str(row.prefetch_unused)]
        if deferred:
            cells += [f"{row.deferred_rate:.1%}"]
        if early:
            cells += [percent(row.early_hit_rate), percent(row.other_hit_rate)]
        if row.bytes_per_token is not None and row.tokens_per_second is not None:
            cells += [f"{row.bytes_per_token / 1e6:.1f}", f"{row.tokens_per_second:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table, markup=False)
