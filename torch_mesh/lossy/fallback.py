"""Fallback experts: cold experts are computed from a second pool in a format of fewer bits. docs/lossy.md."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..config import MeshConfig
from ..errors import UnsupportedModelError
from ..formats import FORMATS, formats_of_fewer_bits
from ..models.families import ExpertsLayer
from ..pool.expert_pool import least_slots, record_bytes
from ..store.convert import checked_group_size


def check_fallback(model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig, weights: str) -> None:
    """Raises ValueError or UnsupportedModelError if ``config.lossy.fallback`` does not fit experts in ``weights``."""
    check_fallback_config(config, weights)
    if config.lossy.fallback != "none" and layers[0].fused_activation is None:
        raise UnsupportedModelError(
            f"lossy.fallback={config.lossy.fallback!r} is unsupported for {type(model).__name__}: its experts run "
            "unfused, since the fused kernel lacks their activation. Set lossy.fallback to 'none'."
        )


def check_fallback_config(config: MeshConfig, weights: str) -> None:
    """Raises ValueError for a fallback without fewer bits than ``weights``, and for settings that exclude it."""
    if config.lossy.fallback == "none":
        return
    given = f"lossy.fallback={config.lossy.fallback!r}"
    fewer = [name for name in formats_of_fewer_bits(weights) if not FORMATS[name].holds_bf16]
    if config.lossy.fallback not in fewer:
        advice = f"give one of {', '.join(map(repr, fewer))}" if fewer else "leave lossy.fallback at 'none'"
        raise ValueError(f"{given} has no fewer bits than the experts' {weights}: {advice}.")
    if config.lossy.deferred_experts:
        raise ValueError(
            f"{given} and lossy.deferred_experts={config.lossy.deferred_experts} exclude each other: a cold expert is "
            "either computed from fewer bits or later. Choose one."
        )


def fallback_group_size(config: MeshConfig) -> int:
    """The group size of the fallback's records."""
    return checked_group_size(config.lossy.fallback, config.group_size)


def split_slots(
    config: MeshConfig, slots: int, *, experts: int, top_k: int, record_bytes: int, fallback_bytes: int
) -> tuple[int, int]:
    """The slots for ``experts`` in the main format, and those for fallback experts, in the memory of ``slots`` records
    of ``record_bytes``.

    Fallback experts get three quarters of the memory, or enough for all of them, after the ``top_k`` main slots that a
    token needs. There are none without ``lossy.fallback``, or if every expert has a slot. Raises ValueError if
    ``top_k`` of either do not fit.
    """
    if config.lossy.fallback == "none" or slots == experts:
        return slots, 0
    memory = slots * record_bytes
    room = min(memory * 3 // 4, memory - top_k * record_bytes)
    fallback_slots = min(experts, room // fallback_bytes)
    if fallback_slots < top_k:
        raise ValueError(
            f"lossy.fallback={config.lossy.fallback!r} needs memory for the {top_k} experts of a token and as many "
            f"fallback experts, but resident={config.resident!r} holds {slots} experts: give at least {2 * top_k}."
        )
    return (memory - fallback_slots * fallback_bytes) // record_bytes, fallback_slots


def split_pool(
    layers: Sequence[ExpertsLayer], config: MeshConfig, slots: int, *, stored_layers: int, weights: str, group_size: int
) -> tuple[int, int]:
    """``split_slots`` for the experts of ``layers``, of which a store has ``stored_layers``."""
    if config.lossy.fallback == "none":  # whose records have no size
        return slots, 0
    return split_slots(
        config,
        slots,
        experts=stored_layers * layers[0].num_experts,
        top_k=least_slots(layers),
        record_bytes=record_bytes(layers, weights, group_size),
        fallback_bytes=record_bytes(layers, config.lossy.fallback, fallback_group_size(config)),
    )
