"""``attention`` of decode steps over a KV cache: fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("torch_mesh::attention")
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    torch._check(
        all(len(shape) == 4 for shape in shapes),
        lambda: f"query, key and value must be [batch, heads, rows, head_dim]; got {shapes}",
    )
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, value.shape[3]))
