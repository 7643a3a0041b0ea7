"""``experts``, ``experts_backward`` and ``experts_deferred``: fake kernels and the gradient.

The gradient is for the hidden states and the routing weights; the experts are frozen. Quantised activations pass it
straight through (Bengio et al. 2013, arXiv 1308.3432), so it is the gradient of the same layer with exact activations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    torch._check(x.dim() == 2, lambda: f"x must be [tokens, hidden]; got {tuple(x.shape)}")
    torch._check(topk_ids.dim() == 2, lambda: f"topk_ids must be [tokens, k]; got {tuple(topk_ids.shape)}")
    torch._check(topk_ids.shape[0] == x.shape[0], lambda: "topk_ids and x differ in tokens")
    torch._check(topk_weights.shape == topk_ids.shape, lambda: "topk_weights must have the shape of topk_ids")


@torch.library.register_fake("torch_mesh::experts")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False) -> Tensor:
    _check(x, topk_ids, topk_weights)
    return x.new_empty(x.shape)


@torch.library.register_fake("torch_mesh::experts_deferred")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, deferred: int, last_layer: bool) -> Tensor:
    _check(x, topk_ids, topk_weights)
    return x.new_empty(x.shape)


@torch.library.register_fake("torch_mesh::experts_backward")
def _(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False
) -> tuple[Tensor, Tensor]:
    _check(x, topk_ids, topk_weights)
    torch._check(grad.shape == x.shape, lambda: "grad must have the shape of x")
    return x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, topk_ids, topk_weights, handle, sentinels = inputs
    ctx.save_for_backward(x, topk_ids, topk_weights, handle)
    ctx.sentinels = sentinels


@once_differentiable
def _backward(ctx, grad: Tensor):
    x, topk_ids, topk_weights, handle = ctx.saved_tensors
    x_grad, weights_grad = torch.ops.torch_mesh.experts_backward(grad, x, topk_ids, topk_weights, handle, ctx.sentinels)
    return x_grad, None, weights_grad, None, None


torch.library.register_autograd("torch_mesh::experts", _backward, setup_context=_setup_context)
