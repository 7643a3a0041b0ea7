"""Measure the speed of prompts and decoding of a model in memory: the contender of whole_model.py.

Standard library only. As in session.py, all models have the same seeded stream of tokens.
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
class Usage:
    """Elapsed time, and processor time of all threads of this process, in seconds."""

    seconds: float
    processor_seconds: float

    @classmethod
    def current(cls) -> Usage:
        return cls(time.perf_counter(), time.process_time())

    def elapsed(self) -> Usage:
        now = Usage.current()
        return Usage(now.seconds - self.seconds, now.processor_seconds - self.processor_seconds)


class Decoder(Protocol):
    def forward_rows(self, rows: Sequence[Sequence[int]]) -> Sequence[session.Logits]:
        """Append one row of tokens to each sequence, and return the logits of each row's last token. All rows have one
        length."""

    def reset(self) -> None:
        """Forgets all sequences."""


class Warm:
    """One model in one or several modes."""

    def __init__(self, modes: Mapping[str, Decoder], setup: dict[str, Any]) -> None:
        self.modes = modes
        generator = random.Random(setup["seed"])
        self.stream = [generator.randrange(setup["vocab"]) for _ in range(4096)]

    def facts(self) -> dict[str, Any]:
        """Return the logits of each mode after a prompt and one more token, the step that may be compiled."""
        return {mode: self._first_step(decoder).tolist() for mode, decoder in self.modes.items()}

    def measure(self, mode: str, what: str, tokens: int, sequences: int = 1) -> dict[str, Any]:
        """Return tokens per second and processor time per token of all sequences. ``what``: "prefill", ``tokens`` of
        each sequence in one forward, or "decode", one token of each per step."""
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

    def _prefill(self, decoder: Decoder, rows: list[list[int]], tokens: int) -> Usage:
        decoder.reset()
        before = Usage.current()
        decoder.forward_rows([row[:tokens] for row in rows])
        return before.elapsed()

    def _decode(self, decoder: Decoder, rows: list[list[int]], tokens: int) -> Usage:
        self._start(decoder, rows)
        for at in range(CONTEXT, CONTEXT + WARM_UP):
            decoder.forward_rows([[row[at]] for row in rows])
        before = Usage.current()
        for at in range(CONTEXT + WARM_UP, CONTEXT + WARM_UP + tokens):
            decoder.forward_rows([[row[at]] for row in rows])
        return before.elapsed()
