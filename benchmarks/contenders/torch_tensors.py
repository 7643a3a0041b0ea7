"""NumPy's arrays as torch's tensors and back."""

from __future__ import annotations

import torch
from layer import Array


def bf16(values: Array) -> torch.Tensor:
    """float32 that are bf16 values -> a bf16 tensor of its own."""
    return torch.from_numpy(values).to(torch.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Array:
    return tensor.float().numpy()
