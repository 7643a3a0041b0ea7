"""Claim: a whole model in memory reads a prompt of 512 tokens 1.5 x as fast as transformers' grouped_mm, decodes in bf16 at
least as fast as llama.cpp's BF16, and with int4 throughout under torch.compile at least as fast as its Q4_0.

Nothing is cold: this is the price or gain of the kernels alone. Every system has the same weights and is given the same
tokens, which it routes itself; llama.cpp may repack. Systems of one width of weights are in memory at the same time and
take turns; the cosine of each one's logits with those of transformers is shown.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row
from workers import Worker

PREFILL_TOKENS, SEED = 512, 20260101
GROUPED_MM = "transformers bf16, grouped_mm"
LLAMA_FORM = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class System:
    """One process; ``modes`` maps what the contender calls its modes to what the table calls them."""

    script: str
    python: Path
    model: Path
    modes: dict[str, str]
    fields: dict[str, Any] = field(default_factory=dict)


def dense_forms(weights: str) -> tuple[str, str]:
    """What the layers beside the experts are: torch's own, or packed as the experts are."""
    return "none", weights


def mesh(weights: str, dense: str, model: Path) -> System:
    name = mesh_name(weights, dense)
    modes = {"eager": name, "compiled": f"{name}, compiled"}
    return System("warm_mesh.py", Path(sys.executable), model, modes, {"dense": dense})


def mesh_name(weights: str, dense: str) -> str:
    return f"torch_mesh {weights}" if dense == "none" else f"torch_mesh {weights}, dense {dense}"


def systems(directory: Path, shape: synthetic.Shape, weights: str) -> list[System]:
    source = synthetic.checkpoint(directory, shape)
    own = source if weights == "bf16" else synthetic.store(directory, shape, weights)
    quantised = synthetic.gguf(directory, shape, LLAMA_FORM[weights])
    in_bf16 = {"grouped_mm": GROUPED_MM, "eager": "transformers bf16, eager"}
    return [
        *(mesh(weights, dense, own) for dense in dense_forms(weights)),
        System("warm_llama.py", synthetic.PEERS_PYTHON, quantised, {"": f"llama.cpp {LLAMA_FORM[weights]}"}),
        System("warm_transformers.py", Path(sys.executable), source, in_bf16),
    ]


@dataclass(frozen=True)
class Contender:
    """One mode of a system."""

    worker: Worker
    mode: str

    def tokens_per_second(self, what: str, tokens: int) -> float:
        return self.worker.measure(mode=self.mode, what=what, tokens=tokens)["tokens_per_second"]

    @property
    def logits(self) -> list[float]:
        return self.worker.facts[self.mode]


def open_contenders(chosen: Iterable[System], options: Any) -> dict[str, Contender]:
    contenders = {}
    for system in chosen:
        worker = Worker(
            system.python,
            system.script,
            model=str(system.model),
            threads=options.threads,
            vocab=synthetic.Shape.vocab,
            seed=SEED,
            decode=options.tokens,
            fields=system.fields,
        )
        contenders |= {name: Contender(worker, mode) for mode, name in system.modes.items()}
    return contenders


Speeds = dict[str, list[float]]


def add_prefill(report: Report, weights: str, speeds: Speeds) -> None:
    llama = f"llama.cpp {LLAMA_FORM[weights]}"
    for dense in dense_forms(weights):
        own = mesh_name(weights, dense)
        row = partial(harness.paired_row, f"prefill-{PREFILL_TOKENS}, {own}", speeds[own], "tok/s")
        report.add(row(GROUPED_MM, speeds[GROUPED_MM], at_least=1.5))
        report.add(row(llama, speeds[llama]))


def add_decode(report: Report, weights: str, speeds: Speeds) -> None:
    llama = f"llama.cpp {LLAMA_FORM[weights]}"
    # The same width throughout, as in llama.cpp, with the step compiled.
    claimed = f"{mesh_name(weights, weights)}, compiled"
    for own in (name for name in speeds if name.startswith("torch_mesh")):
        row = partial(harness.paired_row, f"decode, {own}", speeds[own], "tok/s")
        report.add(row(llama, speeds[llama], at_least=1.0 if own == claimed and weights != "int8" else None))
        report.add(row(GROUPED_MM, speeds[GROUPED_MM]))


def add_logits(report: Report, contenders: dict[str, Contender]) -> None:
    exact = contenders[GROUPED_MM].logits
    for name, contender in contenders.items():
        if name != GROUPED_MM:
            report.add(Row(f"cosine of logits, {name}", cosine(contender.logits, exact), ""))


def cosine(left: list[float], right: list[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    return dot / math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))


def measure_width(report: Report, weights: str, options: Any) -> None:
    shape = synthetic.Shape(layers=options.layers)
    contenders = open_contenders(systems(options.dir, shape, weights), options)
    # Decode steps do not depend on how the prompt is read, so a compiled mode has no prefill of its own.
    readers = {name: c for name, c in contenders.items() if c.mode != "compiled"}
    prefill = measure_speeds(readers, "prefill", PREFILL_TOKENS, options.rounds)
    decode = measure_speeds(contenders, "decode", options.tokens, options.rounds)
    add_prefill(report, weights, prefill)
    add_decode(report, weights, decode)
    add_logits(report, contenders)
    report.details[weights] = {"prefill": prefill, "decode": decode}
    for worker in {contender.worker for contender in contenders.values()}:
        worker.close()


def measure_speeds(contenders: dict[str, Contender], what: str, tokens: int, rounds: int) -> Speeds:
    """Tokens per second after one round that does not count: it reads what is cold, and compiles."""
    runs = {name: partial(contender.tokens_per_second, what, tokens) for name, contender in contenders.items()}
    harness.interleave(runs, 1)
    return harness.interleave(runs, rounds)


def measure(options: Any) -> Report:
    report = Report(f"{options.layers}-layer Qwen3-MoE in memory, batch 1, {options.threads} threads")
    for weights in options.weights:
        measure_width(report, weights, options)
    report.notes.append(
        f"medians of {options.rounds} interleaved rounds of one prompt of {PREFILL_TOKENS} tokens and {options.tokens} decode steps"
    )
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--weights", nargs="+", choices=tuple(LLAMA_FORM), default=list(LLAMA_FORM))
    arguments.add_argument("--layers", type=int, default=synthetic.Shape.layers)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokens", type=int, default=48, help="decode steps a round")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
