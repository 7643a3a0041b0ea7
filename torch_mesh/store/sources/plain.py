"""Unquantized tensors of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from torch_mesh.store.header import Tensor
from torch_mesh.store.sources.layout import Layout, Nearest, Shape, nearest_to


class Plain(Layout):
    title = "unquantized"
    quantized = False

    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        return parts["codes"].shape

    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        return parts["codes"].float()

    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        return nearest_to(parts["codes"].dtype)
