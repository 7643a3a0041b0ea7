"""``grouped_linear`` and its backward, one projection of all experts: fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("torch_mesh::grouped_linear")
def _(
    x_sorted: Tensor,
    offsets: Tensor,
    handle: Tensor,
    projection: int,
    out_features: int,
    top_k: int = 1,
    sentinels: bool = False,
) -> Tensor:
    torch._check(x_sorted.dim() == 2, lambda: f"x_sorted must be [rows, in]; got {tuple(x_sorted.shape)}")
    torch._check(offsets.dim() == 1, lambda: f"offsets must be [experts + 1]; got {tuple(offsets.shape)}")
    return x_sorted.new_empty((x_sorted.shape[0], out_features))


@torch.library.register_fake("torch_mesh::grouped_linear_backward")
def _(grad: Tensor, offsets: Tensor, handle: Tensor, projection: int, in_features: int) -> Tensor:
    torch._check(grad.dim() == 2, lambda: f"grad must be [rows, out]; got {tuple(grad.shape)}")
    return grad.new_empty((grad.shape[0], in_features))
