"""Read a statistics file of ``stats.file`` back, as runs and stretches of time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from torch_mesh.errors import MeshError
from torch_mesh.statistics.counters import (
    PHASES,
    SIZES,
    Counters,
    LayerCounters,
    Stats,
    counted_since,
    summed,
    was_reset,
)
from torch_mesh.statistics.snapshot import Snapshot, parse_snapshot

_MAX_LINE_BYTES = 64 << 20  # bytes; a line of 100 layers has some 100,000
_MAX_COUNT = 1 << 63  # JSON integers may have thousands of digits, too large for a float
_COUNTERS = {entry.name: entry.default for entry in dataclasses.fields(Counters)}


@dataclass(frozen=True)
class Stretch:
    """Counts between two lines, and the snapshot of the second. ``begin`` and ``end`` are seconds since 1970."""

    begin: float
    end: float
    stats: Stats
    snapshot: Snapshot


@dataclass(frozen=True)
class Run:
    """Lines of one pool. Counts across resets are added up.

    In lines of earlier versions ``forward`` rises within a run, and a falling count shows a reset.
    """

    begin: float  # time of the first line
    end: float
    lines: int
    forwards: int  # count at the last line
    total: Stats  # sums of all counts
    stretches: tuple[Stretch, ...]  # between lines, in order
    peak_bytes: int | None  # maximum memory of the process; None: unknown
    budget_bytes: int | None  # maximum memory of experts; None: unknown
    about: Mapping[str, str]  # from the last line; empty for lines of earlier versions

    @property
    def span(self) -> str:
        begin, end = (datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S") for time in (self.begin, self.end))
        return f"{self.lines} lines up to forward {self.forwards}, {begin} to {end}"


@dataclass(frozen=True)
class Report:
    path: Path
    runs: tuple[Run, ...]
    damaged: tuple[int, ...]  # numbers of truncated lines

    def named_runs(self) -> list[tuple[str, Run]]:
        """Each run with its name: the file, and its number if there are several."""
        name, many = path_text(self.path), len(self.runs)
        return [
            (f"{name}, run {number} of {many}" if many > 1 else name, run) for number, run in enumerate(self.runs, 1)
        ]


@dataclass(frozen=True)
class _Line:
    offset: int
    time: float
    forward: int
    layers: int
    run: str | None  # None: of an earlier version
    resets: int
    fell: bool  # a count is below that of the run's previous line
    process: int | None  # bytes of memory: the peak may be in a line that is not a cut
    budget: int | None


def path_text(path: str | os.PathLike[str]) -> str:
    """The path as printable text: a name may have bytes that are not text."""
    return os.fsencode(path).decode(errors="replace")


def read_report(path: str | os.PathLike[str], stretches: int = 12) -> Report:
    """Read a file of ``MeshConfig.stats.file``, and cut each of its runs into at most ``stretches``.

    Truncated lines, as after a full disk or a killed process, are skipped and counted. Raises MeshError, naming the
    line, for a file with anything else than statistics; OSError if it cannot be read.
    """
    return StatsFile(path).report(stretches)


class StatsFile:
    """A statistics file that may still grow: ``report`` reads the lines since the last report."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lines: list[_Line] = []
        self._damaged: list[int] = []
        self._offset = self._number = 0  # bytes and lines read so far
        self._file: tuple[int, int] | None = None  # device and inode
        self._first = b""  # the first line, which has its time
        self._seen: dict[int, tuple[Stats, Snapshot]] = {}  # by offset: the lines that the last report used
        self._latest: tuple[str | None, Stats] = None, Stats()  # the last line, and its run

    def report(self, stretches: int, growing: bool = False) -> Report:
        """As ``read_report``. If the file is ``growing``, an incomplete last line is left for later, and the file may
        be empty."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._begin_anew()
            raise
        with file:
            self._begin_anew_if_replaced(file)
            self._read_on(file, growing)
            if not self._lines and not growing:
                raise MeshError(f"{self.path} has no line of statistics: give a file that MeshConfig.stats.file named.")
            seen, self._seen = self._seen, {}
            runs = tuple(self._run(file, lines, stretches, seen) for lines in _runs(self._lines))
        return Report(self.path, runs, tuple(self._damaged))

    def _begin_anew_if_replaced(self, file: BinaryIO) -> None:
        """Compares the first line: inodes are reused, and a rewritten file keeps its inode."""
        status = os.fstat(file.fileno())
        which = status.st_dev, status.st_ino
        file.seek(0)
        if which != self._file or status.st_size < self._offset or file.read(len(self._first)) != self._first:
            self._begin_anew()
        self._file = which

    def _read_on(self, file: BinaryIO, growing: bool) -> None:
        file.seek(self._offset)
        while line := file.readline(_MAX_LINE_BYTES):
            if growing and not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                break
            number = self._number + 1
            if len(line) == _MAX_LINE_BYTES:
                raise MeshError(f"{self.path}, line {number}: longer than any line of statistics.")
            if line.strip():
                try:
                    table = json.loads(line)
                except (ValueError, RecursionError):
                    self._damaged.append(number)
                else:
                    time, stats, snapshot = _parsed(self.path, number, table)
                    memory, run = snapshot.memory or {}, table.get("run")
                    latest, self._latest = self._latest, (run, stats)
                    self._lines.append(
                        _Line(
                            offset=self._offset,
                            time=time,
                            forward=table["forward"],
                            layers=len(stats.per_layer),
                            run=run,
                            resets=stats.resets,
                            fell=latest[0] == run and was_reset(latest[1], stats),
                            process=memory.get("process"),
                            budget=memory.get("budget"),
                        )
                    )
            self._first = self._first or line
            # Together: a refused line is read again, and keeps its number.
            self._offset, self._number = self._offset + len(line), number
        if self._damaged and not self._lines:
            raise MeshError(f"{self.path}, line {self._damaged[0]}: not JSON, so not a line of statistics.")

    def _run(
        self, file: BinaryIO, lines: list[_Line], stretches: int, known: Mapping[int, tuple[Stats, Snapshot]]
    ) -> Run:
        def read(line: _Line) -> tuple[Stats, Snapshot]:
            if (found := known.get(line.offset)) is None:
                file.seek(line.offset)
                _, stats, snapshot = _parsed(self.path, 0, json.loads(file.readline()))
                found = stats, snapshot
            self._seen[line.offset] = found
            return found

        total, parts = Stats(), []
        every = max(1, math.ceil((len(lines) - 1) / stretches))
        for segment in _split(lines, lambda a, b: b.resets != a.resets or b.fell):
            chosen = [*segment[:-1:every], segment[-1]] if len(segment) > 1 else segment
            seen = [read(line) for line in chosen]
            for index in range(1, len(chosen)):
                (old, _), (new, snapshot) = seen[index - 1 : index + 1]
                parts.append(Stretch(chosen[index - 1].time, chosen[index].time, counted_since(old, new), snapshot))
            total = summed(total, seen[-1][0])
        return Run(
            begin=lines[0].time,
            end=lines[-1].time,
            lines=len(lines),
            forwards=lines[-1].forward,
            total=total,
            stretches=tuple(parts),
            peak_bytes=max((line.process for line in lines if line.process is not None), default=None),
            budget_bytes=max((line.budget for line in lines if line.budget is not None), default=None),
            about=seen[-1][1].about,
        )


def _runs(lines: Sequence[_Line]) -> list[list[_Line]]:
    """Group lines by run, in the order of the runs' first lines. Two processes may write to one file at a time."""
    by_name: dict[str | None, list[_Line]] = {}
    for line in lines:
        by_name.setdefault(line.run, []).append(line)
    runs = [
        run
        for name, own in by_name.items()
        for run in _split(own, lambda a, b: b.layers != a.layers or (b.run is None and b.forward <= a.forward))
    ]
    return sorted(runs, key=lambda run: run[0].offset)


def _split(lines: Sequence[Any], begins: Any) -> Iterator[list[Any]]:
    """Cut a list before each element that ``begins`` something after its predecessor."""
    if not lines:
        return
    part = [lines[0]]
    for before, line in itertools.pairwise(lines):
        if begins(before, line):
            yield part
            part = []
        part.append(line)
    yield part


def _parsed(path: Path, number: int, table: Any) -> tuple[float, Stats, Snapshot]:
    """Time, statistics and snapshot of one line. Unknown fields are ignored, missing counts are 0."""

    def refuse(problem: str) -> MeshError:
        return MeshError(f"{path}, line {number}: not a line of statistics, {problem}.")

    def counts(held: Any, where: str) -> dict[str, Any]:
        if not isinstance(held, Mapping):
            raise refuse(f"{where} is no object")
        found = {name: held.get(name, default) for name, default in _COUNTERS.items()}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_COUNT:
                raise refuse(f"{name} of {where} is {value!r} and no count")
        if "accesses" not in held:
            raise refuse(f"{where} counts no accesses")
        return found

    def phases(held: Mapping[str, Any], where: str) -> dict[str, Any]:
        return counts(held, where) | {name: Counters(**counts(held.get(name), f"{name} of {where}")) for name in PHASES}

    if not isinstance(table, dict):
        raise refuse(f"but a JSON {type(table).__name__}")
    time, forward, layers = table.get("time"), table.get("forward"), table.get("per_layer")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < 1e11:
        raise refuse(f"its time is {time!r}")
    if type(forward) is not int or not 0 <= forward < 1 << 63:
        raise refuse(f"its forward is {forward!r}")
    if not isinstance(layers, list):
        raise refuse("it has no per_layer")
    if not isinstance(table.get("run", ""), str):
        raise refuse(f"its run is {table['run']!r:.80}")
    per_layer = [LayerCounters(**phases(layer, f"layer {index}")) for index, layer in enumerate(layers)]
    sizes = {name: table.get(name, 0) for name in (*SIZES, "resets")}
    if not all(type(size) is int and 0 <= size < _MAX_COUNT for size in sizes.values()):
        raise refuse(f"its sizes are {sizes}")
    lossy = table.get("lossy", "")
    if not isinstance(lossy, str):
        raise refuse(f"its lossy is {lossy!r}")
    try:
        snapshot = parse_snapshot(table, len(per_layer))
    except ValueError as problem:
        raise refuse(str(problem)) from None
    lossy = lossy.encode(errors="replace").decode()  # JSON may have lone surrogates, which cannot be printed
    return float(time), Stats(**phases(table, "the whole"), per_layer=per_layer, lossy=lossy, **sizes), snapshot
