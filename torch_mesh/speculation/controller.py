"""Choose the draft length with the most tokens per second, or none where plain decoding is faster.

After Cascade (arXiv 2506.20675); cost and gain are measured while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

_TRIAL = 3  # forwards with drafts before they are judged
_PLAIN = 4  # forwards without drafts before the first ones with drafts
_FIRST_WAIT, _MAX_WAIT = 16, 1024  # forwards without drafts after a failed trial; doubled each time
_REVIEW = 32  # forwards with one length before another one is tried
_STALE = 64  # forwards with drafts before one without updates the plain time
# Fraction of plain decoding time that trials may lose. Their further costs stay within a twentieth: the last trial,
# which starts while budget is left, and the untimed first forward of each length.
_LOSS = 1 / 30
_MAX_BUDGET = 4.0  # in forwards without drafts: limits the budget from earlier gains
# Correction of a bias: drafts seem up to this much better than they are, since plain forwards between drafts are slower
# than plain decoding (docs/decisions/0056-speculation.md).
_PLAIN_TIME_CORRECTION = 1.05
_OUTLIER_FACTOR = 4  # longer durations, in multiples of the usual one, are cut as outliers
_LONGER_DRAFT_FRACTION = 0.7  # fraction of the tokens that a forward gives at most; from there on, try a longer draft


class _Mean:
    """The mean of all values at first, later an exponential mean."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count


class _Drafts:
    """Results of drafts of one tier, by length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.forget()
        self.wait = 0
        self.interval = _FIRST_WAIT
        self.since_review = 0
        self.last = 0  # the last drafted length

    def forget(self) -> None:
        self.seconds = {length: _Mean(16) for length in self._lengths}
        self.tokens = {length: _Mean(16) for length in self._lengths}

    def utilities(self, plain_seconds: float) -> dict[int, float]:
        """Tokens per second of each recently tried length, relative to one token in ``plain_seconds``."""
        return {
            length: tokens.value * plain_seconds / seconds.value
            for (length, seconds), tokens in zip(self.seconds.items(), self.tokens.values(), strict=True)
            if min(seconds.count, tokens.count) >= _TRIAL and seconds.value > 0
        }

    def begin(self) -> None:
        if self.wait > 0:
            self.wait, self.interval = 0, _FIRST_WAIT

    def tried(self, length: int, plain_seconds: float) -> int:
        """``length``, unless it would not pay even if all drafted tokens were right."""
        seconds = self.seconds[length]
        cannot_pay = seconds.count > 0 and seconds.value >= (length + 1) * plain_seconds
        return self.back_off() if cannot_pay else length

    def back_off(self) -> int:
        self.forget()
        self.wait = self.interval
        self.interval = min(2 * self.interval, _MAX_WAIT)
        return 0


class Controller:
    """Chooses among ``lengths``, each a number of drafted tokens, ascending.

    Each confidence tier of drafts (``Drafter.tier``) has utilities of its own, so that bad drafts do not hide good
    ones. A tier is tried unless a lower one has failed; tiers from 2 on also need a budget of a plain forward for each
    tier above the first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._plain = _Mean(32)  # seconds of a forward without drafts
        self._drafts: dict[int, _Drafts] = {}  # by tier
        self._budget = 0.0  # budget of trials in seconds; negative when overdrawn
        self._since_plain = 0

    def utilities(self, tier: int = 0) -> dict[int, float]:
        """A lower bound of the speedup with drafts of each recently tried length."""
        return self._drafts_of(tier).utilities(self._plain_seconds) if self._plain.count >= _PLAIN else {}

    def _drafts_of(self, tier: int) -> _Drafts:
        if tier not in self._drafts:
            self._drafts[tier] = _Drafts(self.lengths)
        return self._drafts[tier]

    @property
    def _plain_seconds(self) -> float:
        """A lower bound of the seconds per token without drafts."""
        return self._plain.value / _PLAIN_TIME_CORRECTION

    def begin(self) -> None:
        for drafts in list(self._drafts.values()):  # another thread's text may add a tier
            drafts.begin()
        self._budget = min(self._budget, 0.0)  # earlier gains are not spent on this text

    def choose(self, limit: int, tier: int = 0) -> int:
        """How many tokens to draft, at most ``limit``."""
        drafts = self._drafts_of(tier)
        lengths = [length for length in self.lengths if length <= limit]
        needs_plain = self._plain.count < _PLAIN or self._since_plain >= _STALE
        if not lengths or needs_plain or self._budget < 0 or any(self._is_failing(each) for each in range(tier + 1)):
            return 0
        known = self.utilities(tier)
        if not known:
            affordable = self._budget >= (tier - 1) * self._plain.value
            return drafts.tried(lengths[0], self._plain_seconds) if affordable else 0
        drafts.interval = _FIRST_WAIT
        pays = [length for length in lengths if known.get(length, 0) > 1]
        if not pays:  # only longer drafts pay, which do not fit
            return 0
        best = max(pays, key=known.__getitem__)
        index = lengths.index(best)
        longer = lengths[index + 1 : index + 2]
        if longer and longer[0] not in known and drafts.tokens[best].value >= _LONGER_DRAFT_FRACTION * (best + 1):
            return longer[0]
        if drafts.since_review >= _REVIEW:
            return (longer or lengths[max(index - 1, 0) : index] or [best])[0]
        return best

    def _is_failing(self, tier: int) -> bool:
        """Whether drafts of this tier do not pay and may not be retried yet."""
        drafts, known = self._drafts_of(tier), self.utilities(tier)
        if known and max(known.values()) <= 1:
            drafts.back_off()
        return drafts.wait > 0

    def fitting(self, length: int) -> int:
        """The longest length in ``lengths`` that a draft of ``length`` tokens can be cut to; 0 without one."""
        return max((each for each in self.lengths if each <= length), default=0)

    def spend(self, seconds: float) -> None:
        """Take the time of drafts that were not used from the budget."""
        self._add_to_budget(-seconds)

    def observe(self, length: int, accepted: int, seconds: float | None, tier: int = 0) -> None:
        """Record a forward: how many of ``length`` drafted tokens (0, or one of ``lengths``) were right, and its
        duration; None: not counted."""
        drafts = self._drafts_of(tier)
        if seconds is not None and self._plain.count >= _PLAIN:
            known = length > 0 and drafts.seconds[length].count >= _TRIAL
            usual = drafts.seconds[length].value if known else (length + 1) * self._plain.value
            seconds = min(seconds, _OUTLIER_FACTOR * usual)
        if length == 0:
            for each in list(self._drafts.values()):
                each.wait = max(each.wait - 1, 0)
            if seconds is not None:
                self._since_plain = 0
                self._plain.add(seconds)
                self._add_to_budget(_LOSS * seconds)
            return
        for shorter in self.lengths:
            if shorter <= length:  # the result of a shorter draft is known, that of a longer one is not
                drafts.tokens[shorter].add(min(accepted, shorter) + 1)
        self._since_plain += 1
        drafts.since_review = drafts.since_review + 1 if length == drafts.last else 0
        drafts.last = length
        if seconds is not None:
            drafts.seconds[length].add(seconds)
            self._add_to_budget((accepted + 1) * self._plain_seconds - seconds)

    def _add_to_budget(self, seconds: float) -> None:
        self._budget = min(self._budget + seconds, _MAX_BUDGET * self._plain.value)
