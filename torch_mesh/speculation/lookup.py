"""Drafts that cost nothing: what followed the last time that the text ended like this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .drafter import Drafter

# The longest ending that is looked up, and the longest that has a doubt of its own: the fewer tokens, the more are chance.
_LONGEST, _DOUBTED = 5, 2


class Lookup(Drafter):
    """The endings of a text and what followed each, after prompt lookup decoding (Apoorv Saxena, 2023), for generated text too."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # the place behind the last time, for each run of tokens
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            for size in range(1, min(_LONGEST, len(text)) + 1):
                self._followed[tuple(text[-size:])] = len(text)
            text.append(token)

    @property
    def doubt(self) -> int:
        size, _ = self._last_time()
        return max(_DOUBTED + 1 - size, 0) if size else 0

    def draft(self, length: int) -> Sequence[int]:
        """``length`` tokens, or none. Where the last time is so near that the text ends first, the draft repeats itself."""
        size, place = self._last_time()
        if not size:
            return ()
        text, drafted = self._tokens, list[int]()
        for i in range(place, place + length):
            drafted.append(text[i] if i < len(text) else drafted[i - len(text)])
        return drafted

    def _last_time(self) -> tuple[int, int]:
        """The longest ending that was there before, in tokens, and the place behind it; 0: there is none."""
        text = self._tokens
        for size in range(min(_LONGEST, len(text)), 0, -1):
            place = self._followed.get(tuple(text[-size:]))
            if place is not None:
                return size, place
        return 0, 0
