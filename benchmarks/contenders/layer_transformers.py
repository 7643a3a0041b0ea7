"""transformers' own experts in bf16 on the layer of layer_peers.py: grouped_mm, and the loop over experts ("eager")."""

from __future__ import annotations

from typing import Any

import torch
from layer import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Array, Layer, Variant, repeated, weights
from serve import serve
from torch_tensors import bf16, to_numpy
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def variant(implementation: str, gate_up: torch.Tensor, down: torch.Tensor) -> Variant:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.load_state_dict({"gate_up_proj": gate_up, "down_proj": down}, assign=True)

    def prepare(x: Array, ids: Array) -> tuple[torch.Tensor, ...]:
        return bf16(x), torch.from_numpy(ids), torch.full(ids.shape, 1 / TOP_K, dtype=torch.bfloat16)

    @torch.inference_mode()
    def forward(arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return experts(*arguments)

    return Variant(prepare, forward, to_numpy, gate_up.nbytes + down.nbytes)


def open_layer(setup: dict[str, Any]) -> Layer:
    torch.set_num_threads(setup["threads"])
    gate_up, down = (bf16(repeated(distinct)) for distinct in weights(setup["seed"]))
    return Layer({name: variant(name, gate_up, down) for name in ("grouped_mm", "eager")}, setup["seed"])


if __name__ == "__main__":
    serve(open_layer)
