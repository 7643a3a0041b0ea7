"""AWQ: 4-bit integers in words along the output, in an order of their own, with zero points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from torch_mesh.store.dtypes import FLOATS
from torch_mesh.store.header import Tensor
from torch_mesh.store.sources.layout import (
    Layout,
    MisfitError,
    Nearest,
    Shape,
    check_dtype,
    check_rank,
    check_shape,
    in_int8,
    is_multiple,
    scale_values,
    unpack_words,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # for each four bits of a word: which of eight outputs they belong to


class Awq(Layout):
    title = "AWQ"
    ending, becomes = ".qweight", ".weight"
    others: ClassVar = {"zeros": [".qzeros"], "scale": [".scales"]}
    required = frozenset({"zeros", "scale"})

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "codes", "I32")
        check_dtype(parts, "zeros", "I32")
        check_dtype(parts, "scale", *FLOATS)
        columns, words = parts["codes"].shape
        scale = parts["scale"].shape
        if len(scale) != 2 or scale[1] != 8 * words or not is_multiple(columns, scale[0]):
            raise MisfitError(
                "scale", f"has the shape {list(scale)}, and the weight {columns} inputs and {8 * words} outputs"
            )
        check_shape(parts, "zeros", (scale[0], words))
        return 8 * words, columns

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        scale = scale_values(parts).t()
        zeros = _in_order(parts["zeros"]).t().float()
        values = _in_order(parts["codes"]).t().float().contiguous()
        grouped = values.view(*scale.shape, -1)
        grouped -= zeros.unsqueeze(-1)
        grouped *= scale.unsqueeze(-1)
        return values

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8("no record has zero points")


def _in_order(words: torch.Tensor) -> torch.Tensor:
    codes = unpack_words(words, 4)
    outputs = torch.empty_like(codes).view(*words.shape, 8)
    outputs[..., list(_ORDER)] = codes.view(*words.shape, 8)
    return outputs.flatten(-2)
