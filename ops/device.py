"""Experts whose records lie on a device: where, and which ones."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from torch_mesh import _C

from .launches import BLOCK_COLUMNS


@dataclass(frozen=True)
class DeviceRecord:
    """One expert's record as kernels see it: offsets count 32-bit words. ``activation`` is that of the fused op."""

    format: str
    group_size: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    activation: str

    words: int = field(init=False)
    gate_up_block: int = field(init=False)
    gate_up_bias: int = field(init=False)
    down: int = field(init=False)
    down_block: int = field(init=False)
    down_bias: int = field(init=False)

    def __post_init__(self) -> None:
        layout = _C.record_layout(self.format, self.group_size, self.hidden, self.intermediate, self.gated, self.bias)
        for name, entry in (
            ("words", "bytes"),
            ("gate_up_block", "gate_up_block_bytes"),
            ("gate_up_bias", "gate_up_bias_offset"),
            ("down", "down_offset"),
            ("down_block", "down_block_bytes"),
            ("down_bias", "down_bias_offset"),
        ):
            object.__setattr__(self, name, layout[entry] // 4)

    @property
    def group(self) -> int:
        """Values along the depth that are taken at a time: those that share a scale, or a step of bf16."""
        return self.group_size or BLOCK_COLUMNS

    def groups(self, depth: int) -> int:
        return -(-depth // self.group)

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """The experts of one layer that lie on a device."""

    record: DeviceRecord
    records: Tensor  # uint8 [slots, record bytes] on the device, shared by its layers
    table: Tensor  # int32 [experts] on the device: the slot of each expert, or -1
    here: Tensor  # bool [experts] on the CPU: table >= 0
    complete: bool  # all of them
    workspace: int  # bytes that the products of one chunk of tokens may take


# By what a handle holds. Whoever made a layer owns it; a handle whose model is gone finds nothing.
_layers: weakref.WeakValueDictionary[tuple[int, ...], DeviceLayer] = weakref.WeakValueDictionary()


def place(handle: Tensor, layer: DeviceLayer) -> None:
    """Makes ``experts_split`` find ``layer`` by ``handle``, for as long as it lives."""
    _layers[tuple(handle.tolist())] = layer


def find(handle: Tensor) -> DeviceLayer:
    """Raises ValueError for a handle of no layer with experts on a device."""
    layer = _layers.get(tuple(handle.tolist()))
    if layer is None:
        raise ValueError(
            f"handle {handle.tolist()} names no layer with experts on a device: it is of another pool, of one that is "
            "closed, or of a layer without gpu_experts; torch.ops.torch_mesh.experts takes it"
        )
    return layer
