"""Claim: with 40 % of its experts' bytes in memory, torch_mesh decodes 8 x as fast as llama.cpp and 20 x as accelerate.

Each system runs with the same weights in its own process under a memory limit: its anonymous memory (measured without a
limit) + the bytes of its dense weights + 0.4 of the bytes of its experts. The other systems also run under torch_mesh's
limit. torch_mesh and llama.cpp have 4-bit experts; other linear layers are 8 bits in torch_mesh and 4 bits in
llama.cpp; accelerate has the bf16 originals. Files are evicted from the page cache before every session, and tokens are
timed after a warm-up.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import sessions
import synthetic
from harness import Report, Row
from rich.console import Console

RESIDENT = 0.4
# Page tables, kernel objects and jitter between two runs; the same for every system.
SLACK = 32 << 20
PROMPT, SEED = 16, 20260101
LLAMA_MMAP, LLAMA_RANDOM = "llama.cpp Q4_0, stock mmap", "llama.cpp Q4_0, MADV_RANDOM"
ACCELERATE, MESH = "accelerate disk offload, bf16", "torch_mesh int4, dense int8"
DEFAULTS = "torch_mesh int4, nothing else asked for"
PEERS = (LLAMA_MMAP, LLAMA_RANDOM, ACCELERATE)


def with_equal_memory(name: str) -> str:
    return f"{name}, torch_mesh's limit"


@dataclass(frozen=True)
class Contender:
    """One system: its script and interpreter, its model, and the number of its tokens."""

    script: str
    python: Path
    model: Path
    dense_bytes: int
    expert_bytes: int
    warm_up: int
    measured: int
    options: dict[str, Any]

    def run(self, limit: int, measured: int, warm_up: int, watch_memory: bool = False) -> dict[str, Any]:
        request = {
            "watch_memory": watch_memory,
            "vocab": synthetic.Shape.vocab,
            "prompt": PROMPT,
            "seed": SEED,
            "measured": measured,
            "warm_up": warm_up,
            **self.options,
        }
        return sessions.run(self.python, self.script, self.model, limit, request)


def limit_of(contender: Contender) -> int:
    """Return the memory limit: anonymous memory of a run without a limit + dense bytes + 0.4 of the expert bytes +
    slack.

    The run without a limit has the same tokens as the measured one. torch.compile's C++ compiler takes more memory than
    the model if its cache has no code for these shapes.
    """
    unlimited = contender.run(sessions.NO_LIMIT, contender.measured, contender.warm_up, watch_memory=True)
    own = unlimited["anonymous_peak"] - unlimited["anonymous_weights"]
    dense = unlimited.get("dense_bytes", contender.dense_bytes)
    return own + dense + int(RESIDENT * contender.expert_bytes) + SLACK


def contenders(directory: Path, shape: synthetic.Shape, threads: int, tokens: int) -> dict[str, Contender]:
    source = synthetic.checkpoint(directory, shape)
    dense = synthetic.dense_bytes(source)
    ours = synthetic.store(directory, shape, "int4")
    quantized = synthetic.gguf(directory, shape, "Q4_0")
    offloaded = synthetic.offload_folder(directory, shape)
    # llama.cpp has its dense weights in 4 bits too; its file holds nothing but those and the experts.
    llama_experts = shape.expert_bytes_bf16 // 2 * 18 // 32
    llama = partial(
        Contender,
        script="llama.py",
        python=synthetic.PEERS_PYTHON,
        model=quantized,
        dense_bytes=quantized.stat().st_size - llama_experts,
        expert_bytes=llama_experts,
        warm_up=tokens // 4,
        measured=tokens,
    )
    # Repacking copies all weights, which the limit does not allow.
    llama_options = {"threads": threads, "repack": False}
    own_python = Path(sys.executable)
    return {
        MESH: Contender(
            script="mesh.py",
            python=own_python,
            model=ours,
            dense_bytes=dense,
            expert_bytes=synthetic.store_expert_bytes(ours),
            warm_up=tokens // 4,
            measured=tokens,
            options={"threads": threads, "resident": RESIDENT, "dense": "int8"},
        ),
        DEFAULTS: Contender(
            script="mesh.py",
            python=own_python,
            model=ours,
            dense_bytes=dense,
            expert_bytes=synthetic.store_expert_bytes(ours),
            warm_up=tokens // 4,
            measured=tokens,
            options={"threads": threads, "resident": RESIDENT, "eager": True},
        ),
        LLAMA_MMAP: llama(options={**llama_options, "random_access": False}),
        LLAMA_RANDOM: llama(options={**llama_options, "random_access": True}),
        ACCELERATE: Contender(
            script="accelerate_offload.py",
            python=own_python,
            model=offloaded,
            dense_bytes=dense,
            expert_bytes=shape.expert_bytes_bf16,
            # Few tokens are enough, since it reads much for each one.
            warm_up=2,
            measured=max(2, tokens // 8),
            options={"threads": threads, "checkpoint": str(source)},
        ),
    }


def add_speed(report: Report, results: dict[str, list[dict[str, Any]]]) -> None:
    speeds = {name: [run["tokens_per_second"] for run in runs] for name, runs in results.items()}
    better_llama = max((LLAMA_MMAP, LLAMA_RANDOM), key=lambda name: statistics.median(speeds[name]))
    min_ratios = {better_llama: 8.0, ACCELERATE: 20.0}
    peers = [name for name in results if name not in (MESH, DEFAULTS)]
    for ours in (MESH, DEFAULTS):
        for name in peers:
            at_least = min_ratios.get(name) if ours == MESH else None
            report.add(
                harness.paired_row(f"decode, {ours}", speeds[ours], "tok/s", name, speeds[name], at_least=at_least)
            )
    for name in peers:
        report.add(Row(f"decode, {name}", statistics.median(speeds[name]), "tok/s"))


def add_conditions(report: Report, results: dict[str, list[dict[str, Any]]]) -> None:
    """Add the conditions of the speeds: limits, bytes read, hit rate, and the similarity of the systems' logits."""

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in results[name])

    for name in results:
        limit = results[name][0]["limit"] / 1e6
        report.add(Row(f"memory, {name}", median(name, "group_peak") / 1e6, "MB", "limit", limit, at_most=1.0))
        report.add(Row(f"read per token, {name}", median(name, "read_per_token") / 1e6, "MB"))
    for name in (MESH, DEFAULTS):
        report.add(Row(f"hit rate, {name}", 100 * median(name, "hit_rate"), "%"))
    report.add(Row(f"load after imports, {MESH}", median(MESH, "load_seconds"), "s", "limit", 5.0, at_most=1.0))
    report.add(
        Row(f"peak of loading (VmHWM), {MESH}", median(MESH, "load_peak") / 1e9, "GB", "limit", 2.0, at_most=1.0)
    )
    exact = results[ACCELERATE][0]["prompt_logits"]
    for name in (MESH, LLAMA_MMAP):
        cosine = harness.cosine(results[name][0]["prompt_logits"], exact)
        report.add(Row(f"cosine of logits with bf16's, {name}", cosine, ""))


def measure(options: Any) -> Report:
    shape = synthetic.Shape(layers=options.layers)
    console = Console(stderr=True)
    systems = contenders(options.dir, shape, options.threads, options.tokens)
    limits = {}
    for name, contender in systems.items():
        limits[name] = limit_of(contender)
    limits[MESH] = limits[DEFAULTS] = max(limits[MESH], limits[DEFAULTS])
    for name in PEERS:
        systems[with_equal_memory(name)] = systems[name]
        limits[with_equal_memory(name)] = limits[MESH]
    for name, limit in limits.items():
        console.print(f"{name}: limit {limit / 1e6:,.0f} MB")

    def session(name: str) -> dict[str, Any]:
        contender = systems[name]
        result = contender.run(limits[name], contender.measured, contender.warm_up)
        console.print(
            f"{name}: {result['tokens_per_second']:.2f} tok/s, {result['read_per_token'] / 1e6:.1f} MB read per token"
        )
        return result

    results = harness.interleave({name: partial(session, name) for name in systems}, options.rounds)
    report = Report(
        f"Decode with {RESIDENT:.0%} of the experts' bytes in memory, {options.layers} layers, batch 1, cold files"
    )
    add_speed(report, results)
    add_conditions(report, results)
    report.notes += [
        (
            f"limit = own anonymous memory + dense bytes + {RESIDENT} x expert bytes + {SLACK >> 20} MiB for page "
            "tables; "
            "Python and torch are torch_mesh's own"
        ),
        "torch_mesh's limit: the larger of its two configurations', for both",
        "read per token: /proc/self/io read_bytes, the bytes requested from the storage device, with read-ahead",
        f"medians of {options.rounds} interleaved rounds, ratios round by round",
        "every system is given the same seeded stream of tokens and routes them itself",
        "torch_mesh's decode step is compiled by torch.compile (fullgraph, static cache), which happens in the warm-up",
        "llama.cpp runs without repacking, which would copy every weight into anonymous memory",
    ]
    report.details["runs"] = sessions.without_logits(results)
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--tokens", type=int, default=64, help="timed tokens; accelerate decodes an eighth of them")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
