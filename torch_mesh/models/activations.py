"""The activations of the fused kernels by name; ``csrc/kernels/activation.h`` defines them.

"silu", "gelu", "gelu_tanh" and "relu2" are functions of the gate. A ``Gate`` is a function of gate and up, with its
parameters in its name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

import torch

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class Gate:
    """``swiglu``: (clamp(up, -up_limit, up_limit) + offset) * g * sigmoid(alpha * g) of g = min(gate, gate_limit).

    ``softcap``: c(gate) * sigmoid(gate) * c(up), where c(x) is limit * tanh(x / limit) with the limit of either.
    """

    kind: str = "swiglu"
    alpha: float = 1.0
    offset: float = 0.0
    gate_limit: float = math.inf
    up_limit: float = math.inf

    @property
    def name(self) -> str:
        if self == SWIGLUOAI:
            return "swigluoai"
        if self == Gate():
            return "silu"
        changed = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "kind"]
        given = [
            f"{name.removesuffix('_limit')}={value!r}" for name, value in changed if value != getattr(_DEFAULTS, name)
        ]
        return f"{self.kind}({','.join(given)})"

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.kind == "softcap":
            capped = self.gate_limit * torch.tanh(gate / self.gate_limit) * torch.sigmoid(gate)
            return capped * self.up_limit * torch.tanh(up / self.up_limit)
        gate, up = gate.clamp(max=self.gate_limit), up.clamp(-self.up_limit, self.up_limit)
        return (up + self.offset) * gate * torch.sigmoid(self.alpha * gate)


_DEFAULTS = Gate()
SWIGLUOAI = Gate(alpha=1.702, offset=1.0, gate_limit=7.0, up_limit=7.0)  # gpt-oss's
_NAMED = re.compile(r"(swiglu|softcap)\((.*)\)")
_NUMBER = re.compile(r"(alpha|offset|gate|up)=(-?\d+\.?\d*(?:e[-+]?\d+)?)")


def gate_named(name: str) -> Gate | None:
    """The Gate of that name; None for a function of the gate alone. Raises ValueError for neither."""
    if name in FUNCTIONS:
        return None
    if name == "swigluoai":
        return SWIGLUOAI
    named = _NAMED.fullmatch(name)
    numbers = [_NUMBER.fullmatch(each) for each in named[2].split(",") if each] if named else []
    if named is None or None in numbers:
        allowed = ", ".join(map(repr, FUNCTIONS))
        raise ValueError(
            f"activation={name!r} is unknown; allowed: {allowed}, 'swigluoai', "
            "'swiglu(alpha=1,offset=0,gate=10,up=10)' and 'softcap(gate=4,up=25)' with other numbers."
        )
    fields_of = {"gate": "gate_limit", "up": "up_limit"}
    given = {fields_of.get(number[1], number[1]): float(number[2]) for number in numbers if number is not None}
    gate = Gate(named[1], **given)
    limits = (gate.alpha, gate.gate_limit, gate.up_limit)
    if not all(limit > 0 for limit in limits) or (gate.kind == "softcap" and math.inf in limits):
        raise ValueError(f"activation={name!r}: alpha and the limits must be above 0, and softcap needs both limits.")
    return gate


def swiglu(alpha: float, offset: float, gate_limit: float, up_limit: float) -> str:
    """The name of the gate with these parameters."""
    return Gate("swiglu", float(alpha), float(offset), float(gate_limit), float(up_limit)).name


def softcap(gate_limit: float, up_limit: float) -> str:
    """The name of the gate with these limits."""
    return Gate("softcap", gate_limit=float(gate_limit), up_limit=float(up_limit)).name


def limit_before_silu(limit: float) -> float:
    """The x for which silu(x) is ``limit``, which is above 0: clamping x there clamps silu's value."""
    if limit == math.inf:
        return limit
    at = limit
    for _ in range(50):
        sigmoid = 1 / (1 + math.exp(-at))
        step = (at * sigmoid - limit) / (sigmoid * (1 + at * (1 - sigmoid)))
        at -= step
        if abs(step) <= 1e-16 * at:
            break
    return at
