"""transformers in bf16 with the whole model in memory: experts by grouped_mm, and in a loop ("eager")."""

from __future__ import annotations

from typing import Any

import torch
from serve import serve
from transformer import CachedTransformer
from transformers import AutoModelForCausalLM, PreTrainedModel
from warm import Warm


class WithExperts(CachedTransformer):
    """The model with one of transformers' implementations of experts. All share the model's weights."""

    def __init__(self, model: PreTrainedModel, implementation: str) -> None:
        super().__init__(model)
        self.implementation = implementation

    def reset(self) -> None:
        super().reset()
        self.model.set_experts_implementation(self.implementation)


def open_transformers(setup: dict[str, Any]) -> Warm:
    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.bfloat16)
    return Warm({name: WithExperts(model, name) for name in ("grouped_mm", "eager")}, setup)


if __name__ == "__main__":
    serve(open_transformers)
