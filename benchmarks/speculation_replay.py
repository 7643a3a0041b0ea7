"""Claim: drafts that are right nine, seven or five times in ten make decoding on Qwen3-30B-A3B's shapes at no residency
more than 5 % slower than without. With --rewriting a file that is repeated with one name changed takes two thirds of
the time with a quarter of the experts resident, and half with all.

The text of random weights cannot be predicted, so text and drafts are given. A logits processor chooses the tokens, and
the experts are those of a synthetic trace (as in full_size.py). Each token is drafted correctly at a seeded rate, or
with --rewriting by lookup in the file, which is the prompt. Rows after a wrong draft have the experts of another token.
Everything else is `generate(custom_generate=torch_mesh.speculate())` with its controller. Plain decoding is
transformers' own loop with the same text on a model with its own pool; both alternate. With everything resident both
use one model. The time is that from the first token to the last.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from keyword import iskeyword
from typing import Any

import full_size
import harness
import synthetic
import torch
from harness import Report, Row
from perplexity import ROOT
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel

import torch_mesh
from torch_mesh.modules.experts import patched_modules
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.decoding import LENGTHS, Speculation
from torch_mesh.speculation.drafter import Drafter
from torch_mesh.speculation.lookup import Lookup

PROMPT = 32  # more tokens than a decode step has rows
FILE = 512  # maximum tokens of a file that is rewritten
MIN_SPEED = 0.95
REWRITING = {0.25: 1.5, 1.0: 2.0}
WEIGHTS = "int4"
STORES = {
    4: lambda directory: synthetic.store(directory, synthetic.Shape(), WEIGHTS),
    full_size.SHAPE.layers: lambda directory: full_size.store(directory, WEIGHTS),
}


@dataclass
class Text:
    tokens: list[int]
    prompt: int  # number of prompt tokens
    routing: torch.Tensor  # [tokens, layers, top_k]
    correct: list[bool]  # whether the draft of a position is correct
    other_positions: list[int]  # another position of the text for each position


def texts(options: Any, shape: synthetic.Shape, vocabulary: int, rates: Sequence[float]) -> Iterator[Text]:
    """Yield a text for each of ``rates``."""
    generator = random.Random(options.seed)
    length = PROMPT + options.tokens
    for routing, rate in zip(routings(options, shape, [length] * len(rates)), rates, strict=True):
        yield Text(
            [generator.randrange(vocabulary) for _ in range(length)],
            PROMPT,
            routing,
            [generator.random() < rate for _ in range(length)],
            [generator.randrange(length) for _ in range(length)],
        )


def rewritten(options: Any, shape: synthetic.Shape) -> Iterator[Text]:
    """Yield files of Python's library as tokens of mesh-tiny. Each is followed by itself with its most frequent name
    replaced."""
    generator = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "mesh-tiny")
    with (ROOT / "tests" / "data" / "text" / "code.jsonl").open() as lines:
        files = [json.loads(line)["text"] for line in lines][: 1 + options.texts]
    pairs = []
    for text in files:
        names = re.findall(r"\b[a-z_]{4,}\b", text[: 3 * options.tokens])  # names in the decoded part
        name = next(name for name, _ in Counter(names).most_common() if not iskeyword(name))
        changed = re.sub(rf"\b{name}\b", f"new_{name}", text)
        before, after = (tokenizer(each).input_ids for each in (text, changed))
        pairs.append((before[:FILE], after[: options.tokens]))
    lengths = [len(before) + len(after) for before, after in pairs]
    for (before, after), routing, length in zip(pairs, routings(options, shape, lengths), lengths, strict=True):
        yield Text([*before, *after], len(before), routing, [], [generator.randrange(length) for _ in range(length)])


def routings(options: Any, shape: synthetic.Shape, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield each text's experts [tokens, layers, top_k]."""
    sizes = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.experts_per_token}
    trace = synthetic_trace(
        **sizes, prompts=len(lengths), prompt_tokens=2 * max(lengths), overlap=full_size.OVERLAP, seed=options.seed
    )
    for first, length in zip(trace.offsets[:-1], lengths, strict=True):
        yield torch.from_numpy(trace.ids[first : first + length]).long()


class Replay(LogitsProcessor):
    """Make a model generate ``text`` with the text's experts."""

    text: Text

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config
        self._chosen = {
            rows: torch.zeros(config.num_hidden_layers, rows, config.num_experts_per_tok, dtype=torch.long)
            for rows in (1, *(1 + length for length in LENGTHS))
        }
        self.times: list[float] = []  # time of each token
        # Of each verification: position of its first token after the prompt, and number of drafted tokens.
        self.steps: list[tuple[int, int]] = []
        for layer, module in enumerate(patched_modules(model)):
            module.register_forward_pre_hook(self._force(layer))

    def _force(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, _ids, weights = arguments
            return hidden, self._chosen[len(hidden)][layer], weights

        return hook

    def route(self, routing: torch.Tensor) -> None:
        """Set the experts [rows, layers, top_k] of the next forward with that number of rows."""
        chosen = routing.transpose(0, 1).contiguous()
        self._chosen.setdefault(len(routing), chosen).copy_(chosen)  # in place, since compiled steps read this tensor

    def begin(self, text: Text) -> torch.Tensor:
        """Begin another text, and return its prompt [1, n]."""
        self.text = text
        self.times, self.steps = [], []
        self.route(text.routing[: text.prompt])
        return torch.tensor([text.tokens[: text.prompt]])

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        position = ids.shape[1]
        self.route(self.text.routing[position : position + 1])
        scores[:, self.text.tokens[position]] = torch.inf
        return scores

    def drafter(self, tokens: list[int]) -> Drafter:
        return GivenDrafts(self, tokens) if self.text.correct else LookupDrafts(self, tokens)

    def verify(self, position: int, drafted: Sequence[int]) -> None:
        """Set the experts of a forward that verifies ``drafted``, the draft from ``position`` on."""
        text = self.text
        correct = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, text.tokens[position:], strict=False))
        )
        rows = [position + i if i < correct else text.other_positions[position + i] for i in range(len(drafted))]
        self.route(text.routing[[position - 1, *rows]])


class Replayed(Drafter):
    """Base of the drafters for the text of ``replay``."""

    def __init__(self, replay: Replay, tokens: Sequence[int]) -> None:
        self.replay, self.position, self._drafted = replay, len(tokens), 0

    def extend(self, tokens: Iterable[int]) -> None:
        self.replay.steps.append((self.position - self.replay.text.prompt, self._drafted))
        self.position += sum(1 for _ in tokens)
        self._drafted = 0

    def draft(self, length: int) -> list[int]:
        drafted = self.propose(length)
        self._drafted = len(drafted)
        if drafted:
            self.replay.verify(self.position, drafted)
        return drafted

    @abstractmethod
    def propose(self, length: int) -> list[int]:
        """Return ``length`` draft tokens, or none."""


class GivenDrafts(Replayed):
    """Draft correctly up to the first position that the text marks as wrong."""

    def propose(self, length: int) -> list[int]:
        text = self.replay.text
        drafted = text.tokens[self.position : self.position + length]
        wrong = next((i for i in range(length) if not text.correct[self.position + i]), length)
        if wrong < length:
            drafted[wrong] = (drafted[wrong] + 1) % self.replay.model.config.vocab_size
        return drafted


class LookupDrafts(Replayed):
    """Draft by torch_mesh's lookup."""

    def __init__(self, replay: Replay, tokens: Sequence[int]) -> None:
        super().__init__(replay, tokens)
        self._lookup = Lookup(tokens)

    @property
    def tier(self) -> int:
        return self._lookup.tier

    def extend(self, tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        super().extend(tokens)
        self._lookup.extend(tokens)

    def propose(self, length: int) -> list[int]:
        return list(self._lookup.draft(length))


@dataclass
class Decoder:
    """Decode with or without speculation, and collect the figures."""

    replay: Replay
    seconds: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    stall: float = 0.0
    read: int = 0
    tokens: int = 0

    def decode(self, text: Text, speculation: Speculation | None) -> None:
        model, count = self.replay.model, len(text.tokens) - text.prompt
        ids = self.replay.begin(text)
        settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        before = torch_mesh.stats(model).decode
        answer = model.generate(ids, logits_processor=[self.replay], custom_generate=speculation, **settings)
        after = torch_mesh.stats(model).decode
        if answer[0].tolist() != text.tokens:
            raise AssertionError("the model generated a text other than the given one")
        times = self.replay.times
        self.seconds.append(times[-1] - times[0])
        self.times.append(times)
        self.steps.append(self.replay.steps)
        self.stall += after.stall_seconds - before.stall_seconds
        self.read += after.bytes_read - before.bytes_read
        self.tokens += count - 1


class AllLengths(Controller):
    """Use all draft lengths one after the other, so that all are compiled."""

    def choose(self, most: int, tier: int = 0) -> int:
        self._index = (getattr(self, "_index", -1) + 1) % (1 + len(self.lengths))
        length = (0, *self.lengths)[self._index]
        return length if length <= most else 0


def open_replay(options: Any, resident: float) -> Replay:
    config = torch_mesh.MeshConfig(
        resident=resident, dense=full_size.DENSE, attention="mesh", prefetch="off", threads=options.threads
    )
    folder = STORES[options.layers](options.dir)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return Replay(torch_mesh.compile(model) if options.compiled else model)


def measure(options: Any) -> Report:
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    shape = synthetic.Shape() if options.layers == 4 else full_size.SHAPE
    steps = "compiled" if options.compiled else "eager"
    what = "A file repeated with a change" if options.rewriting else "Drafts correct at a given rate"
    report = Report(
        f"{what}, Qwen3-30B-A3B's shapes, {shape.layers} layers in {WEIGHTS}, {steps} steps, {options.tokens} tokens "
        f"of {options.texts} texts"
    )
    for resident in options.resident:
        plain = open_replay(options, resident)
        drafting = plain if resident == 1 else open_replay(options, resident)
        if options.rewriting:
            first, *rest = rewritten(options, shape)
            kinds = {"rewriting": max(MIN_SPEED, REWRITING.get(resident, 0.0))}
        else:
            rates = [rate for rate in options.rates for _ in range(options.texts)]
            first, *rest = texts(options, shape, plain.model.config.vocab_size, [1.0, *rates])
            kinds = {f"{rate:.0%} right": MIN_SPEED for rate in options.rates}
        for replay in {id(plain): plain, id(drafting): drafting}.values():
            Decoder(replay).decode(first, None)  # fills the pool
            if options.compiled:
                Decoder(replay).decode(first, Speculation(AllLengths(LENGTHS), replay.drafter))
        for number, (kind, min_speed) in enumerate(kinds.items()):
            speculation = Speculation(Controller(LENGTHS), drafting.drafter)
            torch_mesh.reset_stats(drafting.model)
            plain_decoder, draft_decoder = Decoder(plain), Decoder(drafting)
            for index, text in enumerate(rest[number * options.texts :][: options.texts]):
                for decoder in (plain_decoder, draft_decoder) if index % 2 else (draft_decoder, plain_decoder):
                    decoder.decode(text, speculation if decoder is draft_decoder else None)
            name = f"{resident:.0%} resident, {kind}"
            add_rows(report, name, min_speed, plain_decoder, draft_decoder)
            console.print(f"{name}: {report.details[name]['speed']:.3f} of plain decoding's speed")
    report.notes.append(
        f"the trace's tokens share {full_size.OVERLAP:.0%} of their experts with the next; seed {options.seed}; "
        "prefetch off (forced "
        "routing cannot be predicted by routers)"
    )
    return report


def additional_time(plain: Decoder, drafting: Decoder, drafts: bool) -> float:
    """Return the additional time of forwards with drafts, or of those without, over plain decoding of the same tokens,
    as a fraction of plain decoding's time."""
    seconds = 0.0
    for expected, found, steps in zip(plain.times, drafting.times, drafting.steps, strict=True):
        ends = [position for position, _ in steps[1:]] + [len(found)]
        for (position, length), end in zip(steps, ends, strict=True):
            if (length > 0) == drafts:
                seconds += found[end - 1] - found[position - 1] - (expected[end - 1] - expected[position - 1])
    return seconds / sum(plain.seconds)


def add_rows(report: Report, name: str, min_speed: float, plain: Decoder, drafting: Decoder) -> None:
    ratios = sorted(
        plain_decoder / draft_decoder
        for plain_decoder, draft_decoder in zip(plain.seconds, drafting.seconds, strict=True)
    )
    speeds = [decoder.tokens / sum(decoder.seconds) for decoder in (drafting, plain)]
    spread = {"low": ratios[0], "high": ratios[-1]}
    report.add(Row(f"{name}: speed", speeds[0], "tok/s", "plain", speeds[1], at_least=min_speed, **spread))
    for drafts, label in ((True, "with drafts"), (False, "without")):
        report.add(Row(f"{name}: lost by forwards {label}", 100 * additional_time(plain, drafting, drafts), "%"))
    if plain.read:
        stalls = [decoder.stall / decoder.tokens * 1e3 for decoder in (drafting, plain)]
        reads = [decoder.read / decoder.tokens / 2**20 for decoder in (drafting, plain)]
        report.add(Row(f"{name}: waiting per token", stalls[0], "ms", "plain", stalls[1]))
        report.add(Row(f"{name}: read per token", reads[0], "MiB", "plain", reads[1]))
    counts = torch_mesh.stats(drafting.replay.model).speculation
    assert counts is not None
    report.notes.append(f"{name}: {counts}")
    report.details[name] = {
        "speed": speeds[0] / speeds[1],
        "speculation": counts.to_dict(),
        "plain": plain.seconds,
        "drafting": drafting.seconds,
    }


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, choices=STORES, default=4)
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    arguments.add_argument(
        "--rewriting", action="store_true", help="files that are repeated with a change, in place of rates"
    )
    arguments.add_argument("--texts", type=int, default=8, help="texts of each rate, or rewritten files")
    arguments.add_argument("--tokens", type=int, default=128, help="decoded tokens of each text")
    arguments.add_argument("--compiled", action="store_true", help="torch_mesh.compile")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
