"""How many experts a GPU holds beside the rest of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_mesh.config_fields import GpuFields
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.gpu.placement import MOVED_TOGETHER, Placement, batch_beside, given_experts

# Memory that gpu.experts="auto" leaves free for the KV cache, activations and other processes.
_RESERVE_BYTES = 2 << 30
_RESERVE_DIVISOR = 8  # the fraction 1 / 8 of the GPU
# The page size in which torch's allocator takes large blocks.
_ALLOCATION = 2 << 20
UNFUSED = "the experts of this family have a gate, activation or norm of their own and run unfused, on the CPU."

SEVERAL_ACTIVATIONS = (
    "this model's layers have different activations; experts on a GPU need the same one in all layers."
)


@dataclass(frozen=True)
class GpuPlan:
    """How many experts a GPU holds. ``counts``: per layer. Sizes are in bytes; ``advice`` as in ``Plan``."""

    status: Literal["ok", "below recommended", "too small", "nothing to do"]
    advice: str
    counts: tuple[int, ...]
    spare: int  # empty slots for moving experts
    buffers: int  # records of the two streaming buffers; 0 if all experts fit
    expert_bytes: int  # of all placed experts and buffers, as torch's allocator takes them
    reserve_bytes: int
    loads: bool = True  # False: loading the model with this config would raise

    @property
    def placed(self) -> int:
        """Experts on the GPU."""
        return sum(self.counts)


def plan_gpu(
    free: int,
    total: int,
    layers: int,
    experts: int,
    top_k: int,
    record_bytes: int,
    up_bytes: int | None = None,
    streaming: bool = True,
    dynamic: bool = False,
) -> GpuPlan:
    """What ``gpu.experts="auto"`` places on a GPU with ``free`` of ``total`` bytes left, for ``layers`` layers on it.

    All layers get the same number, the first ones one more if they fit. At least as many as a token uses are
    recommended. ``streaming`` adds two buffers for prompts and ``dynamic`` spare slots, unless all experts fit.
    ``up_bytes``: of a streamed record, if not ``record_bytes`` as on the GPU.
    """
    reserve = max(_RESERVE_BYTES, total // _RESERVE_DIVISOR)
    budget = max(0, free - reserve)
    every = layers * experts
    slots = min(every, _whole(budget) // record_bytes)
    spare = buffers = 0
    if 0 < slots < every:
        spare, buffers = MOVED_TOGETHER * dynamic, 2 * batch_beside(slots) * streaming
        left = budget - _allocated(buffers * (up_bytes or record_bytes))
        slots = max(0, min(slots, _whole(left) // record_bytes) - spare)
    if slots == 0:
        spare = buffers = 0
    counts = tuple(slots // layers + (layer < slots % layers) for layer in range(layers))
    taken = _taken(slots + spare, record_bytes, buffers, up_bytes or record_bytes)
    return GpuPlan(*_verdict(slots, layers, experts, top_k, record_bytes), counts, spare, buffers, taken, reserve)


def plan_fields(
    gpu: GpuFields, free: int, total: int, layers: int, experts: int, top_k: int, record_bytes: int, up_bytes: int
) -> GpuPlan:
    """``plan_gpu`` for the fields of a config, whose ``experts`` may also be a number or a mask: then exactly those, or
    none if they do not fit.

    ``record_bytes``: of ``gpu.weights``, ``up_bytes``: of ``weights``. A negative ``free`` is what the rest of the
    model lacks. Raises ValueError for a number or a mask that does not fit the model.
    """
    if free < 0:
        advice = f"The rest of the model alone needs {-free:,} bytes more than the card has: leave it in memory."
        return _no_plan(layers, advice, loads=False)
    streaming, dynamic = gpu.streaming != "off", gpu.placement == "dynamic"
    if gpu.experts == "auto":
        return plan_gpu(free, total, layers, experts, top_k, record_bytes, up_bytes, streaming, dynamic)
    card = (torch.device("cuda"),) * layers
    here = given_experts(gpu.experts, layers, experts, None)
    placement = Placement(here, card, gpu.weights, gpu.streaming, dynamic)
    if placement.count == 0:
        return _no_plan(layers, "gpu.experts names none.", loads=not dynamic)
    spare, buffers = placement.spare_on(card[0]), 2 * placement.batch_on(card[0])
    taken = _taken(placement.slots_on(card[0]), record_bytes, buffers, up_bytes)
    if taken > free:
        left = f"beside the rest of the model the card has {free:,} left"
        return _no_plan(layers, f"gpu.experts needs {taken:,} bytes, but {left}: give fewer, or 'auto'.", loads=False)
    verdict = _verdict(placement.count, layers, experts, top_k, record_bytes)
    return GpuPlan(*verdict, tuple(int(layer.sum()) for layer in here), spare, buffers, taken, 0)


def plan_on_cpu(gpu: GpuFields, layers: int, why: str) -> GpuPlan:
    """A plan for experts on the CPU only. Raises UnsupportedModelError if ``gpu.experts`` requires some on a GPU."""
    if gpu.experts != "auto":
        raise UnsupportedModelError(f"gpu.experts cannot be had here: {why}")
    return _no_plan(layers, f"gpu.experts='auto' places none: {why}", loads=True)


def _no_plan(layers: int, advice: str, loads: bool) -> GpuPlan:
    return GpuPlan("too small", advice, (0,) * layers, 0, 0, 0, 0, loads)


def _whole(size: int) -> int:
    """The largest allocation that fits in so many bytes."""
    return max(0, size) // _ALLOCATION * _ALLOCATION


def _allocated(size: int) -> int:
    """Bytes that an allocation of so many bytes takes."""
    return -(-size // _ALLOCATION) * _ALLOCATION


def _taken(slots: int, record_bytes: int, buffers: int, up_bytes: int) -> int:
    return _allocated(slots * record_bytes) + _allocated(buffers * up_bytes)


def _verdict(slots: int, layers: int, experts: int, top_k: int, record_bytes: int) -> tuple[Any, str]:
    if slots == layers * experts:
        return "nothing to do", "All experts fit on the card: no forward waits for the CPU."
    if slots == 0:
        return "too small", f"Beside the rest of the model no expert of {record_bytes:,} bytes fits on the card."
    if slots >= layers * top_k:
        return "ok", f"{slots} of {layers * experts} experts fit on the card; the CPU computes the others."
    return "below recommended", (
        f"{slots} of {layers * experts} experts fit on the GPU, but a token uses {layers * top_k}: it saves the CPU "
        "little."
    )
