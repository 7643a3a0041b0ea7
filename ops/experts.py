"""``experts``, ``experts_adapted``, their backward, ``experts_deferred`` and ``experts_fallback``: fake kernels.

The autograd formula is in csrc/bindings/autograd.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    torch._check(x.dim() == 2, lambda: f"x must be [tokens, hidden]; got {tuple(x.shape)}")
    torch._check(topk_ids.dim() == 2, lambda: f"topk_ids must be [tokens, k]; got {tuple(topk_ids.shape)}")
    torch._check(topk_ids.shape[0] == x.shape[0], lambda: "topk_ids and x differ in tokens")
    torch._check(topk_weights.shape == topk_ids.shape, lambda: "topk_weights must have the shape of topk_ids")


def _forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *_: object, **__: object) -> Tensor:
    check_shapes(x, topk_ids, topk_weights)
    return x.new_empty(x.shape)


# The ops differ in the arguments that follow, which do not affect the output's shape.
for _name in ("experts", "experts_adapted", "experts_deferred", "experts_fallback"):
    torch.library.register_fake(f"torch_mesh::{_name}", _forward)


@torch.library.register_fake("torch_mesh::experts_backward")
def _(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False
) -> tuple[Tensor, Tensor]:
    check_shapes(x, topk_ids, topk_weights)
    torch._check(grad.shape == x.shape, lambda: "grad must have the shape of x")
    return x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape)


@torch.library.register_fake("torch_mesh::experts_adapted_backward")
def _(
    grad: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    handle: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scaling: float,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scaling: float,
    sentinels: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_shapes(x, topk_ids, topk_weights)
    torch._check(grad.shape == x.shape, lambda: "grad must have the shape of x")

    def like(factor: Tensor | None) -> Tensor:
        return x.new_empty(0, dtype=torch.float32) if factor is None else torch.empty_like(factor, device=x.device)

    of_inputs = x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape)
    return *of_inputs, like(gate_up_a), like(gate_up_b), like(down_a), like(down_b)
