"""Fallback experts: cold experts are computed from a second pool in a format of fewer bits. docs/lossy.md."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.formats import FORMATS, formats_of_fewer_bits
from torch_mesh.models.families import ExpertsLayer


def check_fallback(
    model: nn.Module, layers: Sequence[ExpertsLayer], weights: str, *, fallback: str, deferred_experts: int
) -> None:
    """Raises ValueError or UnsupportedModelError if ``lossy.fallback`` does not fit experts in ``weights``."""
    check_fallback_format(weights, fallback=fallback, deferred_experts=deferred_experts)
    if fallback != "none" and layers[0].fused_activation is None:
        raise UnsupportedModelError(
            f"lossy.fallback={fallback!r} is unsupported for {type(model).__name__}: its experts run unfused, since "
            "the fused kernel lacks their activation. Set lossy.fallback to 'none'."
        )


def check_fallback_format(weights: str, *, fallback: str, deferred_experts: int) -> None:
    """Raises ValueError for a fallback without fewer bits than ``weights``, and beside deferred experts."""
    if fallback == "none":
        return
    given = f"lossy.fallback={fallback!r}"
    fewer = [name for name in formats_of_fewer_bits(weights) if not FORMATS[name].holds_bf16]
    if fallback not in fewer:
        advice = f"give one of {', '.join(map(repr, fewer))}" if fewer else "leave lossy.fallback at 'none'"
        raise ValueError(f"{given} has no fewer bits than the experts' {weights}: {advice}.")
    if deferred_experts:
        raise ValueError(
            f"{given} and lossy.deferred_experts={deferred_experts} exclude each other: a cold expert is either "
            "computed from fewer bits or later. Choose one."
        )


def split_slots(
    slots: int,
    *,
    fallback: str,
    resident: str | float,
    experts: int,
    top_k: int,
    record_bytes: int,
    fallback_bytes: int,
) -> tuple[int, int]:
    """The slots for ``experts`` in the main format, and those for fallback experts, in the memory of ``slots`` records
    of ``record_bytes``.

    Fallback experts get three quarters of the memory, or enough for all of them. There are none without ``fallback``,
    or if every expert has a slot. Raises ValueError, naming ``resident``, if ``top_k`` of either do not fit.
    """
    if fallback == "none" or slots == experts:
        return slots, 0
    memory = slots * record_bytes
    room = min(memory * 3 // 4, memory - top_k * record_bytes)
    fallback_slots = min(experts, room // fallback_bytes)
    if fallback_slots < top_k:
        raise ValueError(
            f"lossy.fallback={fallback!r} needs memory for the {top_k} experts of a token and as many fallback "
            f"experts, but resident={resident!r} holds {slots} experts: give at least {2 * top_k}."
        )
    return (memory - fallback_slots * fallback_bytes) // record_bytes, fallback_slots
