"""Claim: a whole model in memory reads a prompt of 512 tokens 1.5 x as fast as transformers' grouped_mm, decodes one
sequence and two at a time in bf16 at least as fast as llama.cpp's BF16, and with int4 throughout under torch.compile at
least as fast as its Q4_0.

Nothing is cold: this measures the kernels alone. Every system has the same weights and tokens, and its own routing;
llama.cpp may repack. The linear layers outside the experts are torch's own with the default dense="auto", or packed
like the experts. Systems with weights of one width are in memory at the same time and alternate, except those with
packed layers in bf16, which run separately. The cosine of each system's logits with those of transformers is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row
from workers import Worker

PREFILL_TOKENS, SEED = 512, 20260101
SEQUENCES = (1, 2)  # sequences that are decoded together
GROUPED_MM = "transformers bf16, grouped_mm"
LLAMA_FORM = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class System:
    """One process. ``modes`` maps the contender's names of its modes to the table's names."""

    script: str
    python: Path
    model: Path
    modes: dict[str, str]
    fields: dict[str, Any] = field(default_factory=dict)


def dense_groups(weights: str) -> tuple[tuple[str, ...], ...]:
    """Return groups of values of ``dense`` that are measured together. Three copies of the experts in bf16, in addition
    to llama.cpp's and transformers', do not fit into 24 GB."""
    return (("none", "auto"), (weights,)) if weights == "bf16" else (("none", "auto", weights),)


def mesh(weights: str, dense: str, model: Path) -> System:
    name = mesh_name(weights, dense)
    modes = {"eager": name, "compiled": f"{name}, compiled"}
    return System("warm_mesh.py", Path(sys.executable), model, modes, {"dense": dense})


def mesh_name(weights: str, dense: str) -> str:
    return f"torch_mesh {weights}, dense {dense}"


def systems(directory: Path, shape: synthetic.Shape, weights: str, group: Sequence[str]) -> list[System]:
    source = synthetic.checkpoint(directory, shape)
    own = source if weights == "bf16" else synthetic.store(directory, shape, weights)
    quantized = synthetic.gguf(directory, shape, LLAMA_FORM[weights])
    in_bf16 = {"grouped_mm": GROUPED_MM, "eager": "transformers bf16, eager"}
    return [
        *(mesh(weights, dense, own) for dense in group),
        System("warm_llama.py", synthetic.PEERS_PYTHON, quantized, {"": f"llama.cpp {LLAMA_FORM[weights]}"}),
        System("warm_transformers.py", Path(sys.executable), source, in_bf16),
    ]


@dataclass(frozen=True)
class Contender:
    """One mode of a system."""

    worker: Worker
    mode: str

    def tokens_per_second(self, **request: Any) -> float:
        return self.worker.measure(mode=self.mode, **request)["tokens_per_second"]

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


def own_names(speeds: Speeds) -> list[str]:
    return [name for name in speeds if name.startswith("torch_mesh")]


def add_prefill(report: Report, weights: str, speeds: Speeds) -> None:
    llama = f"llama.cpp {LLAMA_FORM[weights]}"
    for own in own_names(speeds):
        row = partial(harness.paired_row, f"prefill-{PREFILL_TOKENS}, {own}", speeds[own], "tok/s")
        report.add(row(GROUPED_MM, speeds[GROUPED_MM], at_least=1.5))
        report.add(row(llama, speeds[llama]))


def add_decode(report: Report, weights: str, sequences: int, speeds: Speeds) -> None:
    llama = f"llama.cpp {LLAMA_FORM[weights]}"
    # The claim is on one width for all weights, as in llama.cpp, with a compiled step.
    claimed = f"{mesh_name(weights, weights)}, compiled"
    for own in own_names(speeds):
        row = partial(harness.paired_row, f"decode, batch {sequences}, {own}", speeds[own], "tok/s")
        report.add(row(llama, speeds[llama], at_least=1.0 if own == claimed and weights != "int8" else None))
        report.add(row(GROUPED_MM, speeds[GROUPED_MM]))


def add_logits(report: Report, contenders: dict[str, Contender]) -> None:
    exact = contenders[GROUPED_MM].logits
    shown = {row.name for row in report.rows}
    for name, contender in contenders.items():
        row = Row(f"cosine of logits, {name}", harness.cosine(contender.logits, exact), "")
        if name != GROUPED_MM and row.name not in shown:
            report.add(row)


def measure_group(report: Report, weights: str, group: Sequence[str], options: Any) -> None:
    shape = synthetic.Shape(layers=options.layers)
    contenders = open_contenders(systems(options.dir, shape, weights, group), options)
    # A compiled mode compiles decode steps alone, so its prefill is not measured.
    prefill_contenders = {name: c for name, c in contenders.items() if c.mode != "compiled"}
    details = {"prefill": measure_speeds(prefill_contenders, options.rounds, what="prefill", tokens=PREFILL_TOKENS)}
    add_prefill(report, weights, details["prefill"])
    for sequences in SEQUENCES:
        request = {"what": "decode", "tokens": options.tokens, "sequences": sequences}
        speeds = details[f"decode, batch {sequences}"] = measure_speeds(contenders, options.rounds, **request)
        add_decode(report, weights, sequences, speeds)
    add_logits(report, contenders)
    report.details[f"{weights}, dense {' '.join(group)}"] = details
    for worker in {contender.worker for contender in contenders.values()}:
        worker.close()


def measure_speeds(contenders: dict[str, Contender], rounds: int, **request: Any) -> Speeds:
    """Return tokens per second. A first round is not counted: it reads cold experts, and compiles."""
    runs = {name: partial(contender.tokens_per_second, **request) for name, contender in contenders.items()}
    harness.interleave(runs, 1)
    return harness.interleave(runs, rounds)


def measure(options: Any) -> Report:
    report = Report(f"{options.layers}-layer Qwen3-MoE in memory, {options.threads} threads")
    for weights in options.weights:
        for group in dense_groups(weights):
            measure_group(report, weights, group, options)
    report.notes += [
        (
            f"medians of {options.rounds} interleaved rounds of one prompt of {PREFILL_TOKENS} tokens and "
            f"{options.tokens} decode steps"
        ),
        "tokens per second of a batch of 2 are those of both sequences",
    ]
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--weights", nargs="+", choices=tuple(LLAMA_FORM), default=list(LLAMA_FORM))
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokens", type=int, default=48, help="decode steps a round")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
