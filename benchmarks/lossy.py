"""Claim: with a quarter of examples/mesh-tiny's experts resident, deferred_experts=1 costs at most 1 % of perplexity
and halves the waits of decode steps. routing_bias=0.1 has the same limits, and reads a fifth less. fallback="int4" has
the same limits, and reads half.

Each row shows perplexity, waits and reads of decode steps relative to the exact model in the same run. The tokens of
held-out prose and code are fed one at a time, as in decoding, after the first 16 of each document.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, Row
from perplexity import ROOT, documents
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh
from torch_mesh.statistics.counters import Counters
from torch_mesh.store.convert import convert

PROMPT = 16
BIASES = (0.02, 0.05, 0.1, 0.2, 0.5)
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    **{f"deferred_experts={count}": {"lossy": {"deferred_experts": count}} for count in (1, 2, 3)},
    **{f"routing_bias={bias}": {"lossy": {"routing_bias": bias}} for bias in BIASES},
    "deferred_experts=1, routing_bias=0.1": {"lossy": {"deferred_experts": 1, "routing_bias": 0.1}},
    "fallback=int4": {"lossy": {"fallback": "int4"}},
}
# The peer of fallback: every expert in the fallback's format, in as much memory.
ALL_INT4 = "all in int4"
# Claims of a mode: maximum perplexity, waits and bytes, relative to the exact model.
CLAIMS = {
    "deferred_experts=1": (1.01, 0.5, None),
    "routing_bias=0.1": (1.01, 0.5, 0.8),
    "fallback=int4": (1.01, 0.5, 0.5),
}


@dataclass
class Outcome:
    model: PreTrainedModel
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def decode(self) -> Counters:
        return torch_mesh.stats(self.model).decode

    @property
    def waits(self) -> float:
        """Experts per token that a decode step waited for in their own layer."""
        return (self.decode.cold_misses + self.decode.inflight_misses) / self.tokens

    @property
    def read(self) -> float:
        """KiB per token."""
        return self.decode.bytes_read / self.tokens / 1024


@torch.inference_mode()
def decode(outcome: Outcome, ids: torch.Tensor) -> None:
    """Decode a document one token at a time, and add its figures to ``outcome``."""
    cache = outcome.model(input_ids=ids[:, : PROMPT + 1], use_cache=True).past_key_values
    begin = time.perf_counter()
    for position in range(PROMPT + 1, ids.shape[1] - 1):
        step = outcome.model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        outcome.loss += torch.nn.functional.cross_entropy(
            step.logits[0].double(), ids[0, position + 1 : position + 2]
        ).item()
        outcome.tokens += 1
    outcome.seconds += time.perf_counter() - begin


def measure(options: Any) -> Report:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [
        ids
        for name in ("prose", "code")
        for ids in documents(options.text / f"{name}.jsonl", tokenizer, options.documents, options.length)
    ]
    texts = [ids for ids in texts if ids.shape[1] > PROMPT + 2]
    report = Report(
        f"Lossy modes, {options.model.name} in int8 with {options.resident:.0%} of its experts resident, "
        f"prefetch={options.prefetch!r}, one token at a time"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # for the fallbacks
        stores = {name: convert(options.model, Path(folder) / name, name).store for name in ("int8", "int4")}
        outcomes = {}

        def add(name: str, weights: str, **fields: Any) -> None:
            config = torch_mesh.MeshConfig(prefetch=options.prefetch, **{"resident": options.resident} | fields)
            model = AutoModelForCausalLM.from_pretrained(stores[weights].folder, quantization_config=config)
            outcomes[name] = Outcome(model)

        for name, fields in MODES.items():
            add(name, "int8", **fields)
        memory = torch_mesh.stats(outcomes["exact"].model).slots * stores["int8"].manifest.record_bytes
        add(ALL_INT4, "int4", resident=memory)
        remaining = {name: iter(texts) for name in outcomes}
        harness.interleave(
            {name: lambda name=name: decode(outcomes[name], next(remaining[name])) for name in outcomes}, len(texts)
        )
        for name, outcome in outcomes.items():
            add_rows(report, name, outcome, outcomes["exact"])
            report.details[name] = outcome.decode.to_dict()
    report.notes.append(f"{outcomes['exact'].tokens} decoded tokens of {len(texts)} documents")
    report.notes.append(markdown(outcomes))
    return report


def add_rows(report: Report, name: str, outcome: Outcome, exact: Outcome) -> None:
    perplexity, waits, read = CLAIMS.get(name, (None, None, None))
    rows = (
        ("perplexity", "", outcome.perplexity, exact.perplexity, perplexity),
        ("experts waited for per token", "", outcome.waits, exact.waits, waits),
        ("read per token", "KiB", outcome.read, exact.read, read),
        ("tokens/s", "", outcome.tokens / outcome.seconds, exact.tokens / exact.seconds, None),
    )
    for what, unit, value, reference, at_most in rows:
        report.add(Row(f"{name}: {what}", value, unit, "exact", reference, at_most=at_most))


def markdown(outcomes: dict[str, Outcome]) -> str:
    """The table of docs/lossy.md."""
    exact = outcomes["exact"]
    lines = [
        "",
        (
            "| | perplexity | hits | cold | in flight | deferred | rerouted | fallbacks | read per token | waiting | "
            "tokens/s |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        counts, tokens = outcome.decode, outcome.tokens
        missed = (counts.cold_misses, counts.inflight_misses, counts.deferred)
        access_counts = (counts.hits, *missed, counts.rerouted, counts.fallback_accesses)
        cells = (
            f"× {outcome.perplexity / exact.perplexity:.4f}",
            *(f"{count / tokens:.2f}" for count in access_counts),
            f"{outcome.read:.0f} KiB",
            f"× {counts.stall_seconds / exact.decode.stall_seconds:.2f}" if exact.decode.stall_seconds else "-",
            f"× {exact.seconds / outcome.seconds:.2f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=ROOT / "examples" / "mesh-tiny")
    arguments.add_argument("--text", type=Path, default=ROOT / "tests" / "data" / "text", help="folder of *.jsonl")
    arguments.add_argument("--documents", type=int, default=10, help="of each source")
    arguments.add_argument("--length", type=int, default=144, help="maximum tokens of a document")
    arguments.add_argument("--resident", type=float, default=0.25)
    arguments.add_argument("--prefetch", choices=("auto", "off"), default="auto")
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
