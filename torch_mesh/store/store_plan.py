"""The contents of a store, before any of it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch_mesh.store.manifest import Calibration, Manifest, Shape, fields_to_write

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]  # bytes done, bytes in total
Chunk = bytes | memoryview
Record = tuple[int, int]  # layer, expert
Pack = Callable[[int, int], "torch.Tensor"]  # layer, expert -> uint8 [record_bytes]; called from a worker thread
Piece = tuple[Path, int, int]  # a range of a file: offset and bytes


@dataclass(frozen=True)
class StorePlan:
    """The contents of a store, as its manifest names them. Runs with equal plans write the same store."""

    shape: Shape
    modules: tuple[str, ...]
    weights: str
    group_size: int  # 0 for bf16
    source_name: str
    source_fingerprint: str
    calibration: Calibration | None = None
    tables: str = ""  # the format that rows of embedding tables are rounded to; empty: none

    @property
    def record_bytes(self) -> int:
        return self.shape.record_bytes(self.weights, self.group_size)

    def identity(self) -> dict[str, Any]:
        table = fields_to_write(self)
        del table["source_name"]  # a folder may move
        if isinstance(self.shape.activation, tuple):  # lists, as in the journal's JSON
            table["shape"]["activation"] = list(self.shape.activation)
        return table | {"modules": list(self.modules)}

    def is_plan_of(self, manifest: Manifest) -> bool:
        written = {name: getattr(manifest, name) for name in vars(self)} | {"source_name": self.source_name}
        if manifest.shape.activation is None:  # may be from a build that did not fuse it yet
            written["shape"] = replace(manifest.shape, activation=self.shape.activation)
        return written == vars(self)


@dataclass(frozen=True)
class Scratch:
    """Temporary files for making records, in the unfinished folder.

    ``prepare(folder, done)`` makes them, or continues an earlier run, before the first record is made; ``done`` gets
    the bytes as they are written. ``names`` are all files that it may leave, ``bytes`` their maximum size.
    """

    names: tuple[str, ...]
    bytes: int
    prepare: Callable[[Path, Callable[[int], None]], None]


class Packer(Protocol):
    """Packs records calibrated on a text: ``calibration.packing.Calibrator``."""

    @property
    def calibration(self) -> Calibration: ...

    @property
    def scratch(self) -> Scratch: ...

    def pack(self, layer: int, expert: int) -> torch.Tensor:
        """Returns uint8 [record_bytes]. Called from a worker thread."""


# The subfolder in which transformers keeps the further templates of a tokenizer. A store has no other.
TEMPLATES_FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class NewFile:
    """A file to write beside the records, in the store's folder or in ``TEMPLATES_FOLDER`` there. ``chunks`` yields its
    ``size`` bytes, again at each call, on a worker thread. A chunk may become invalid after the next. ``pieces``: the
    ranges of weight files that it reads."""

    name: str
    size: int
    chunks: Callable[[], Iterable[Chunk]]
    pieces: tuple[Piece, ...] = ()
