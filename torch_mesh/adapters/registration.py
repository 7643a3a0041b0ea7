"""Make PEFT use our wrapper for experts in a pool, with any LoraConfig.

PEFT's extension point is a mapping of one config. It is filled in when a config meets such experts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

from torch_mesh.errors import MeshError
from torch_mesh.hf.compat import CHECK_MERGE, CREATE_MODULE, register_wrapper
from torch_mesh.hf.import_hooks import AfterImport

_MIN_PEFT = "0.21"  # since 0.21 PEFT's layer for a parameter takes the config


@functools.cache
def watch() -> None:
    """Extend PEFT, now or when it is imported."""
    AfterImport(["peft.tuners.lora.model"], ["peft", "torch_mesh"], register).watch()


def register() -> None:
    """Never raises: an unexpected PEFT is left alone."""
    lora_model: Any = getattr(importlib.import_module("peft.tuners.lora.model"), "LoraModel", None)
    create = getattr(lora_model, CREATE_MODULE, None)
    if create is None or hasattr(create, "_mesh_original"):
        return

    @functools.wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        from torch_mesh.modules.experts import MeshExperts

        experts = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(experts, MeshExperts):
            _check_version()
            register_wrapper(lora_config, MeshExperts, _wrapper().ParamWrapper)
        elif (parameter := kwargs.get("parameter_name")) is not None:
            _check_read(experts, parameter)
        return create(lora_config, adapter_name, target, **kwargs)

    create_new_module._mesh_original = create  # type: ignore[attr-defined]
    setattr(lora_model, CREATE_MODULE, staticmethod(create_new_module))
    check = getattr(lora_model, CHECK_MERGE, None)
    if check is not None:
        setattr(lora_model, CHECK_MERGE, _with_refusal(check))
    _wrap("peft.utils.hotswap", "hotswap_adapter_from_state_dict", _widening)
    _wrap("peft.utils.save_and_load", "has_valid_embedding_base_layer", _without_packed)


def _wrap(module: str, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Replace a function of PEFT, if it has one of that name."""
    with contextlib.suppress(ImportError):
        holder = importlib.import_module(module)
        original = getattr(holder, name, None)
        if original is not None:
            setattr(holder, name, wrapping(original))


def _with_refusal(check: Any) -> Any:
    """Our check, then PEFT's before a merge: a refusal in the middle would leave earlier layers merged."""

    @functools.wraps(check)
    def check_merge_allowed(model: Any, *args: Any, **kwargs: Any) -> Any:
        from peft.tuners.lora import LoraLayer

        from torch_mesh.modules.experts import MeshExperts
        from torch_mesh.modules.packed_weight import PackedWeight

        modules = list(model.model.modules())
        if any(isinstance(module, MeshExperts) for module in modules):
            base = getattr(getattr(model.model, "config", None), "name_or_path", "")
            for module in modules:
                if isinstance(module, _wrapper().ParamWrapper):
                    module.refuse_to_merge(base)
            for module in modules:
                weight = getattr(module.get_base_layer(), "weight", None) if isinstance(module, LoraLayer) else None
                if isinstance(weight, PackedWeight):
                    raise weight._refuse("Cannot merge an adapter into")
        return check(model, *args, **kwargs)

    return check_merge_allowed


def _without_packed(is_saved: Any) -> Any:
    """PEFT's test of whether an adapter's file gets the base weight of an adapted embedding or head, too."""

    @functools.wraps(is_saved)
    def has_valid_embedding_base_layer(layer: Any) -> bool:
        from torch_mesh.modules.packed_weight import PackedWeight

        # The base has a packed weight, and a file of a rounded one would pass for the original.
        return is_saved(layer) and not isinstance(layer.base_layer.weight, PackedWeight)

    return has_valid_embedding_base_layer


def _widening(swap: Any) -> Any:
    """PEFT's in-place swap, which copies a smaller lora_A to the first rows only."""

    @functools.wraps(swap)
    def hotswap_adapter_from_state_dict(
        model: Any, state_dict: Mapping[str, Any], adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        from torch_mesh.modules.experts import MeshExperts

        if any(isinstance(module, MeshExperts) for module in model.modules()):
            state_dict = {key: _widened(model, key, adapter_name, weight) for key, weight in state_dict.items()}
        return swap(model, state_dict, adapter_name, *args, **kwargs)

    return hotswap_adapter_from_state_dict


def _widened(model: Any, key: str, adapter: str, weight: Any) -> Any:
    path, *name = key.rsplit(".", 3)  # lora_A, the adapter, "weight"
    try:
        module = model.get_submodule(path)
    except AttributeError:  # PEFT refuses it
        return weight
    return module.padded_to_rank(name[0], adapter, weight) if isinstance(module, _wrapper().ParamWrapper) else weight


def _check_read(module: Any, parameter: str) -> None:
    """Raises MeshError for a packed parameter: PEFT would parametrize it, and the module's forward does not read it."""
    from torch_mesh.modules.packed_weight import PackedWeight

    weight = getattr(module, parameter, None)
    if isinstance(weight, PackedWeight):
        raise MeshError(
            f"target_parameters names {weight.path}, which is packed ({weight.format}), so that an adapter of this "
            "parameter would change nothing. Name its module in target_modules, or open the model with dense='auto' "
            "and tables='off', which leave such weights unpacked."
        )


def _check_version() -> None:
    version = importlib.import_module("peft").__version__
    if Version(version).release < Version(_MIN_PEFT).release:
        raise MeshError(
            f"PEFT is {version}; adapters on experts of torch_mesh need {_MIN_PEFT} or later: pip install -U peft."
        )


def _wrapper() -> Any:
    return importlib.import_module(".wrapper", __package__)
