"""FP8 (E4M3) with a scale per block, row, group or tensor; and DeepSeek-V4's FP4 in the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from torch_mesh.formats import BF16_ERROR
from torch_mesh.store.dtypes import FLOATS
from torch_mesh.store.header import DTYPE_BITS, Tensor
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
    e4m3_values,
    grid,
    in_int8,
    is_multiple,
    scale_type,
    scale_values,
)
from torch_mesh.store.sources.mxfp4 import PackedMxfp4


class ScaledFp8(Layout):
    """Multiplied by the scale, which DeepSeek calls inverse."""

    title = "FP8"
    dtype = "F8_E4M3"
    required = frozenset({"scale"})

    def __init__(self, block: tuple[int, int] | None, powers_of_two: bool) -> None:
        self._block = block
        self._powers_of_two = powers_of_two

    def companions(self, name: str) -> Mapping[str, Sequence[str]]:
        stem = name.removesuffix(".weight")
        scales = [f"{name}_scale_inv", f"{name}_scale", f"{stem}.scale", f"{stem}.qscale_weight"]
        return {"scale": scales}

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        check_rank(parts, 2, 3)
        check_dtype(parts, "scale", *FLOATS, *EXPONENTS)
        self._block_of(parts["codes"].shape, parts["scale"].shape)
        return parts["codes"].shape

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        values, scale = e4m3_values(parts), scale_values(parts)
        if scale.numel() == 1:
            return values.mul_(scale.reshape(()))
        block = self._block_of(shape, tuple(scale.shape))
        rows, columns = shape[-2:]
        if rows % block[0] or columns % block[1]:
            scale = scale.repeat_interleave(block[0], -2)[..., :rows, :]
            return values.mul_(scale.repeat_interleave(block[1], -1)[..., :columns])
        across = values.view(*shape[:-2], rows // block[0], block[0], columns // block[1], block[1])
        across *= scale.unsqueeze(-2).unsqueeze(-1)
        return values

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        scale = parts["scale"]
        rows, columns = shape[-2:]
        size = DTYPE_BITS[scale.dtype] // 8
        if scale.shape in ((), (1,)):
            return _fp8_codes((128, 0), columns, Scales(scale_type(scale), rows, columns, 0, 0))
        block = self._block_of(shape, scale.shape)
        scales = Scales(scale_type(scale), *block, size * scale.shape[-1], size)
        whole_rows = block[1] >= columns
        if (block[0] % 64 == 0 or block[0] >= rows) and (block[1] % 128 == 0 or whole_rows):
            return _fp8_codes((128, 0) if whole_rows else (128,), columns, scales)
        if whole_rows:
            return _fp8_codes((0,), columns, scales)
        return _fp8_codes((32,), columns, scales) if block[1] % 32 == 0 and scales.type == "e8m0" else None

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        if parts["scale"].dtype in EXPONENTS:
            return IN_BF16
        if self._powers_of_two:
            why = "which holds every value exactly if all scales are powers of two, as scale_fmt says"
            return Nearest("bf16", 0, BF16_ERROR, why)
        return in_int8("bf16 would round by 0.16 % and take twice the bytes")

    def _block_of(self, shape: Shape, scale: Shape) -> tuple[int, int]:
        """The config's block size if the scales fit it, possibly with partial blocks at the end; else one that divides
        the matrix."""
        (rows, columns), experts = shape[-2:], shape[:-2]
        if scale in ((), (1,)):
            return rows, columns
        if scale[:-2] == experts and len(scale) == len(shape):
            if self._block is not None and scale[-2:] == grid(rows, columns, self._block):
                return min(self._block[0], rows), min(self._block[1], columns)
            if is_multiple(rows, scale[-2]) and is_multiple(columns, scale[-1]):
                return rows // scale[-2], columns // scale[-1]
        named = "" if self._block is None else f" in blocks of {self._block[0]} x {self._block[1]}"
        raise MisfitError(
            "scale", f"has the shape {list(scale)}, which does not divide the weight {list(shape)}{named}"
        )


class Fp4InFp8(PackedMxfp4):
    """Two weights of E2M1 in each I8, and a power of two for each 32."""

    title = "FP4 with E8M0 scales"
    ending, becomes, dtype = ".weight", ".weight", "I8"
    others: ClassVar = {"scale": [".scale", ".weight_scale_inv"]}
    scale_dtypes = ()


def _fp8_codes(groups: tuple[int, ...], columns: int, scales: Scales) -> Codes:
    return Codes("fp8", groups, "bytes", columns, columns, columns, scales)
