"""Refusals: models divided among processes in any way other than by experts, and experts whose forward was replaced."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from tiny_models import build, logits_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from upstream import needs_ep_size

import torch_mesh
from torch_mesh import MeshConfig, UnsupportedModelError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert

REFUSED = r"distributed over several processes.*Supported: expert parallelism.*tp_size=N, ep_size=N.*leave out"


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is rank 0 of two, in a fake process group that sends nothing."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


DIVIDED: dict[str, Callable[[], dict[str, Any]]] = {
    "tp": lambda: {"distributed_config": DistributedConfig(tp_size=2)},
    "dict": lambda: {"distributed_config": {"tp_size": 2}},
    "tp_plan": lambda: {"tp_plan": "auto"},
    "fsdp": lambda: {"distributed_config": DistributedConfig(fsdp_size=2)},
    "fsdp and ep": lambda: {"distributed_config": DistributedConfig(fsdp_size=2, ep_size=2)},
    "replicas": lambda: {"distributed_config": DistributedConfig(dp_replicate_size=2)},
    "pp": lambda: {"distributed_config": DistributedConfig(pp_size=2)},
}


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=needs_ep_size) if how in ("fsdp and ep", "replicas") else how for how in DIVIDED]
)
@pytest.mark.parametrize("converted", [False, True])
def test_from_pretrained_refuses_every_division_but_that_of_experts(how: str, converted: bool, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    build().save_pretrained(folder)
    if converted:
        convert(folder, tmp_path / "store", "int8")
        folder = tmp_path / "store"
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(), **DIVIDED[how]())


@pytest.mark.usefixtures("one_of_two")
def test_from_pretrained_refuses_fsdps_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build().save_pretrained(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(UnsupportedModelError, match="launched for FSDP.*Supported: expert parallelism"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MeshConfig())


@needs_ep_size
def test_a_config_that_divides_nothing_changes_nothing(tmp_path: Path, ids: torch.Tensor) -> None:
    build().save_pretrained(tmp_path)
    how: dict[str, Any] = {"distributed_config": DistributedConfig(), "quantization_config": MeshConfig(resident=0.4)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    assert torch.equal(logits_of(model, ids), logits_of(torch_mesh.patch(_whole(tmp_path)), ids))


def _whole(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def _fully_shard(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: PreTrainedModel) -> PreTrainedModel:
    model.save_pretrained(os.environ["SAVED"])
    how = DistributedConfig(tp_size=2, ep_size=2)
    return AutoModelForCausalLM.from_pretrained(os.environ["SAVED"], distributed_config=how)


def _fully_sharded(model: PreTrainedModel) -> torch.nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("divide", [_fully_shard, _fully_sharded, pytest.param(_tensor_parallel, marks=needs_ep_size)])
def test_patch_refuses_a_divided_model(
    divide: Callable[[PreTrainedModel], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVED", str(tmp_path))
    model = divide(build())
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        torch_mesh.patch(model)
    assert not list(patched_modules(model))


def test_experts_whose_forward_was_replaced_are_refused() -> None:
    model = build()
    experts = model.model.layers[1].mlp.experts
    whole = experts.forward
    experts.forward = types.MethodType(lambda self, *args: whole(*args), experts)
    with pytest.raises(UnsupportedModelError, match=r"forward of model\.layers\.1\.mlp\.experts has been replaced"):
        torch_mesh.patch(model)
    assert not list(patched_modules(model))
    del experts.forward
    torch_mesh.patch(model)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("dense", ["none", "bf16"])
def test_a_model_with_hooks_of_accelerate_is_patched(removed: bool, dense: str, ids: torch.Tensor) -> None:
    model = build()
    plain = logits_of(model, ids)
    expected = logits_of(torch_mesh.patch(copy.deepcopy(model), dense=dense), ids)
    attach_align_device_hook(model, execution_device="cpu")
    if removed:  # removal leaves the module's forward as a bound attribute
        remove_hook_from_submodules(model)
    torch_mesh.patch(model, resident=0.4, dense=dense)
    assert torch.equal(logits_of(model, ids), expected)
    assert torch_mesh.stats(model).cold_misses > 0
    torch_mesh.unpatch(model)
    assert torch.equal(logits_of(model, ids), plain)
    remove_hook_from_submodules(model)
    assert torch.equal(logits_of(model, ids), plain)
