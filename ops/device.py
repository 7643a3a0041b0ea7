"""Experts whose records lie on a device: where, and which ones."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_mesh import _C

from .launches import depth_step
from .streaming import Costs


@dataclass(frozen=True)
class DeviceRecord:
    """One expert's record as kernels see it: offsets count 32-bit words. ``group_size`` is 0 where none is shared, ``activation`` is that of the fused op."""

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

    def steps(self, depth: int) -> int:
        """That products along ``depth`` take; two trellises take the same."""
        return -(-depth // depth_step(self.down_format, self.group_size))

    @property
    def gate_up_format(self) -> str:
        return self.format.partition("+")[0]

    @property
    def down_format(self) -> str:
        return self.format.rpartition("+")[2]

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1


def open_driver(device: torch.device) -> _C.Driver:
    """CUDA's. Tests put another in its place where the CPU stands for a card."""
    return _C.open_cuda_driver(device.index)


class SharedDevice:
    """What all layers of a pool have in common that lie on one device: how the host computes its share, and a prompt's way up.

    ``handle`` is of any layer of the pool.
    """

    def __init__(self, handle: Tensor, device: torch.device) -> None:
        self.device = device
        self.host = _C.HostShare(handle, open_driver(device))
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.up: DeviceRecord | None = None  # what comes through them
        self.costs: Costs | None = None
        self.uplift: _C.Uplift | None = None
        self.mover: _C.Mover | None = None
        self.leader = -1  # the first layer whose experts move
        self._streamed_bytes = 0  # when statistics were reset
        self._moved = self._moves_failed = 0
        self._complete = 0
        self._counting = threading.Lock()

    def stream(self) -> int:
        """torch's, as the driver knows it."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def lend(self, first: Tensor, second: Tensor, up: DeviceRecord) -> None:
        """Two buffers, uint8 [records, record bytes] each, through which experts without a slot come up, as ``up``: the pool's records.

        ``costs`` says when they do.
        """
        self.buffers, self.up, self.uplift = (first, second), up, _C.Uplift(self.host, first, second)

    def move_between(
        self, source: Tensor, slots: Tensor, table: Tensor, moving: list[bool], spare: int, *, patience: int
    ) -> None:
        """Lets the experts of layers that are ``moving`` move between ``slots``, uint8 [slots, record bytes], of which ``spare`` hold nothing.

        ``source`` is a handle of the pool that has their records in the format of the slots, ``table`` int32 [layers, experts], on the device.
        """
        entries = table.flatten().tolist()
        self.mover = _C.Mover(
            self.host, source, slots, table, entries, moving, batch=spare, policy="auto", patience=patience
        )
        self.leader = moving.index(True)

    def count_complete(self) -> None:
        """A forward of a layer that is here as a whole."""
        with self._counting:
            self._complete += 1

    def stats(self) -> dict[str, Any]:
        """The fields of ``DeviceCounters``."""
        counts: dict[str, Any] = {**self.host.stats(), "complete": self._complete, "streamed": 0, "bytes_streamed": 0}
        counts["moved"], counts["moves_failed"] = 0, 0
        if self.mover is not None:
            moves = self.mover.stats()
            counts["moved"] = moves["moved_up"] - self._moved
            counts["moves_failed"] = moves["failed"] - self._moves_failed
        if self.uplift is not None and self.buffers is not None:
            counts["bytes_streamed"] = self.uplift.bytes_up() - self._streamed_bytes
            counts["streamed"] = counts["bytes_streamed"] // self.buffers[0].size(1)
        return counts

    def reset_stats(self) -> None:
        self.host.reset_stats()
        self._complete = 0
        self._streamed_bytes = 0 if self.uplift is None else self.uplift.bytes_up()
        if self.mover is not None:
            moves = self.mover.stats()
            self._moved, self._moves_failed = moves["moved_up"], moves["failed"]


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """The experts of one layer that lie on a device."""

    record: DeviceRecord
    records: Tensor  # uint8 [slots, record bytes] on the device, shared by its layers
    table: Tensor  # int32 [experts] on the device: the slot of each expert, or -1
    here: Tensor  # bool [experts] on the CPU: table >= 0 when they were placed
    complete: bool  # all of them
    workspace: int  # bytes that the products of one chunk of tokens may take
    index: int = 0  # of the pool's layers
    shared: SharedDevice | None = None  # none for kernels alone: experts_split needs it

    @property
    def count(self) -> int:
        """Experts that are there now."""
        mover = None if self.shared is None else self.shared.mover
        if mover is None:
            return int(self.here.sum())
        experts = self.here.numel()
        return sum(slot >= 0 for slot in mover.slots_of()[self.index * experts : (self.index + 1) * experts])


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
            "closed, or of a layer without gpu.experts; torch.ops.torch_mesh.experts takes it"
        )
    return layer
