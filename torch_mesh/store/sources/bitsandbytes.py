"""bitsandbytes in 4 bits (NF4, FP4): codes of a table, and the absolute maximum of each block, which may be quantized
itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from torch_mesh.store.header import Tensor, parse_json
from torch_mesh.store.sources.layout import (
    Layout,
    MisfitError,
    Nearest,
    Shape,
    check_dtype,
    check_shape,
    in_int8,
    scale_values,
)

_MAX_STATE_BYTES = 1 << 16


class Bnb4(Layout):
    title = "bitsandbytes 4-bit"
    others: ClassVar = {
        "scale": [".absmax"],
        "table": [".quant_map"],
        "state": [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"],
        "nested_scale": [".nested_absmax"],
        "nested_table": [".nested_quant_map"],
    }
    required = frozenset({"scale", "table", "state"})

    def weight_of(self, name: str, tensors: Mapping[str, Tensor]) -> str | None:
        return name if f"{name}.absmax" in tensors else None

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        nested = "nested_scale" in parts
        check_dtype(parts, "scale", "U8" if nested else "F32")
        check_dtype(parts, "table", "F32")
        check_shape(parts, "table", (16,))
        check_dtype(parts, "state", "U8")
        check_dtype(parts, "nested_scale", "F32")
        check_dtype(parts, "nested_table", "F32")
        check_shape(parts, "nested_table", (256,))
        if nested != ("nested_table" in parts):
            raise MisfitError("scale", "is rounded, but nested_absmax or nested_quant_map is missing")
        if parts["state"].bytes > _MAX_STATE_BYTES:
            raise MisfitError("state", f"has {parts['state'].bytes} bytes, where a few hundred describe a weight")
        state = _state(read("state"))
        if nested != ("nested_blocksize" in state):
            raise MisfitError("state", "but its other tensors disagree on whether the scales are quantized too")
        shape = state["shape"]
        if math.prod(shape) != 2 * parts["codes"].bytes:
            raise MisfitError("state", f"says {shape}, and there are {2 * parts['codes'].bytes} weights")
        blocks = -(-math.prod(shape) // state["blocksize"])
        check_shape(parts, "scale", (blocks,))
        if nested:
            check_shape(parts, "nested_scale", (-(-blocks // state["nested_blocksize"]),))
        return tuple(shape)

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        state = _state(parts["state"])
        codes = parts["codes"].contiguous().view(torch.uint8).flatten().int()
        table = scale_values(parts, "table")
        byte = torch.arange(256, device="cpu")
        values = torch.stack([table[byte >> 4], table[byte & 15]], dim=1).index_select(0, codes).flatten()
        scale = scale_values(parts) if "nested_scale" not in parts else _unrounded(parts, state)
        size = state["blocksize"]
        whole = values.numel() // size
        values[: whole * size].view(whole, size).mul_(scale[:whole, None])
        values[whole * size :].mul_(scale[-1])
        return values.view(shape)

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return in_int8("its table is that of no record")


def _unrounded(parts: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> torch.Tensor:
    scale = scale_values(parts, "nested_table")[parts["scale"].int()]
    of_blocks = scale_values(parts, "nested_scale").repeat_interleave(min(state["nested_blocksize"], scale.numel()))
    unrounded = scale * of_blocks[: scale.numel()] + float(state["nested_offset"])
    if not unrounded.isfinite().all():
        raise MisfitError("state", f"makes scales that are not finite: its nested_offset is {state['nested_offset']}")
    return unrounded


def _state(data: torch.Tensor) -> dict[str, Any]:
    raw = bytes(data.contiguous().view(torch.uint8).flatten().tolist())
    if not any(raw):
        raise MisfitError(
            "state", "is empty: it has the weight's shape, and is behind the header; download the model first"
        )
    try:
        state = parse_json(raw, floats=True)
    except ValueError as problem:
        raise MisfitError("state", f"is not valid JSON: {problem}") from None
    if not isinstance(state, dict) or not isinstance(state.get("shape"), list):
        raise MisfitError("state", "has no shape")
    sizes = [state.get("blocksize"), *state["shape"], state.get("nested_blocksize", 1)]
    offset = state.get("nested_offset", 0.0 if "nested_blocksize" not in state else None)
    if (
        len(state["shape"]) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
        or not isinstance(offset, int | float)
    ):
        raise MisfitError("state", f"does not describe a weight: {state!s:.200}")
    return state
