"""Experts on a GPU: which ones, and where their records are."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_mesh.ops.launches import depth_step
from torch_mesh.ops.streaming import Costs

from torch_mesh import _C


@dataclass(frozen=True)
class DeviceRecord:
    """Layout of one expert's record for kernels; offsets are in 32-bit words.

    ``group_size`` is 0 for formats without shared scales. ``activation`` is that of the fused op.
    """

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
        """Steps of a product along ``depth``."""
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
    """The CUDA driver. Tests replace it."""
    return _C.open_cuda_driver(device.index)


class SharedDevice:
    """State that all layers of a pool share on one device: the host's part of a forward and the streaming of prompts.

    ``handle`` may be that of any layer of the pool.
    """

    def __init__(self, handle: Tensor, device: torch.device) -> None:
        self.device = device
        self.host = _C.HostShare(handle, open_driver(device))
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.up: DeviceRecord | None = None  # layout of the streamed records
        self.costs: Costs | None = None
        self.uplift: _C.Uplift | None = None
        self.mover: _C.Mover | None = None
        # Held while a forward or a move of one thread enqueues what reads or writes the table of a mover.
        self.enqueuing: Any = contextlib.nullcontext()
        self.leader = -1  # first layer with dynamic placement
        self._streamed_bytes = 0  # streamed bytes at the last reset of the statistics
        self._moved = self._moves_failed = 0
        self._complete = 0
        self._counting = threading.Lock()

    def stream(self) -> int:
        """torch's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def lend(self, first: Tensor, second: Tensor, up: DeviceRecord) -> None:
        """Set two buffers, uint8 [records, record bytes], through which experts without a slot are streamed; ``up`` is
        the record layout of the pool.

        ``costs`` decides when that pays.
        """
        self.buffers, self.up = (first, second), up
        self.uplift = _C.Uplift(self.host, first, second, self.stream())

    def move_between(
        self, source: Tensor, slots: Tensor, table: Tensor, moving: list[bool], spare: int, *, patience: int
    ) -> None:
        """Enable dynamic placement for the layers ``moving`` among ``slots``, uint8 [slots, record bytes], of which
        ``spare`` are empty.

        ``source`` is a handle of the pool with the records in the format of the slots; ``table`` is int32 [layers,
        experts] on the device.
        """
        entries = table.flatten().tolist()
        self.mover = _C.Mover(
            self.host, source, slots, table, entries, moving, batch=spare, policy="auto", patience=patience
        )
        self.enqueuing = threading.RLock()  # a signal handler may run a forward within another
        self.leader = moving.index(True)

    def step(self) -> int:
        """Move experts on in the current stream, without waiting; returns how many moved up."""
        if self.mover is None:
            return 0
        with self.enqueuing:
            return self.mover.step(self.stream())

    def count_complete(self) -> None:
        """Count a forward of a layer whose experts are all on the device."""
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
    """The experts of one layer on a device."""

    record: DeviceRecord
    records: Tensor  # uint8 [slots, record bytes] on the device, shared by its layers
    table: Tensor  # int32 [experts] on the device: the slot of each expert, or -1
    here: Tensor  # bool [experts] on the CPU: table >= 0 at placement
    complete: bool  # all experts of the layer are here
    workspace: int  # limit in bytes for the intermediates of one chunk of tokens
    index: int = 0  # the layer's index in the pool
    shared: SharedDevice | None = None  # for experts_split

    @property
    def count(self) -> int:
        """Experts on the device now."""
        mover = None if self.shared is None else self.shared.mover
        if mover is None:
            return int(self.here.sum())
        experts = self.here.numel()
        return sum(slot >= 0 for slot in mover.slots_of()[self.index * experts : (self.index + 1) * experts])


# Layers by the contents of their handles. A layer's owner keeps it alive, so the handle of a deleted model finds none.
_layers: weakref.WeakValueDictionary[tuple[int, ...], DeviceLayer] = weakref.WeakValueDictionary()


def register(handle: Tensor, layer: DeviceLayer) -> None:
    """Register ``layer`` under ``handle`` for ``experts_split``, for as long as ``layer`` lives."""
    _layers[tuple(handle.tolist())] = layer


def find(handle: Tensor) -> DeviceLayer:
    """Raises ValueError for a handle without experts on a device."""
    layer = _layers.get(tuple(handle.tolist()))
    if layer is None:
        raise ValueError(
            f"handle {handle.tolist()} names no layer with experts on a device. Use torch.ops.torch_mesh.experts for "
            "layers without gpu.experts; handles of closed pools are invalid"
        )
    return layer
