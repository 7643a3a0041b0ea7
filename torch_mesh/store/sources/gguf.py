"""GGUF's types in blocks: scales and codes in one run of bytes for each 32 to 256 weights of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from torch_mesh.formats import FORMATS, GGUF_FORMATS
from torch_mesh.store.gguf import BLOCK_TYPES, require_package
from torch_mesh.store.header import Header, Tensor, store_error
from torch_mesh.store.sources.layout import (
    IN_BF16,
    Codes,
    Layout,
    MisfitError,
    Nearest,
    Scales,
    Shape,
    Weight,
    in_int8,
    make_weight,
)
from torch_mesh.store.sources.plain import Plain


class GgufBlocks(Layout):
    """All weights of one type."""

    def __init__(self, title: str) -> None:
        self.title = self.dtype = title

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        *rows, row = parts["codes"].shape
        values, size = _block(self.title)
        return *rows, row // size * values

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        from gguf.quants import dequantize

        blocks = parts["codes"].numpy()
        if self.title == "MXFP4" and bool((blocks.reshape(-1, _block(self.title)[1])[:, 0] == 255).any()):
            raise MisfitError("codes", "holds the scale 255, which stands for no number")
        with np.errstate(all="ignore"):  # values that are not numbers are refused below
            values = torch.from_numpy(dequantize(blocks, _type(self.title))).reshape(shape)
        if not bool(torch.isfinite(values).all()):
            raise MisfitError("codes", "holds a weight that is not a finite number")
        return values

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        values, size = _block(self.title)
        row = shape[-1] // values * size
        kept = _PASSTHROUGH.get(self.title)
        if kept is None:
            own = self.title.lower()
            held = own in GGUF_FORMATS
            return Codes(own, FORMATS[own].group_sizes, "blocks", values, size, row, None) if held else None
        kind, order, scale = kept
        scales = Scales(scale, 1, values, row, size, part="codes")
        offset = 1 if scale == "e8m0" else 2
        return Codes(kind, (values,), order, values, size, row, scales, offset=offset)

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        if self.title == "MXFP4":
            return IN_BF16
        return in_int8("its blocks are none of ours, or of several types")


# Formats whose blocks are a scale and its codes: what the codes are, their order, the scale.
_PASSTHROUGH = {
    "Q4_0": ("int4", "halves", "fp16"),
    "Q8_0": ("int8", "bytes", "fp16"),
    "MXFP4": ("mxfp4", "halves", "e8m0"),
}
_BLOCKS = {name: GgufBlocks(name) for name in BLOCK_TYPES}
_PLAIN = Plain()


def gguf_weights(headers: Sequence[Header]) -> dict[str, Weight]:
    """Every weight of a model's files, by name. Raises ``StoreError`` for a duplicate name."""
    found: dict[str, Weight] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in found:
                raise store_error(header.path, f"tensor {name!r} is also in {found[name].codes[0]}", tensor.offset)
            layout = _BLOCKS.get(tensor.dtype, _PLAIN)
            found[name] = make_weight(name, layout, {"codes": (header.path, tensor)})
    return found


def _type(name: str):  # type: ignore[no-untyped-def]  # from a package that may be missing
    require_package()
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType[name]


def _block(name: str) -> tuple[int, int]:
    """The values and bytes of a block."""
    kind = _type(name)
    from gguf.constants import GGML_QUANT_SIZES

    values, size = GGML_QUANT_SIZES[kind]
    return values, size
