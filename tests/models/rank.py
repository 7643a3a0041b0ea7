"""One rank of a divided model: ``torchrun rank.py FOLDER`` opens and runs what FOLDER/cases.pt lists, and writes what came out beside it."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers.distributed.configuration_utils import DistributedConfig

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules import patched_modules


def run(case: dict[str, Any]) -> dict[str, Any]:
    ranks = torch.distributed.get_world_size()
    how = DistributedConfig(tp_size=ranks, ep_size=ranks, **case.get("distributed", {}))
    if case.get("whole_rest"):
        how.tp_plan = dict.fromkeys(tp_plan_of(case), "replicate")
    config = MeshConfig(**case.get("config", {}))
    dtype = case.get("dtype", torch.bfloat16)
    model = model_class(case).from_pretrained(
        case["folder"], dtype=dtype, distributed_config=how, quantization_config=config
    )
    result: dict[str, Any] = {}
    with torch.no_grad():
        if "ids" in case:
            result["logits"] = model(input_ids=case["ids"], use_cache=False)[0]  # or hidden states, without a head
        if "prompt" in case and model.can_generate():
            result["generated"] = model.generate(case["prompt"], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    if extra := case.get("extra"):
        result["extra"] = globals()[extra](model)
    if case.get("extra") == "unpatched":
        return result
    stats = torch_mesh.stats(model)
    experts = next(patched_modules(model))
    pool = experts._mesh_pool
    size = pool.engine.describe_size()
    result |= {
        "stats": stats.to_dict(),
        "text": str(stats),
        "model": repr(model),
        "pool_bytes": size["slot_bytes"],
        "record_bytes": size["record_bytes"],
        "layers": pool.layers,
        "slots": stats.slots,
        "shapes": {name: tuple(parameter.shape) for name, parameter in experts._parameters.items()},
        "linears": sorted({type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__}),
    }
    return result


def model_class(case: dict[str, Any]) -> Any:
    family, name = case["model"]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def tp_plan_of(case: dict[str, Any]) -> dict[str, str]:
    cls = model_class(case)
    with torch.device("meta"):
        model = cls(cls.config_class.from_pretrained(case["folder"]))
    # transformers wants some rule for tp_size > 1, of families too that have none.
    return dict(model.tp_plan) or {next(name for name, _ in model.named_children()): "replicate"}


def errors(model: Any) -> dict[str, str]:
    """What a divided model refuses, by what was tried."""
    from peft import LoraConfig, get_peft_model

    def save() -> None:
        model.save_pretrained("/nonexistent")

    def profile() -> None:
        torch_mesh.save_profile(model, "/nonexistent")

    def adapt() -> None:
        get_peft_model(model, LoraConfig(target_parameters=["experts.down_proj"], target_modules=[], r=2))

    def patch() -> None:
        torch_mesh.patch(model)

    found = {}
    for attempt in (save, profile, adapt, patch):
        try:
            attempt()
        except torch_mesh.MeshError as error:
            found[attempt.__name__] = f"{type(error).__name__}: {error}"
    return found


IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(2))


def trained(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of adapters beside the experts."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False))
    loss = adapted.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [each.grad for each in adapted.parameters() if each.requires_grad]


def compiled(model: Any) -> torch.Tensor:
    return generated(torch_mesh.compile(model))


def unpatched(model: Any) -> torch.Tensor:
    """A divided model as transformers has it, with this rank's weights."""
    torch_mesh.unpatch(model)
    assert not list(patched_modules(model))
    return generated(model)


def generated(model: Any, sequences: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(IDS[:sequences], max_new_tokens=6, min_new_tokens=6, do_sample=False)


def traced(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        with torch_mesh.record_trace(model, Path(folder) / "trace.npz"):
            generated(model, 1)
        return torch_mesh.load_trace(Path(folder) / "trace.npz").ids


def endless(model: Any) -> None:
    """Generates until something ends it, and writes down when a lost rank did."""
    folder, rank = Path(sys.argv[1]), torch.distributed.get_rank()
    prompt = torch.randint(3, 100, (1, 5), generator=torch.Generator().manual_seed(1))
    model.generate(prompt, max_new_tokens=2)
    (folder / f"generating{rank}").touch()
    try:
        while True:
            model.generate(prompt, max_new_tokens=100, min_new_tokens=100)
    except torch_mesh.LostRankError:
        (folder / f"lost{rank}").write_text(str(time.monotonic()))
        raise


def main(folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=float(os.environ.get("RANK_TIMEOUT", "60")))
    )
    rank = torch.distributed.get_rank()
    results = []
    for case in torch.load(folder / "cases.pt"):
        try:
            results.append(run(case))
        except torch_mesh.UnsupportedModelError as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
