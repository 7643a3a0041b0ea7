"""What a patched model's pool did: hits, misses, bytes and stalls, in all and per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import MeshError
from .modules import patched_modules
from .pool import ExpertPool


@dataclass(frozen=True)
class Counters:
    """Counts since the model was patched, or since ``reset_stats``.

    What is counted is an expert that a forward of a layer uses, once, however many of its tokens chose it.
    """

    hits: int = 0  # was resident
    cold_misses: int = 0  # had to be read
    inflight_misses: int = 0  # was being read already
    bytes_read: int = 0
    stall_seconds: float = 0.0  # a forward had nothing to compute and waited
    promoted: int = 0  # reads that made an expert resident
    evicted: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits per expert asked for; None when none was."""
        asked = self.hits + self.cold_misses + self.inflight_misses
        return self.hits / asked if asked else None

    def __add__(self, other: Counters) -> Counters:
        names = (field.name for field in dataclasses.fields(Counters))
        return Counters(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def to_dict(self) -> dict[str, Any]:
        counts = {field.name: getattr(self, field.name) for field in dataclasses.fields(Counters)}
        return {**counts, "hit_rate": self.hit_rate}


@dataclass(frozen=True)
class Stats(Counters):
    """Counters of a whole model; ``per_layer`` has those of each MoE layer, in order. ``str()`` is a table."""

    per_layer: list[Counters] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "per_layer": [layer.to_dict() for layer in self.per_layer]}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "hit rate", "hits", "cold", "in flight", "read", "stalled", "promoted", "evicted")
        ]
        rows += [_row(str(index), counters) for index, counters in enumerate(self.per_layer)]
        rows.append(_row("all", self))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def stats(model: nn.Module) -> Stats:
    """The counters of a patched model. Copies of a model share its pool, and so its counters.

    Raises MeshError for a model that is not patched.
    """
    per_layer = [counters for pool in _pools(model) for counters in _layers(pool)]
    total = sum(per_layer, Counters())
    return Stats(**dataclasses.asdict(total), per_layer=per_layer)


def reset_stats(model: nn.Module) -> None:
    """Sets the counters of a patched model to zero. Raises MeshError for a model that is not patched."""
    for pool in _pools(model):
        pool.engine.reset_stats()


def _pools(model: nn.Module) -> Iterator[ExpertPool]:
    pools = {id(module._mesh_pool): module._mesh_pool for module in patched_modules(model)}
    if not pools:
        raise MeshError(f"{type(model).__name__} is not patched: it has no statistics. See torch_mesh.patch.")
    return iter(pools.values())


def _layers(pool: ExpertPool) -> Iterator[Counters]:
    counts = pool.engine.stats()
    for layer in range(pool.layers):
        yield Counters(
            hits=int(counts["hits"][layer]),
            cold_misses=int(counts["cold_misses"][layer]),
            inflight_misses=int(counts["inflight_misses"][layer]),
            bytes_read=int(counts["bytes_read"][layer]),
            stall_seconds=int(counts["stall_nanoseconds"][layer]) / 1e9,
            promoted=int(counts["promoted"][layer]),
            evicted=int(counts["evicted"][layer]),
        )


def _row(name: str, counters: Counters) -> tuple[str, ...]:
    return (
        name,
        "-" if counters.hit_rate is None else f"{counters.hit_rate:.1%}",
        str(counters.hits),
        str(counters.cold_misses),
        str(counters.inflight_misses),
        f"{counters.bytes_read / 2**20:.1f} MiB",
        f"{counters.stall_seconds * 1e3:.1f} ms",
        str(counters.promoted),
        str(counters.evicted),
    )
