"""transformers with accelerate's disk offload of the experts, and PEFT.

Adapters on experts do not train there: PEFT puts them on meta, like the experts' parameters. A request with ``frozen``
has no such adapters. Then the forward and backward of frozen experts are timed, with adapters on the attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import train
from accelerate_offload import Checkpoint, device_map, offload_index
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def open_model(request: dict[str, Any]) -> tuple[Any, Any]:
    config = AutoConfig.from_pretrained(request["checkpoint"])
    dtype = getattr(torch, request["dtype"])
    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=request["experts_implementation"]
        )
    dense = {name: tensor.to(dtype) for name, tensor in Checkpoint(Path(request["checkpoint"])).dense().items()}
    model.load_state_dict(dense, strict=False, assign=True)
    # The files are bf16 for every dtype: converting them is faster than reading twice the bytes.
    index = {name: entry | {"dtype": request["dtype"]} for name, entry in offload_index(Path(request["model"])).items()}
    model = accelerate.dispatch_model(model, device_map(model), offload_index=index)
    if request["frozen"]:
        return get_peft_model(model, LoraConfig(r=request["rank"], target_modules=["q_proj", "v_proj"])), dict
    return train.with_adapters(model, request["rank"]), dict


if __name__ == "__main__":
    train.run(open_model)
