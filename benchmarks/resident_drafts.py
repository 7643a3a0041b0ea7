"""Claim: drafts by resident experts alone gain nothing. A draft reads nothing but computes as much as a plain step. On
examples/mesh-tiny at 25 and 50 % resident, decoding with drafts takes at least as long as without. Tokens are those of
plain decoding.

So torch_mesh has no such drafts. For a few tokens each router selects the best resident experts. Then the cache is
rewound, and one exact forward verifies the tokens. (The mode that intercepts a router's selection costs some
microseconds per layer.) Both decoders are the same loop on a model with its own pool, alternating text by text. The
first text of a kind fills the pools and is not counted.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, Row
from perplexity import ROOT
from speculation import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import torch_mesh
from torch_mesh.lossy.decoding import Selection
from torch_mesh.models.families import ExpertsLayer, find_experts, router_module


class ResidentOnly(Selection):
    """Select resident experts, and others only if these are too few."""

    def __init__(self, layer: ExpertsLayer) -> None:
        super().__init__(layer.num_experts, layer.top_k)
        self._handle: torch.Tensor = layer.module._mesh_handle

    def selected(self, scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> Any:
        ids = torch.ops.torch_mesh.route(scores, ids, self._handle, 1.0, 0)  # replace any choice of the router
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class Decoder:
    """A model that decodes with drafts of ``length`` tokens (0: without drafts), and its figures."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        self.model, self.length = model, length
        layers = find_experts(model)
        self._routers: list[Any] = [router_module(model, layer) for layer in layers]
        self._resident_forwards = [
            resident_only_forward(router.forward, layer) for router, layer in zip(self._routers, layers, strict=True)
        ]
        self.reset()

    def reset(self) -> None:
        self.seconds: list[float] = []
        self.tokens = self.forwards = self.drafted = self.accepted = self.read = 0
        self.stall = 0.0

    @torch.no_grad()
    def decode(self, ids: torch.Tensor, tokens: int) -> list[int]:
        """Return the ``tokens`` tokens that follow ``ids`` [1, prompt]."""
        cache = DynamicCache(config=self.model.config)
        text = self._next(ids, cache, 1)
        before, begin = torch_mesh.stats(self.model).decode, time.perf_counter()
        while len(text) < tokens:
            length = min(self.length, tokens - len(text) - 1)
            drafted = self._draft(text[-1], cache, length) if length else []
            expected = self._next(torch.tensor([[text[-1], *drafted]]), cache, length + 1)
            correct = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafted, expected, strict=False))
            )
            if correct < length:
                cache.crop(correct - length)
            text += expected[: correct + 1]
            self.forwards += 1
            self.drafted += length
            self.accepted += correct
        self.seconds.append(time.perf_counter() - begin)
        after = torch_mesh.stats(self.model).decode
        self.stall += after.stall_seconds - before.stall_seconds
        self.read += after.bytes_read - before.bytes_read
        self.tokens += tokens - 1
        return text

    def _next(self, ids: torch.Tensor, cache: DynamicCache, rows: int) -> list[int]:
        """Return the next token after each of the last ``rows`` of ``ids`` [1, n]."""
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=rows).logits
        return logits[0].argmax(-1).tolist()

    def _draft(self, token: int, cache: DynamicCache, length: int) -> list[int]:
        drafted = [token]
        for router, forward in zip(self._routers, self._resident_forwards, strict=True):
            router.forward = forward
        for _ in range(length):
            drafted += self._next(torch.tensor([drafted[-1:]]), cache, 1)
        for router in self._routers:
            del router.forward  # restores the class's method
        cache.crop(-length)
        return drafted[1:]


def resident_only_forward(forward: Callable[..., Any], layer: ExpertsLayer) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with ResidentOnly(layer):
            return forward(*args, **kwargs)

    return wrapped


def open_decoder(options: Any, resident: float, length: int) -> Decoder:
    # With torch_mesh's linear layers and attention a token has the same bits in forwards of one row and of several.
    config = torch_mesh.MeshConfig(resident=resident, dense="bf16", attention="mesh", prefetch=options.prefetch)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, quantization_config=config)
    return Decoder(model, length)


def measure(options: Any) -> Report:
    texts = prompts(options, AutoTokenizer.from_pretrained(options.model))
    report = Report(
        f"Drafts by resident experts alone, {options.model.name} in bf16, {options.tokens} tokens of {options.texts} "
        "texts of each kind"
    )
    differ = 0
    for resident, length in itertools.product(options.resident, options.lengths):
        plain, drafting = open_decoder(options, resident, 0), open_decoder(options, resident, length)
        for text in (kind[0] for kind in texts.values()):
            for decoder in (plain, drafting):
                decoder.decode(text, options.tokens)
                decoder.reset()
        for number, text in enumerate(itertools.chain.from_iterable(kind[1:] for kind in texts.values())):
            decoders = (plain, drafting) if number % 2 else (drafting, plain)
            answers = {decoder.length: decoder.decode(text, options.tokens) for decoder in decoders}
            differ += answers[0] != answers[length]
        add_rows(report, f"{resident:.0%} resident, drafts of {length}", plain, drafting)
    total = len(options.resident) * len(options.lengths) * len(texts) * options.texts
    report.add(Row("answers that differ from plain decoding's", differ, "", "all", total, at_most=0.0))
    report.notes.append(f"prefetch {options.prefetch}, on both sides")
    return report


def add_rows(report: Report, name: str, plain: Decoder, drafting: Decoder) -> None:
    ratio = statistics.quantiles(
        [one / other for one, other in zip(drafting.seconds, plain.seconds, strict=True)], n=10
    )
    report.add(Row(f"{name}: drafted tokens that were right", drafting.accepted, "", "all", drafting.drafted))
    report.add(Row(f"{name}: tokens a forward", drafting.tokens / drafting.forwards, ""))
    report.add(
        Row(
            f"{name}: time of a text",
            ratio[4] * statistics.median(plain.seconds),
            "s",
            "plain",
            statistics.median(plain.seconds),
            at_least=1.0,
            low=ratio[0],
            high=ratio[-1],
        )
    )
    reads, stalls = (
        [getattr(decoder, what) / decoder.tokens for decoder in (drafting, plain)] for what in ("read", "stall")
    )
    report.add(Row(f"{name}: read per token", reads[0] / 1024, "KiB", "plain", reads[1] / 1024))
    report.add(Row(f"{name}: waiting per token", stalls[0] * 1e3, "ms", "plain", stalls[1] * 1e3))


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=ROOT / "examples" / "mesh-tiny")
    arguments.add_argument("--text", type=Path, default=ROOT / "tests" / "data" / "text", help="folder of *.jsonl")
    arguments.add_argument("--texts", type=int, default=5, help="texts of each kind")
    arguments.add_argument("--tokens", type=int, default=64, help="decoded tokens of each text")
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.25, 0.5])
    arguments.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 6], help="tokens of a draft")
    arguments.add_argument("--prefetch", default="off")
    options = arguments.parse_args()
    options.batch = 1
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
