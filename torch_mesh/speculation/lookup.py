"""Prompt lookup: draft what followed the previous occurrence of the text's ending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_mesh.speculation.drafter import Drafter

_MAX_TOKENS = 5  # longest ending that is looked up, in tokens
# Shorter matches have higher tiers, being more likely chance.
_TIER_BOUNDS = (8, 3, 2)


class Lookup(Drafter):
    """Prompt lookup decoding (Apoorv Saxena, 2023), of generated text too."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # the position after the last occurrence of each n-gram
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            for size in range(1, min(_MAX_TOKENS, len(text)) + 1):
                self._followed[tuple(text[-size:])] = len(text)
            text.append(token)

    @property
    def tier(self) -> int:
        _, alike = self._previous_match()
        return sum(alike < bound for bound in _TIER_BOUNDS) if alike else 0

    def draft(self, length: int) -> Sequence[int]:
        """``length`` tokens, or none. If the previous occurrence is near the end, the draft repeats itself."""
        position, alike = self._previous_match()
        if not alike:
            return ()
        text, drafted = self._tokens, list[int]()
        for i in range(position, position + length):
            drafted.append(text[i] if i < len(text) else drafted[i - len(text)])
        return drafted

    def _previous_match(self) -> tuple[int, int]:
        """The position after the previous occurrence of the longest ending, and the length of the match, as far as it
        matters."""
        text = self._tokens
        for size in range(min(_MAX_TOKENS, len(text)), 0, -1):
            position = self._followed.get(tuple(text[-size:]))
            if position is not None:
                while (
                    _MAX_TOKENS <= size < min(_TIER_BOUNDS[0], position)
                    and text[position - size - 1] == text[-size - 1]
                ):
                    size += 1
                return position, size
        return 0, 0
