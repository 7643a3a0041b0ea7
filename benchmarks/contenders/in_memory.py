"""transformers with the whole model in memory, the usual setting."""

from __future__ import annotations

from typing import Any

import session
import torch
from transformer import CachedTransformer
from transformers import AutoModelForCausalLM


class InMemory(CachedTransformer):
    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        super().__init__(AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16))

    def begin(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"anonymous_weights": self.anonymous_dense()}


if __name__ == "__main__":
    session.run(InMemory)
