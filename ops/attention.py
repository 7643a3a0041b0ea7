"""``attention`` of decode steps over a cache of keys and values: fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("torch_mesh::attention")
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        torch._check(
            tensor.dim() == 4, lambda: f"{name} must be [batch, heads, rows, head_dim]; got {tuple(tensor.shape)}"
        )
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, value.shape[3]))
