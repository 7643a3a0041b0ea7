"""torch_mesh on its converted checkpoint: the prompt eagerly, decode steps compiled, as ``generate`` does with a static cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import session
import torch
from transformer import CachedTransformer
from transformers import AutoModelForCausalLM, StaticCache

import torch_mesh
from torch_mesh.dense import packed_linears
from torch_mesh.modules import patched_modules


class Mesh(CachedTransformer):
    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        config = torch_mesh.MeshConfig(resident=request["resident"], dense=request["dense"])
        super().__init__(AutoModelForCausalLM.from_pretrained(request["model"], quantization_config=config))
        length = request["prompt"] + request["warm_up"] + request["measured"]
        self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        self.step = torch.compile(self.model, fullgraph=True, dynamic=False)
        self.position = 0

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        last = self.position + len(tokens)
        positions = torch.arange(self.position, last).unsqueeze(0)
        self.position = last
        run = self.step if len(tokens) == 1 else self.model
        ids = torch.tensor([list(tokens)])
        output = run(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[0, -1].float()

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
            "anonymous_weights": self.anonymous_dense() + packed + engine["pool_bytes"],
            "dense_bytes": sum(x.nbytes for x in self.model.parameters() if not x.is_meta) + packed,
            "engine": engine,
        }


if __name__ == "__main__":
    session.run(Mesh)
