"""What torch_mesh cannot run: a model that is spread over processes in any way but one, and experts whose forward is somebody else's."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import UnsupportedModelError
from ..models.families import ExpertsLayer
from .compat import OLD_FORWARD

_WHAT_WORKS = (
    "Experts can be divided among N ranks: from_pretrained(..., distributed_config=DistributedConfig(tp_size=N, ep_size=N)), started by "
    "torchrun --nproc-per-node N. Otherwise open the model without distributed_config, tp_plan, FSDP and ZeRO-3. device_map= lays it over several "
    "devices of one process; several processes can each open the whole model (a converted folder with io='mmap' is then in memory once)."
)
_SIZES = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size")


def check_undivided(model: nn.Module) -> None:
    """Raises UnsupportedModelError if ``model``, which is loaded, is not whole in this process."""
    if how := _division(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over several processes ({how}), and torch_mesh.patch takes models that are whole in one. "
            f"{_WHAT_WORKS}"
        )


def expert_ranks(model: nn.Module) -> int:
    """Among how many ranks the experts of ``model``, which is about to be loaded, are to be divided; 1: it is whole.

    Raises UnsupportedModelError for any other way to divide it.
    """
    sizes = divided_sizes(model)
    ranks = sizes.get("ep_size", 1)
    if ranks > 1 and sizes == {"tp_size": ranks, "ep_size": ranks}:
        return ranks
    if how := _division(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is to be spread over several processes ({how}), in a way that torch_mesh cannot run. {_WHAT_WORKS}"
        )
    return 1


def divided_sizes(model: nn.Module) -> dict[str, int]:
    """Those of its ``distributed_config`` that are above 1."""
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
        if hasattr(parameter, "device_mesh"):  # a DTensor's; its class would have to be imported
            return f"{name} is a DTensor"
        if hasattr(parameter, "ds_id"):
            return f"{name} belongs to DeepSpeed ZeRO-3"
    return ""


def check_launch() -> None:
    """Raises UnsupportedModelError where ``from_pretrained`` leaves loading to FSDP or DeepSpeed, of which it learns by the environment."""
    how = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP" if is_fsdp_enabled() else ""
    if how:
        raise UnsupportedModelError(
            f"This process was launched for {how}, which divides models among processes in a way that torch_mesh cannot run. {_WHAT_WORKS}"
        )


def check_forwards(layers: Sequence[ExpertsLayer]) -> None:
    """Raises UnsupportedModelError for experts with a forward of their own, behind which torch_mesh's would never run.

    That of expert parallelism, which calls torch_mesh's, is looked at in ``expert_parallel.finish_forwards``.
    """
    for layer in layers:
        if layer.share is not None:
            continue
        module: Any = layer.module
        own: Any = type(module)
        # The first name is what a hook of accelerate's calls, the second is then the hook.
        forward = vars(module).get(OLD_FORWARD, vars(module).get("forward"))
        if forward is None:
            continue
        if isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is own.forward:
            continue
        raise UnsupportedModelError(
            f"The forward of {layer.path} has been replaced by {getattr(forward, '__qualname__', forward)}, as "
            "use_kernels=True does. torch_mesh takes the place of that forward itself: load the model without them."
        )
