"""Claim: with int4 experts a layer is at least 3 x as fast as onnxruntime's QMoE, 1.8 x torch's int4pack and 3 x
kt-kernel for one row, and 1.5 x each for 512.

All systems have the same layer: 128 experts, top-8, the same weights, inputs and routing. Each runs in its own process
with all processors, and is stopped while the others run. The error of each output for one row against float64 shows
that all compute the same.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row
from workers import Worker, WorkerFailedError

sys.path.append(str(Path(__file__).parent / "contenders"))
import layer

ROWS = (1, 4, 512)
MESH, ONNX, TORCH, TRANSFORMERS, KT = "torch_mesh", "onnxruntime QMoE", "torch", "transformers bf16", "kt-kernel"


@dataclass(frozen=True)
class System:
    name: str
    script: str
    python: Path
    setup: dict[str, Any]
    required: bool = True  # if False, a failure to start is only noted


def systems() -> list[System]:
    own, peers = Path(sys.executable), synthetic.PEERS_PYTHON
    return [
        System(MESH, "layer_mesh.py", own, {}),
        System(TORCH, "layer_torch.py", own, {}),
        System(TRANSFORMERS, "layer_transformers.py", own, {}),
        System(ONNX, "layer_onnxruntime.py", peers, {}),
        # One process per form: a form that this processor does not support ends its process.
        *(System(KT, "layer_kt.py", peers, {"forms": [form]}, required=False) for form in ("int4", "int8", "bf16")),
    ]


def bits_of(variant: str) -> str:
    """Return bf16, int8 or int4. Names of variants begin with it; transformers' variants are in bf16."""
    return variant[:4] if variant.startswith("int") else "bf16"


@dataclass(frozen=True)
class Contender:
    """One variant of a system."""

    worker: Worker
    system: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.system} {self.variant}"

    def rows_per_second(self, rows: int, calls: int) -> float:
        return rows / self.worker.measure(variant=self.variant, tokens=rows, calls=calls)["seconds"]

    def error(self, exact: Any) -> float:
        output = self.worker.facts[self.variant]["output"]
        return float(((exact - output) ** 2).sum() ** 0.5 / (exact**2).sum() ** 0.5)


def open_contenders(options: Any, report: Report) -> list[Contender]:
    contenders = []
    for system in systems():
        try:
            worker = Worker(system.python, system.script, threads=options.threads, seed=options.seed, **system.setup)
        except WorkerFailedError as failure:
            if system.required:
                raise
            report.notes.append(f"{system.name} {system.setup} does not run here: {str(failure).splitlines()[0]}")
            continue
        contenders += [Contender(worker, system.name, variant) for variant in worker.facts]
    return contenders


# Required speed of int4 over each peer, by number of rows.
ONE_ROW = {ONNX: 3.0, TORCH: 1.8, KT: 3.0}
MIN_SPEEDUPS = {1: ONE_ROW, 512: dict.fromkeys(ONE_ROW, 1.5)}


# The limits of the layer by number of rows, with units.
LIMITS: dict[int, dict[str, str]] = {
    1: {"read": "GB/s"},
    4: {},
    512: {"float32": "GFLOP/s", "bfloat16": "GFLOP/s"},
}


def add_limits(report: Report, rows: int, rates: dict[str, list[float]]) -> None:
    for name, unit in LIMITS[rows].items():
        what = "plain read of the layer" if name == "read" else f"torch's square product, {name}"
        report.add(Row(f"limit, {what}", statistics.median(rates[name]), unit))
        report.details[f"limit, {name}"] = rates[name]


def add_rows(report: Report, rows: int, contenders: Sequence[Contender], speeds: dict[str, list[float]]) -> None:
    """Compare each of our formats with each peer's fastest variant of as many bits, or in bf16 if it has no other."""
    for own in (contender for contender in contenders if contender.system == MESH):
        for peer in dict.fromkeys(contender.system for contender in contenders if contender.system != MESH):
            candidates = [
                c
                for c in contenders
                if c.system == peer and (bits_of(c.variant) == bits_of(own.variant) or peer == TRANSFORMERS)
            ]
            if not candidates:
                continue
            best = max(candidates, key=lambda candidate: statistics.median(speeds[candidate.name]))
            min_speedup = MIN_SPEEDUPS.get(rows, {}).get(peer)
            report.add(
                harness.paired_row(
                    f"{own.variant}, {rows} row" + "s" * (rows > 1),
                    speeds[own.name],
                    "rows/s",
                    best.name,
                    speeds[best.name],
                    at_least=min_speedup if own.variant == "int4" else None,
                )
            )


def add_errors(report: Report, contenders: Sequence[Contender], seed: int) -> None:
    exact = layer.layer_output(seed)
    for contender in contenders:
        report.add(Row(f"error of one row, {contender.name}", 100 * contender.error(exact), "%"))


def measure(options: Any) -> Report:
    report = Report(
        f"One layer of {layer.EXPERTS} experts, top-{layer.TOP_K}, against its peers, {options.threads} threads"
    )
    limits = Worker(Path(sys.executable), "layer_limits.py", threads=options.threads, seed=options.seed)
    contenders = open_contenders(options, report)

    def limit(name: str, calls: int) -> float:
        return limits.measure(limit=name, calls=calls)["rate"]

    for rows in ROWS:
        calls = options.calls if rows != ROWS[-1] else 1
        runs = {contender.name: partial(contender.rows_per_second, rows, calls) for contender in contenders}
        runs |= {name: partial(limit, name, calls) for name in LIMITS[rows]}
        harness.interleave(runs, 1)
        speeds = harness.interleave(runs, options.rounds)
        add_rows(report, rows, contenders, speeds)
        add_limits(report, rows, speeds)
        report.details[f"rows/s, {rows}"] = {contender.name: speeds[contender.name] for contender in contenders}
    add_errors(report, contenders, options.seed)
    report.details["weight_bytes"] = {c.name: c.worker.facts[c.variant]["weight_bytes"] for c in contenders}
    report.notes.append(
        f"medians of {options.rounds} interleaved rounds of {options.calls} calls of 1 and 4 rows and one of "
        f"{ROWS[-1]}; "
        "the peer is its fastest variant"
    )
    for worker in {limits, *(contender.worker for contender in contenders)}:
        worker.close()
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_rounds(arguments, 9)
    arguments.add_argument("--calls", type=int, default=16)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
