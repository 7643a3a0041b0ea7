"""Which router foretells the experts of the next layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .config import MeshConfig
from .families import ExpertsLayer


@dataclass(frozen=True)
class NextLayer:
    """The layer that runs after another one: its router's module, its handle, and how many experts a token takes there.

    The module and not its weight, which ``.to()`` may replace; inside this object, so that torch does not take it for a
    child of the module that looks ahead.
    """

    router: Any
    handle: torch.Tensor
    top_k: int

    def prefetch(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Starts reading what the next layer's router would choose for hidden_states [tokens, hidden]: a hint, no more.

        ``output`` is that of the layer that looks ahead: guesses are to be read after what it needs itself.
        """
        torch.ops.torch_mesh.lookahead(hidden_states, self.router.weight, self.handle, self.top_k, output)


def connect(model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig) -> None:
    """Tells each patched layer, in the order in which they run, of the next one. Layers without a plain router get no hints."""
    if config.prefetch == "off":
        return
    for layer, following in itertools.pairwise(layers):
        router = find_router(model, following)
        module: Any = layer.module
        next_module: Any = following.module
        if router is not None:
            module._mesh_next = NextLayer(router, next_module._mesh_handle, following.top_k)


def find_router(model: nn.Module, layer: ExpertsLayer) -> nn.Module | None:
    """The module beside the experts whose weight is [experts, hidden]; None if there is no such one or several."""
    parent = model.get_submodule(layer.path.rpartition(".")[0])
    routers = [
        child
        for child in parent.children()
        if child is not layer.module and _shape(child) == (layer.num_experts, layer.hidden)
    ]
    return routers[0] if len(routers) == 1 else None


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
