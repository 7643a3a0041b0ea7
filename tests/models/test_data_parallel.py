"""Data-parallel training: two processes over one store, each with its own pool, train as one does with the whole
batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import TINY_MODELS
from torch.nn.parallel import DistributedDataParallel
from training import ROWS

import torch_mesh
from torch_mesh.store.convert import convert

STEPS = 4
# A worker is one rank. One process runs the first half of the steps, and another continues from its files.
WORKER = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
import torch_mesh

rank, world, begin, end = (int(sys.argv[index]) for index in (1, 2, 4, 5))
folder = Path(sys.argv[3])
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{begin}", rank=rank, world_size=world)
config = torch_mesh.MeshConfig(resident=0.4 if rank else 1.0)  # which changes no bit
model = AutoModelForCausalLM.from_pretrained(folder / "store", dtype=torch.float32, quantization_config=config)
state = folder / f"world-{world}"
if begin:
    model = PeftModel.from_pretrained(model, state, is_trainable=True)
else:
    torch.manual_seed(rank)  # the first process's adapters are taken
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
step_model = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
if begin:
    optimizer.load_state_dict(torch.load(state / "optimizer.pt"))
rows = torch.load(folder / "rows.pt")
own = rows.view(world, -1, rows.size(-1))[rank]
losses = []
for step in range(begin, end):
    loss = step_model(input_ids=own, labels=own, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if rank == 0:
    model.save_pretrained(state)
    torch.save(optimizer.state_dict(), state / "optimizer.pt")
result = {"losses": losses, "gradients": gradients, "pool": torch_mesh.stats(model).bytes_read}
torch.save(result, folder / f"{world}-{rank}-{end}.pt")
if world > 1:
    dist.destroy_process_group()
"""


def _run(folder: Path, world: int, begin: int, end: int) -> list[dict[str, Any]]:
    ranks = [[str(value) for value in (rank, world, folder, begin, end)] for rank in range(world)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [warm.start(WORKER, *rank, env=environment) for rank in ranks]
    for process in processes:
        _, error = process.communicate(timeout=1200)
        assert process.returncode == 0, error
    return [torch.load(folder / f"{world}-{rank}-{end}.pt") for rank in range(world)]


def _together(parts: list[dict[str, Any]]) -> list[float]:
    return torch.tensor([part["losses"] for part in parts]).mean(0).tolist()


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_whole_batch_and_resume(tmp_path: Path) -> None:
    TINY_MODELS["Qwen3MoeExperts"].build().save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "store", "int8")
    torch.save(torch.stack(ROWS[:4]), tmp_path / "rows.pt")
    one, two = ([_run(tmp_path, world, *part) for part in ((0, STEPS // 2), (STEPS // 2, STEPS))] for world in (1, 2))
    for alone, both in zip(one, two, strict=True):
        assert _together(both) == pytest.approx(alone[0]["losses"], rel=1e-4)
        assert both[0]["gradients"].keys() == both[1]["gradients"].keys() == alone[0]["gradients"].keys()
        assert any("experts" in name for name in alone[0]["gradients"])
        for name, gradient in alone[0]["gradients"].items():
            assert torch.equal(both[0]["gradients"][name], both[1]["gradients"][name]), name
            torch.testing.assert_close(
                both[0]["gradients"][name], gradient, rtol=2e-2, atol=2e-3 * gradient.abs().max()
            )
        assert all(part["pool"] > 0 for part in both)
    assert one[1][0]["losses"][-1] < one[0][0]["losses"][0]


def test_ddp_does_not_send_packed_weights() -> None:
    model = torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), resident=0.5, dense="int8")
    packed = {name for name, p in model.named_parameters() if isinstance(p, torch_mesh.PackedWeight)}
    assert packed and packed <= set(model._ddp_params_and_buffers_to_ignore)
    clone = copy.deepcopy(model)
    torch_mesh.unpatch(model, lossy=True)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    del model
    assert packed <= set(clone._ddp_params_and_buffers_to_ignore)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ddp_trains_wrappers_of_peft_and_compile() -> None:
    def patched() -> Any:
        return torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), resident=0.5)

    lora = LoraConfig(r=4, target_modules=["q_proj"])
    learned = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    wrappers = [
        get_peft_model(patched(), PromptTuningConfig(**learned)),
        get_peft_model(patched(), PrefixTuningConfig(**learned)),
        get_peft_model(patched(), lora).base_model,
        torch.compile(patched(), backend="eager"),
        torch.compile(get_peft_model(patched(), lora), backend="eager"),
    ]
    for wrapper in wrappers:
        DistributedDataParallel(wrapper)(input_ids=ROWS[0][None], labels=ROWS[0][None]).loss.backward()
        assert any(parameter.grad is not None for parameter in wrapper.parameters())


@pytest.mark.usefixtures("one_process")
def test_ddp_around_a_patched_submodule_names_the_attribute_to_set() -> None:
    around = torch.nn.ModuleDict({"model": torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), resident=0.5)})
    with pytest.raises(torch_mesh.MeshError, match="_ddp_params_and_buffers_to_ignore"):
        DistributedDataParallel(around)
