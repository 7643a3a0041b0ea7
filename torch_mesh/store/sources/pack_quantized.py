"""Integers of compressed-tensors: 4 or 8 bits in int32 words, and 8 bits in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from torch_mesh.store.dtypes import FLOATS
from torch_mesh.store.header import DTYPE_BITS, Tensor
from torch_mesh.store.sources.layout import (
    Codes,
    Layout,
    MisfitError,
    Nearest,
    Scales,
    Shape,
    check_dtype,
    check_rank,
    check_shape,
    in_int8,
    integer_codes,
    is_multiple,
    scale_type,
    scale_values,
    scaled_in_groups,
    unpack_words,
)

# The reason if no record holds these integers.
UNLIKE_OURS = "no record has zero points, an order of columns, or groups that are no multiple of 32"


class PackedInt(Layout):
    """``bits`` from the lowest of each word on, for codes and zero points, both offset by half of their range."""

    ending, becomes, dtype = ".weight_packed", ".weight", "I32"
    others: ClassVar = {
        "scale": [".weight_scale"],
        "zeros": [".weight_zero_point"],
        "shape": [".weight_shape"],
        "order": [".weight_g_idx"],
    }
    required = frozenset({"scale"})

    def __init__(self, bits: int) -> None:
        self.title = f"INT{bits}"
        self._bits = bits
        self._each = 32 // bits

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "scale", *FLOATS)
        check_dtype(parts, "zeros", "I32")
        check_dtype(parts, "shape", "I32", "I64")
        check_shape(parts, "shape", (2,))
        rows, columns = parts["codes"].shape[0], parts["codes"].shape[1] * self._each
        scale = parts["scale"].shape
        if len(scale) != 2 or scale[0] != rows or not is_multiple(columns, scale[1]):
            raise MisfitError(
                "scale", f"has the shape {list(scale)}, which does not divide the weight {[rows, columns]}"
            )
        check_shape(parts, "zeros", (-(-rows // self._each), scale[1]))
        check_shape(parts, "order", (columns,))
        check_dtype(parts, "order", "I32", "I64")
        return rows, columns

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        stated = parts.get("shape")
        if stated is not None and stated.tolist() != list(shape):
            raise MisfitError("shape", f"is {stated.tolist()}, but the packed weight has the shape {list(shape)}")
        values = unpack_words(parts["codes"], self._bits).float()
        scale = scale_values(parts)
        zeros = torch.full_like(scale, 1 << (self._bits - 1))
        if "zeros" in parts:
            zeros = unpack_words(parts["zeros"].t(), self._bits).t()[: shape[0]].float()
        if "order" in parts:
            order = group_order(parts["order"], scale.shape[1])
            return values.sub_(zeros[:, order]).mul_(scale[:, order])
        grouped = values.view(*scale.shape, -1)
        grouped -= zeros.unsqueeze(-1)
        return scaled_in_groups(values, scale)

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        if "zeros" in parts or "order" in parts:
            return None
        return _in_rows(self._bits, parts["scale"], shape, flip=0 if self._bits == 4 else 0x80)

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8(UNLIKE_OURS)


class ScaledInt8(Layout):
    title = "INT8"
    ending, becomes, dtype = ".weight", ".weight", "I8"
    others: ClassVar = {"scale": [".weight_scale"], "zeros": [".weight_zero_point"]}
    required = frozenset({"scale"})

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "scale", *FLOATS)
        check_dtype(parts, "zeros", "I8")
        rows, columns = parts["codes"].shape
        scale = parts["scale"].shape
        if scale not in ((), (1,)) and (
            len(scale) != 2 or scale[0] not in (1, rows) or not is_multiple(columns, scale[1])
        ):
            raise MisfitError(
                "scale", f"has the shape {list(scale)}, which does not divide the weight {[rows, columns]}"
            )
        check_shape(parts, "zeros", scale)
        return rows, columns

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        values, scale = parts["codes"].float(), scale_values(parts)
        scale = scale.reshape(1, 1) if scale.dim() < 2 else scale
        grouped = values.view(shape[0], scale.shape[1], -1)
        if "zeros" in parts:
            grouped -= parts["zeros"].float().reshape(scale.shape).unsqueeze(-1)
        grouped *= scale.unsqueeze(-1)
        return values

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        if "zeros" in parts:
            return None
        return _in_rows(8, parts["scale"], shape, flip=0)

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8(UNLIKE_OURS)


def _in_rows(bits: int, scale: Tensor, shape: Shape, flip: int) -> Codes | None:
    of_rows, groups = scale.shape if len(scale.shape) == 2 else (1, 1)
    size = DTYPE_BITS[scale.dtype] // 8
    scales = Scales(scale_type(scale), 1, shape[1] // groups, size * groups if of_rows > 1 else 0, size)
    row = shape[1] * bits // 8
    return integer_codes(bits, scales, shape[1], run=shape[1], run_bytes=row, row_bytes=row, flip=flip)


def group_order(order: torch.Tensor, groups: int) -> torch.Tensor:
    """The group of each column. Raises ``MisfitError`` for a group out of range."""
    if bool(((order < 0) | (order >= groups)).any()):
        raise MisfitError("order", f"names a group that is none of the {groups}")
    return order.long()
