"""torch_mesh on its converted checkpoint."""

from __future__ import annotations

from typing import Any

import session
import torch
import torch._inductor.config
from transformer import CachedTransformer, CompiledSteps, from_folder_or_file, holds_values
from transformers import PreTrainedModel

import torch_mesh
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import patched_modules


def opened(request: dict[str, Any]) -> PreTrainedModel:
    torch.set_num_threads(request["threads"])
    options = {name: request[name] for name in ("resident", "dense", "prefetch", "weights", "store") if name in request}
    config = torch_mesh.MeshConfig(**options)
    return from_folder_or_file(request["model"], config)


class Measured(CachedTransformer):
    def begin(self) -> None:
        torch_mesh.reset_stats(self.model)

    def facts(self) -> dict[str, Any]:
        stats = torch_mesh.stats(self.model)
        packed = sum(linear._mesh_packed.nbytes for _, linear in packed_linears(self.model))
        engine = next(patched_modules(self.model))._mesh_pool.engine.describe()
        return {
            "hit_rate": stats.hit_rate,
            "engine_bytes_read": stats.bytes_read,
            "stall_seconds": stats.stall_seconds,
            "decision_seconds": stats.decision_seconds,
            "promoted": stats.promoted,
            "anonymous_weights": self.anonymous_dense() + packed + engine["pool_bytes"],
            "dense_bytes": sum(x.nbytes for x in self.model.parameters() if holds_values(x)) + packed,
            "engine": engine,
        }


class Eager(Measured):
    """Eager steps, the default of ``generate``."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(opened(request))


class Mesh(Measured, CompiledSteps):
    def __init__(self, request: dict[str, Any]) -> None:
        # Processes that compile in parallel do not end, and their memory would count against the limit.
        torch._inductor.config.compile_threads = 1
        length = request["prompt"] + request["warm_up"] + request["measured"]
        CompiledSteps.__init__(self, opened(request), length, request.get("compiled", True))


if __name__ == "__main__":
    session.run(lambda request: Eager(request) if request.get("eager", False) else Mesh(request))
