"""transformers with accelerate's disk offload of the experts, the rest in memory.

usage: accelerate_offload.py REQUEST.json RESULT.json
       accelerate_offload.py --prepare CHECKPOINT FOLDER      writes the offload folder, one layer at a time
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import session
import torch
from safetensors import safe_open
from transformer import CachedTransformer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.accelerate import offload_weight

EXPERTS = ".mlp.experts."


class Checkpoint:
    """The tensors of a sharded checkpoint by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def dense(self) -> dict[str, torch.Tensor]:
        return {name: self[name].clone() for name in self.shards if EXPERTS not in name}

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.shards[name], framework="pt") as file:
            return file.get_tensor(name)


def prepare(source: Path, folder: Path) -> None:
    """Write the files of ``from_pretrained(device_map=…, offload_folder=folder)``: one per stacked parameter."""
    checkpoint, config = Checkpoint(source), AutoConfig.from_pretrained(source)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(*projections: str, prefix: str = prefix) -> torch.Tensor:
            experts = range(config.num_experts)
            return torch.stack(
                [torch.cat([checkpoint[f"{prefix}.{e}.{p}.weight"] for p in projections]) for e in experts]
            )

        offload_weight(stack("gate_proj", "up_proj"), f"{prefix}.gate_up_proj", str(folder), index)
        offload_weight(stack("down_proj"), f"{prefix}.down_proj", str(folder), index)
    for entry in index.values():  # relative, so that the folder can be moved
        entry["safetensors_file"] = Path(entry["safetensors_file"]).name
    (folder / "index.json").write_text(json.dumps(index))


def offload_index(folder: Path) -> dict[str, Any]:
    index = json.loads((folder / "index.json").read_text())
    return {
        name: {**entry, "safetensors_file": str(folder / entry["safetensors_file"])} for name, entry in index.items()
    }


class AccelerateOffload(CachedTransformer):
    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        config = AutoConfig.from_pretrained(request["checkpoint"])
        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        dense = Checkpoint(Path(request["checkpoint"])).dense()
        model.load_state_dict(dense, strict=False, assign=True)
        index = offload_index(Path(request["model"]))
        super().__init__(accelerate.dispatch_model(model, device_map(model), offload_index=index))

    def begin(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"anonymous_weights": self.anonymous_dense(), "version": accelerate.__version__}


def device_map(model: torch.nn.Module) -> dict[str, str]:
    """Return a device map of all modules with own parameters: experts on disk, the others on the CPU."""
    places = {}
    for name, module in model.named_modules():
        if (
            next(module.parameters(recurse=False), None) is not None
            or next(module.buffers(recurse=False), None) is not None
        ):
            places[name] = "disk" if name.endswith(EXPERTS.rstrip(".")) else "cpu"
    return places


if __name__ == "__main__":
    if sys.argv[1] == "--prepare":
        prepare(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        session.run(AccelerateOffload)
