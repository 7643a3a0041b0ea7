"""Experts whose codes and scales a record holds as they are: where these stand in the files of a quantised checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torch_mesh.store.header import Header
from torch_mesh.store.manifest import has_chosen_groups
from torch_mesh.store.sources.layout import Codes, Weight

if TYPE_CHECKING:
    from torch_mesh._C import RawCodes, RawPlace, RawView

RAW_DTYPES: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_MOST_PIECES = 16  # of an expert: kMaxPieces of csrc/store/source.h


@dataclass(frozen=True)
class KeptCodes:
    """``extents`` and ``raw_views`` as a raw ``torch_mesh._C.Source`` takes them; biases are of ``dtype``."""

    weights: str
    group_size: int
    dtype: str
    extents: npt.NDArray[np.int64]
    raw_views: dict[str, RawView | RawCodes]


@dataclass(frozen=True)
class _Piece:
    """A weight that experts have rows of, and which pieces of a raw expert its parts are: those from ``begin`` on."""

    weight: Weight
    codes: Codes | None  # None: it is not quantised, as biases are not
    begin: int

    @property
    def roles(self) -> list[str]:
        return _roles(self.codes)

    def place(self, role: str, offset: int = 0) -> RawPlace:
        return {"piece": self.begin + self.roles.index(role), "offset": offset}


def kept_codes(
    weights: Sequence[Weight],
    headers: Sequence[Header],
    extents: npt.NDArray[np.int64],
    raw_views: Mapping[str, RawView],
) -> KeptCodes | None:
    """Of experts whose values ``extents`` and ``raw_views`` describe (``CheckpointExperts``); None where no record holds their codes, or not all
    are kept alike."""
    pieces = _pieces([weights[index] for index in extents[0, 0, :, 0].tolist()])
    found: set[Codes | None] = {
        pieces[view["piece"]].codes for part, view in raw_views.items() if not part.endswith("_bias")
    }
    names = {codes.weights for codes in found if codes is not None}
    groups = {codes.group_size for codes in found if codes is not None}
    dtypes = {piece.weight.codes[1].dtype for piece in pieces if piece.codes is None} or {"BF16"}
    count = pieces[-1].begin + len(pieces[-1].roles)
    # A group of one matrix may be part of a group of another's, where integers have one scale for a row.
    one_format = len(names) == 1 and (len(groups) == 1 or has_chosen_groups(*names))
    if None in found or not one_format or len(dtypes) > 1 or not dtypes <= RAW_DTYPES.keys() or count > _MOST_PIECES:
        return None
    views: dict[str, RawView | RawCodes] = {}
    for part, view in raw_views.items():
        piece = pieces[view["piece"]]
        own = _codes_view(piece, piece.codes, view) if piece.codes else _plain_view(piece, view)
        if own is None:
            return None
        views[part] = own
    places = _places(weights, headers, extents, pieces)
    if places is None:
        return None
    return KeptCodes(
        names.pop(), min(groups), RAW_DTYPES[dtypes.pop()], places.reshape(*extents.shape[:2], count, 3), views
    )


def _roles(codes: Codes | None) -> list[str]:
    """The parts that are read of such a weight."""
    if codes is None:
        return ["codes"]
    zeros = None if codes.zeros is None else "zeros"
    parts = ("codes", codes.scales.part, codes.factor, codes.divisor, zeros, codes.in_turn)
    return list(dict.fromkeys(filter(None, parts)))


def _pieces(weights: Sequence[Weight]) -> list[_Piece]:
    pieces: list[_Piece] = []
    begin = 0
    for weight in weights:
        pieces.append(_Piece(weight, weight.codes_as_they_are(), begin))
        begin += len(pieces[-1].roles)
    return pieces


def _places(
    weights: Sequence[Weight], headers: Sequence[Header], extents: npt.NDArray[np.int64], pieces: Sequence[_Piece]
) -> npt.NDArray[np.int64] | None:
    """(file, offset, bytes) of each piece of each expert, one after the other; None if they are not all as the first one's ``pieces``."""
    files = {header.path: index for index, header in enumerate(headers)}
    places: list[tuple[int, int, int]] = []
    for expert in extents.reshape(-1, len(pieces), 3).tolist():
        for piece, (index, offset, size) in zip(pieces, expert, strict=True):
            weight = weights[index]
            same_type = piece.codes is not None or weight.codes[1].dtype == piece.weight.codes[1].dtype
            if weight.codes_as_they_are() != piece.codes or not same_type:
                return None
            number = offset // size if size < 4 * math.prod(weight.shape) else None
            for role in piece.roles:
                path, tensor = weight.part(role, number)
                places.append((files[path], tensor.offset, tensor.bytes))
    return np.array(places, dtype=np.int64)


def _plain_view(piece: _Piece, view: RawView) -> RawView:
    return {**view, "piece": piece.begin}


def _codes_view(piece: _Piece, codes: Codes, view: RawView) -> RawCodes | None:
    """Some rows of a weight; None where they are not whole rows, or share scales with other rows between them."""
    columns, scales = piece.weight.shape[-1], codes.scales
    first, beyond = divmod(view["offset"], columns)
    step, between = divmod(view["row_stride"], columns)
    own_scales = scales.rows == 1
    if view["column_stride"] != 1 or beyond or between or (step != 1 and not own_scales):
        return None
    if not own_scales and codes.group_size == 128 and first % 64:
        return None  # a block of 64 outputs has one scale
    table: RawCodes = {
        **piece.place("codes", codes.offset + first * codes.row_bytes),
        "order": codes.order,
        "flip": codes.flip,
        "run": codes.run,
        "run_bytes": codes.run_bytes,
        "row_bytes": codes.row_bytes * step,
        "first_row": 0 if own_scales else first,
        "scales": {
            **piece.place(scales.part, first * scales.row_bytes if own_scales else 0),
            "type": scales.type,
            "rows": scales.rows,
            "columns": scales.columns,
            "row_bytes": scales.row_bytes * step,
            "column_bytes": scales.column_bytes,
        },
    }
    if codes.factor is not None:
        table["factor"] = piece.place(codes.factor)
    if codes.divisor is not None:
        table["divisor"] = piece.place(codes.divisor)
    if codes.in_turn is not None:
        table["in_turn"] = piece.place(codes.in_turn)
    if codes.zeros is not None:
        zeros = piece.weight.parts["zeros"][1].bytes
        table["zeros"] = {**piece.place("zeros"), "value": codes.zeros, "bytes": zeros}
    return table
