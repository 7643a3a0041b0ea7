"""``gather_rows`` and ``prefetch_rows``, rows of embedding tables that are read from files: fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def _check(ids: Tensor) -> None:
    torch._check(ids.dtype in (torch.int32, torch.int64), lambda: f"row ids must be int32 or int64; got {ids.dtype}")


@torch.library.register_fake("torch_mesh::gather_rows")
def _(ids: Tensor, handle: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    _check(ids)
    return ids.new_empty((*ids.shape, dim), dtype=dtype)


@torch.library.register_fake("torch_mesh::prefetch_rows")
def _(ids: Tensor, handle: Tensor) -> None:
    _check(ids)
