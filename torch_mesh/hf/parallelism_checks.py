"""Refuse unsupported ways to distribute a model, and experts with a replaced forward."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf.compat import OLD_FORWARD
from torch_mesh.models.families import ExpertsLayer

_WHAT_WORKS = (
    "Supported: expert parallelism over N ranks, by from_pretrained(..., "
    "distributed_config=DistributedConfig(tp_size=N, ep_size=N)) under torchrun --nproc-per-node N; device_map= over "
    "several devices of one process; and a whole model in each process (torch-mesh share keeps a converted "
    "folder's experts in memory once). Otherwise leave out distributed_config, tp_plan, FSDP and ZeRO-3."
)
_SIZES = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size")


def check_undivided(model: nn.Module) -> None:
    """Raises UnsupportedModelError unless the loaded ``model`` is whole in this process."""
    if how := _division(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is distributed over several processes ({how}), but torch_mesh.patch needs a "
            f"whole model. {_WHAT_WORKS}"
        )


def expert_ranks(model: nn.Module) -> int:
    """The number of ranks for the experts of ``model``, which is about to be loaded; 1: not distributed.

    Raises UnsupportedModelError for other kinds of parallelism.
    """
    sizes = divided_sizes(model)
    ranks = sizes.get("ep_size", 1)
    if ranks > 1 and sizes == {"tp_size": ranks, "ep_size": ranks}:
        return ranks
    if how := _division(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is to be distributed over several processes ({how}), which torch_mesh does not "
            f"support. {_WHAT_WORKS}"
        )
    return 1


def divided_sizes(model: nn.Module) -> dict[str, int]:
    """The sizes above 1 in its ``distributed_config``."""
    for table in _distributed_configs(model):
        if sizes := {name: table[name] for name in _SIZES if (table.get(name) or 1) > 1}:
            return sizes
    return {}


def dispatches(model: nn.Module) -> set[str]:
    """The ``ep_implementation`` of its ``distributed_config``."""
    return {table.get("ep_implementation") or "auto" for table in _distributed_configs(model)}


def _distributed_configs(model: nn.Module) -> Iterator[dict[str, Any]]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            given: Any = getattr(module.config, "distributed_config", None)
            yield given if isinstance(given, dict) else vars(given) if given is not None else {}


def _division(model: nn.Module) -> str:
    if sizes := divided_sizes(model):
        return ", ".join(f"{name}={size}" for name, size in sizes.items())
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return "FullyShardedDataParallel"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor; its class would have to be imported
            return f"{name} is a DTensor"
        if hasattr(parameter, "ds_id"):
            return f"{name} belongs to DeepSpeed ZeRO-3"
    return ""


def check_launch() -> None:
    """Raises UnsupportedModelError if the environment makes ``from_pretrained`` use FSDP or DeepSpeed."""
    how = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP" if is_fsdp_enabled() else ""
    if how:
        raise UnsupportedModelError(
            f"This process was launched for {how}, which distributes models in a way that torch_mesh does not "
            f"support. {_WHAT_WORKS}"
        )


def check_forwards(layers: Sequence[ExpertsLayer]) -> None:
    """Raises UnsupportedModelError for experts with a replaced forward, which would hide torch_mesh's."""
    for layer in layers:
        if layer.expert_range is not None:
            continue
        module: Any = layer.module
        own: Any = type(module)
        # accelerate's hooks call the first; the second is then the hook.
        forward = vars(module).get(OLD_FORWARD, vars(module).get("forward"))
        if forward is None:
            continue
        if isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is own.forward:
            continue
        raise UnsupportedModelError(
            f"The forward of {layer.path} has been replaced by {getattr(forward, '__qualname__', forward)}, as "
            "use_kernels=True does. torch_mesh replaces that forward itself: load the model without them."
        )
