"""Claim: drafts that are right nine, seven or five times in ten make decoding on Qwen3-30B-A3B's shapes at no residency
more than 5 % slower than without; with --rewriting, a file written again with one name changed takes two thirds of the
time with a quarter of the experts resident, and half with all.

Random weights write text that cannot be predicted, so that text and drafts are given: a logits processor chooses the
tokens, the experts are those of a synthetic trace (as in full_size.py), and each token is drafted correctly at a seeded
rate, or with --rewriting by lookup in the file, which is the prompt. Rows after a wrong draft take the experts of
another token. Everything else is `generate(custom_generate=torch_mesh.speculate())` with its controller. Plain decoding
is transformers' own loop on a model with a pool of its own, with the same text in turn; with everything resident there
is one model for both. The time is that from the first token to the last.
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

PROMPT = 32  # more rows than a decode step has
FILE = 512  # tokens of a file that is rewritten, at most
SLOWEST = 0.95
REWRITING = {0.25: 1.5, 1.0: 2.0}
WEIGHTS = "int4"
FOLDERS = {
    4: lambda directory: synthetic.store(directory, synthetic.Shape(), WEIGHTS),
    full_size.SHAPE.layers: lambda directory: full_size.store(directory, WEIGHTS),
}


@dataclass
class Text:
    tokens: list[int]
    prompt: int  # of them
    routing: torch.Tensor  # [tokens, layers, top_k]
    right: list[bool]  # whether the token at a place is what is drafted for it
    others: list[int]  # for each place another one of the text


def texts(options: Any, shape: synthetic.Shape, vocabulary: int, rates: Sequence[float]) -> Iterator[Text]:
    """A text for each of ``rates``."""
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
    """Files of Python's library, each followed by what it is with another for the name that its beginning has most
    often; in mesh-tiny's tokens."""
    generator = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "mesh-tiny")
    with (ROOT / "tests" / "data" / "text" / "code.jsonl").open() as lines:
        files = [json.loads(line)["text"] for line in lines][: 1 + options.texts]
    pairs = []
    for text in files:
        names = re.findall(r"\b[a-z_]{4,}\b", text[: 3 * options.tokens])  # where they are changed, in what is decoded
        name = next(name for name, _ in Counter(names).most_common() if not iskeyword(name))
        changed = re.sub(rf"\b{name}\b", f"new_{name}", text)
        before, after = (tokenizer(each).input_ids for each in (text, changed))
        pairs.append((before[:FILE], after[: options.tokens]))
    lengths = [len(before) + len(after) for before, after in pairs]
    for (before, after), routing, length in zip(pairs, routings(options, shape, lengths), lengths, strict=True):
        yield Text([*before, *after], len(before), routing, [], [generator.randrange(length) for _ in range(length)])


def routings(options: Any, shape: synthetic.Shape, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """Of each text the experts [tokens, layers, top_k]."""
    sizes = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.experts_per_token}
    trace = synthetic_trace(
        **sizes, prompts=len(lengths), prompt_tokens=2 * max(lengths), overlap=full_size.OVERLAP, seed=options.seed
    )
    for first, length in zip(trace.offsets[:-1], lengths, strict=True):
        yield torch.from_numpy(trace.ids[first : first + length]).long()


class Replay(LogitsProcessor):
    """Has a model write ``text`` with the experts of ``text``."""

    text: Text

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config
        self._chosen = {
            rows: torch.zeros(config.num_hidden_layers, rows, config.num_experts_per_tok, dtype=torch.long)
            for rows in (1, *(1 + length for length in LENGTHS))
        }
        self.times: list[float] = []  # when each token came
        # Of speculation: the place of its first token behind the prompt, and how many were drafted.
        self.steps: list[tuple[int, int]] = []
        for layer, module in enumerate(patched_modules(model)):
            module.register_forward_pre_hook(self._force(layer))

    def _force(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, _ids, weights = arguments
            return hidden, self._chosen[len(hidden)][layer], weights

        return hook

    def route(self, routing: torch.Tensor) -> None:
        """Chooses the experts [rows, layers, top_k] of the next forward of so many rows."""
        chosen = routing.transpose(0, 1).contiguous()
        self._chosen.setdefault(len(routing), chosen).copy_(chosen)  # in place: compiled steps have it as an input

    def begin(self, text: Text) -> torch.Tensor:
        """The ids [1, prompt] of another text."""
        self.text = text
        self.times, self.steps = [], []
        self.route(text.routing[: text.prompt])
        return torch.tensor([text.tokens[: text.prompt]])

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        place = ids.shape[1]
        self.route(self.text.routing[place : place + 1])
        scores[:, self.text.tokens[place]] = torch.inf
        return scores

    def drafter(self, tokens: list[int]) -> Drafter:
        return Told(self, tokens) if self.text.right else LookedUp(self, tokens)

    def verify(self, place: int, drafted: Sequence[int]) -> None:
        """Chooses the experts of a forward with what is drafted from ``place`` on."""
        text = self.text
        right = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, text.tokens[place:], strict=False))
        )
        rows = [place + i if i < right else text.others[place + i] for i in range(len(drafted))]
        self.route(text.routing[[place - 1, *rows]])


class Replayed(Drafter):
    """Of the text that ``replay`` has the model write."""

    def __init__(self, replay: Replay, tokens: Sequence[int]) -> None:
        self.replay, self.place, self._drafted = replay, len(tokens), 0

    def extend(self, tokens: Iterable[int]) -> None:
        self.replay.steps.append((self.place - self.replay.text.prompt, self._drafted))
        self.place += sum(1 for _ in tokens)
        self._drafted = 0

    def draft(self, length: int) -> list[int]:
        drafted = self.guess(length)
        self._drafted = len(drafted)
        if drafted:
            self.replay.verify(self.place, drafted)
        return drafted

    @abstractmethod
    def guess(self, length: int) -> list[int]:
        """``length`` tokens, or none."""


class Told(Replayed):
    """Right up to the first place at which the text says that it is not."""

    def guess(self, length: int) -> list[int]:
        text = self.replay.text
        drafted = text.tokens[self.place : self.place + length]
        wrong = next((i for i in range(length) if not text.right[self.place + i]), length)
        if wrong < length:
            drafted[wrong] = (drafted[wrong] + 1) % self.replay.model.config.vocab_size
        return drafted


class LookedUp(Replayed):
    """By torch_mesh's own lookup."""

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

    def guess(self, length: int) -> list[int]:
        return list(self._lookup.draft(length))


@dataclass
class Side:
    """One way to decode, and what it took."""

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
            raise AssertionError("the model wrote another text than it was given")
        times = self.replay.times
        self.seconds.append(times[-1] - times[0])
        self.times.append(times)
        self.steps.append(self.replay.steps)
        self.stall += after.stall_seconds - before.stall_seconds
        self.read += after.bytes_read - before.bytes_read
        self.tokens += count - 1


class Each(Controller):
    """Drafts of all lengths in turn, which compiles what there is to compile."""

    def choose(self, most: int, tier: int = 0) -> int:
        self._turn = (getattr(self, "_turn", -1) + 1) % (1 + len(self.lengths))
        length = (0, *self.lengths)[self._turn]
        return length if length <= most else 0


def opened(options: Any, resident: float) -> Replay:
    config = torch_mesh.MeshConfig(
        resident=resident, dense=full_size.DENSE, attention="mesh", prefetch="off", threads=options.threads
    )
    folder = FOLDERS[options.layers](options.dir)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return Replay(torch_mesh.compile(model) if options.compiled else model)


def measure(options: Any) -> Report:
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    shape = synthetic.Shape() if options.layers == 4 else full_size.SHAPE
    steps = "compiled" if options.compiled else "eager"
    what = "A file written again" if options.rewriting else "Drafts right at a given rate"
    report = Report(
        f"{what}, Qwen3-30B-A3B's shapes, {shape.layers} layers in {WEIGHTS}, {steps} steps, {options.tokens} tokens "
        f"of {options.texts} texts"
    )
    for resident in options.resident:
        plain = opened(options, resident)
        drafting = plain if resident == 1 else opened(options, resident)
        if options.rewriting:
            first, *rest = rewritten(options, shape)
            kinds = {"rewriting": max(SLOWEST, REWRITING.get(resident, 0.0))}
        else:
            rates = [rate for rate in options.rates for _ in range(options.texts)]
            first, *rest = texts(options, shape, plain.model.config.vocab_size, [1.0, *rates])
            kinds = {f"{rate:.0%} right": SLOWEST for rate in options.rates}
        for replay in {id(plain): plain, id(drafting): drafting}.values():
            Side(replay).decode(first, None)  # which fills the pool
            if options.compiled:
                Side(replay).decode(first, Speculation(Each(LENGTHS), replay.drafter))
        for number, (kind, wanted) in enumerate(kinds.items()):
            speculation = Speculation(Controller(LENGTHS), drafting.drafter)
            torch_mesh.reset_stats(drafting.model)
            one, other = Side(plain), Side(drafting)
            for turn, text in enumerate(rest[number * options.texts :][: options.texts]):
                for side in (one, other) if turn % 2 else (other, one):
                    side.decode(text, speculation if side is other else None)
            name = f"{resident:.0%} resident, {kind}"
            add_rows(report, name, wanted, one, other)
            console.print(f"{name}: {report.details[name]['speed']:.3f} of plain decoding's speed")
    report.notes.append(
        f"the trace's tokens share {full_size.OVERLAP:.0%} of their experts with the next; seed {options.seed}; "
        "prefetch off (forced "
        "routing cannot be predicted by routers)"
    )
    return report


def lost(plain: Side, drafting: Side, drafts: bool) -> float:
    """What forwards with drafts, or those without, took more than plain decoding did for the same tokens; of its
    time."""
    seconds = 0.0
    for expected, found, steps in zip(plain.times, drafting.times, drafting.steps, strict=True):
        ends = [place for place, _ in steps[1:]] + [len(found)]
        for (place, length), end in zip(steps, ends, strict=True):
            if (length > 0) == drafts:
                seconds += found[end - 1] - found[place - 1] - (expected[end - 1] - expected[place - 1])
    return seconds / sum(plain.seconds)


def add_rows(report: Report, name: str, wanted: float, plain: Side, drafting: Side) -> None:
    ratios = sorted(one / other for one, other in zip(plain.seconds, drafting.seconds, strict=True))
    speeds = [side.tokens / sum(side.seconds) for side in (drafting, plain)]
    spread = {"low": ratios[0], "high": ratios[-1]}
    report.add(Row(f"{name}: speed", speeds[0], "tok/s", "plain", speeds[1], at_least=wanted, **spread))
    for drafts, which in ((True, "with drafts"), (False, "without")):
        report.add(Row(f"{name}: lost by forwards {which}", 100 * lost(plain, drafting, drafts), "%"))
    if plain.read:
        stalls = [side.stall / side.tokens * 1e3 for side in (drafting, plain)]
        reads = [side.read / side.tokens / 2**20 for side in (drafting, plain)]
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
    arguments.add_argument("--layers", type=int, choices=FOLDERS, default=4)
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    arguments.add_argument("--rewriting", action="store_true", help="files written again, in the place of rates")
    arguments.add_argument("--texts", type=int, default=8, help="of each rate, or that are rewritten")
    arguments.add_argument("--tokens", type=int, default=128, help="decoded of each")
    arguments.add_argument("--compiled", action="store_true", help="torch_mesh.compile")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
