"""What torch_mesh cannot run: a model that is spread over processes, and experts whose forward is somebody else's."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .errors import UnsupportedModelError
from .families import ExpertsLayer

_WHAT_WORKS = (
    "Open it without distributed_config, tp_plan, FSDP and ZeRO-3. device_map= lays it over several devices of one process; several "
    "processes can each open the whole model (a converted folder with io='mmap' is then in memory once)."
)
_SIZES = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size")


def check_undivided(model: nn.Module) -> None:
    """Raises UnsupportedModelError if ``model``, loaded or about to be, is not whole in this process.

    A pool has all experts of the model and numbers them as the whole model does; a rank of a divided one counts its own.
    """
    if how := _division(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over several processes ({how}), and torch_mesh runs models that are whole in one. "
            f"{_WHAT_WORKS}"
        )


def _division(model: nn.Module) -> str:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            given: Any = getattr(module.config, "distributed_config", None)
            table = given if isinstance(given, dict) else vars(given) if given is not None else {}
            sizes = {name: table.get(name) or 1 for name in _SIZES}
            if any(size > 1 for size in sizes.values()):
                return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
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
            f"This process was launched for {how}, which divides models among processes, and torch_mesh runs models that are whole in one. "
            f"{_WHAT_WORKS}"
        )


def check_forwards(layers: Sequence[ExpertsLayer]) -> None:
    """Raises UnsupportedModelError for experts with a forward of their own, behind which torch_mesh's would never run."""
    for layer in layers:
        module: Any = layer.module
        own: Any = type(module)
        # The first name is what a hook of accelerate's calls, the second is then the hook.
        forward = vars(module).get("_old_forward", vars(module).get("forward"))
        if forward is None:
            continue
        if isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is own.forward:
            continue
        raise UnsupportedModelError(
            f"The forward of {layer.path} has been replaced by {getattr(forward, '__qualname__', forward)}, as expert parallelism and "
            "use_kernels=True do. torch_mesh takes the place of that forward itself: load the model without them."
        )
