"""A live view of a patched model's pool."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.statistics.counters import PHASES, Counters, Stats, counted_since, percent
from torch_mesh.statistics.stats import pool_stats

RATES = ("forwards", "per s", "hit rate", "in flight", "deferred", "read", "waiting", "prefetches used", "unused")
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def watch(model: nn.Module, *, interval: float = 2.0, console: Console | None = None) -> Iterator[None]:
    """Show hit rates, reads and waits of a patched model while the body runs, every ``interval`` seconds.

    >>> with torch_mesh.watch(model):
    ...     model.generate(**inputs)

    Rates and percentages are of the last interval, and at the end of the whole time; undefined ones show ``-``. If
    ``console`` (default: standard output) is not a terminal, only the last table is printed.

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
        try:
            yield
        finally:
            view.has_ended = True


class _View:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begin = self._last = (time.monotonic(), pool_stats(model, experts=False))
        self._shown: RenderableType = ""
        self.has_ended = False

    def latest(self) -> RenderableType:
        try:
            now = (time.monotonic(), pool_stats(self._model, experts=False))
        except MeshError:  # unpatched or closed: the last state stays
            return self._shown
        self._shown = render(self._begin if self.has_ended else self._last, now)
        self._last = now
        return self._shown

    def whole(self) -> RenderableType:
        try:
            return render(self._begin, (time.monotonic(), pool_stats(self._model, experts=False)))
        except MeshError as error:
            return Text(str(error))


def render(before: tuple[float, Stats], after: tuple[float, Stats]) -> RenderableType:
    (begin, old), (end, new) = before, after
    counted = counted_since(old, new)
    table = Table("", *RATES)
    parts = {name: (getattr(new, name), getattr(counted, name)) for name in PHASES} | {"all": (new, counted)}
    for name, (total, part) in parts.items():
        cells = rate_cells(total.forwards, part, end - begin)
        table.add_row(*map(Text, (name, *cells)))  # strings would be searched for markup
    lines: list[RenderableType] = [table, Text(f"hit rate by layer  {layer_bars(counted)}")]
    if new.lossy:
        lines.append(Text(f"lossy: {new.lossy}", style="yellow"))
    if new.prefetch_error is not None:
        lines.append(Text(f"last failed prefetch: {new.prefetch_error}", style="yellow"))
    return Group(*lines)


def rate_cells(forwards: int, counted: Counters, seconds: float) -> list[str]:
    """The cells of ``RATES``: ``forwards`` as given, the rest from the counts in so many seconds."""
    if not counted.accesses or seconds <= 0:
        return [str(forwards), *["-"] * 8]
    return [
        str(forwards),
        f"{counted.forwards / seconds:.1f}",
        percent(counted.hit_rate),
        percent(counted.inflight_misses / counted.accesses),
        percent(counted.deferred / counted.accesses),
        f"{counted.bytes_read / seconds / 1e6:.0f} MB/s",
        percent(counted.stall_seconds / seconds),
        percent(counted.prefetch_accuracy),
        f"{counted.unused_prefetch_bytes / seconds / 1e6:.0f} MB/s",
    ]


def layer_bars(counted: Stats) -> str:
    """One bar for each layer, its height the hit rate; ``-`` without accesses."""
    rates = [layer.hit_rate for layer in counted.per_layer]
    return "".join("-" if rate is None else _BARS[min(len(_BARS) - 1, int(rate * len(_BARS)))] for rate in rates)
