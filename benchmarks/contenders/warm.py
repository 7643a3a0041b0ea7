"""How fast a model that is in memory reads a prompt and decodes: the contender of whole_model.py.

Standard library only. As in session.py, tokens come from a seeded stream, the same for all, and not from the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import session

CONTEXT, WARM_UP = 16, 4


@dataclass(frozen=True)
class Taken:
    """What something took: on the clock, and of processor time by all threads of this process."""

    seconds: float
    processor_seconds: float

    @classmethod
    def so_far(cls) -> Taken:
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Taken:
        now = Taken.so_far()
        return Taken(now.seconds - self.seconds, now.processor_seconds - self.processor_seconds)


class Decoder(Protocol):
    def forward_rows(self, rows: Sequence[Sequence[int]]) -> Sequence[session.Logits]:
        """Appends a row of tokens, all rows being of one length, to each of as many sequences; the logits of each one's
        last."""

    def reset(self) -> None:
        """Forgets all sequences."""


class Warm:
    """One model in one or several modes."""

    def __init__(self, modes: Mapping[str, Decoder], setup: dict[str, Any]) -> None:
        self.modes = modes
        generator = random.Random(setup["seed"])
        self.stream = [generator.randrange(setup["vocab"]) for _ in range(4096)]

    def facts(self) -> dict[str, Any]:
        """The logits of each mode after a prompt and one token more, which is what a compiled step computes."""
        return {mode: self._first_step(decoder).tolist() for mode, decoder in self.modes.items()}

    def measure(self, mode: str, what: str, tokens: int, sequences: int = 1) -> dict[str, Any]:
        """Tokens per second, and processor time a token, of all sequences. ``what`` is "prefill", ``tokens`` of each at
        once, or "decode", one of each after the other."""
        rows = self._rows(sequences, CONTEXT + WARM_UP + tokens)
        taken = {"prefill": self._prefill, "decode": self._decode}[what](self.modes[mode], rows, tokens)
        count = sequences * tokens
        return {
            "tokens_per_second": count / taken.seconds,
            "processor_seconds_per_token": taken.processor_seconds / count,
        }

    def _rows(self, sequences: int, length: int) -> list[list[int]]:
        return [self.stream[first * length : (first + 1) * length] for first in range(sequences)]

    def _start(self, decoder: Decoder, rows: list[list[int]]) -> None:
        decoder.reset()
        decoder.forward_rows([row[:CONTEXT] for row in rows])

    def _first_step(self, decoder: Decoder) -> session.Logits:
        rows = self._rows(1, CONTEXT + 1)
        self._start(decoder, rows)
        return decoder.forward_rows([rows[0][CONTEXT:]])[0]

    def _prefill(self, decoder: Decoder, rows: list[list[int]], tokens: int) -> Taken:
        decoder.reset()
        before = Taken.so_far()
        decoder.forward_rows([row[:tokens] for row in rows])
        return before.until_now()

    def _decode(self, decoder: Decoder, rows: list[list[int]], tokens: int) -> Taken:
        self._start(decoder, rows)
        for at in range(CONTEXT, CONTEXT + WARM_UP):
            decoder.forward_rows([[row[at]] for row in rows])
        before = Taken.so_far()
        for at in range(CONTEXT + WARM_UP, CONTEXT + WARM_UP + tokens):
            decoder.forward_rows([[row[at]] for row in rows])
        return before.until_now()
