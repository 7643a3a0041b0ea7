"""``linear``, ``linear_backward``, ``pack_linear``, ``pack_linear_blocks`` and ``unpack_linear``: layers outside the
experts.

Input and bias get gradients; the weights are frozen. Activation quantization is a straight-through estimator. The
formula is in csrc/bindings/autograd.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_mesh import _C


@torch.library.register_fake("torch_mesh::linear")
def _(
    x: Tensor, packed: Tensor, bias: Tensor | None, in_features: int, out_features: int, format: str, group_size: int
) -> Tensor:
    torch._check(x.dim() >= 1, lambda: "x must be [..., in_features]; got a scalar")
    torch._check(
        x.shape[-1] == in_features, lambda: f"x must be [..., in_features={in_features}]; got {tuple(x.shape)}"
    )
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("torch_mesh::linear_backward")
def _(grad: Tensor, packed: Tensor, in_features: int, out_features: int, format: str, group_size: int) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], in_features))


@torch.library.register_fake("torch_mesh::pack_linear")
def _(weight: Tensor, format: str, group_size: int) -> Tensor:
    torch._check(weight.dim() == 2, lambda: f"weight must be [out_features, in_features]; got {tuple(weight.shape)}")
    out_features, in_features = weight.shape
    return weight.new_empty(_C.linear_bytes(format, group_size, in_features, out_features), dtype=torch.uint8)


@torch.library.register_fake("torch_mesh::pack_linear_blocks")
def _(blocks: Tensor, in_features: int, format: str) -> Tensor:
    torch._check(blocks.dim() == 2, lambda: f"blocks must be [out_features, bytes]; got {tuple(blocks.shape)}")
    return blocks.new_empty(_C.linear_bytes(format, 32, in_features, blocks.shape[0]), dtype=torch.uint8)


@torch.library.register_fake("torch_mesh::unpack_linear")
def _(packed: Tensor, in_features: int, out_features: int, format: str, group_size: int) -> Tensor:
    return packed.new_empty((out_features, in_features), dtype=torch.float32)


@torch.library.register_fake("torch_mesh::plain_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch._check(weight.dim() == 2, lambda: f"weight must be [out_features, in_features]; got {tuple(weight.shape)}")
    torch._check(x.dim() >= 1, lambda: "x must be [..., in_features]; got a scalar")
    torch._check(
        x.shape[-1] == weight.shape[1],
        lambda: f"x must be [..., in_features={weight.shape[1]}]; got {tuple(x.shape)}",
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
