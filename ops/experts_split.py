"""``experts_split``: a layer whose experts lie partly on the device of the hidden states, partly in the pool.

In Python, because what it launches is Triton. The output is the sum of two parts in fp32, rounded once: what the device makes,
in the order of the choices, and what the CPU makes, likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .device import DeviceLayer, find
from .experts import check_shapes

_library = torch.library.Library("torch_mesh", "FRAGMENT")
# x, topk_ids, topk_weights and the result as in `experts`, on the device that the layer's experts were placed on. An id outside
# [0, experts) is an error where the CPU sees it; where a layer lies on the device as a whole, nobody waits for the device to
# look, and the token becomes NaN.
_library.define(
    "experts_split(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, bool sentinels=False) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@torch.library.impl(_library, "experts_split", "CompositeExplicitAutograd")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False) -> Tensor:
    layer = find(handle)
    _check_inputs(x, topk_ids, topk_weights, layer)
    from . import experts_triton  # triton is there where experts could be placed

    if layer.complete:
        return experts_triton.experts(x, topk_ids, topk_weights, layer, sentinels, x.dtype)
    # The copies wait for what made them; then the device has its share to do while the CPU does its own.
    host_x, host_ids, host_weights = x.cpu().float(), topk_ids.cpu(), topk_weights.cpu()
    here = experts_triton.experts(x, topk_ids, topk_weights, layer, sentinels, torch.float32)
    cold = torch.ops.torch_mesh.experts(
        host_x, _cold_ids(host_ids, layer, sentinels), host_weights, handle, sentinels=True
    )
    return (here + cold.to(x.device)).to(x.dtype)


def _cold_ids(ids: Tensor, layer: DeviceLayer, sentinels: bool) -> Tensor:
    """The same ids, with the sentinel for each that the device computes. Raises ValueError for one that names no expert."""
    experts = layer.here.numel()
    known = (ids >= 0) & (ids < experts)
    wrong = ids < 0 if sentinels else ~known
    if wrong.any():
        token, choice = wrong.nonzero()[0].tolist()
        raise ValueError(f"expert id {ids[token, choice]} of token {token}, choice {choice} is outside [0, {experts})")
    return torch.where(known & layer.here[ids.clamp(max=experts - 1)], experts, ids)


def _check_inputs(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer) -> None:
    check_shapes(x, topk_ids, topk_weights)
    hidden, device = layer.record.hidden, layer.records.device
    if x.size(1) != hidden:
        raise ValueError(f"x must be [tokens, hidden={hidden}]; got {list(x.shape)}")
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the layer's experts were placed on {device}")
    if topk_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_ids has dtype {topk_ids.dtype}; allowed: int64, int32")
    for name, tensor in (("x", x), ("topk_weights", topk_weights)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: a floating dtype")


@torch.library.register_fake("torch_mesh::experts_split")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False) -> Tensor:
    check_shapes(x, topk_ids, topk_weights)
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.sentinels = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """That of ``experts``, on the CPU: the pool has every expert, those on the device too."""
    x_grad, weights_grad = torch.ops.torch_mesh.experts_backward(grad, *ctx.saved_tensors, ctx.sentinels)
    return x_grad, None, weights_grad, None, None


torch.library.register_autograd("torch_mesh::experts_split", _backward, setup_context=_keep, lib=_library)
