"""The private names of transformers, PEFT and accelerate that torch_mesh uses.

Those of ``generate`` are in ``generation_compat.py``, torch's in ``torch_compat.py``; no other file has any. ``NAMES``
lists each with the versions that have it. ``tests/models/test_compat.py`` fails with the name that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.integrations import moe


@dataclass(frozen=True)
class Name:
    """``owner`` is a module or class, ``name`` its attribute or, with ``in_source``, one that its module's source
    assigns.

    ``versions``: of the package that have it, as a requirement.
    """

    owner: str
    name: str
    versions: str = "transformers>=5.17"
    in_source: bool = False


def names_of(
    owner: str, *names: str, versions: str = "transformers>=5.17", in_source: bool = False
) -> tuple[Name, ...]:
    return tuple(Name(owner, name, versions, in_source) for name in names)


_PEFT = "peft>=0.21"
NAMES: tuple[Name, ...] = (
    *names_of("transformers.integrations.moe", "_default_apply_gate"),
    *names_of("transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts", "_apply_gate"),
    # Older ones divide experts by another interface, which torch_mesh refuses.
    *names_of("transformers.integrations.moe", "_is_expert_parallel", versions="transformers>=5.18", in_source=True),
    *names_of("transformers.modeling_utils", "get_hf_quantizer", "get_model_conversion_mapping"),
    *names_of("transformers.modeling_utils", "_get_resolved_checkpoint_files"),
    *names_of("transformers.modeling_utils.PreTrainedModel", "_keys_to_ignore_on_load_unexpected"),
    *names_of("transformers.modeling_utils", "_is_hf_initialized", in_source=True),
    *names_of("transformers.core_model_loading", "_weight_conversions", in_source=True),
    *names_of("transformers.distributed.mixin", "_ep_plan", in_source=True),
    *names_of("transformers.distributed.expert_parallel", "_is_hooked", versions="transformers>=5.22", in_source=True),
    *names_of("transformers.integrations.torchao", "_hf_quantized_needs_local_tp", in_source=True),
    *names_of("transformers.configuration_utils", "_attn_implementation", in_source=True),
    *names_of("transformers.quantizers.base", "_is_quantized", in_source=True),
    *names_of("transformers.modeling_utils.PreTrainedModel", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    *names_of("transformers.integrations.peft", "_hf_peft_config_loaded", in_source=True),
    *names_of("transformers.integrations.gguf", "GGUF_CONFIG_ARCHS"),
    # Older ones make a tokenizer by architecture, and none for those that they do not know.
    *names_of(
        "transformers.integrations.gguf.gguf_tokenizer_mapping",
        "convert_gguf_tokenizer",
        "GGUF_PRE_TOKENIZER_SPLITS",
        versions="transformers>=5.24",
    ),
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
    *names_of("peft.peft_model", "_checkpoint_conversion_mapping", versions=_PEFT, in_source=True),
    *names_of("accelerate.hooks", "_old_forward", versions="accelerate>=1.10", in_source=True),
)
# Experts
default_apply_gate = moe._default_apply_gate
OLD_FORWARD = "_old_forward"  # accelerate's hooks keep the wrapped forward there
EXPERT_PARALLEL = "_is_expert_parallel"


def own_gate(module: Any) -> Any:
    """The gate of an experts module, a function of ``gate_up``; None if it has none."""
    return getattr(module, "_apply_gate", None)


def gate_definer(kind: type) -> type | None:
    """The class among ``kind`` and its bases that defines the gate; None if it is the default one."""
    owner = next((each for each in kind.__mro__ if "_apply_gate" in vars(each)), None)
    return None if owner is None or vars(owner)["_apply_gate"] is default_apply_gate else owner


FIND_FILES = "_get_resolved_checkpoint_files"  # a function of transformers.modeling_utils


def attention_of(config: Any) -> str:
    return str(config._attn_implementation)


def has_own_adapters(model: Any) -> bool:
    """Whether ``model`` has adapters by transformers' ``add_adapter``: save_pretrained then saves only these."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def ignore_unexpected(model: Any, patterns: set[str]) -> None:
    """Do not report checkpoint tensors of these names as unexpected."""
    model._keys_to_ignore_on_load_unexpected = {*ignored_keys(model), *patterns}


def ignored_keys(model: Any) -> tuple[str, ...]:
    """Patterns of checkpoint names that ``model`` ignores."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def conversions_of(model: Any) -> list[Any]:
    """The mutable list of conversions by which a model was loaded."""
    conversions: list[Any] = model._weight_conversions
    return conversions


def set_initialized(module: Any) -> None:
    """Keep transformers from initializing a tensor or the parameters of a module."""
    module._is_hf_initialized = True


def keep_ep_rules(model: Any, keep: Callable[[str], bool]) -> None:
    """Remove the rules of a model's expert parallelism plan whose name ``keep`` rejects."""
    if getattr(model, "_ep_plan", None):
        model._ep_plan = {name: rule for name, rule in model._ep_plan.items() if keep(name)}


def is_hooked(module: Any) -> bool:
    """Whether transformers' parallelism wraps the forward of ``module``."""
    return bool(getattr(module, "_is_hooked", False))


def unhook(module: Any) -> None:
    """Remove the wrapper that transformers' parallelism put around the forward of ``module``, if it did."""
    if is_hooked(module):
        del module._is_hooked
        vars(module).pop("forward", None)


def keep_local(module: Any) -> None:
    """Make the hooks of a layer that has a rank's plain part of a weight pass local tensors."""
    module._hf_quantized_needs_local_tp = True


def gguf_config_readers() -> dict[str, Any]:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    return GGUF_CONFIG_ARCHS


def replace_gguf_tokenizers(make: Callable[[str, Mapping[str, Any], Mapping[str, str]], Any]) -> None:
    """Take the tokenizer of a GGUF file from ``make(architecture, metadata, transformers' patterns)``, unless it is
    None.

    Leaves versions alone that make a tokenizer by architecture.
    """
    from transformers.integrations import gguf

    def converted(architecture: str, tokenizer_dict: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

        made = make(architecture, tokenizer_dict, theirs.GGUF_PRE_TOKENIZER_SPLITS)
        return theirs.convert_gguf_tokenizer(architecture, tokenizer_dict) if made is None else (made, {})

    if "convert_gguf_tokenizer" in dir(gguf):  # which does not import its module
        gguf.convert_gguf_tokenizer = converted


def modules_in_fp32(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parts of the names of modules that transformers keeps in fp32: in fp16 models alone, and in any model."""
    fp16, strict = (
        getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    return tuple(fp16), tuple(strict)


def clear_quantized(config: Any) -> None:
    """Remove the quantization from a config."""
    vars(config).pop("quantization_config", None)
    vars(config).pop("_is_quantized", None)


# PEFT
def key_mapping_of(model: Any) -> dict[str, str] | None:
    """The renaming of checkpoint names that PEFT applies to an adapter's."""
    mapping: dict[str, str] | None = getattr(model, "_checkpoint_conversion_mapping", None)
    return mapping


# Methods of LoraModel
CREATE_MODULE, CHECK_MERGE = "_create_new_module", "_check_merge_allowed"
# Attributes by which PEFT divides adapters like the linear layers of a plan.
TENSOR_PARALLEL = ("_hf_tp_plan", "_hf_device_mesh")


def register_wrapper(lora_config: Any, kind: type[nn.Module], wrapper: type[nn.Module]) -> None:
    """Make PEFT wrap modules of class ``kind`` in ``wrapper``."""
    lora_config._register_custom_module({kind: wrapper})


def has_swapped_features(wrapper: Any) -> bool:
    """Whether the wrapped parameter counts as [experts, out, in]."""
    return bool(wrapper._did_swap_in_out_features)


def check_forward_arguments(wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Raises what PEFT's layers raise for the arguments of a forward."""
    wrapper._check_forward_args(*args, **kwargs)
