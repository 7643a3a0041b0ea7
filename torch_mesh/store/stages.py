"""The order in which a store is written from weight files that are fetched one at a time.

A record or a file is made as soon as all that it reads has been fetched. Of a fetched file only the ranges stay that
are still to be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_mesh.store.store_plan import NewFile, Piece, Record

PiecesOf = Callable[[int, int], Iterable[Piece]]  # (layer, expert) -> the ranges that their record reads


class Shards(ABC):
    """Weight files that are fetched on request. Before that each has its header and its size, and no data."""

    @property
    @abstractmethod
    def sizes(self) -> dict[Path, int]:
        """Bytes by file, in the order in which they are fetched."""

    @abstractmethod
    def fetch(self, path: Path) -> None:
        """Make all of the file readable. Raises ``HubError``, and ``OSError`` for a full disk."""

    @abstractmethod
    def keep(self, path: Path, pieces: Sequence[Piece]) -> None:
        """Discard a fetched file except for ``pieces``: only these are read from now on."""

    def present_bytes(self) -> int:
        """Bytes on the disk of the destination."""
        return 0


@dataclass
class Stage:
    """The records and files that can be made once ``path`` has been fetched; None: without any file. ``kept``: by file,
    the ranges that later stages read; empty for a file that this stage is the last to read."""

    path: Path | None
    records: list[Record] = field(default_factory=list)
    files: list[NewFile] = field(default_factory=list)
    kept: dict[Path, list[Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class Streaming:
    """A store written from ``shards``. ``pieces_of``: the ranges that the record of a layer and an expert reads."""

    shards: Shards
    pieces_of: PiecesOf

    def peak_bytes(self, records: Iterable[Record], files: Iterable[NewFile]) -> int:
        """The maximum disk space that the shards take at any time."""
        sizes = self.shards.sizes
        return peak_bytes(stages(sizes, self.pieces_of, records, files), sizes)

    def fetched(self, records: Iterable[Record], files: Iterable[NewFile]) -> Iterator[Stage]:
        """Yield each stage when the files it reads are there. Files that no later stage reads are removed when the next
        is requested."""
        for stage in stages(self.shards.sizes, self.pieces_of, records, files):
            if stage.path is not None:
                self.shards.fetch(stage.path)
            yield stage
            # The stage's own file first: it is the larger part.
            for path in sorted(stage.kept, key=lambda path: path != stage.path):
                self.shards.keep(path, stage.kept[path])


def stages(
    paths: Iterable[Path], pieces_of: PiecesOf, records: Iterable[Record], files: Iterable[NewFile]
) -> list[Stage]:
    """The stages in the order of ``paths``, without those of files that nothing reads."""
    every = [Stage(None), *map(Stage, paths)]
    numbers = {stage.path: number for number, stage in enumerate(every)}
    # By file: the last stage that reads it, and the ranges that stages after its own read.
    last: dict[Path, int] = {}
    waiting: dict[Path, set[Piece]] = defaultdict(set)

    def stage_for(pieces: Iterable[Piece]) -> Stage:
        pieces = list(pieces)
        number = max((numbers[piece[0]] for piece in pieces), default=0)
        for piece in pieces:
            last[piece[0]] = max(last.get(piece[0], 0), number)
            if numbers[piece[0]] < number:
                waiting[piece[0]].add(piece)
        return every[number]

    for record in records:
        stage_for(pieces_of(*record)).records.append(record)
    for file in files:
        stage_for(file.pieces).files.append(file)
    for path, number in last.items():
        every[number].kept[path] = []
        if number > numbers[path]:
            every[numbers[path]].kept[path] = _merged(waiting[path])
    return [stage for stage in every if stage.path is None or stage.path in last]


def peak_bytes(stages: Iterable[Stage], sizes: Mapping[Path, int]) -> int:
    """The maximum disk space that files of these ``sizes`` take at any time."""
    kept: dict[Path, int] = {}
    peak = 0
    for stage in stages:
        new = {path: sum(size for _, _, size in pieces) for path, pieces in stage.kept.items()}
        # The ranges are copied out of the file before it is removed.
        own = 0 if stage.path is None else sizes[stage.path] + new.get(stage.path, 0)
        peak = max(peak, sum(kept.values()) + own)
        kept |= new
    return peak


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same ranges of one file, without overlaps."""
    merged: list[Piece] = []
    for path, offset, size in sorted(pieces):
        if merged and offset <= merged[-1][1] + merged[-1][2]:
            begin = merged[-1][1]
            merged[-1] = (path, begin, max(merged[-1][1] + merged[-1][2], offset + size) - begin)
        else:
            merged.append((path, offset, size))
    return merged
