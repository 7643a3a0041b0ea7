"""Stand-ins for cold experts: the same experts in a format of fewer bits, in a pool of their own. docs/lossy.md."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..config import MeshConfig
from ..errors import UnsupportedModelError
from ..models.families import ExpertsLayer
from ..pool.expert_pool import least_slots, record_bytes
from ..pool.secondary_pool import formats_of_fewer_bits
from ..store.convert import checked_group_size


def check_fallback(model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig, weights: str) -> None:
    """Raises ValueError or UnsupportedModelError if experts in ``weights`` cannot have the stand-ins of ``config``."""
    check_fallback_config(config, weights)
    if config.lossy.fallback != "none" and layers[0].fused_activation is None:
        raise UnsupportedModelError(
            f"lossy.fallback={config.lossy.fallback!r} cannot be had for {type(model).__name__}: its experts run by projection, since the fused kernel does not know "
            "their activation. Leave lossy.fallback at 'none'."
        )


def check_fallback_config(config: MeshConfig, weights: str) -> None:
    """Raises ValueError for stand-ins that are no smaller than experts in ``weights``, and for what does not go with them."""
    if config.lossy.fallback == "none":
        return
    given = f"lossy.fallback={config.lossy.fallback!r}"
    fewer = formats_of_fewer_bits(weights)
    if config.lossy.fallback not in fewer:
        advice = f"give one of {', '.join(map(repr, fewer))}" if fewer else "leave lossy.fallback at 'none'"
        raise ValueError(f"{given} has no fewer bits than the experts' {weights}: {advice}.")
    if config.lossy.deferred_experts:
        raise ValueError(
            f"{given} does not go with lossy.deferred_experts={config.lossy.deferred_experts}: a cold expert is either computed from fewer bits or "
            "later. Leave out one of the two."
        )
    if config.io == "mmap":
        raise ValueError(
            f"{given} keeps records of two formats in memory of its own, and with io='mmap' the page cache decides what it keeps: "
            "use io='auto'."
        )


def fallback_group_size(config: MeshConfig) -> int:
    """As records of the stand-ins have it."""
    return checked_group_size(config.lossy.fallback, config.group_size)


def split_slots(
    config: MeshConfig, slots: int, *, experts: int, top_k: int, record_bytes: int, fallback_bytes: int
) -> tuple[int, int]:
    """How many of ``experts`` are resident as they are, and how many as stand-ins, in the memory of ``slots`` records of ``record_bytes``.

    Stand-ins get three quarters of it, or what all of them need; the ``top_k`` experts that a token needs have their slots first. Without
    ``lossy.fallback``, or where every expert has a slot, there are none. Raises ValueError where there is no room for ``top_k`` of either.
    """
    if config.lossy.fallback == "none" or slots == experts:
        return slots, 0
    memory = slots * record_bytes
    room = min(memory * 3 // 4, memory - top_k * record_bytes)
    fallback_slots = min(experts, room // fallback_bytes)
    if fallback_slots < top_k:
        raise ValueError(
            f"lossy.fallback={config.lossy.fallback!r} needs memory for the {top_k} experts that a token takes and for as many stand-ins, but "
            f"resident={config.resident!r} is that of {slots} experts: give at least that of {2 * top_k}."
        )
    return (memory - fallback_slots * fallback_bytes) // record_bytes, fallback_slots


def split_pool(
    layers: Sequence[ExpertsLayer], config: MeshConfig, slots: int, *, stored_layers: int, weights: str, group_size: int
) -> tuple[int, int]:
    """``split_slots`` for the experts of ``layers``, of which a store has ``stored_layers``."""
    if config.lossy.fallback == "none":  # records of which have no size
        return slots, 0
    return split_slots(
        config,
        slots,
        experts=stored_layers * layers[0].num_experts,
        top_k=least_slots(layers),
        record_bytes=record_bytes(layers, weights, group_size),
        fallback_bytes=record_bytes(layers, config.lossy.fallback, fallback_group_size(config)),
    )
