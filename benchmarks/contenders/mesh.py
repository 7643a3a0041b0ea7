"""torch_mesh on its converted checkpoint."""

from __future__ import annotations

from typing import Any

import session
import torch
from transformer import CachedTransformer
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.modules import patched_modules


class Mesh(CachedTransformer):
    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        config = torch_mesh.MeshConfig(resident=request["resident"])
        super().__init__(AutoModelForCausalLM.from_pretrained(request["model"], quantization_config=config))

    def begin(self) -> None:
        torch_mesh.reset_stats(self.model)

    def facts(self) -> dict[str, Any]:
        stats = torch_mesh.stats(self.model)
        engine = next(patched_modules(self.model))._mesh_pool.engine.describe()
        return {
            "hit_rate": stats.hit_rate,
            "engine_bytes_read": stats.bytes_read,
            "stall_seconds": stats.stall_seconds,
            "anonymous_weights": self.anonymous_dense() + engine["pool_bytes"],
            "engine": engine,
        }


if __name__ == "__main__":
    session.run(Mesh)
