"""The private names of transformers, PEFT and accelerate that torch_mesh uses.

Those of ``generate`` are in ``generation_compat.py``, torch's in ``torch_compat.py``; no other file has any. ``NAMES`` lists each with the versions that have it: importable names, and attributes that the
source of a module sets. ``tests/models/test_compat.py`` fails with the name that is gone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.integrations import moe


@dataclass(frozen=True)
class Name:
    """``owner`` is a module or class, ``name`` its attribute or, with ``in_source``, one that its module's source names.

    ``versions``: of the package that have it, as a requirement.
    """

    owner: str
    name: str
    versions: str = "transformers>=5.17"
    in_source: bool = False


def names_of(
    owner: str, *names: str, versions: str = "transformers>=5.17", in_source: bool = False
) -> tuple[Name, ...]:
    """Those of one owner."""
    return tuple(Name(owner, name, versions, in_source) for name in names)


_PEFT = "peft>=0.21"
NAMES: tuple[Name, ...] = (
    *names_of("transformers.integrations.moe", "_default_apply_gate"),
    # Older ones divide experts by another interface, which torch_mesh refuses.
    *names_of("transformers.integrations.moe", "_is_expert_parallel", versions="transformers>=5.18", in_source=True),
    *names_of("transformers.modeling_utils", "get_hf_quantizer", "get_model_conversion_mapping"),
    *names_of("transformers.modeling_utils.PreTrainedModel", "_keys_to_ignore_on_load_unexpected"),
    *names_of("transformers.modeling_utils", "_is_hf_initialized", in_source=True),
    *names_of("transformers.core_model_loading", "_weight_conversions", in_source=True),
    *names_of("transformers.distributed.mixin", "_ep_plan", in_source=True),
    *names_of("transformers.distributed.expert_parallel", "_is_hooked", versions="transformers>=5.22", in_source=True),
    *names_of("transformers.integrations.torchao", "_hf_quantized_needs_local_tp", in_source=True),
    *names_of("transformers.configuration_utils", "_attn_implementation", in_source=True),
    *names_of("transformers.integrations.peft", "_hf_peft_config_loaded", in_source=True),
    *names_of("transformers.integrations.gguf", "GGUF_CONFIG_ARCHS"),
    *names_of("transformers.quantizers.auto.AutoHfQuantizer", "merge_quantization_configs"),
    *names_of("peft.tuners.lora.model.LoraModel", "_create_new_module", "_check_merge_allowed", versions=_PEFT),
    *names_of("peft.tuners.lora.config.LoraConfig", "_register_custom_module", versions=_PEFT),
    *names_of("peft.tuners.lora.layer.LoraLayer", "_check_forward_args", versions=_PEFT),
    *names_of(
        "peft.tuners.lora.layer",
        "_did_swap_in_out_features",
        "_hf_tp_plan",
        "_hf_device_mesh",
        versions=_PEFT,
        in_source=True,
    ),
    *names_of("accelerate.hooks", "_old_forward", versions="accelerate>=1.10", in_source=True),
)
# Of transformers.cli.serving, which is imported by `torch-mesh serve` alone and needs torch_mesh[serve].
SERVING_NAMES: tuple[Name, ...] = (
    *names_of("transformers.cli.serving.utils", "_StreamError"),
    *names_of("transformers.cli.serving.utils", "_generate_managers", "_cb_config", "_cb_manager", in_source=True),
    *names_of("transformers.cli.serve", "_generation_state", in_source=True),
)

# Experts
default_apply_gate = moe._default_apply_gate
OLD_FORWARD = "_old_forward"  # where accelerate's hooks keep the forward that they are around
EXPERT_PARALLEL = "_is_expert_parallel"


def attention_of(config: Any) -> str:
    """The ``attn_implementation`` that a config has come to."""
    return str(config._attn_implementation)


def has_own_adapters(model: Any) -> bool:
    """Whether transformers' ``add_adapter`` has put adapters into ``model``: save_pretrained then saves these alone."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def ignore_unexpected(model: Any, patterns: set[str]) -> None:
    """Loading then reports no weights of these names that have no owner."""
    model._keys_to_ignore_on_load_unexpected = {*ignored_keys(model), *patterns}


def ignored_keys(model: Any) -> tuple[str, ...]:
    """Patterns of names in a checkpoint that ``model`` leaves out."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def conversions_of(model: Any) -> list[Any]:
    """Those by which a model was loaded, and which saving reverts; changes are seen."""
    conversions: list[Any] = model._weight_conversions
    return conversions


def set_initialized(module: Any) -> None:
    """Keeps transformers from initialising the parameters of ``module``, or a tensor."""
    module._is_hf_initialized = True


def keep_ep_rules(model: Any, keep: Callable[[str], bool]) -> None:
    """Removes the rules of a model's plan of expert parallelism whose name ``keep`` refuses."""
    if getattr(model, "_ep_plan", None):
        model._ep_plan = {name: rule for name, rule in model._ep_plan.items() if keep(name)}


def is_hooked(module: Any) -> bool:
    """Whether transformers' parallelism is around the forward of ``module``."""
    return bool(getattr(module, "_is_hooked", False))


def keep_local(module: Any) -> None:
    """For a layer with a rank's part of a weight that is no DTensor: its hooks then pass local tensors."""
    module._hf_quantized_needs_local_tp = True


def gguf_config_readers() -> dict[str, Any]:
    """By a GGUF file's architecture, what makes a config of its metadata. Changes take effect."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    return GGUF_CONFIG_ARCHS


def clear_quantized(config: Any) -> None:
    """Makes a config that of a model that is not quantised."""
    vars(config).pop("quantization_config", None)
    vars(config).pop("_is_quantized", None)


def wrap(owner: str, name: str, around: Callable[[Any], Any]) -> None:
    """Replaces a function or method of an upstream module or class by ``around(what stands there)``.

    What another library has put there stays inside. Raises AttributeError where there is none.
    """
    place = resolve(owner)
    setattr(place, name, around(vars(place)[name]))


def resolve(path: str) -> Any:
    """A module, class or what either has, by its dotted path. Raises AttributeError or ModuleNotFoundError."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            if end == 1:
                raise
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise AssertionError(path)


# PEFT

# Methods of LoraModel
CREATE_MODULE, CHECK_MERGE = "_create_new_module", "_check_merge_allowed"
# Attributes by which PEFT divides adapters like the linear layers of a plan.
TENSOR_PARALLEL = ("_hf_tp_plan", "_hf_device_mesh")


def register_wrapper(lora_config: Any, kind: type[nn.Module], wrapper: type[nn.Module]) -> None:
    """PEFT then puts ``wrapper`` around modules of ``kind``."""
    lora_config._register_custom_module({kind: wrapper})


def has_swapped_features(wrapper: Any) -> bool:
    """Whether PEFT's ParamWrapper took its parameter for [experts, out, in]."""
    return bool(wrapper._did_swap_in_out_features)


def check_forward_arguments(wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Raises what PEFT's layers raise for the arguments of a forward."""
    wrapper._check_forward_args(*args, **kwargs)


# Serving


def stream_error() -> Any:
    """What a stream of transformers' server carries for a failure."""
    from transformers.cli.serving.utils import _StreamError

    return _StreamError


def generation_state(serve: Any) -> Any:
    """Of transformers' server."""
    return serve._generation_state


def generation_managers(state: Any) -> list[Any]:
    """Those of its generation state that run ``generate``."""
    return list(state._generate_managers.values())


def batching_config(state: Any) -> Any:
    """Of continuous batching; None: the default."""
    return state._cb_config


def set_batching_config(state: Any, config: Any) -> None:
    """For continuous batching that has not begun."""
    state._cb_config = config


def batching_manager(state: Any) -> Any:
    """What runs continuous batching; None: nothing yet."""
    return state._cb_manager


def running_batches(state: Any) -> Any:
    """The continuous batching that runs."""
    return state._cb_manager._cb
