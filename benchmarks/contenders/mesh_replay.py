"""torch_mesh with the experts of a recorded trace instead of those of the random model's routers.

Routers would predict other experts, so prefetch is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import session
import torch
from mesh import Eager, Measured, Mesh

from torch_mesh.modules.experts import patched_modules
from torch_mesh.routing.traces import load_trace


class Forced(Measured):
    """A mixin before the class that opens the model and computes its steps."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)  # type: ignore[arg-type]
        trace = load_trace(request["trace"])
        self.routing = torch.from_numpy(trace.ids).long()  # [tokens, layers, top_k]
        self.traced = 0  # tokens of the trace that were used; `position` is the cache's
        self.chosen = torch.zeros(trace.layers, 1, trace.top_k, dtype=torch.long)
        for layer, module in enumerate(patched_modules(self.model)):
            module.register_forward_pre_hook(self._force(layer))

    def _force(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, _ids, weights = arguments
            return hidden, self.chosen[layer], weights

        return hook

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        routing_rows = self.routing[self.traced : self.traced + len(tokens)].transpose(0, 1)
        self.traced += len(tokens)
        if routing_rows.shape == self.chosen.shape:
            self.chosen.copy_(routing_rows)  # in place, since compiled steps read this tensor
        else:
            self.chosen = routing_rows.contiguous()
        logits = super().forward(tokens)
        if self.chosen.size(1) != 1:
            self.chosen = self.chosen[:, :1].clone()
        return logits


class EagerReplay(Forced, Eager):
    pass


class MeshReplay(Forced, Mesh):
    pass


if __name__ == "__main__":
    session.run(lambda request: EagerReplay(request) if request.get("eager", False) else MeshReplay(request))
