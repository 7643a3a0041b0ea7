"""torch_mesh with PEFT's adapters on its experts."""

from __future__ import annotations

from typing import Any

import torch
import train
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.modules.experts import patched_modules


def open_model(request: dict[str, Any]) -> tuple[Any, Any]:
    config = torch_mesh.MeshConfig(resident=request["resident"])
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype, quantization_config=config)
    own = (each for each in model.parameters() if not each.is_meta and not isinstance(each, torch_mesh.PackedWeight))
    dense_bytes = sum(each.nbytes for each in own)
    engine = next(patched_modules(model))._mesh_pool.engine
    record_bytes = engine.describe()["record_bytes"]

    def after_step() -> dict[str, Any]:
        engine.drain()  # reads ahead for the next step do not count for this one
        stats = torch_mesh.stats(model)
        torch_mesh.reset_stats(model)
        return {
            "max_reads": max(max(layer.experts.promoted) for layer in stats.per_layer),
            "reads": stats.bytes_read / record_bytes,
            "stall_seconds": stats.stall_seconds,
            "pool_bytes": engine.describe()["pool_bytes"],
            "workspace_bytes": engine.describe()["workspace_bytes"],
            "dense_bytes": dense_bytes,
        }

    return train.with_adapters(model, request["rank"]), after_step


if __name__ == "__main__":
    train.run(open_model)
