"""Who drafts for a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence


class Drafter(ABC):
    """Of one text, which grows."""

    # The next draft takes longer than others will, for what it has to read first.
    is_behind = False

    @property
    def tier(self) -> int:
        """0; 1, 2, ... where the next draft is right less often than with the number before."""
        return 0

    @abstractmethod
    def extend(self, tokens: Iterable[int]) -> None:
        """Adds to the text."""

    @abstractmethod
    def draft(self, length: int) -> Sequence[int]:
        """The next ``length`` tokens as they are guessed; none where there is no guess."""
