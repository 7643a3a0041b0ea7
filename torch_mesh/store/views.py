"""Locate an expert's matrices in files: byte ranges, offsets and strides. Reads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.families import ExpertsLayer, ExpertTensors
from torch_mesh.store.header import Tensor

if TYPE_CHECKING:
    from torch_mesh._C import RawView

PARTS = ExpertTensors._fields


@dataclass(frozen=True, slots=True)
class View:
    """A matrix inside a tensor of a file. ``begin`` and ``size`` (bytes) are the range of this expert only; ``offset``
    and the strides count elements from ``begin``."""

    file: int
    begin: int
    size: int
    offset: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int

    def transposed(self) -> View:
        return replace(
            self, rows=self.columns, columns=self.rows, row_stride=self.column_stride, column_stride=self.row_stride
        )

    def take_rows(self, start: int, count: int, step: int = 1) -> View:
        return replace(
            self, offset=self.offset + start * self.row_stride, rows=count, row_stride=self.row_stride * step
        )


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's matrix: ``parts`` concatenated along ``axis``."""

    parts: tuple[View, ...]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        first = self.parts[0]
        if self.axis == 0:
            return sum(part.rows for part in self.parts), first.columns
        return first.rows, sum(part.columns for part in self.parts)

    def transposed(self) -> Matrix:
        return Matrix(tuple(part.transposed() for part in self.parts), 1 - self.axis)

    def rows(self, start: int, count: int, step: int = 1) -> View | None:
        """These rows as one view, or None if strides cannot describe it."""
        if len(self.parts) == 1:
            return self.parts[0].take_rows(start, count, step)
        if self.axis != 0 or step != 1:
            return None
        for part in self.parts:
            if start >= 0 and start + count <= part.rows:
                return part.take_rows(start, count)
            start -= part.rows
        return None

    def whole(self) -> View | None:
        return self.rows(0, self.shape[0])


Stack = list[Matrix]  # one per expert


def plain_view(file: int, tensor: Tensor) -> View:
    rows, columns = (*tensor.shape, 1, 1)[:2]
    return View(file, tensor.offset, tensor.bytes, 0, rows, columns, columns, 1)


def split_experts(file: int, tensor: Tensor) -> Stack:
    experts = tensor.shape[0]
    size = tensor.bytes // experts if experts else 0
    return [
        Matrix(
            (plain_view(file, replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * size, bytes=size)),)
        )
        for i in range(experts)
    ]


def strided(layer: ExpertsLayer, parameter: str, view: View | None) -> View:
    if view is None:
        raise UnsupportedModelError(
            f"{layer.path}.{parameter} cannot be read straight from the checkpoint, because strides cannot describe "
            "its gate and up rows. Load the model with from_pretrained, then patch it with torch_mesh.patch."
        )
    return view


def expert_extents(
    folder: Path,
    layers: Sequence[ExpertsLayer],
    placed: Sequence[Sequence[dict[str, View]]],
) -> tuple[npt.NDArray[np.int64], dict[str, RawView]]:
    """Extents per expert, and the views into them that all experts share."""
    shared: dict[str, RawView] | None = None
    extents = []
    for layer, experts in zip(layers, placed, strict=True):
        for views in experts:
            pieces, raw_views = _expert_pieces(views)
            if shared is not None and raw_views != shared:
                raise UnsupportedModelError(
                    f"{folder}: the experts of {layer.path} are laid out differently from those of {layers[0].path}. "
                    "Save the model again with save_pretrained, so that all are alike."
                )
            shared = raw_views
            extents.append(pieces)
    assert shared is not None, "find_experts returned at least one layer with experts"
    return np.array(extents, dtype=np.int64).reshape(len(layers), len(placed[0]), -1, 3), shared


def _expert_pieces(views: Mapping[str, View]) -> tuple[list[tuple[int, int, int]], dict[str, RawView]]:
    pieces: list[tuple[int, int, int]] = []
    raw_views: dict[str, RawView] = {}
    for part in PARTS:
        if part not in views:
            continue
        view = views[part]
        extent = (view.file, view.begin, view.size)
        if extent not in pieces:
            pieces.append(extent)
        raw_views[part] = {
            "piece": pieces.index(extent),
            "offset": view.offset,
            "row_stride": view.row_stride,
            "column_stride": view.column_stride,
        }
    return pieces, raw_views
