"""Metadata of a patched model for transformers, torch and users: quantization, memory footprint, parameters that are
not broadcast."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS
from torch_mesh.hf.torch_compat import DDP_IGNORED
from torch_mesh.hf.wrapping import wrap
from torch_mesh.modules.experts import patched_modules, pools_of
from torch_mesh.modules.packed_weight import PackedLinearWeight, PackedWeight

_REPLACED = "_mesh_replaced_configs"
# Wrappers of torch.compile and PEFT delegate to the model, and their names of its parameters are longer.
_PREFIXES = [
    compiled + peft for compiled in ("", "_orig_mod.") for peft in ("", "model.", "base_model.", "base_model.model.")
]


def set_config_metadata(model: nn.Module, config: MeshConfig) -> None:
    """Put ``config`` into the configs of ``model`` and of inner models with patched experts.

    ``is_quantized`` and ``quantization_method`` stay unset: transformers would refuse to train or cast the model.
    """
    pool = next(patched_modules(model))._mesh_pool
    # Leave out the store: it belongs to this model's weights, and another model opened with the config would use it.
    group_size = pool.group_size if FORMATS[pool.weights].chosen_groups else config.group_size
    config = config.replace(weights=pool.weights, group_size=group_size, store=None)
    replaced: list[tuple[Any, Any, Any]] = []
    vars(model)[_REPLACED] = replaced
    for part in patched_models(model):
        before = vars(part.config).get("quantization_config")
        if before is not config:
            # A MeshConfig is that of another model with this config, which may be unpatched first.
            replaced.append((part.config, config, None if isinstance(before, MeshConfig) else before))
            part.config.quantization_config = config
        setattr(part, DDP_IGNORED, _PackedNames(part))


def clear_config_metadata(model: nn.Module) -> None:
    for module in model.modules():
        for config, ours, before in vars(module).get(_REPLACED, ()):
            # Models may share a config, which has the entry of the one that was patched last.
            if vars(config).get("quantization_config") is ours:
                del config.quantization_config
                if before is not None:
                    config.quantization_config = before
        vars(module).pop(_REPLACED, None)  # last: an interrupted call can be repeated
        if isinstance(vars(module).get(DDP_IGNORED), _PackedNames):
            delattr(module, DDP_IGNORED)


@contextlib.contextmanager
def without_config_metadata(model: nn.Module) -> Iterator[None]:
    """Within, an ordinary ``model`` has no MeshConfig of a patched one that shares its configs."""
    removed: list[tuple[Any, Any]] = []
    try:
        for module in model.modules():
            config: Any = module.config if isinstance(module, PreTrainedModel) else None
            if isinstance(getattr(config, "quantization_config", None), MeshConfig):
                removed.append((config, config.quantization_config))
                del config.quantization_config
        yield
    finally:
        for config, entry in removed:
            config.quantization_config = entry


def patched_models(model: nn.Module) -> list[Any]:
    """The transformers models in ``model`` with patched experts."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in models if next(patched_modules(module), None) is not None]


class _PackedNames:
    """The current names of packed weights. They are resolved when read, since PEFT may have added wrappers.

    Each process has its own pool of frozen weights, which must not be broadcast.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # which it is an attribute of

    def __deepcopy__(self, memo: dict[int, Any]) -> _PackedNames:
        """Of the copied model, which copying put into ``memo`` before its attributes."""
        model: Any = self._model()
        return _PackedNames(memo.get(id(model), model))

    def __iter__(self) -> Iterator[str]:
        model: Any = self._model()
        for name, parameter in model.named_parameters():
            if isinstance(parameter, PackedWeight):
                yield from (prefix + name for prefix in _PREFIXES)


def _get_memory_footprint(theirs: Any, model: nn.Module, return_buffers: bool = True) -> Any:
    return _memory_footprint(model, return_buffers) if pools_of(model) else theirs(model, return_buffers)


# Not an attribute of each model: a bound method there would keep the model alive.
wrap("transformers.modeling_utils.PreTrainedModel", "get_memory_footprint", _get_memory_footprint)


def _memory_footprint(model: nn.Module, return_buffers: bool) -> int:
    """Bytes of parameters with memory, packed weights, the pool and experts on GPUs.

    A pool counts with its limit, and not at all if the page cache holds its experts.
    """
    held: list[Any] = [each for each in model.parameters() if not isinstance(each, PackedWeight)]
    held += [each.packed for each in model.parameters() if isinstance(each, PackedLinearWeight)]
    held += model.buffers() if return_buffers else []
    main = pools_of(model)
    others = [each for pool in main for each in (pool.fallback, pool.moves_from) if each is not None]
    pools = dict.fromkeys([*main, *others])
    held += [layer.records for pool in pools for layer in pool.device_layers]
    each_once = {(tensor.device, tensor.data_ptr()): tensor.nbytes for tensor in held if not tensor.is_meta}
    in_pools: list[Any] = [pool.engine.describe()["pool_bytes"] for pool in pools]
    return sum(each_once.values()) + sum(in_pools)
