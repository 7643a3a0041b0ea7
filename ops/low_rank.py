"""``grouped_low_rank``: adapters of experts that run unfused, beside their ``grouped_linear``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# x_sorted [rows, in] with rows grouped by expert, offsets int64 [experts + 1], a [experts, rank, in], b [experts, rank,
# out] -> (x · a^T) · b of each row's expert, fp32 [rows, out]. Rows after the last offset get 0. Reads only experts
# that have rows.
_FORWARD = "torch_mesh::grouped_low_rank"
_BACKWARD = "torch_mesh::grouped_low_rank_backward"
_TAGS = (torch.Tag.cudagraph_unsafe,)  # sizes depend on values


def _with_rows(offsets: Tensor) -> list[tuple[int, slice]]:
    bounds = offsets.tolist()
    return [
        (expert, slice(first, end)) for expert, (first, end) in enumerate(itertools.pairwise(bounds)) if end > first
    ]


def _exact(x: Tensor) -> torch.autocast:
    """Disable autocast, which also applies inside custom ops: products would be rounded and not match their output's
    dtype."""
    return torch.autocast(x.device.type, enabled=False)


@torch.library.custom_op(_FORWARD, mutates_args=(), tags=_TAGS)
def grouped_low_rank(x_sorted: Tensor, offsets: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = x_sorted.new_empty((x_sorted.size(0), b.size(2)), dtype=torch.float32)
    out[int(offsets[-1]) :] = 0
    with _exact(x_sorted):
        for expert, rows in _with_rows(offsets):
            torch.mm(x_sorted[rows].float() @ a[expert].float().t(), b[expert].float(), out=out[rows])
    return out


@torch.library.custom_op(_BACKWARD, mutates_args=(), tags=_TAGS)
def grouped_low_rank_backward(
    grad: Tensor, x_sorted: Tensor, offsets: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x_grad, a_grad, b_grad = torch.empty_like(x_sorted), torch.zeros_like(a), torch.zeros_like(b)
    x_grad[int(offsets[-1]) :] = 0
    with _exact(x_sorted):
        for expert, rows in _with_rows(offsets):
            x, own = x_sorted[rows].float(), grad[rows].float()
            inner, inner_grad = x @ a[expert].float().t(), own @ b[expert].float().t()
            x_grad[rows] = (inner_grad @ a[expert].float()).to(x_grad.dtype)
            a_grad[expert] = (inner_grad.t() @ x).to(a_grad.dtype)
            b_grad[expert] = (inner.t() @ own).to(b_grad.dtype)
    return x_grad, a_grad, b_grad


@grouped_low_rank.register_fake
def _(x_sorted: Tensor, offsets: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x_sorted.new_empty((x_sorted.size(0), b.size(2)), dtype=torch.float32)


@grouped_low_rank_backward.register_fake
def _(grad: Tensor, x_sorted: Tensor, offsets: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x_sorted), torch.empty_like(a), torch.empty_like(b)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor):
    x_sorted, offsets, a, b = ctx.saved_tensors
    x_grad, a_grad, b_grad = grouped_low_rank_backward(grad, x_sorted, offsets, a, b)
    return x_grad, None, a_grad, b_grad


grouped_low_rank.register_autograd(_backward, setup_context=_keep)
