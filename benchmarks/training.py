"""Claim: a training step with adapters on all experts takes at most 1.5 x the time of unpatched transformers and PEFT
in memory, is 10 x as fast at 40 % resident as accelerate's disk offload, takes at most 10 % more memory than the sum of
its parts, and reads no expert more than twice.

The synthetic model has experts in bf16, AdamW, and adapters on experts only. Each system runs in its own process, and
its first step is not counted. accelerate puts adapters on offloaded experts on the meta device, where they do not
train. So the failure is shown, and the time of the frozen experts' forward and backward alone. ``--full-size`` measures
48 layers in int4 instead, with the prediction of `torch-mesh plan --train`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import full_size
import harness
import sessions
import synthetic
from harness import Report, Row
from rich.console import Console

PEFT, ACCELERATE = "transformers and PEFT", "accelerate disk offload, frozen experts"
# The parts of a step's resident memory. "imported": Python and its libraries before a model is opened; "workspace": the
# kernels'.
PARTS = ("imported", "dense", "pool", "workspace", "adapter", "gradient", "optimizer", "activation")
SEED = 20260101


def request_of(options: Any, tokens: int, sequences: int, vocab: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": options.steps,
        "warm_up": 1,
        "rank": options.rank,
        "seed": SEED,
        "vocab": vocab,
        "threads": options.threads,
        "dtype": options.dtype,
        "checkpointing": options.checkpointing,
        "experts_implementation": options.experts_implementation,
        "limit": options.limit,
    }


class Runs:
    """Run contenders, and report their times."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._console = Console(stderr=True)

    def __call__(self, name: str, script: str, model: Path, request: dict[str, Any]) -> dict[str, Any]:
        result = sessions.run(Path(sys.executable), script, model, sessions.NO_LIMIT, request)
        self._report.details[name] = result
        stopped = " and was stopped" if result["unfinished"] else ""
        self._console.print(f"{name}: {median(result, 'seconds'):.2f} s a step{stopped}")
        if result["unfinished"]:
            self._report.notes.append(
                f"{name}: stopped after {request['limit']:g} s of a step, the lower bound of its time"
            )
        return result


def median(result: dict[str, Any], what: str) -> float:
    return statistics.median(step[what] for step in result["steps"])


def require_finished(name: str, result: dict[str, Any]) -> dict[str, Any]:
    if result["unfinished"]:
        raise SystemExit(f"{name} did not end a step in {result['steps'][0]['seconds']:g} s: give it a longer --limit")
    return result


def add_mesh(report: Report, name: str, result: dict[str, Any]) -> None:
    for what in ("forward", "backward", "stall_seconds"):
        report.add(Row(f"{what.removesuffix('_seconds')}, {name}", median(result, what), "s"))
    last = result["steps"][-1]
    parts = {part: result.get(f"{part}_bytes", last.get(f"{part}_bytes")) for part in PARTS}
    peak, of = result["peak"] / 1e9, "its parts"
    report.add(Row(f"peak memory, {name}", peak, "GB", of, sum(parts.values()) / 1e9, at_most=1.1))
    report.notes.append(f"{name}: " + ", ".join(f"{part} {size / 1e9:.2f} GB" for part, size in parts.items()))
    max_reads = max(step["max_reads"] for step in result["steps"])
    report.add(Row(f"reads of one expert in a step, {name}", max_reads, "", "one", 1.0, at_most=2.0))
    report.add(Row(f"read per step, {name}", median(result, "bytes_read") / 1e9, "GB"))


def measure(options: Any) -> Report:
    report = Report(
        f"Training {options.layers} layers of {options.experts} experts in {options.weights}, the rest in "
        f"{options.dtype}, {options.tokens} tokens, "
        f"rank {options.rank} on all experts"
    )
    run = Runs(report)
    shape = synthetic.Shape(layers=options.layers, experts=options.experts)
    checkpoint = synthetic.checkpoint(options.dir, shape)
    request = request_of(options, options.tokens, options.sequences, shape.vocab)
    peer = run(PEFT, "train_transformers.py", checkpoint, request) if "peft" in options.peers else None
    frozen = run_accelerate(options, run, report, shape, request) if "accelerate" in options.peers else None
    for resident in options.resident:
        name = f"{resident:.0%} resident"
        store = synthetic.store(options.dir, shape, options.weights)
        result = require_finished(name, run(name, "train_mesh.py", store, request | {"resident": resident}))
        seconds = median(result, "seconds")
        report.add(Row(f"step, {name}", seconds, "s"))
        add_mesh(report, name, result)
        if peer is not None and resident == 1.0:
            report.add(Row(f"step, {name}", seconds, "s", PEFT, median(peer, "seconds"), at_most=1.5))
        if frozen is not None and resident < 1.0:
            peer_rate = 3600 / median(frozen, "seconds")
            report.add(Row(f"steps an hour, {name}", 3600 / seconds, "", ACCELERATE, peer_rate, at_least=10.0))
    for name, each in ((PEFT, peer), (ACCELERATE, frozen)):
        if each is not None:
            report.add(Row(f"peak memory, {name}", each["peak"] / 1e9, "GB"))
    report.notes.append(f"medians of {options.steps} steps after one; {options.sequences} sequences of equal length")
    return report


def run_accelerate(
    options: Any, run: Runs, report: Report, shape: synthetic.Shape, request: dict[str, Any]
) -> dict[str, Any]:
    folder = synthetic.offload_folder(options.dir, shape)
    request = request | {"checkpoint": str(synthetic.checkpoint(options.dir, shape))}
    try:
        run("accelerate, adapters on experts", "train_accelerate.py", folder, request | {"frozen": False})
        report.notes.append("accelerate trains adapters on offloaded experts: measure those, not frozen ones")
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        report.notes.append(f"accelerate with adapters on offloaded experts does not train: {last}")
    return run(ACCELERATE, "train_accelerate.py", folder, request | {"frozen": True})


def run_plan(model: Path, request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch_mesh", "plan", str(model), "--json", "--train"]
    command += ["--lora-rank", str(request["rank"]), "--tokens", str(request["tokens"])]
    command += ["--resident", str(request["resident"])]
    command += ["--gradient-checkpointing"] if request["checkpointing"] else []
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def measure_full_size(options: Any) -> Report:
    report = Report(
        f"Training Qwen3-30B-A3B's shapes in int4, {options.tokens} tokens, rank {options.rank} on all experts"
    )
    run = Runs(report)
    model = full_size.store(options.dir, "int4")
    request = request_of(options, options.tokens, options.sequences, full_size.SHAPE.vocab)
    # A step takes minutes, so the first one is measured. Its allocations take little of that time.
    request |= {"resident": int(options.full_size * 1e9), "warm_up": 0, "steps": 1}
    name = f"{options.full_size:g} GB of experts"
    result = require_finished(name, run(name, "train_mesh.py", model, request))
    plan = run_plan(model, request)
    training = plan["training"]
    report.add(Row(f"step, {name}", median(result, "seconds"), "s", "plan", training["step_seconds"][1]))
    add_mesh(report, name, result)
    peak = result["peak"] / 1e9
    report.add(Row(f"peak memory, {name}", peak, "GB", "plan", training["peak_bytes"] / 1e9))
    report.add(Row(f"peak memory, {name}", peak, "GB", "allowed", 12.0, at_most=1.0))
    report.details["plan"] = plan
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--experts", type=int, default=synthetic.Shape.experts, help="experts of a layer")
    arguments.add_argument("--weights", default="bf16", help="format of torch_mesh's experts")
    arguments.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of all other weights"
    )
    arguments.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    arguments.add_argument("--sequences", type=int, default=2, help="sequences of a step")
    arguments.add_argument("--rank", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=3, help="timed steps")
    arguments.add_argument(
        "--resident", type=float, nargs="*", default=[1.0, 0.4], help="fractions of the experts, one per run"
    )
    arguments.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, for every system")
    arguments.add_argument(
        "--experts-implementation", default="grouped_mm", help="implementation of plain transformers"
    )
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments.add_argument("--peers", nargs="*", choices=("peft", "accelerate"), default=["peft", "accelerate"])
    arguments.add_argument("--limit", type=float, default=600, help="seconds after which a step is aborted")
    arguments.add_argument(
        "--full-size", type=float, default=None, metavar="GB", help="48 layers, GB of experts in memory, no peers"
    )
    options = arguments.parse_args()
    report = measure(options) if options.full_size is None else measure_full_size(options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
