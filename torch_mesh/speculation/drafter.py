"""Drafters of a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence


class Drafter(ABC):
    """Drafts for one text, which grows."""

    # Whether the next draft takes longer than later ones, since the drafter has tokens to read first.
    is_behind = False

    @property
    def tier(self) -> int:
        """Confidence tier of the next draft: 0, and larger numbers for drafts that are right less often."""
        return 0

    @abstractmethod
    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""

    @abstractmethod
    def draft(self, length: int) -> Sequence[int]:
        """Predict the next ``length`` tokens; empty without a prediction."""
