"""FP4 (E2M1) with an E4M3 scale for each 16 and one fp32 scale per tensor: ModelOpt's, and compressed-tensors'
reciprocal one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from torch_mesh.store.header import Tensor
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
    fp4_values,
    in_int8,
    scale_values,
    scaled_in_groups,
)


class Nvfp4(Layout):
    title = "NVFP4"
    becomes, dtype = ".weight", "U8"
    required = frozenset({"scale", "global"})
    scale_dtypes = ("F8_E4M3",)
    reciprocal: ClassVar[bool]

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2)
        check_dtype(parts, "global", "F32")
        check_shape(parts, "global", (), (1,))
        rows, columns = parts["codes"].shape
        if columns % 8:
            raise MisfitError("codes", f"has {2 * columns} weights a row, which is no multiple of 16")
        check_shape(parts, "scale", (rows, columns // 8))
        return rows, 2 * columns

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        of_all = scale_values(parts, "global").reshape(())
        if self.reciprocal and of_all == 0:
            raise MisfitError("global", "is 0, and is divided by")
        scale = scale_values(parts)
        scale = scale / of_all if self.reciprocal else scale * of_all
        return scaled_in_groups(fp4_values(parts["codes"]), scale)

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        columns = shape[-1]
        scales = Scales("e4m3", 1, 16, columns // 16, 1)
        kept = Codes("nvfp4", (16,), "pairs", columns, columns // 2, columns // 2, scales)
        return replace(kept, divisor="global") if self.reciprocal else replace(kept, factor="global")

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8("the scale of the tensor makes the values inexact in bf16")


class ModelOpt(Nvfp4):
    ending = ".weight"
    others: ClassVar = {"scale": [".weight_scale"], "global": [".weight_scale_2"]}
    reciprocal = False


class CompressedTensors(Nvfp4):
    ending = ".weight_packed"
    others: ClassVar = {"scale": [".weight_scale"], "global": [".weight_global_scale"]}
    reciprocal = True
