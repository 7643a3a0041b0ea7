"""How fast a model that is in memory reads a prompt and decodes: the contender of whole_model.py.

Standard library only. As in session.py, tokens come from a seeded stream, the same for all, and not from the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import session

CONTEXT, WARM_UP = 16, 4


class Decoder(Protocol):
    def forward(self, tokens: Sequence[int]) -> session.Logits:
        """Appends ``tokens`` to the sequence; the logits of the last one."""

    def reset(self) -> None:
        """Forgets the sequence."""


class Warm:
    """One model in one or several modes."""

    def __init__(self, modes: Mapping[str, Decoder], setup: dict[str, Any]) -> None:
        self.modes = modes
        generator = random.Random(setup["seed"])
        self.stream = [generator.randrange(setup["vocab"]) for _ in range(4096)]

    def facts(self) -> dict[str, Any]:
        """The logits of each mode after a prompt and one token more, which is what a compiled step computes."""
        return {mode: self._first_step(decoder).tolist() for mode, decoder in self.modes.items()}

    def measure(self, mode: str, what: str, tokens: int) -> dict[str, Any]:
        """Tokens per second: ``what`` is "prefill", all tokens at once, or "decode", one after the other."""
        decoder = self.modes[mode]
        seconds = {"prefill": self._prefill, "decode": self._decode}[what](decoder, tokens)
        return {"tokens_per_second": tokens / seconds}

    def _start(self, decoder: Decoder) -> session.Logits:
        decoder.reset()
        return decoder.forward(self.stream[:CONTEXT])

    def _first_step(self, decoder: Decoder) -> session.Logits:
        self._start(decoder)
        return decoder.forward([self.stream[CONTEXT]])

    def _prefill(self, decoder: Decoder, tokens: int) -> float:
        decoder.reset()
        begin = time.perf_counter()
        decoder.forward(self.stream[:tokens])
        return time.perf_counter() - begin

    def _decode(self, decoder: Decoder, tokens: int) -> float:
        self._start(decoder)
        rest = self.stream[CONTEXT : CONTEXT + WARM_UP + tokens]
        for token in rest[:WARM_UP]:
            decoder.forward([token])
        begin = time.perf_counter()
        for token in rest[WARM_UP:]:
            decoder.forward([token])
        return time.perf_counter() - begin
