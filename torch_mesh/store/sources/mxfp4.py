"""FP4 (E2M1) with a power of two for each 32: gpt-oss's stacks, and those of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from torch_mesh.store.header import Tensor
from torch_mesh.store.sources.layout import (
    EXPONENTS,
    IN_BF16,
    Codes,
    Layout,
    MisfitError,
    Nearest,
    Scales,
    Shape,
    check_dtype,
    check_rank,
    check_shape,
    fp4_values,
    scale_values,
    scaled_in_groups,
)


class Mxfp4(Layout):
    """Two codes in each byte, and a power of two for each 32; subclasses name the tensors."""

    title = "MXFP4"
    required = frozenset({"scale"})

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        return scaled_in_groups(fp4_values(parts["codes"]).reshape(shape), scale_values(parts))

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        columns = shape[-1]
        scales = Scales("e8m0", 1, 32, columns // 32, 1)
        return Codes("mxfp4", (32,), "pairs", columns, columns // 2, columns // 2, scales)

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return IN_BF16


class Mxfp4Blocks(Mxfp4):
    """All experts of a layer in one tensor, each row in blocks of 16 bytes."""

    ending = "_blocks"
    others: ClassVar = {"scale": ["_scales"]}
    is_transposed = True

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 4)
        check_dtype(parts, "codes", "U8")
        check_dtype(parts, "scale", *EXPONENTS)
        experts, rows, groups, size = parts["codes"].shape
        check_shape(parts, "scale", (experts, rows, groups))
        if size != 16:
            raise MisfitError("codes", f"has blocks of {size} bytes; those of MXFP4 have 16")
        return experts, rows, groups * 32


class PackedMxfp4(Mxfp4):
    ending, becomes, dtype = ".weight_packed", ".weight", "U8"
    others: ClassVar = {"scale": [".weight_scale"]}
    scale_dtypes: ClassVar[Sequence[str]] = EXPONENTS

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "scale", *EXPONENTS)
        rows, columns = parts["codes"].shape
        if columns % 16:
            raise MisfitError("codes", f"has {2 * columns} weights a row, which is no multiple of 32")
        check_shape(parts, "scale", (rows, columns // 16))
        return rows, 2 * columns
