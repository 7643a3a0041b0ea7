"""The state at a line of statistics, beside its counts: resident experts and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_mesh import _C
from torch_mesh.system.memory import anonymous_bytes, available_bytes

_READY = 2  # state of a slot: EMPTY, LOADING or READY (csrc/residency/core/slots.h)
_MAX_INTEGER = 1 << 63
_MAX_EXPERTS = 1 << 16  # experts of a layer
MEMORY = ("process", "pool", "budget", "left")
ABOUT = ("model", "format", "policy", "machine")


@dataclass(frozen=True)
class Snapshot:
    """``resident`` has a hexadecimal string for each MoE layer, with a bit for each of its ``experts``, the first one
    the highest bit of the first digit; excess bits are 0.

    ``memory`` is in bytes: ``process`` (anonymous, pools included), ``pool`` (experts and fallback experts now),
    ``budget`` (their limit), ``left`` (still available). None: unknown. ``about`` describes the model and the machine.
    """

    experts: int = 0  # experts of a layer; 0: unknown, as in lines of earlier versions
    resident: tuple[str, ...] = ()
    memory: Mapping[str, int] | None = None
    about: Mapping[str, str] = field(default_factory=dict)  # the known ones of ``ABOUT``

    def to_dict(self) -> dict[str, Any]:
        memory = None if self.memory is None else dict(self.memory)
        return {
            "experts": self.experts,
            "resident": list(self.resident),
            "memory": memory,
            "about": dict(self.about),
        }


def take_snapshot(engines: Sequence[_C.Engine], layers: int, about: Mapping[str, str]) -> Snapshot:
    """The snapshot of a pool: its engine, and that of fallback experts if there is one. Raises PoolClosedError for a
    closed engine."""
    engine = engines[0]
    states = [
        torch.ops.torch_mesh.residency(torch.tensor([engine.id, layer], device="cpu")).numpy()
        for layer in range(layers)
    ]
    return Snapshot(
        len(states[0]),
        tuple(np.packbits(state == _READY).tobytes().hex() for state in states),
        _memory(engines),
        about,
    )


def _memory(engines: Sequence[_C.Engine]) -> dict[str, int] | None:
    sizes = [engine.describe_size() for engine in engines]
    try:
        process, left = anonymous_bytes(), available_bytes()
    except OSError:  # a sandbox without /proc, or a removed cgroup: the counts are still worth a line
        return None
    return {
        "process": process,
        "pool": sum(size["slots"] * size["record_bytes"] for size in sizes),
        "budget": sum(size["max_slots"] * size["record_bytes"] for size in sizes),
        "left": left,
    }


def parse_snapshot(table: Mapping[str, Any], layers: int) -> Snapshot:
    """Parse a line of statistics; fields missing in older lines are empty. Raises ValueError for invalid values."""
    experts, resident, memory = table.get("experts", 0), table.get("resident", []), table.get("memory")
    if type(experts) is not int or not 0 <= experts <= _MAX_EXPERTS:
        raise ValueError(f"its experts are {experts!r:.80}")
    if not isinstance(resident, list) or len(resident) != (layers if experts else 0):
        raise ValueError("its resident is no list of as many layers as there are")
    if not all(_is_bits(bits, experts) for bits in resident):
        raise ValueError(f"its resident has other bits than those of {experts} experts")
    if memory is not None:
        if not isinstance(memory, Mapping) or not all(_is_bytes(memory.get(name)) for name in MEMORY):
            raise ValueError("its memory is not in bytes")
        memory = {name: memory[name] for name in MEMORY}
    about = table.get("about", {})
    if not isinstance(about, Mapping) or not all(isinstance(about.get(name, ""), str) for name in ABOUT):
        raise ValueError("its about is no text")
    # JSON may have lone surrogates, which cannot be printed.
    about = {name: about[name].encode(errors="replace").decode() for name in ABOUT if name in about}
    return Snapshot(experts, tuple(resident), memory, about)


def _is_bits(value: Any, experts: int) -> bool:
    return isinstance(value, str) and len(value) == -(-experts // 8) * 2 and not value.strip("0123456789abcdef")


def _is_bytes(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INTEGER
