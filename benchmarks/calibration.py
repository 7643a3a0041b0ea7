"""Claim: calibration removes a sixth or more of the effect of rounding mesh-tiny's experts to 4, 3 and 2 bits.

"Divergence" is the Kullback-Leibler divergence of each token's prediction by the engine from that by the unpatched
model, in thousandths of a nat. Perplexity is shown too. It may fall by chance when a model gets worse. Records are
calibrated on every other document of tests/data/text, prose and code, and measured on the first of the others; "prose
alone" is calibrated without code, which shows the effect of text of another kind. Both models of a pair run in one
process.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import perplexity
import torch
from harness import Report, Row
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh
from torch_mesh import _C
from torch_mesh.calibration import CALIBRATE_TOKENS
from torch_mesh.calibration.packing import on_text
from torch_mesh.store.convert import convert

FORMATS = (
    *((weights, group_size) for weights in ("int4", "lut4") for group_size in (32, 64, 128)),
    ("tcq3", 128),
    ("tcq2+tcq3", 128),
    ("tcq2", 128),
)
KINDS = ("prose", "code")


@dataclass(frozen=True)
class Predictions:
    """The log probabilities [tokens, vocabulary] and the actual next tokens of each document."""

    log_probabilities: list[torch.Tensor]
    targets: list[torch.Tensor]

    @property
    def perplexity(self) -> float:
        losses = [
            -predicted.gather(1, target[:, None]).double()
            for predicted, target in zip(self.log_probabilities, self.targets, strict=True)
        ]
        return math.exp(torch.cat(losses).mean().item())

    def divergence(self, other: Predictions) -> float:
        """Divergence of ``other`` from these predictions, in thousandths of a nat per token."""
        each = [
            (log_p.exp() * (log_p - log_q)).sum(1)
            for log_p, log_q in zip(self.log_probabilities, other.log_probabilities, strict=True)
        ]
        return 1000 * torch.cat(each).mean().item()


@torch.inference_mode()
def predict(model: PreTrainedModel, documents: Sequence[torch.Tensor]) -> Predictions:
    outputs = [model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1) for ids in documents]
    return Predictions(outputs, [ids[0, 1:] for ids in documents])


def split_text(folder: Path, kinds: Sequence[str], output: Path) -> Path:
    """Write every other document of ``kinds`` to the file ``output``."""
    lines = [(folder / f"{kind}.jsonl").read_text().splitlines()[1::2] for kind in kinds]
    shortest = min(map(len, lines))  # alternating, so that the first tokens include every kind
    mixed = [line for group in zip(*lines, strict=False) for line in group]
    output.write_text("\n".join(mixed + [line for each in lines for line in each[shortest:]]) + "\n")
    return output


def held_out(path: Path, tokenizer: Any, count: int, length: int) -> list[torch.Tensor]:
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()[::2]][:count]
    return [tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"] for text in texts]


def bits(weights: str, group_size: int) -> float:
    """Bits per weight of an expert of Qwen3-30B-A3B."""
    return 8 * _C.record_bytes(weights, group_size, 2048, 768, True, False) / (3 * 2048 * 768)


def measure(options: Any) -> Report:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {
        kind: held_out(options.text / f"{kind}.jsonl", tokenizer, options.documents, options.length) for kind in KINDS
    }
    unpatched = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    exact = {kind: predict(unpatched, ids) for kind, ids in texts.items()}
    count = sum(len(target) for each in exact.values() for target in each.targets)
    report = Report(f"Divergence of {options.model.name} from its unpatched self over {count} tokens")
    for kind in KINDS:
        report.add(Row(f"perplexity of {kind}, unpatched", exact[kind].perplexity, ""))
    points = report.details["points"] = {}  # read by figure.py
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mixed = split_text(options.text, KINDS, folder / "mixed.jsonl")
        prose = split_text(options.text, ("prose",), folder / "prose.jsonl")
        for weights, group_size in FORMATS:

            def run(text: Path | None, weights: str = weights, group_size: int = group_size) -> dict[str, Predictions]:
                store = convert(
                    options.model,
                    folder / "store",
                    weights,
                    group_size,
                    calibrate=None if text is None else on_text(text, options.tokens),
                    force=True,
                ).store
                config = torch_mesh.MeshConfig(resident=1.0)
                model = AutoModelForCausalLM.from_pretrained(store.folder, quantization_config=config)
                return {kind: predict(model, ids) for kind, ids in texts.items()}

            plain, calibrated, prose_calibrated = run(None), run(mixed), run(prose)
            points[f"{weights} g{group_size}"] = {
                "bits": bits(weights, group_size),
                "plain": mean_divergence(exact, plain),
                "calibrated": mean_divergence(exact, calibrated),
            }
            add_rows(
                report,
                f"{weights} g{group_size}, {bits(weights, group_size):.3g} bits",
                exact,
                plain,
                calibrated,
                prose_calibrated,
            )
    report.notes.append(f"calibrated on at most {options.tokens} tokens")
    return report


def mean_divergence(exact: dict[str, Predictions], other: dict[str, Predictions]) -> float:
    return sum(exact[kind].divergence(other[kind]) for kind in KINDS) / len(KINDS)


def add_rows(
    report: Report,
    name: str,
    exact: dict[str, Predictions],
    plain: dict[str, Predictions],
    calibrated: dict[str, Predictions],
    prose_calibrated: dict[str, Predictions],
) -> None:
    for kind in KINDS:
        before = exact[kind].divergence(plain[kind])
        row = f"{name}, {kind}"
        report.add(Row(row, exact[kind].divergence(calibrated[kind]), "", "plain", before, at_most=0.84))
        report.add(Row(f"{row}, of prose alone", exact[kind].divergence(prose_calibrated[kind]), "", "plain", before))
        report.add(Row(f"{row}, perplexity", calibrated[kind].perplexity, "", "plain", plain[kind].perplexity))


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=perplexity.ROOT / "examples" / "mesh-tiny")
    arguments.add_argument("--text", type=Path, default=perplexity.ROOT / "tests" / "data" / "text")
    arguments.add_argument("--documents", type=int, default=8, help="measured documents of each kind")
    arguments.add_argument("--length", type=int, default=512, help="maximum tokens of a document")
    arguments.add_argument(
        "--tokens", type=int, default=CALIBRATE_TOKENS, help="maximum tokens of the calibration text"
    )
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
