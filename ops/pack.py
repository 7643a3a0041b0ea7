"""``pack``, ``pack_calibrated`` and ``unpack``: one expert to its record and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_mesh import _C


def _record(
    gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, *others: Any
) -> Tensor:
    *_, format, group_size = others
    torch._check(up.dim() == 2 and down.dim() == 2, lambda: "up and down must be matrices")
    intermediate, hidden = up.shape
    bytes_ = _C.record_bytes(format, group_size, hidden, intermediate, gate is not None, up_bias is not None)
    return torch.empty(bytes_, dtype=torch.uint8)


# The two ops differ in the arguments between the biases and the format.
for _name in ("pack", "pack_calibrated"):
    torch.library.register_fake(f"torch_mesh::{_name}", _record)


@torch.library.register_fake("torch_mesh::unpack")
def _(
    record: Tensor, format: str, group_size: int, hidden: int, intermediate: int, gated: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (2 if gated else 1) * intermediate
    return (
        record.new_empty((rows, hidden), dtype=torch.float32),
        record.new_empty((hidden, intermediate), dtype=torch.float32),
        record.new_empty((rows if bias else 0,), dtype=torch.float32),
        record.new_empty((hidden if bias else 0,), dtype=torch.float32),
    )
