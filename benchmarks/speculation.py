"""Claim: with speculation="lookup" examples/mesh-tiny decodes no text at any residency more than 5 % slower than
without. Rewriting is 1.5 x as fast with a quarter of the experts resident and 2 x with all. With a quarter a token
waits half as long. Greedy tokens are those of plain decoding.

Prose, code, rewriting (a text twice, then its beginning) and turns of a chat are decoded greedily by two models, one of
which speculates. They have separate pools and alternate. The first text of a kind fills the pools and is not counted.
If tokens differ, the two largest logits of the plain model at the first difference are compared. --batch is the number
of texts of a kind that are decoded together.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, Row
from perplexity import ROOT, documents
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh

PROMPT = 24
KINDS = ("prose", "code", "rewriting", "chat")
MIN_SPEED = 0.95
REWRITING = {0.25: 1.5, 1.0: 2.0}
MAX_STALL = {0.25: 0.5}


def prompts(options: Any, tokenizer: Any) -> dict[str, list[torch.Tensor]]:
    """Return prompts [batch, n] of each kind."""
    count = (options.texts + 1) * options.batch
    prose, code = (documents(options.text / f"{name}.jsonl", tokenizer, count, 120) for name in ("prose", "code"))
    if min(len(prose), len(code)) < count:
        raise SystemExit(
            f"{options.text} has {len(prose)} documents of prose and {len(code)} of code; {count} are needed of each"
        )
    turn_ids = [tokenizer(text, return_tensors="pt").input_ids for text in ("User: ", "\nAssistant: ", "\nUser: ")]
    chats = []
    for one, other in zip(prose, code, strict=True):
        parts = [turn_ids[0], one[:, :20], turn_ids[1], other[:, :30], turn_ids[2], one[:, 20:40], turn_ids[1]]
        chats.append(torch.cat(parts, dim=1))
    found = {
        "prose": [ids[:, :PROMPT] for ids in prose],
        "code": [ids[:, :PROMPT] for ids in code],
        "rewriting": [torch.cat([ids, ids, ids[:, :PROMPT]], dim=1) for ids in code],
        "chat": chats,
    }
    return {
        kind: [batch(ids[i : i + options.batch]) for i in range(0, count, options.batch)] for kind, ids in found.items()
    }


def batch(texts: list[torch.Tensor]) -> torch.Tensor:
    """Stack the last tokens of each text, as many as the shortest has, so that there is no padding."""
    length = min(ids.shape[1] for ids in texts)
    return torch.cat([ids[:, -length:] for ids in texts])


@dataclass
class Decoder:
    model: PreTrainedModel
    seconds: list[float] = field(default_factory=list)
    stall: float = 0.0
    read: int = 0
    tokens: int = 0

    def decode(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        before = torch_mesh.stats(self.model).decode
        begin = time.perf_counter()
        answer = self.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        self.seconds.append(time.perf_counter() - begin)
        after = torch_mesh.stats(self.model).decode
        self.stall += after.stall_seconds - before.stall_seconds
        self.read += after.bytes_read - before.bytes_read
        self.tokens += tokens * len(ids)
        return answer

    def reset(self) -> None:
        self.seconds, self.stall, self.read, self.tokens = [], 0.0, 0, 0


def difference(plain: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> str:
    """Describe the first difference of two answers, with the two largest logits there."""
    differs = expected != found
    first = int(differs.any(dim=0).nonzero()[0])
    text = int(differs[:, first].nonzero()[0])
    with torch.no_grad():
        logits = plain(input_ids=expected[text : text + 1, :first]).logits[0, -1].float().topk(2).values
    return f"token {first - ids.shape[1]}: {logits[0]:.4f} and {logits[1]:.4f}"


def measure(options: Any) -> Report:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    report = Report(
        f"Speculation, {options.model.name} in {options.weights} (dense={options.dense!r}, "
        f"attention={options.attention!r}), "
        f"{options.tokens} tokens of {options.texts} x {options.batch} texts of each kind"
    )
    texts = prompts(options, tokenizer)
    differences: list[str] = []
    for resident in options.resident:
        common = {name: getattr(options, name) for name in ("weights", "dense", "attention")}
        plain, drafting = (
            Decoder(
                AutoModelForCausalLM.from_pretrained(
                    options.model,
                    dtype=torch.bfloat16,
                    quantization_config=torch_mesh.MeshConfig(resident=resident, speculation=speculation, **common),
                )
            )
            for speculation in ("off", "lookup")
        )
        for kind in KINDS:
            for number, ids in enumerate(texts[kind]):
                if number == 1:
                    plain.reset()
                    drafting.reset()
                    torch_mesh.reset_stats(drafting.model)
                decoders = (plain, drafting) if number % 2 else (drafting, plain)
                answers = {id(decoder): decoder.decode(ids, options.tokens) for decoder in decoders}
                expected, found = answers[id(plain)], answers[id(drafting)]
                if not torch.equal(expected, found):
                    differences.append(f"{resident:.0%} {kind}: {difference(plain.model, ids, expected, found)}")
            name = f"{resident:.0%} resident, {kind}"
            add_rows(report, name, resident, kind, plain, drafting, single=options.batch == 1)
    total = len(options.resident) * sum(map(len, texts.values()))
    # With torch's attention the bits of a row depend on the number of rows.
    at_most = 0.0 if options.attention == "mesh" else None
    report.add(Row("answers that differ from plain decoding's", len(differences), "", "all", total, at_most=at_most))
    report.notes += differences
    return report


def add_rows(
    report: Report, name: str, resident: float, kind: str, plain: Decoder, drafting: Decoder, *, single: bool
) -> None:
    """``single``: one text at a time, for which there are more claims."""
    ratios = [one / other for one, other in zip(plain.seconds, drafting.seconds, strict=True)]
    speed, reference = statistics.median(ratios), 1.0
    min_speed = max(MIN_SPEED, REWRITING.get(resident, 0.0) if single and kind == "rewriting" else 0.0)
    spread = {"low": min(ratios), "high": max(ratios)}
    report.add(Row(f"{name}: speed over plain decoding", speed, "", "plain", reference, at_least=min_speed, **spread))
    if plain.stall:
        at_most = MAX_STALL.get(resident) if single else None
        stalls = (drafting.stall / drafting.tokens * 1e3, plain.stall / plain.tokens * 1e3)
        report.add(Row(f"{name}: waiting per token", stalls[0], "ms", "plain", stalls[1], at_most=at_most))
    if plain.read:
        reads = (drafting.read / drafting.tokens / 1024, plain.read / plain.tokens / 1024)
        report.add(Row(f"{name}: read per token", reads[0], "KiB", "plain", reads[1]))
    counts = torch_mesh.stats(drafting.model).speculation
    assert counts is not None
    report.notes.append(f"{name}: {counts}")
    report.details[name] = {"speculation": counts.to_dict(), "ratios": ratios}


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=ROOT / "examples" / "mesh-tiny")
    arguments.add_argument("--text", type=Path, default=ROOT / "tests" / "data" / "text", help="folder of *.jsonl")
    arguments.add_argument("--texts", type=int, default=10, help="texts of each kind, times --batch")
    arguments.add_argument("--batch", type=int, default=1, help="texts decoded together, 1 to 4")
    arguments.add_argument("--tokens", type=int, default=128, help="decoded tokens of each text")
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    arguments.add_argument("--weights", default="bf16")
    arguments.add_argument("--dense", default="auto")
    arguments.add_argument(
        "--attention", default="mesh", help='"mesh": a token has the same bits in forwards of any size'
    )
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
