"""Locate codes and scales in a quantized checkpoint that a record can hold unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torch_mesh.formats import FORMATS, GGUF_FORMATS, SCALES_ERROR, is_format, name_of_layers, name_of_matrices
from torch_mesh.store.header import Header
from torch_mesh.store.sources.layout import Codes, Weight

if TYPE_CHECKING:
    from torch_mesh._C import RawCodes, RawPlace, RawView

RAW_DTYPES: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_MAX_PIECES = 16  # kMaxPieces of csrc/store/source.h


@dataclass(frozen=True)
class KeptCodes:
    """Arguments of a raw ``torch_mesh._C.Source``: ``extents``, ``raw_views`` and ``raw_views_of``; biases have
    ``dtype``.

    ``groups`` are the possible group sizes of records, best first. ``error`` is the relative RMS error of records: 0,
    or that of rounded scales.
    """

    weights: str
    groups: tuple[int, ...]
    error: float
    dtype: str
    extents: npt.NDArray[np.int64]
    raw_views: list[dict[str, RawView | RawCodes]]
    raw_views_of: npt.NDArray[np.int64]

    @property
    def group_size(self) -> int:
        return self.groups[0]

    def views_of(self, layer: int, expert: int) -> dict[str, RawView | RawCodes]:
        return self.raw_views[int(self.raw_views_of[layer, expert])]


@dataclass(frozen=True)
class _Piece:
    """A weight with rows of experts, whose parts are the pieces of a raw expert from ``begin`` on."""

    weight: Weight
    codes: Codes | None  # None: not quantized, for example biases
    begin: int

    @property
    def roles(self) -> list[str]:
        return _roles(self.codes)

    def locate(self, role: str, offset: int = 0) -> RawPlace:
        return {"piece": self.begin + self.roles.index(role), "offset": offset}


def kept_codes(
    weights: Sequence[Weight],
    headers: Sequence[Header],
    extents: npt.NDArray[np.int64],
    raw_views: Mapping[str, RawView],
) -> KeptCodes | None:
    """Codes of experts with values at ``extents`` and ``raw_views`` (``CheckpointExperts``), or their values in bf16.

    None if no single record format holds them all.
    """
    layers, experts = extents.shape[:2]
    layouts = _layouts(weights, extents)
    every = {layout: number for number, layout in enumerate(dict.fromkeys(layouts))}
    pieces = {layout: _pieces([weights[index] for index in layout]) for layout in every}
    matrices = {view["piece"] for part, view in raw_views.items() if not part.endswith("_bias")}
    codes = list(dict.fromkeys(pieces[layout][piece].codes for layout in every for piece in sorted(matrices)))
    dtypes = {piece.weight.codes[1].dtype for layout in every for piece in pieces[layout] if piece.codes is None} or {
        "BF16"
    }
    held = None
    if codes == [None] and dtypes == {"BF16"}:
        held = "bf16", FORMATS["bf16"].group_sizes, 0.0
    elif None not in codes:
        every_codes = [each for each in codes if each is not None]
        held = record_of(every_codes) or _mixture_of(
            [_formats_in(pieces[layout], raw_views) for layout in layouts], layers
        )
    if held is None or len(dtypes) > 1 or not dtypes <= RAW_DTYPES.keys():
        return None
    views = [_views(pieces[layout], raw_views) for layout in every]
    parts = max(pieces[layout][-1].begin + len(pieces[layout][-1].roles) for layout in every)
    if parts > _MAX_PIECES or any(view is None for view in views):
        return None
    ranges = _ranges_of(weights, headers, extents, [pieces[layout] for layout in layouts], parts)
    kept, groups, error = held
    return KeptCodes(
        kept,
        groups,
        error,
        RAW_DTYPES[dtypes.pop()],
        ranges.reshape(layers, experts, parts, 3),
        [view for view in views if view is not None],
        np.array([every[layout] for layout in layouts], dtype=np.int64).reshape(layers, experts),
    )


def _layouts(weights: Sequence[Weight], extents: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The layout of each expert's pieces, by the first weight with the same layout."""
    first: dict[tuple[Codes | None, str, tuple[int, ...]], int] = {}
    alike: dict[int, int] = {}
    for index in dict.fromkeys(extents[..., 0].flatten().tolist()):
        codes = weights[index].passthrough_codes()
        dtype = "" if codes is not None else weights[index].codes[1].dtype
        alike[index] = first.setdefault((codes, dtype, weights[index].shape), index)
    return [
        tuple(alike[index] for index in expert) for expert in extents[..., 0].reshape(-1, extents.shape[2]).tolist()
    ]


def _roles(codes: Codes | None) -> list[str]:
    """The roles of the parts to read of a weight with these codes."""
    if codes is None:
        return ["codes"]
    zeros = None if codes.zeros is None else "zeros"
    scales = None if codes.scales is None else codes.scales.part
    parts = ("codes", scales, codes.factor, codes.divisor, zeros, codes.group_index)
    return list(dict.fromkeys(filter(None, parts)))


def _pieces(weights: Sequence[Weight]) -> list[_Piece]:
    pieces: list[_Piece] = []
    begin = 0
    for weight in weights:
        pieces.append(_Piece(weight, weight.passthrough_codes(), begin))
        begin += len(pieces[-1].roles)
    return pieces


def record_of(codes: Sequence[Codes]) -> tuple[str, tuple[int, ...], float] | None:
    """The record format for all of these codes, its group sizes, and the error of its scales; None if there is none."""
    kinds = {each.kind for each in codes}
    groups = tuple(group for group in codes[0].groups if all(group in each.groups for each in codes))
    if len(kinds) > 1 or not groups:
        return None
    kind = kinds.pop()
    types = {each.scales.type for each in codes if each.scales is not None}
    if kind not in ("int4", "int8"):
        return kind, groups, 0.0
    if types == {"fp16"}:
        return f"{kind}_fp16", groups, 0.0
    # fp16 cannot hold all scales of bf16 and fp32, and headers do not have the values.
    return kind, groups, 0.0 if types == {"bf16"} else SCALES_ERROR


def _formats_in(pieces: Sequence[_Piece], raw_views: Mapping[str, RawView]) -> str | None:
    """The format of a record with one GGUF format for gate and up and another for down; None if there is none."""
    codes = {part: pieces[view["piece"]].codes for part, view in raw_views.items() if not part.endswith("_bias")}
    down = codes.pop("down")
    held = [record_of([each for each in matrices if each]) for matrices in (list(codes.values()), [down])]
    names = [record[0] for record in held if record is not None and record[0] in GGUF_FORMATS]
    return None if len(names) < 2 else name_of_matrices(*names)


def _mixture_of(formats: Sequence[str | None], layers: int) -> tuple[str, tuple[int, ...], float] | None:
    """Like ``record_of``, from the format of each expert of each layer. None also for more formats than a name can
    have."""
    each = len(formats) // layers
    own = [set(formats[layer * each : (layer + 1) * each]) for layer in range(layers)]
    names = [next(iter(found)) for found in own]
    if None in names or any(len(found) > 1 for found in own):
        return None
    weights = name_of_layers([name for name in names if name is not None])
    return (weights, FORMATS[weights].group_sizes, 0.0) if is_format(weights) else None


def _views(pieces: Sequence[_Piece], raw_views: Mapping[str, RawView]) -> dict[str, RawView | RawCodes] | None:
    """Views into these pieces; None if a matrix's rows are not rows of codes."""
    views: dict[str, RawView | RawCodes] = {}
    for part, view in raw_views.items():
        piece = pieces[view["piece"]]
        own = _codes_view(piece, piece.codes, view) if piece.codes else _plain_view(piece, view)
        if own is None:
            return None
        views[part] = own
    return views


def _ranges_of(
    weights: Sequence[Weight],
    headers: Sequence[Header],
    extents: npt.NDArray[np.int64],
    pieces: Sequence[Sequence[_Piece]],
    count: int,
) -> npt.NDArray[np.int64]:
    """(file, offset, bytes) of the ``count`` pieces of each expert, concatenated."""
    files = {header.path: index for index, header in enumerate(headers)}
    ranges: list[tuple[int, int, int]] = []
    for own, expert in zip(pieces, extents.reshape(-1, *extents.shape[2:]).tolist(), strict=True):
        begin = len(ranges)
        for piece, (index, offset, size) in zip(own, expert, strict=True):
            weight = weights[index]
            number = offset // size if size < 4 * math.prod(weight.shape) else None
            for role in piece.roles:
                path, tensor = weight.part(role, number)
                ranges.append((files[path], tensor.offset, tensor.bytes))
        # All experts need the same number of pieces: pad with one byte that is read anyway.
        file, at, _ = ranges[begin]
        ranges += [(file, at, 1)] * (begin + count - len(ranges))
    return np.array(ranges, dtype=np.int64)


def _plain_view(piece: _Piece, view: RawView) -> RawView:
    return {**view, "piece": piece.begin}


def _codes_view(piece: _Piece, codes: Codes, view: RawView) -> RawCodes | None:
    """Rows of a weight; None if they are not whole rows, or share scales with other rows."""
    columns, scales = piece.weight.shape[-1], codes.scales
    first, beyond = divmod(view["offset"], columns)
    step, between = divmod(view["row_stride"], columns)
    own_scales = scales is None or scales.rows == 1
    if view["column_stride"] != 1 or beyond or between or (step != 1 and not own_scales):
        return None
    codes_location = piece.locate("codes", codes.offset + first * codes.row_bytes)
    if scales is None:
        return {**codes_location, "order": codes.order, "row_bytes": codes.row_bytes * step}
    if not own_scales and 128 in codes.groups and first % 64:
        return None  # a block of 64 outputs has one scale
    table: RawCodes = {
        **codes_location,
        "order": codes.order,
        "flip": codes.flip,
        "run": codes.run,
        "run_bytes": codes.run_bytes,
        "row_bytes": codes.row_bytes * step,
        "first_row": 0 if own_scales else first,
        "scales": {
            **piece.locate(scales.part, first * scales.row_bytes if own_scales else 0),
            "type": scales.type,
            "rows": scales.rows,
            "columns": scales.columns,
            "row_bytes": scales.row_bytes * step,
            "column_bytes": scales.column_bytes,
        },
    }
    if codes.factor is not None:
        table["factor"] = piece.locate(codes.factor)
    if codes.divisor is not None:
        table["divisor"] = piece.locate(codes.divisor)
    if codes.group_index is not None:
        table["group_index"] = piece.locate(codes.group_index)
    if codes.zeros is not None:
        zeros = piece.weight.parts["zeros"][1].bytes
        table["zeros"] = {**piece.locate("zeros"), "value": codes.zeros, "bytes": zeros}
    return table
