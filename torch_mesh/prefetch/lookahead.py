"""Predict the next layer's experts with its router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_mesh.models.families import ExpertsLayer, find_router, router_unsupported_reason
from torch_mesh.prefetch.predictor import fitted_routers, load_predictor


@dataclass(frozen=True)
class NextLayer:
    """The layer after another one: its router's module or a fitted one, its handle, and its number of experts per
    token.

    Holds the module instead of its weight, which ``.to()`` may replace; inside this object torch does not register it
    as a child.
    """

    router: Any
    handle: torch.Tensor
    top_k: int

    def prefetch(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Start to read the experts that the next layer's router would choose for hidden_states [tokens, hidden].

        A hint. ``output`` is that of the current layer: predicted experts are read after those that this layer needs
        itself.
        """
        if hint := self.hint(hidden_states):
            weight, handle, top_k, bias, scoring = hint
            torch.ops.torch_mesh.lookahead(hidden_states, weight, handle, top_k, output, bias, scoring)

    @property
    def device(self) -> torch.device:
        """Of the next layer's own router; a fitted one is always on the CPU."""
        device: torch.device = (getattr(self.router, "own", None) or self.router).weight.device
        return device

    def hint(self, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        """The same prediction as the last arguments of the ops that compute experts, which read these experts after
        their own; empty where the router or ``hidden_states`` is not on the CPU, since a hint is not worth a copy."""
        router = self.router
        weight = router.weight
        if not (hidden_states.is_cpu and weight.is_cpu):
            return ()
        return weight, self.handle, self.top_k, router.bias, router.scoring


def connect(model: nn.Module, layers: Sequence[ExpertsLayer], predictor: str | None) -> None:
    """Tell each patched layer, in order, its next layer, or why lookahead is unsupported. See ``check_predictor``."""
    routers: list[Any] = [None, *(find_router(model, layer) for layer in layers[1:])]
    if predictor is not None:
        routers = [*fitted_routers(model, layers, load_predictor(predictor, layers).weights)]
    previous = [layers[-1], *layers[:-1]]  # the first layer runs after the last one, for the next token
    for layer, before, router in zip(layers, previous, routers, strict=True):
        module: Any = before.module
        following: Any = layer.module
        if router is not None:
            # A clone: the op mutates its handle, and that of the layer's products is kept for their backward.
            module._mesh_next = NextLayer(router, following._mesh_handle.clone(), layer.top_k)
        elif layer is not layers[0]:  # no model predicts the first layer with a router
            module._mesh_lookahead_unsupported_reason = f"of the next layer, {router_unsupported_reason(model, layer)}"


def check_predictor(layers: Sequence[ExpertsLayer], path: str | None, model: nn.Module | None = None) -> None:
    """Check the predictor in ``path`` before expensive work. ``model``: one whose routers have their weights.

    Raises StoreError for a predictor that does not fit these layers, MeshError for one of another ``model``.
    """
    if path is None:
        return
    predictor = load_predictor(path, layers)
    if model is not None:
        predictor.check_model(model, layers, path)
