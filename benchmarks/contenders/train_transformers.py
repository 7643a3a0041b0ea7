"""Plain transformers and PEFT, all in memory."""

from __future__ import annotations

from typing import Any

import torch
import train
from transformers import AutoModelForCausalLM


def open_model(request: dict[str, Any]) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        request["model"],
        dtype=getattr(torch, request["dtype"]),
        experts_implementation=request["experts_implementation"],
    )
    return train.with_adapters(model, request["rank"]), dict


if __name__ == "__main__":
    train.run(open_model)
