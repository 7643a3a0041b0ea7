"""Read a folder that PEFT's ``save_pretrained`` wrote, on the meta-device outline of its base model.

PEFT parses it, over placeholders without memory, and its own layers compute the changes of weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_mesh.adapters.factors import Factors, factors_of
from torch_mesh.hf.compat import has_swapped_features, key_mapping_of
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.store.checkpoint import checkpoint_fingerprint
from torch_mesh.store.header import read_header, read_json_file, store_error
from torch_mesh.store.weight_files import check_folder

try:
    from peft import LoraConfig, PeftModel
    from peft import __version__ as peft_version
    from peft.tuners.lora import layer as lora
    from peft.tuners.lora import variants
    from peft.utils.error import NoMatchingPeftModuleError  # noqa: F401  # for planning
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
except ImportError as missing:
    raise ImportError("merging adapters needs PEFT 0.21 or later: pip install -U peft") from missing

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # name of the only adapter in PEFT's model
# PEFT's other initializations change the base weights too.
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
_FIELDS = frozenset(field.name for field in dataclasses.fields(LoraConfig))
_VARIANTS = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant)


@dataclass(frozen=True)
class Change:
    """The change of one parameter of the base. ``needs``: the parameters whose fp32 values ``made_of`` gets by name."""

    needs: tuple[str, ...]
    made_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Adapter:
    """``experts``: the factors on a projection, by the path of the experts and the parameter's name; ``rest``: changes
    of all other parameters, by name."""

    experts: Mapping[tuple[str, str], Factors]
    rest: Mapping[str, Change]


def adapter_fingerprint(folder: Path) -> str:
    """A fingerprint of the adapter's files. Raises ``StoreError`` if the folder has no adapter."""
    check_folder(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise store_error(folder, f"has no {name}: name a folder that PEFT's save_pretrained(folder) wrote")
    config = hashlib.blake2b((folder / _CONFIG).read_bytes(), digest_size=16).hexdigest()
    return f"{config} {checkpoint_fingerprint([folder / _WEIGHTS])}"


def read_adapter(folder: Path, model: nn.Module, layers: Sequence[ExpertsLayer]) -> Adapter:
    """Read the adapter in ``folder`` for ``model`` on the meta device, which is consumed; ``layers``: those with
    experts in records.

    Raises ``StoreError`` for an adapter that is damaged, does not fit the model, has unused tensors, or cannot be
    merged.
    """
    config = _config(folder, layers)
    placeholders = put_placeholders(model)
    loaded = _load(folder, model, config)
    base: Any = loaded.get_base_model()
    _check_variants(folder, base)
    experts: dict[tuple[str, str], Factors] = {}
    rest: dict[str, Change] = {}
    by_path = {layer.path: layer for layer in layers}
    for name, module in base.named_modules():
        path = ".".join(part for part in name.split(".") if part != "base_layer")
        if isinstance(module, lora.ParamWrapper) and path in by_path:
            experts[path, module.parameter_name] = _factors(folder, module, by_path[path])
        elif isinstance(module, lora.LoraLayer):
            rest |= _changes(folder, path, module)
        elif isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_NAME].state_dict()
            rest |= {f"{path}.{key}": Change((), _always(folder, key, value)) for key, value in saved.items()}
    # An adapter of embeddings may have the whole embedding in its file, where PEFT treats it as part of the base.
    for name, parameter in base.named_parameters():
        if ".modules_to_save." not in name and ".lora_" not in name and id(parameter) not in placeholders:
            plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            given = Change((), _always(folder, plain, parameter.detach()))
            rest[plain] = _on_given(plain, given, rest[plain]) if plain in rest else given
    return Adapter(experts, rest)


def _config(folder: Path, layers: Sequence[ExpertsLayer]) -> LoraConfig:
    path = folder / _CONFIG
    table = read_json_file(path, floats=True)
    kind = table.get("peft_type") if isinstance(table, dict) else None
    if kind != "LORA":
        raise store_error(path, f"has peft_type={kind!r}; only LORA can be merged")
    initialization = table.get("init_lora_weights", True)
    if initialization not in _INITIALISATIONS:
        raise store_error(
            path,
            (
                f"has init_lora_weights={initialization!r}, which changes the base weights. Convert it with PEFT's "
                "save_pretrained(folder, path_initial_model_for_weight_conversion=...)"
            ),
        )
    # PEFT ignores fields of a later PEFT and would build another adapter.
    if unknown := [name for name, value in table.items() if value and name not in _FIELDS]:
        raise store_error(path, f"has {_first_names(unknown)}, unknown to PEFT {peft_version}: pip install -U peft")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names without a value, which change nothing
            config = LoraConfig.from_pretrained(str(folder))
    except Exception as problem:  # PEFT raises anything for values that it does not expect
        raise store_error(path, f"is not a config that PEFT accepts: {problem}") from problem
    if config.layer_replication:
        raise store_error(path, "has layer_replication, which changes the layers of the base and cannot be merged")
    for layer in layers:
        parts = layer.path.split(".")
        inside = {".".join(parts[start:end]) for end in range(1, len(parts) + 1) for start in range(end)}
        for name in config.modules_to_save or ():
            if name in inside:
                raise store_error(
                    path, f"has modules_to_save={name!r}, which contains the experts {layer.path}: too large"
                )
    return config


def put_placeholders(model: nn.Module) -> set[int]:
    """Replace each parameter by a one-element zero tensor, expanded, on the CPU. Returns their ids."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                placeholder = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
                module._parameters[name] = made.setdefault(id(parameter), placeholder)
    model._mesh_placeholders = list(made.values())  # type: ignore[assignment]  # an id is theirs as long as they live
    return {id(placeholder) for placeholder in made.values()}


def _load(folder: Path, model: Any, config: LoraConfig) -> PeftModel:
    read_header(folder / _WEIGHTS)  # raises where it is damaged
    config.inference_mode = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the causes are refused below
            loaded = PeftModel(model, config, _NAME, low_cpu_mem_usage=True)
            result = loaded.load_adapter(
                str(folder),
                _NAME,
                torch_device="cpu",
                low_cpu_mem_usage=True,
                key_mapping=key_mapping_of(model),
            )
    except KeyError as problem:
        raise store_error(folder / _WEIGHTS, f"lacks {problem}, which {_CONFIG} names") from problem
    except Exception as problem:
        raise store_error(folder, f"does not fit {type(model).__name__}: {_beginning(problem)}") from problem
    if result.unexpected_keys:
        raise store_error(
            folder / _WEIGHTS,
            f"has tensors that {type(model).__name__} does not have: {_first_names(result.unexpected_keys)}",
        )
    missing = [name for name, parameter in loaded.named_parameters() if parameter.is_meta]
    if missing:
        raise store_error(
            folder / _WEIGHTS,
            f"lacks tensors that {_CONFIG} names: {_first_names([name.replace(f'.{_NAME}', '') for name in missing])}",
        )
    return loaded


def _beginning(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines()]
    return " ".join(lines[:3]) + (f" And {len(lines) - 3} others." if len(lines) > 3 else "")


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


def _check_variants(folder: Path, base: nn.Module) -> None:
    for name, module in base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise store_error(
                folder, f"trains single tokens of {name} (trainable_token_indices), which cannot be merged"
            )
        variant = getattr(module, "lora_variant", {}).get(_NAME)
        if variant is not None and not isinstance(variant, _VARIANTS):
            raise store_error(
                folder, f"has {type(variant).__name__} on {name}, which cannot be merged; LoRA and DoRA can"
            )


def _factors(folder: Path, module: Any, layer: ExpertsLayer) -> Factors:
    if module.parameter_name not in layer.parameter_names[:2]:
        raise store_error(folder, f"has an adapter on {layer.path}.{module.parameter_name}, which is not a projection")
    lora_a, lora_b = (pair[_NAME].weight.detach().float() for pair in (module.lora_A, module.lora_B))
    return factors_of(
        lora_a,
        lora_b,
        module.num_experts,
        module.scaling[_NAME],
        layer=layer,
        parameter=module.parameter_name,
        swapped=has_swapped_features(module),
    )


def _changes(folder: Path, path: str, module: Any) -> dict[str, Change]:
    """The changes of a PEFT layer: its weight and, if the adapter has one, its bias."""
    own = [getattr(module, "parameter_name", None) or "weight"]
    if module.lora_bias.get(_NAME):
        own.append("bias")
    base = module.get_base_layer()
    if any(base._parameters.get(name) is None for name in own):
        raise store_error(folder, f"has an adapter on {path}, a {type(base).__name__}, which cannot be merged")
    needs = tuple(f"{path}.{name}" for name in own)
    return {
        f"{path}.{name}": Change(needs, functools.partial(_merged, folder, path, module, own, name)) for name in own
    }


@torch.no_grad()
def _merged(
    folder: Path, path: str, module: Any, own: Sequence[str], wanted: str, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    base = module.get_base_layer()
    placeholders = {name: base._parameters[name] for name in own}
    try:
        for name in own:
            base._parameters[name] = nn.Parameter(values[f"{path}.{name}"], requires_grad=False)
        module.merge(safe_merge=True)
        return base._parameters[wanted].detach()
    except ValueError as problem:  # not finite
        raise store_error(folder, f"cannot be merged into {path}: {problem}") from problem
    finally:
        base._parameters.update(placeholders)
        module.merged_adapters.clear()


def _on_given(name: str, given: Change, change: Change) -> Change:
    """Like ``change``, but applied to the values of ``name`` in the adapter's file instead of the base's."""
    needs = tuple(need for need in change.needs if need != name)
    return Change(needs, lambda values: change.made_of({**values, name: given.made_of(values).float()}))


def _always(folder: Path, name: str, value: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    if not value.isfinite().all():
        raise store_error(folder / _WEIGHTS, f"has values of {name} that are not finite")
    return lambda _: value
