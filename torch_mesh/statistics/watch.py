"""A live view of what a patched model's pool does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn

from ..errors import MeshError
from .counters import PHASES, Counters, Stats, engine_stats, percent
from .stats import engines_of, lossy_of, stand_ins_of

RATES = ("forwards", "per s", "hit rate", "in flight", "deferred", "read", "waiting", "prefetches used", "wasted")
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def watch(model: nn.Module, *, interval: float = 2.0, console: Console | None = None) -> Iterator[None]:
    """Shows hit rates, reads and waits of a patched model while the body runs, anew every ``interval`` seconds.

    >>> with torch_mesh.watch(model):
    ...     model.generate(**inputs)

    Rates are those of the last interval, percentages too; what was not asked shows ``-``. Where ``console`` (default: the
    standard output) is no terminal, one table of the whole time is printed at the end. Each look takes some milliseconds of
    Python time, besides what the terminal takes.

    Raises MeshError for a model that is not patched, ValueError for an interval that is not positive.
    """
    if not interval > 0:
        raise ValueError(f"interval={interval!r} must be a positive number of seconds.")
    console = console or Console()
    view = _View(model)
    if not console.is_terminal:
        yield
        console.print(view.whole())
        return
    with Live(get_renderable=view.latest, console=console, refresh_per_second=1 / interval):
        yield


def _look(model: nn.Module) -> Stats:
    return engine_stats(engines_of(model), experts=False, lossy=lossy_of(model), stand_ins=stand_ins_of(model))


class _View:
    """``latest`` compares with what the one before saw, ``whole`` with the beginning."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begin = self._last = (time.monotonic(), _look(model))
        self._shown: RenderableType = ""

    def latest(self) -> RenderableType:
        try:
            now = (time.monotonic(), _look(self._model))
        except MeshError:  # unpatched, or closed: what was seen last stays
            return self._shown
        self._shown = render(self._last, now)
        self._last = now
        return self._shown

    def whole(self) -> RenderableType:
        try:
            return render(self._begin, (time.monotonic(), _look(self._model)))
        except MeshError as error:
            return Text(str(error))


def render(before: tuple[float, Stats], after: tuple[float, Stats]) -> RenderableType:
    (begin, old), (end, new) = before, after
    if new.accesses < old.accesses:  # reset meanwhile
        old = Stats(per_layer=[type(layer)() for layer in new.per_layer])
    table = Table("", *RATES)
    for name in PHASES:
        table.add_row(name, *rate_cells(getattr(old, name), getattr(new, name), end - begin))
    table.add_row("all", *rate_cells(old, new, end - begin))
    lines: list[RenderableType] = [table, Text(f"hit rate by layer  {layer_bars(old, new)}")]
    if new.lossy:
        lines.append(Text(f"lossy: {new.lossy}", style="yellow"))
    if new.prefetch_error is not None:
        lines.append(Text(f"last failed prefetch: {new.prefetch_error}", style="yellow"))
    return Group(*lines)


def rate_cells(old: Counters, new: Counters, seconds: float) -> list[str]:
    """What ``RATES`` names, of the ``seconds`` between two looks."""
    accesses = new.accesses - old.accesses
    if not accesses or seconds <= 0:
        return [str(new.forwards), *["-"] * 8]
    settled = new.prefetches_used + new.prefetches_wasted - old.prefetches_used - old.prefetches_wasted
    return [
        str(new.forwards),
        f"{(new.forwards - old.forwards) / seconds:.1f}",
        percent((new.hits - old.hits) / accesses),
        percent((new.inflight_misses - old.inflight_misses) / accesses),
        percent((new.deferred - old.deferred) / accesses),
        f"{(new.bytes_read - old.bytes_read) / seconds / 1e6:.0f} MB/s",
        percent((new.stall_seconds - old.stall_seconds) / seconds),
        percent((new.prefetches_used - old.prefetches_used) / settled if settled else None),
        f"{(new.wasted_bytes - old.wasted_bytes) / seconds / 1e6:.0f} MB/s",
    ]


def layer_bars(old: Stats, new: Stats) -> str:
    """One bar for each layer, its height the hit rate; ``-`` for a layer that was not asked."""
    bars = []
    for before, after in zip(old.per_layer, new.per_layer, strict=True):
        accesses = after.accesses - before.accesses
        share = (after.hits - before.hits) / accesses if accesses else None
        bars.append("-" if share is None else _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(bars)
