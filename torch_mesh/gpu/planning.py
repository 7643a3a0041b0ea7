"""How many experts a card holds, beside what else has to lie there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..config import MeshConfig
from ..errors import UnsupportedModelError
from .placement import MOVED_TOGETHER, Placement, batch_beside, given_experts

# What gpu.experts="auto" leaves free: the KV cache, activations, what else runs on the card.
_RESERVE_BYTES = 2 << 30
_RESERVE_SHARE = 8  # one part of the card in so many
# torch's allocator takes large blocks in whole pages of this size.
_ALLOCATION = 2 << 20
BY_PROJECTION = (
    "the experts of this family have a gate, activation or norm of their own and run by projection, on the CPU."
)

SEVERAL_ACTIVATIONS = (
    "the experts of this model differ in their activation from layer to layer, and all on a card have one."
)


@dataclass(frozen=True)
class GpuPlan:
    """How many experts a card holds. ``counts``: of each layer. Bytes; advice as in ``Plan``."""

    status: Literal["ok", "below recommended", "too small", "nothing to do"]
    advice: str
    counts: tuple[int, ...]
    spare: int  # slots that hold nothing, for experts that move
    buffers: int  # records of the two buffers through which prompts bring others up; 0 where all fit
    expert_bytes: int  # of all that are placed and the buffers, as torch's allocator takes them
    reserve_bytes: int
    loads: bool = True  # False: loading the model so would raise

    @property
    def placed(self) -> int:
        """Experts on the card."""
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
    """What ``gpu.experts="auto"`` places on a card that has ``free`` of its ``total`` bytes left, for ``layers`` layers on it.

    The same number in each layer, and one more in the first ones as far as that goes. Recommended are as many as a token uses.
    ``streaming``: beside them lie two buffers for prompts, ``dynamic``: and spare slots, unless all experts fit. ``up_bytes``: of a record as
    prompts bring it up, if not ``record_bytes`` as on the card.
    """
    reserve = max(_RESERVE_BYTES, total // _RESERVE_SHARE)
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


def plan_config(
    config: MeshConfig, free: int, total: int, layers: int, experts: int, top_k: int, record_bytes: int, up_bytes: int
) -> GpuPlan:
    """``plan_gpu`` for a config, whose ``gpu.experts`` may also be a number or a mask: then those, or none if they do not fit.

    ``record_bytes``: of ``gpu.weights``, ``up_bytes``: of ``weights``. A negative ``free`` is what the rest of the model lacks. Raises
    ValueError for a number or a mask that does not fit the model.
    """
    if free < 0:
        advice = f"The rest of the model alone needs {-free:,} bytes more than the card has: leave it in memory."
        return _no_plan(layers, advice, loads=False)
    streaming, dynamic = config.gpu.streaming != "off", config.gpu.placement == "dynamic"
    if config.gpu.experts == "auto":
        return plan_gpu(free, total, layers, experts, top_k, record_bytes, up_bytes, streaming, dynamic)
    card = (torch.device("cuda"),) * layers
    here = given_experts(config, layers, experts, None)
    placement = Placement(here, card, config.gpu.weights, config.gpu.streaming, dynamic)
    if placement.count == 0:
        return _no_plan(layers, "gpu.experts names none.", loads=not dynamic)
    spare, buffers = placement.spare_on(card[0]), 2 * placement.batch_on(card[0])
    taken = _taken(placement.slots_on(card[0]), record_bytes, buffers, up_bytes)
    if taken > free:
        left = f"beside the rest of the model the card has {free:,} left"
        return _no_plan(layers, f"gpu.experts needs {taken:,} bytes, but {left}: give fewer, or 'auto'.", loads=False)
    verdict = _verdict(placement.count, layers, experts, top_k, record_bytes)
    return GpuPlan(*verdict, tuple(int(layer.sum()) for layer in here), spare, buffers, taken, 0)


def plan_on_cpu(config: MeshConfig, layers: int, why: str) -> GpuPlan:
    """For experts that run on the CPU only. Raises UnsupportedModelError where the config insists on some."""
    if config.gpu.experts != "auto":
        raise UnsupportedModelError(f"gpu.experts cannot be had here: {why}")
    return _no_plan(layers, f"gpu.experts='auto' places none: {why}", loads=True)


def _no_plan(layers: int, advice: str, loads: bool) -> GpuPlan:
    return GpuPlan("too small", advice, (0,) * layers, 0, 0, 0, 0, loads)


def _whole(size: int) -> int:
    """What of so many bytes one allocation can be."""
    return max(0, size) // _ALLOCATION * _ALLOCATION


def _allocated(size: int) -> int:
    """What an allocation of so many bytes takes."""
    return -(-size // _ALLOCATION) * _ALLOCATION


def _taken(slots: int, record_bytes: int, buffers: int, up_bytes: int) -> int:
    """What slots and a prompt's buffers take, each an allocation of its own."""
    return _allocated(slots * record_bytes) + _allocated(buffers * up_bytes)


def _verdict(slots: int, layers: int, experts: int, top_k: int, record_bytes: int) -> tuple[Any, str]:
    if slots == layers * experts:
        return "nothing to do", "All experts fit on the card: no forward waits for the CPU."
    if slots == 0:
        return "too small", f"Beside the rest of the model no expert of {record_bytes:,} bytes fits on the card."
    if slots >= layers * top_k:
        return "ok", f"{slots} of {layers * experts} experts fit on the card; the CPU computes the others."
    return "below recommended", (
        f"{slots} of {layers * experts} experts fit on the card, and a token uses {layers * top_k}: it saves the CPU little."
    )
