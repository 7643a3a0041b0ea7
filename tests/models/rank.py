"""A rank of a divided model. It opens and runs the cases in FOLDER/cases.pt, and writes their results to FOLDER.

``rank.py FOLDER RANKS`` starts all ranks. Without RANKS the environment says which rank this is, as with torchrun."""

from __future__ import annotations

import copy
import datetime
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peft  # noqa: F401  imported once for all ranks
import torch
import torch.distributed
from transformers.distributed.configuration_utils import DistributedConfig

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.experts import patched_modules


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
            result["logits"] = model(input_ids=case["ids"], use_cache=False)[
                0
            ]  # hidden states in a model without a head
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
    # With tp_size > 1 transformers needs some rule, also for families that have none.
    return dict(model.tp_plan) or {next(name for name, _ in model.named_children()): "replicate"}


def errors(model: Any) -> dict[str, str]:
    """The errors of calls that a divided model refuses, by the name of the call."""
    from peft import LoraConfig, get_peft_model

    def save() -> None:
        model.save_pretrained("/nonexistent")

    def profile() -> None:
        torch_mesh.save_profile(model, "/nonexistent")

    rank = torch.distributed.get_rank()

    def on_experts(seed: int) -> Any:
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(target_parameters=["experts.down_proj"], target_modules=[], r=2))

    def merge() -> None:
        adapted = on_experts(0)
        try:
            adapted.merge_and_unload()
        finally:
            adapted.unload()

    def seeds() -> None:
        adapted = on_experts(rank)
        try:
            adapted(input_ids=IDS)
        finally:
            adapted.unload()

    def patch() -> None:
        torch_mesh.patch(model)

    def clone() -> None:
        copy.deepcopy(model)

    def train_copy() -> None:
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))

    found = {}
    for attempt in (save, profile, patch, merge, seeds, clone, train_copy):
        try:
            attempt()
        except torch_mesh.MeshError as error:
            found[attempt.__name__] = f"{type(error).__name__}: {error}"
    return found


def batches(model: Any) -> list[str]:
    """The errors of ranks that get different batches, in the first forward and later. Ranks can go on after each."""
    rank, messages = torch.distributed.get_rank(), []
    for _ in range(2):
        try:
            model(input_ids=IDS + rank)
        except torch_mesh.MeshError as error:
            messages.append(str(error))
        model(input_ids=IDS)
    return messages


def embeddings(model: Any) -> str:
    """The error of ranks that get different ``inputs_embeds`` while adapters train. Each rank has the model's whole
    embedding, for a divided one would mix the ranks' inputs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS))
    try:
        adapted(inputs_embeds=model.get_input_embeddings()(IDS + torch.distributed.get_rank()))
    except torch_mesh.MeshError as error:
        return str(error)
    return ""


def drawn(model: Any) -> tuple[str, torch.Tensor]:
    """The error when ranks draw tokens with different seeds, and the tokens that they draw with one seed."""
    message = ""
    how: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": True}
    torch.manual_seed(torch.distributed.get_rank())
    try:
        model.generate(IDS, **how)
    except torch_mesh.MeshError as error:
        message = str(error)
    torch.manual_seed(0)
    return message, model.generate(IDS, **how)


IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(2))


def trained(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of adapters on experts and on linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS, init_lora_weights=False))
    loss = adapted.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [each.grad for each in adapted.parameters() if each.requires_grad]


ADAPTERS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "r": 2,
}


def adapted(model: Any, checkpointing: bool = False) -> dict[str, Any]:
    """Train adapters on experts and on linear layers for 20 steps. Returns losses, norms of gradients, the trained
    adapters, and the logits after training."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found: dict[str, Any] = {"losses": [], "norms": []}
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    # With a small eps Adam would scale gradients that are only rounding up to the size of the others.
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-3, eps=1e-4)
    for _ in range(20):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found["logits"] = adapted.eval()(input_ids=IDS, use_cache=False).logits
    found["trained"] = {name: each.detach().clone() for name, each in trained.items()}
    if torch.distributed.is_initialized():  # every rank loads what rank 0 saves
        from peft import PeftModel

        folder = Path(sys.argv[1]) / "adapter"
        adapted.save_pretrained(folder, is_main_process=torch.distributed.get_rank() == 0)
        torch.distributed.barrier()
        with torch.no_grad():
            again = PeftModel.from_pretrained(adapted.unload(), folder).eval()
            found["loaded"] = again(input_ids=IDS, use_cache=False).logits
    return found


def adapted_with_checkpointing(model: Any) -> dict[str, Any]:
    return adapted(model, checkpointing=True)


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(input_ids=IDS, labels=IDS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trained_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def resumed(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The adapters of ``folder`` after three more steps, with the optimizer's moments that are in the folder."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, folder, is_trainable=True).train()
    optimizer = torch.optim.AdamW(trained_parameters(adapted).values(), lr=2e-3, eps=1e-4)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    steps(adapted, optimizer, 3)
    return trained_parameters(adapted)


def in_parts(model: Any) -> dict[str, Any]:
    """Adapters after six steps at once, and after three steps, a checkpoint by rank 0, and three more steps."""
    from peft import LoraConfig, get_peft_model

    folder = Path(sys.argv[1]) / "checkpoint"
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS)).train()
    optimizer = torch.optim.AdamW(trained_parameters(adapted).values(), lr=2e-3, eps=1e-4)
    steps(adapted, optimizer, 3)
    first = torch.distributed.get_rank() == 0
    adapted.save_pretrained(folder, is_main_process=first)
    if first:
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    steps(adapted, optimizer, 3)
    at_once = {name: each.detach().clone() for name, each in trained_parameters(adapted).items()}
    torch.distributed.barrier()
    again = resumed(adapted.unload(), folder)
    return {"at once": at_once, "in parts": {name: each.detach().clone() for name, each in again.items()}}


def trainer(model: Any) -> str:
    """The error of constructing a Trainer."""
    from peft import LoraConfig, get_peft_model
    from training import trainer_for

    try:
        trainer_for(get_peft_model(model, LoraConfig(**ADAPTERS)), Path(sys.argv[1]) / "trainer")
    except ValueError as error:
        return str(error)
    return ""


def compiled(model: Any) -> torch.Tensor:
    return generated(torch_mesh.compile(model))


def compiled_adapted(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that a model with adapters on its experts generates, eager and compiled."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS, init_lora_weights=False)).eval()
    plain = generated(adapted.base_model.model)
    return plain, generated(torch_mesh.compile(adapted.base_model.model))


def unpatched(model: Any) -> torch.Tensor:
    """The tokens of a divided model after unpatching, when transformers computes with this rank's weights."""
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
    """Generate until an error. If it is a LostRankError, write its time to a file."""
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


def endless_training(model: Any) -> None:
    """Train adapters on experts until an error. If a rank was lost, write the time to a file."""
    from peft import LoraConfig, get_peft_model

    folder, rank = Path(sys.argv[1]), torch.distributed.get_rank()
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS)).train()
    optimizer = torch.optim.AdamW(trained_parameters(adapted).values(), lr=1e-4)
    steps(adapted, optimizer, 1)
    (folder / f"training{rank}").touch()
    try:
        steps(adapted, optimizer, 1_000_000)
    except (
        torch_mesh.LostRankError,
        RuntimeError,
    ):  # in a backward of transformers' dispatch a lost rank is an error of gloo
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


def fork(ranks: int) -> bool:
    """Fork ``ranks`` processes, so that modules are imported only once. Returns True in each of them, and False in the
    parent when all have ended. The first one that fails ends the others."""
    running = set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            torch.set_num_threads(torch.get_num_threads())  # makes a new thread pool, see warm.py
            return True
        running.add(child)
    while running:
        ended, status = os.wait()
        running.remove(ended)
        if status != 0:
            for each in running:
                os.kill(each, signal.SIGKILL)
            sys.exit(f"a rank ended with status {status}")
    return False


if __name__ == "__main__":
    if len(sys.argv) < 3 or fork(int(sys.argv[2])):
        main(Path(sys.argv[1]))
