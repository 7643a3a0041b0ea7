"""What a patched model says of itself to transformers, torch and its users: its quantisation, the memory that it takes, what no process sends."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..config import MeshConfig
from ..modules.experts import patched_modules
from ..modules.packed_weight import PackedLinearWeight, PackedWeight
from ..store.manifest import has_chosen_groups

_REPLACED = "_mesh_replaced_configs"
_NOT_SENT = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel asks for it
_IN_PEFT_MODEL = (
    "base_model.model."  # a PeftModel hands the question on to the model in it, whose names are longer there
)


def set_config_metadata(model: nn.Module, config: MeshConfig) -> None:
    """Puts ``config`` into the configs of ``model`` and of the models inside it that have patched experts.

    transformers would refuse to train or cast a model with ``is_quantized`` and ``quantization_method``, which a patched one can be: these stay
    unset.
    """
    pool = next(patched_modules(model))._mesh_pool
    # Without the store, which is of this model's weights: another model that is opened with the config would want it for its own.
    group_size = pool.group_size if has_chosen_groups(pool.weights) else config.group_size
    found = config.replace(weights=pool.weights, group_size=group_size, store=None)
    replaced: list[tuple[Any, Any]] = []
    vars(model)[_REPLACED] = replaced
    for part in patched_models(model):
        if vars(part.config).get("quantization_config") is not found:
            replaced.append((part.config, vars(part.config).get("quantization_config")))
            part.config.quantization_config = found
        part.get_memory_footprint = types.MethodType(_memory_footprint, part)
        setattr(part, _NOT_SENT, _PackedNames(part))


def clear_config_metadata(model: nn.Module) -> None:
    """The reverse of ``set_config_metadata``."""
    for module in model.modules():
        for config, before in vars(module).get(_REPLACED, ()):
            vars(config).pop("quantization_config", None)
            if before is not None:
                config.quantization_config = before
        vars(module).pop(_REPLACED, None)  # when all is back, or nobody could go on after Ctrl-C
        if isinstance(module, PreTrainedModel):
            vars(module).pop("get_memory_footprint", None)
            if isinstance(vars(module).get(_NOT_SENT), _PackedNames):
                delattr(module, _NOT_SENT)


def patched_models(model: nn.Module) -> list[Any]:
    """The transformers models in ``model`` that hold patched experts."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in models if next(patched_modules(module), None) is not None]


class _PackedNames:
    """Names of packed weights as they are when somebody asks: by then PEFT may have put its layers around them.

    Each process has a pool of its own, whose weights are frozen and have no values that could be sent.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Iterator[str]:
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter, PackedWeight):
                yield from (name, _IN_PEFT_MODEL + name)


def _memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Bytes of the parameters that have memory, of packed weights, of the pool and of what lies on GPUs.

    A pool counts as what it may take, and not at all where its experts are the page cache's.
    """
    held: list[Any] = [each for each in model.parameters() if not isinstance(each, PackedWeight)]
    held += [each.packed for each in model.parameters() if isinstance(each, PackedLinearWeight)]
    held += model.buffers() if return_buffers else []
    pools = {id(module._mesh_pool): module._mesh_pool for module in patched_modules(model)}
    pools |= {id(pool.fallback): pool.fallback for pool in list(pools.values()) if pool.fallback is not None}
    pools |= {id(pool.moves_from): pool.moves_from for pool in list(pools.values()) if pool.moves_from is not None}
    held += [layer.records for pool in pools.values() for layer in pool.device_layers]
    each_once = {(tensor.device, tensor.data_ptr()): tensor.nbytes for tensor in held if not tensor.is_meta}
    in_pools: list[Any] = [pool.engine.describe()["pool_bytes"] for pool in pools.values()]
    return sum(each_once.values()) + sum(in_pools)
