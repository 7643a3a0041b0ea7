"""Results of drafts: tokens, time, reads and waits by the number of drafted tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

# Attribute of a model, patched or not: so without patching's prefix.
_TALLY = "_speculated"


@dataclass(frozen=True)
class DraftedCounters:
    """Forwards that verified drafts of one length; of length 0, plain ones."""

    forwards: int = 0
    tokens: int = 0  # accepted
    timed: int = 0  # forwards with a duration: first ones may include compilation
    timed_tokens: int = 0
    seconds: float = 0.0  # of the timed forwards
    stall_seconds: float = 0.0  # of all forwards
    bytes_read: int = 0


@dataclass(frozen=True)
class SpeculationCounters:
    """Speculation of a model since it was patched, or since ``reset_stats``. ``str()`` is a line.

    Without prompts. Reads and waits of the pool during a forward count to it, prefetches included.
    """

    lengths: Mapping[int, DraftedCounters] = field(default_factory=dict)  # by drafted tokens; 0: plain decoding
    drafted: int = 0
    accepted: int = 0

    @property
    def forwards(self) -> int:
        """Forwards with drafts and without."""
        return sum(each.forwards for each in self.lengths.values())

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.lengths.values())

    @property
    def acceptance(self) -> float | None:
        """The accepted fraction of drafted tokens; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    def utility(self, length: int) -> float | None:
        """Tokens per second with drafts of ``length``, relative to plain decoding; None if either was not timed."""
        plain, drafts = self.lengths.get(0, DraftedCounters()), self.lengths.get(length, DraftedCounters())
        if not plain.timed_tokens or not drafts.seconds:
            return None
        return drafts.timed_tokens / drafts.seconds * plain.seconds / plain.timed_tokens

    def stall_per_token(self, drafted: bool) -> float | None:
        """Stall seconds per token of forwards with drafts, or without."""
        return self._per_token("stall_seconds", drafted)

    def bytes_per_token(self, drafted: bool) -> float | None:
        return self._per_token("bytes_read", drafted)

    def _per_token(self, name: str, drafted: bool) -> float | None:
        counted = [each for length, each in self.lengths.items() if (length > 0) == drafted]
        tokens = sum(each.tokens for each in counted)
        return sum(getattr(each, name) for each in counted) / tokens if tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Everything in types of JSON, with the utility of each length."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "forwards": self.forwards,
            "tokens": self.tokens,
            "lengths": {
                str(length): {**vars(each), "utility": self.utility(length)}
                for length, each in sorted(self.lengths.items())
            },
        }

    def __str__(self) -> str:
        if not self.forwards:
            return "speculation: nothing yet"
        parts = [f"speculation: {self.tokens} tokens in {self.forwards} forwards"]
        if self.drafted:
            parts.append(f"{self.accepted} of {self.drafted} drafted tokens were right")
        utilities = {length: self.utility(length) for length in sorted(self.lengths) if length > 0}
        parts += [
            f"drafts of {length}: {value:.2f} x plain" for length, value in utilities.items() if value is not None
        ]
        for drafted, name in ((True, "with drafts"), (False, "without")):
            stall, read = self.stall_per_token(drafted), self.bytes_per_token(drafted)
            if stall is not None and read is not None:
                parts.append(f"{name} {stall * 1e3:.2f} ms of waiting and {read / 2**20:.2f} MiB a token")
        return "; ".join(parts)


class Tally:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lengths: dict[int, dict[str, Any]] = {}
        self._drafted = self._accepted = 0

    def add(
        self, drafted: int, tokens: int, seconds: float | None, stall_seconds: float, bytes_read: int, texts: int = 1
    ) -> None:
        """Count a forward that gave ``tokens`` of each of ``texts``; ``seconds`` None: not timed."""
        zeros = {each.name: 0 for each in fields(DraftedCounters)}
        counts = self._lengths.setdefault(drafted, zeros)
        counts["forwards"] += 1
        counts["tokens"] += tokens * texts
        counts["stall_seconds"] += stall_seconds
        counts["bytes_read"] += bytes_read
        if seconds is not None:
            counts["timed"] += 1
            counts["timed_tokens"] += tokens * texts
            counts["seconds"] += seconds
        self._drafted += drafted * texts
        self._accepted += (tokens - 1) * texts

    def counters(self) -> SpeculationCounters:
        lengths = {length: DraftedCounters(**counts) for length, counts in list(self._lengths.items())}
        return SpeculationCounters(lengths, self._drafted, self._accepted)


def tally_of(model: nn.Module) -> Tally:
    tally: Tally = vars(model).setdefault(_TALLY, Tally())
    return tally


def tallies_in(model: nn.Module) -> list[Tally]:
    """The counts of a model and its inner models: adapters wrap the one that generates."""
    return [vars(module)[_TALLY] for module in model.modules() if _TALLY in vars(module)]


def drop_tally(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(_TALLY, None)
