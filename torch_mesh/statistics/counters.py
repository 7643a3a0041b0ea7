"""Counters of a pool: hits, misses, prefetches, bytes and waits, in total, per phase, layer and expert."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torch_mesh import _C
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.statistics.speculated import SpeculationCounters

PHASES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")

_LayerCounts = Mapping[str, npt.NDArray[np.int64]]  # by counter: [layers]


@dataclass(frozen=True)
class Counters:
    """Counts since the model was patched, or since ``reset_stats``.

    An access is one expert used by one forward of a layer, however many of its tokens chose it; if a forward is split
    into chunks or runs unfused, one per part. A read and its fate belong to the phase that queued it, an eviction to
    the phase that needed the slot; both to the expert's own layer. ``accesses`` is the sum of ``hits``,
    ``cold_misses``, ``inflight_misses`` and ``deferred``.
    """

    forwards: int = 0  #: of a layer; of a model, the maximum over its layers
    accesses: int = 0  #: experts used by a forward of a layer
    hits: int = 0  #: resident
    cold_misses: int = 0  #: read on demand
    inflight_misses: int = 0  #: already being read
    early_accesses: int = 0  #: accesses to experts that ``residency.early_experts`` soft-pins
    early_hits: int = 0  #: hits of these
    deferred: int = 0  #: not resident, and used one MoE layer later
    rerouted: int = 0  #: choices replaced by a resident expert; not in accesses
    fallback_accesses: int = 0  #: accesses to fallback experts, resident or not
    prefetches: int = 0  #: reads queued before any forward asked
    prefetches_used: int = 0  #: prefetches that a forward used
    prefetches_unused: int = 0  #: evicted or failed before any forward asked
    unused_prefetch_bytes: int = 0  #: read by unused prefetches
    prefetches_failed: int = 0  #: prefetch reads that ended in an error
    failed: int = 0  #: reads that ended in an error
    second_reads: int = 0  #: of a record, from the original file, after one with a wrong checksum
    bytes_read: int = 0  #: of experts, by reads of all kinds
    stall_seconds: float = 0.0  #: time in which a forward had nothing to compute
    prefetch_stall_seconds: float = 0.0  #: of these, waiting only for reads that were begun as prefetches
    decision_seconds: float = 0.0  #: under the pool's lock: choosing slots and victims, queueing reads
    expert_seconds: float = 0.0  #: forwards of layers' experts, with all of the above
    #: outside of ``expert_seconds``: attention, dense layers, Python; from one decode step to the next, not before or
    #: between prompts
    outside_seconds: float = 0.0
    promoted: int = 0  #: reads that made an expert resident
    evicted: int = 0  #: experts removed from memory for others

    @property
    def hit_rate(self) -> float | None:
        """Hits per access; None without accesses."""
        return self.hits / self.accesses if self.accesses else None

    @property
    def early_hit_rate(self) -> float | None:
        """Hits per access to experts that ``residency.early_experts`` soft-pins; None without accesses."""
        return self.early_hits / self.early_accesses if self.early_accesses else None

    @property
    def other_hit_rate(self) -> float | None:
        """Hits per access to all other experts; None without accesses."""
        others = self.accesses - self.early_accesses
        return (self.hits - self.early_hits) / others if others else None

    @property
    def prefetch_accuracy(self) -> float | None:
        """The used fraction of completed prefetches; None without any."""
        settled = self.prefetches_used + self.prefetches_unused
        return self.prefetches_used / settled if settled else None

    def time_per_forward(self) -> dict[str, float] | None:
        """Milliseconds of a forward of the model by where they went; None before the first one.

        ``computing`` experts, ``waiting`` for reads that a layer asked for itself, ``prefetching``: waiting for the
        rest of reads that were begun as prefetches, and ``outside`` of the experts.
        """
        if not self.forwards:
            return None
        seconds = {
            "computing": self.expert_seconds - self.stall_seconds,
            "waiting": self.stall_seconds - self.prefetch_stall_seconds,
            "prefetching": self.prefetch_stall_seconds,
            "outside": self.outside_seconds,
        }
        # With fallback experts a difference of two bounds may be negative (counted_since).
        return {name: 1e3 * max(value, 0) / self.forwards for name, value in seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        """The counts by name, the hit rates and ``prefetch_accuracy``; times in seconds, undefined rates None."""
        return dict(zip(_DICT_NAMES, _dict_values(self), strict=True))


_NAMES = tuple(entry.name for entry in dataclasses.fields(Counters))
_values = operator.attrgetter(*_NAMES)
_NO_COUNTS = Counters()
_DICT_NAMES = (*_NAMES, "hit_rate", "early_hit_rate", "other_hit_rate", "prefetch_accuracy")
_dict_values = operator.attrgetter(*_DICT_NAMES)
SIZES = ("slots", "early", "max_slots", "shrinks", "grows")
_RESIZES = ("shrinks", "grows")  # the counts among SIZES


@dataclass(frozen=True)
class ExpertCounters:
    """Counts of each expert of a layer, in the order of the experts, over all phases."""

    accesses: tuple[int, ...] = ()
    hits: tuple[int, ...] = ()
    cold_misses: tuple[int, ...] = ()
    inflight_misses: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()
    promoted: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    prefetches: tuple[int, ...] = ()


@dataclass(frozen=True)
class PhaseCounters(Counters):
    """Counters over all phases, and of each phase. Counts of neither phase, such as reads of a backward, are in the sum
    only."""

    prefill: Counters = field(default_factory=Counters)  #: forwards of more than 16 rows
    decode: Counters = field(default_factory=Counters)  #: forwards of up to 16 rows

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()}


@dataclass(frozen=True)
class LayerCounters(PhaseCounters):
    """Counters of one MoE layer."""

    experts: ExpertCounters = field(default_factory=ExpertCounters)  #: counts of each expert
    #: The pool and its resets: only counts of one epoch are comparable. Empty: unknown.
    epoch: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self, experts: bool = True) -> dict[str, Any]:
        counts = super().to_dict()
        if experts:
            counts["experts"] = {name: list(values) for name, values in vars(self.experts).items()}
        return counts


@dataclass(frozen=True)
class DeviceCounters:
    """Counters of layers with experts on GPUs. ``str()`` is a line.

    A replay of a captured graph is counted where the host takes part, without the GPU's waiting time.
    """

    calls: int = 0  #: of host nodes: forwards of layers that are partly there; a long prompt has several
    all_on_device: int = 0  #: calls in which the host had nothing to compute
    complete: int = 0  #: forwards of layers that are entirely there; not those of a graph's replay
    failed: int = 0  #: calls whose output was NaN; the error is raised later
    streamed: int = 0  #: experts streamed for prompts
    moved: int = 0  #: experts moved under ``gpu.placement="dynamic"``
    moves_failed: int = 0  #: failed reads of moving experts
    bytes_down: int = 0  #: hidden states, ids and routing weights
    bytes_up: int = 0  #: sums
    bytes_streamed: int = 0  #: of the experts streamed for prompts
    node_seconds: float = 0.0  #: in host nodes
    waited_seconds: float = 0.0  #: the GPU waited for the host, over the last ``waited_calls``
    waited_calls: int = 0  #: calls that ``waited_seconds`` is over

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        waited = f"waited {self.waited_seconds * 1e3:.1f} ms in the last {self.waited_calls}"
        return (
            f"on GPUs: {self.complete} forwards of whole layers; {self.calls} shared with the CPU, which had nothing "
            f"to do in {self.all_on_device}, took {self.node_seconds * 1e3:.1f} ms, failed in {self.failed}; {waited}; "
            f"{self.bytes_down / 2**20:.1f} MiB down, {self.bytes_up / 2**20:.1f} up; {self.streamed} experts "
            f"streamed, {self.bytes_streamed / 2**20:.1f} MiB; {self.moved} moved, {self.moves_failed} moves failed"
        )


@dataclass(frozen=True)
class TableCounters:
    """Counters of an embedding whose table is in files. ``str()`` is a line."""

    name: str  #: the parameter's
    weights: str = ""  #: the format of its rows; empty: their values
    gathers: int = 0  #: forwards of the embedding
    lookups: int = 0  #: ids
    distinct: int = 0  #: distinct ids, summed over forwards
    hits: int = 0  #: distinct ids whose row was in memory
    reads: int = 0  #: distinct ids whose row was read
    prefetches: int = 0  #: rows whose read began before a forward asked
    failed: int = 0  #: reads that ended in an error
    bytes_read: int = 0  #: by reads and prefetches, in whole blocks
    wait_seconds: float = 0.0  #: a forward waited for rows

    @property
    def hit_rate(self) -> float | None:
        """Hits per distinct row; None when none was asked for."""
        return self.hits / self.distinct if self.distinct else None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        name = f"{self.name} in {self.weights}" if self.weights else self.name
        return (
            f"rows of {name}: {self.lookups} looked up, {self.distinct} of them distinct, hit rate "
            f"{percent(self.hit_rate)}, {self.bytes_read / 2**20:.1f} MiB read, waited {self.wait_seconds * 1e3:.1f} ms"
        )


@dataclass(frozen=True)
class Stats(PhaseCounters):
    """Counters of a whole model. ``str()`` is a table that shows ``-`` for undefined values."""

    per_layer: list[LayerCounters] = field(default_factory=list)  #: each MoE layer, in order
    slots: int = 0  #: current limit of resident experts
    early: int = 0  #: slots that ``residency.early_experts`` soft-pins: at most half
    max_slots: int = 0  #: initial limit
    shrinks: int = 0  #: times that the pool shrank because memory ran low
    grows: int = 0  #: times that it grew again
    resets: int = 0  #: times that its pools' counters were reset
    device: DeviceCounters | None = None  #: of experts on GPUs; None: there are none
    expert_range: ExpertRange | None = None  #: the experts on this rank; None: all
    lossy: str = ""  #: the active lossy modes; empty: exact
    #: Why lookahead is unsupported, and from which layers; empty: supported everywhere, or off. None: unknown, as in a
    #: ``stats.file``, which has no modules.
    lookahead_unsupported_reasons: Mapping[str, tuple[int, ...]] | None = None
    #: The error of the last failed prefetch, with ``layer``, ``expert``, ``file`` and ``offset``. It fails no forward,
    #: and prefetching goes on. None: none has failed.
    prefetch_error: Exception | None = None
    #: Counters of speculation; None: not used, or unknown, as in a ``stats.file``.
    speculation: SpeculationCounters | None = None
    #: Counters of embedding tables in files; empty: none, or unknown, as in a ``stats.file``.
    tables: tuple[TableCounters, ...] = ()

    def to_dict(self, experts: bool = True) -> dict[str, Any]:
        """Everything in types of JSON; without ``experts``, all but the counts of each expert, which are most of it.

        ``prefetch_error`` is None, or a dict of type, message and location.
        """
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in SIZES},
            "resets": self.resets,
            "device": None if self.device is None else self.device.to_dict(),
            "expert_range": None if self.expert_range is None else self.expert_range.to_dict(),
            "lossy": self.lossy,
            "lookahead_unsupported_reasons": None
            if self.lookahead_unsupported_reasons is None
            else {reason: list(layers) for reason, layers in self.lookahead_unsupported_reasons.items()},
            "prefetch_error": _error_dict(self.prefetch_error),
            "speculation": None if self.speculation is None else self.speculation.to_dict(),
            "tables": [table.to_dict() for table in self.tables],
            "per_layer": [layer.to_dict(experts) for layer in self.per_layer],
        }

    def table(self) -> list[tuple[str, ...]]:
        """Headings, then a row for each layer, each phase with accesses, and the total."""
        rows = [tuple(HEADINGS), *(_row(str(index), counters) for index, counters in enumerate(self.per_layer))]
        rows += [_row(name, getattr(self, name)) for name in PHASES if getattr(self, name).accesses]
        return [*rows, _row("all", self)]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [_time_summary(name, getattr(self, name)) for name in PHASES if getattr(self, name).forwards]
        if self.slots < self.max_slots or self.shrinks:
            lines.append(
                f"{self.slots} of {self.max_slots} slots, shrunk {self.shrinks} times, grown {self.grows} times"
            )
        if self.expert_range is not None:
            lines.append(str(self.expert_range))
        if self.early:
            rates = f"hit rate {percent(self.early_hit_rate)}, others {percent(self.other_hit_rate)}"
            lines.append(f"{self.early} early experts are soft-pinned: {rates}")
        if self.device is not None:
            lines.append(str(self.device))
        if self.lossy:
            lines.append(f"lossy: {self.lossy}")
        for reason, layers in (self.lookahead_unsupported_reasons or {}).items():
            lines.append(f"no lookahead from {_ranges(layers)}: {reason}")
        if self.fallback_accesses:
            lines.append(f"{self.fallback_accesses} of {self.accesses} accesses were to fallback experts")
        if self.second_reads:
            lines.append(f"{self.second_reads} reads were repeated after a wrong checksum")
        if self.speculation is not None:
            lines.append(str(self.speculation))
        lines += map(str, self.tables)
        if self.prefetch_error is not None:
            lines.append(f"last failed prefetch: {self.prefetch_error}")
        return "\n".join(lines)


def engine_stats(
    pools: Iterable[Sequence[_C.Engine]], experts: bool = True, lossy: str = "", expert_range: ExpertRange | None = None
) -> Stats:
    """The counters of these pools together; without ``experts``, all but those of each expert, which take longest.

    A pool is its engine and, if there is one, the engine of ``lossy.fallback``, whose counts are added, except for
    numbers of slots. ``lossy`` names the model's active lossy modes; ``expert_range``: the experts on this rank.
    """
    snapshots, epochs = [], []
    for engines in pools:
        seen = [each.detailed_stats() for each in engines]
        snapshots.append(seen[0] if len(seen) == 1 else _with_fallback(*seen))
        pairs = zip(engines, seen, strict=True)
        epochs.append(tuple(n for each, counts in pairs for n in (each.id, counts["resets"])))
    return dataclasses.replace(_combined(snapshots, epochs, experts, lossy), expert_range=expert_range)


def counted_since(before: Stats, now: Stats) -> Stats:
    """The counts of ``now`` less those of ``before``, of one model; all of ``now``'s for layers whose counters were
    reset.

    Other fields are those of ``now``. Counts of each expert are left out.
    """
    layers = []
    for layer, old in itertools.zip_longest(now.per_layer, before.per_layer[: len(now.per_layer)]):
        continues = old is not None and _continues(old, layer)
        layers.append(_changed(layer, old if continues else LayerCounters(), operator.sub))
    resizes = Stats() if was_reset(before, now) else before
    return _of_layers(now, layers, {name: getattr(now, name) - getattr(resizes, name) for name in _RESIZES})


def summed(first: Stats, second: Stats) -> Stats:
    """The counts of both, for the layers of ``second``, which gives the other fields. Counts of each expert are left
    out."""
    pairs = itertools.zip_longest(second.per_layer, first.per_layer[: len(second.per_layer)])
    layers = [_changed(layer, LayerCounters() if old is None else old, operator.add) for layer, old in pairs]
    return _of_layers(second, layers, {name: getattr(second, name) + getattr(first, name) for name in _RESIZES})


def was_reset(before: Stats, now: Stats) -> bool:
    pairs = itertools.zip_longest(before.per_layer, now.per_layer)
    return any(old is None or layer is None or not _continues(old, layer) for old, layer in pairs)


def _continues(before: LayerCounters, now: LayerCounters) -> bool:
    """Whether ``now`` continues the counts of ``before``: they are of one epoch. Lines of earlier versions have no
    epoch; there, no counter fell."""
    if before.epoch or now.epoch:
        return before.epoch == now.epoch
    phases = (before, now), (before.prefill, now.prefill), (before.decode, now.decode)
    return all(all(map(operator.le, _values(old), _values(new))) for old, new in phases)


def _changed(layer: LayerCounters, other: LayerCounters, change: Callable[[Any, Any], Any]) -> LayerCounters:
    def phase(mine: Counters, theirs: Counters) -> Counters:
        counts, others = _values(mine), _values(theirs)
        if change is operator.sub and counts == others:  # most often: only one of the two phases goes on
            return _NO_COUNTS
        return Counters(*map(change, counts, others))

    return LayerCounters(  # type: ignore[misc]  # mypy does not know how many values there are
        *map(change, _values(layer), _values(other)),
        prefill=phase(layer.prefill, other.prefill),
        decode=phase(layer.decode, other.decode),
        epoch=layer.epoch,
    )


def _of_layers(stats: Stats, layers: list[LayerCounters], changes: Mapping[str, Any]) -> Stats:
    return dataclasses.replace(stats, per_layer=layers, **_whole(layers), **changes)


def _whole(layers: Sequence[LayerCounters]) -> dict[str, Any]:
    return {
        **_sum(layers),
        "prefill": Counters(**_sum([layer.prefill for layer in layers])),
        "decode": Counters(**_sum([layer.decode for layer in layers])),
    }


def _with_fallback(exact: _C._DetailedStats, fallback: _C._DetailedStats) -> _C._DetailedStats:
    """``exact`` with the counts of ``lossy.fallback``'s engine."""
    added = exact.copy()
    phases: tuple[Literal["none", "prefill", "decode"], ...] = ("none", *PHASES)
    for phase in phases:
        counts = {name: exact[phase][name] + fallback[phase][name] for name in exact[phase]}
        added[phase] = counts | {
            "forwards": exact[phase]["forwards"],
            "fallback_accesses": fallback[phase]["accesses"],
            **_times_with_fallback(exact[phase], fallback[phase]),
        }
    added["experts"] = {name: exact["experts"][name] + fallback["experts"][name] for name in exact["experts"]}
    added["prefetch_error"] = exact["prefetch_error"] or fallback["prefetch_error"]
    added["resets"] = exact["resets"] + fallback["resets"]
    return added


def _times_with_fallback(exact: _LayerCounts, fallback: _LayerCounts) -> _LayerCounts:
    """The least time in forwards, and the most outside of them.

    A forward of fallback experts includes the exact one of its layer. The exact pool counts the rest, the fallback's
    own time, as outside, before its own forward or before the next layer's. That is at least the time that the fallback
    pool waited for reads, and at least the difference of the sums. How long exact forwards within others took is not
    counted.
    """
    computing, outside = "expert_nanoseconds", "outside_nanoseconds"
    fallback_time = np.maximum(fallback["stall_nanoseconds"], fallback[computing] - exact[computing])
    # Which layers counted the rest is unknown. Taken from all in proportion, the total is that of the exact pool.
    fraction = max(1 - fallback_time.sum() / max(exact[outside].sum(), 1), 0)
    return {computing: exact[computing] + fallback_time, outside: (exact[outside] * fraction).astype(np.int64)}


def _combined(
    snapshots: Sequence[_C._DetailedStats], epochs: Sequence[tuple[int, ...]], with_experts: bool, lossy: str
) -> Stats:
    seen = zip(snapshots, epochs, strict=True)
    per_layer = [layer for snapshot, epoch in seen for layer in _layers(snapshot, epoch, with_experts)]
    counts: Sequence[Mapping[str, Any]] = snapshots
    sizes = {name: sum(each[name] for each in counts) for name in SIZES}
    errors = [snapshot["prefetch_error"] for snapshot in snapshots if snapshot["prefetch_error"] is not None]
    return Stats(
        **_whole(per_layer),
        per_layer=per_layer,
        **sizes,
        resets=sum(snapshot["resets"] for snapshot in snapshots),
        lossy=lossy,
        prefetch_error=errors[-1] if errors else None,
    )


def _sum(layers: Sequence[Counters]) -> dict[str, Any]:
    counts = zip(_NAMES, map(sum, zip(*map(_values, layers), strict=True)), strict=False)
    return {**dict(counts), "forwards": max((layer.forwards for layer in layers), default=0)}


def _layers(snapshot: _C._DetailedStats, epoch: tuple[int, ...], with_experts: bool) -> Iterator[LayerCounters]:
    prefill, decode = snapshot["prefill"], snapshot["decode"]
    every = {name: snapshot["none"][name] + prefill[name] + decode[name] for name in prefill}
    phases = [_by_layer(counts) for counts in (every, prefill, decode)]
    experts = {name: counts.tolist() for name, counts in snapshot["experts"].items() if with_experts}
    for layer, (whole, in_prefill, in_decode) in enumerate(zip(*phases, strict=True)):
        yield LayerCounters(  # type: ignore[misc]  # as in _changed
            *whole,
            prefill=Counters(*in_prefill),
            decode=Counters(*in_decode),
            experts=ExpertCounters(**{name: tuple(rows[layer]) for name, rows in experts.items()}),
            epoch=epoch,
        )


def _by_layer(counts: _LayerCounts) -> Iterator[tuple[Any, ...]]:
    """The fields of Counters for each layer, in their order; the engine counts nanoseconds."""
    columns: dict[str, Iterable[Any]] = {"fallback_accesses": itertools.repeat(0)}  # unless there is a fallback
    for name, values in counts.items():
        if name.endswith("_nanoseconds"):
            columns[name.replace("_nanoseconds", "_seconds")] = (values / 1e9).tolist()
        else:
            columns[name] = values.tolist()
    return zip(*(columns[name] for name in _NAMES))  # noqa: B905 - one of them may have no end


def _error_dict(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    location = {name: getattr(error, name, None) for name in ("layer", "expert", "file", "offset", "errno")}
    return {"type": type(error).__name__, "message": str(error), **location}


# Columns of the table, with explanations for readers who do not know the cache.
HEADINGS = {
    "layer": "a MoE layer of the model, prefill (prompts: forwards of more than 16 rows), decode, or all together",
    "hit rate": "hits, of all times that a layer asked for an expert",
    "hits": "the expert was in memory when its layer asked",
    "cold": "it had to be read from the disk",
    "in flight": "it was being read already, mostly by a prefetch, and the layer waited for the rest of that read",
    "deferred": "it was read while the model went on, and added one MoE layer later (a lossy mode)",
    "prefetched": "reads that were begun before any layer asked",
    "used": "of the prefetched experts that were asked for or evicted, those that were asked for",
    "unused": "bytes of prefetched experts that were evicted before any layer asked",
    "read": "bytes that were read from the disk",
    "stalled": "time in which a layer had nothing left to compute and waited for the disk",
    "deciding": "time spent choosing which expert to evict and which to read, under the pool's lock",
    "promoted": "experts that a read made resident",
    "evicted": "experts that were removed from memory for others",
}


def _row(name: str, counters: Counters) -> tuple[str, ...]:
    if not any(getattr(counters, counter) for counter in _NAMES):
        return (name, *("-" for _ in range(len(HEADINGS) - 1)))
    return (
        name,
        percent(counters.hit_rate),
        str(counters.hits),
        str(counters.cold_misses),
        str(counters.inflight_misses),
        str(counters.deferred),
        str(counters.prefetches),
        percent(counters.prefetch_accuracy),
        f"{counters.unused_prefetch_bytes / 2**20:.1f} MiB",
        f"{counters.bytes_read / 2**20:.1f} MiB",
        f"{counters.stall_seconds * 1e3:.1f} ms",
        f"{counters.decision_seconds * 1e3:.1f} ms",
        str(counters.promoted),
        str(counters.evicted),
    )


def _time_summary(phase: str, counters: Counters) -> str:
    times = counters.time_per_forward()
    assert times is not None
    what = "step" if phase == "decode" else "prompt"
    return (
        f"a {phase} {what}: {sum(times.values()):.1f} ms = {times['computing']:.1f} computing experts + "
        f"{times['waiting']:.1f} waiting for reads + {times['prefetching']:.1f} for prefetches + "
        f"{times['outside']:.1f} outside of the experts"
    )


def _ranges(layers: Sequence[int]) -> str:
    """``layers 0-2, 5`` for 0, 1, 2 and 5."""
    ends = [layer for layer in layers if layer + 1 not in layers]
    starts = [layer for layer in layers if layer - 1 not in layers]
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(runs)}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
