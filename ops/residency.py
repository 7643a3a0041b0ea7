"""``promote``, ``prefetch``, ``lookahead``, ``evict``, ``residency`` and ``route``.

Their schemas mutate the handle, which keeps these ops in order in a compiled graph. A functional op such as ``experts``
may be reordered among them: its value is the same at any residency.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _nothing(handle: Tensor, ids: Tensor) -> None: ...


for _name in ("promote", "prefetch", "evict"):
    torch.library.register_fake(f"torch_mesh::{_name}", _nothing)


@torch.library.register_fake("torch_mesh::lookahead")
def _(
    x: Tensor,
    router_weight: Tensor,
    handle: Tensor,
    top_k: int,
    after: Tensor | None = None,
    bias: Tensor | None = None,
    scoring: str = "logits",
) -> None:
    torch._check(x.dim() == 2, lambda: f"x must be [tokens, hidden]; got {tuple(x.shape)}")
    torch._check(router_weight.dim() == 2, lambda: "router_weight must be [experts, hidden]")


@torch.library.register_fake("torch_mesh::route")
def _(scores: Tensor, topk_ids: Tensor, handle: Tensor, bias: float, kept: int) -> Tensor:
    torch._check(scores.dim() == 2, lambda: f"scores must be [tokens, experts]; got {tuple(scores.shape)}")
    torch._check(topk_ids.dim() == 2, lambda: f"topk_ids must be [tokens, k]; got {tuple(topk_ids.shape)}")
    torch._check(topk_ids.shape[0] == scores.shape[0], lambda: "topk_ids and scores differ in tokens")
    return scores.new_empty(topk_ids.shape, dtype=torch.int64)


@torch.library.register_fake("torch_mesh::residency")
def _(handle: Tensor) -> Tensor:
    experts = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(experts, dtype=torch.int8)
