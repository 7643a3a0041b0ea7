"""GPTQ: integers in words along the input, with a scale and a zero point for each group and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    unpack_words,
)
from torch_mesh.store.sources.pack_quantized import UNLIKE_OURS, group_order


class Gptq(Layout):
    title = "GPTQ"
    ending, becomes = ".qweight", ".weight"
    others: ClassVar = {"zeros": [".qzeros"], "scale": [".scales"], "order": [".g_idx"]}
    required = frozenset({"zeros", "scale"})

    def __init__(self, bits: Sequence[int], *, symmetric: bool, ordered: bool, one_less: bool) -> None:
        """``bits``: those that weights may have, the usual one first."""
        self._bits = tuple(bits)
        self._symmetric = symmetric
        self._ordered = ordered
        self._one_less = one_less  # the first version of the format stores zero points less one

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "codes", "I32")
        check_dtype(parts, "zeros", "I32")
        check_dtype(parts, "scale", *FLOATS)
        each = 32 // self._bits_of(parts)
        columns, rows = parts["codes"].shape[0] * each, parts["codes"].shape[1]
        scale = parts["scale"].shape
        if len(scale) != 2 or scale[1] != rows or not 0 < scale[0] <= columns:
            raise MisfitError(
                "scale", f"has the shape {list(scale)}, and the weight {columns} inputs and {rows} outputs"
            )
        if "order" not in parts and columns % scale[0]:
            raise MisfitError("scale", f"has {scale[0]} groups, which do not divide {columns} inputs")
        check_shape(parts, "zeros", (scale[0], -(-rows // each)))
        check_shape(parts, "order", (columns,))
        check_dtype(parts, "order", "I32", "I64")
        return rows, columns

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        rows, columns = shape
        bits = self._bits_of(parts)
        scale = scale_values(parts)
        zeros = unpack_words(parts["zeros"], bits)[:, :rows]
        if self._one_less:
            # A zero point of 0 was stored as the highest code.
            zeros = (zeros + 1) & ((1 << bits) - 1)
        # Transposed while values take one byte.
        values = unpack_words(parts["codes"].t(), bits).float()
        zeros, scale = zeros.t().float(), scale.t()
        groups = scale.shape[1]
        order = None if "order" not in parts else group_order(parts["order"], groups)
        if order is None or (
            is_multiple(columns, groups) and bool((order == _sequential_groups(columns, groups)).all())
        ):
            grouped = values.view(rows, groups, columns // groups)
            grouped -= zeros.unsqueeze(-1)
            grouped *= scale.unsqueeze(-1)
            return values
        return values.sub_(zeros[:, order]).mul_(scale[:, order])

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        rows, columns = shape
        scale = parts["scale"]
        bits = self._bits_of(parts)
        if bits == 2 or not self._is_plain(parts, shape) or rows * bits % 32:
            return None
        if "order" in parts and parts["order"].dtype != "I32":
            return None
        size = DTYPE_BITS[scale.dtype] // 8
        scales = Scales(scale_type(scale), 1, columns // scale.shape[0], size, size * rows)
        middle = 0x88 if bits == 4 else 0x80
        return integer_codes(
            bits,
            scales,
            columns,
            run=32 // bits,
            run_bytes=4 * rows,
            row_bytes=4,
            flip=0 if bits == 4 else 0x80,
            group_index="order" if "order" in parts else None,
            zeros=middle - (0x11 if bits == 4 else 1) if self._one_less else middle,
        )

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8("no record has codes of 2 bits" if self._bits_of(parts) == 2 else UNLIKE_OURS)

    def _bits_of(self, parts: Mapping[str, Tensor] | Mapping[str, torch.Tensor]) -> int:
        """The bits of a weight, by the words of its zero points; the usual ones if these do not fit."""
        rows, words = parts["codes"].shape[1], parts["zeros"].shape[-1:]
        return next((bits for bits in self._bits if words == (-(-rows * bits // 32),)), self._bits[0])

    def _is_plain(self, parts: Mapping[str, Tensor], shape: Shape) -> bool:
        return self._symmetric and not self._ordered and is_multiple(shape[1], parts["scale"].shape[0])


def _sequential_groups(columns: int, groups: int) -> torch.Tensor:
    return torch.arange(columns, device="cpu") // (columns // groups)
