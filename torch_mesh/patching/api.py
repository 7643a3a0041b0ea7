"""``patch`` moves the experts of a loaded model into a pool, ``unpatch`` moves them back."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from torch_mesh.config import MeshConfig, with_fields
from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.formats import FORMATS, is_passthrough, short_name
from torch_mesh.hf.parallelism_checks import check_undivided
from torch_mesh.models.families import WEIGHT_DTYPES, ExpertsLayer, check_model, find_experts
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import (
    MeshExperts,
    PackedModule,
    drop_attributes,
    has_attributes,
    patched_modules,
    pools_of,
    restore,
)
from torch_mesh.modules.packed_weight import device_around
from torch_mesh.modules.tables import PackedTableWeight, check_room, table_modules
from torch_mesh.patching.expert_source import LoadedModelSource
from torch_mesh.patching.modes import MODES
from torch_mesh.patching.pipeline import assemble, check
from torch_mesh.system.memory import shortage

Model = TypeVar("Model", bound=nn.Module)

_UNPATCHING = "_mesh_unpatching"
_WRAPPED = ("base_layer", "original_module", "token_adapter")  # PEFT's names of the module in a wrapper


def patch(model: Model, config: MeshConfig | None = None, **fields: Any) -> Model:
    """Move the experts of a loaded model into a pool, in place, and return the same model.

    ``fields`` are fields of MeshConfig and override those of ``config``. The weights in memory are packed. If all
    experts stay resident and ``store`` is unset, they are packed in memory, and each layer's parameters are freed when
    the layer is done. Otherwise they are written to ``store``, or to a temporary store in the cache folder, which is
    removed when the process ends. ``store`` is a new folder, since weights in memory cannot be compared with those of
    an existing store. Experts in another format (``gpu.weights``, ``lossy.fallback``) are always written.
    No forward may run meanwhile.

    An error or Ctrl-C restores the model. Layers that were already packed in memory and rounded keep the rounded
    values, with a warning; if there is no memory to unpack them, they stay patched, with a warning.

    Raises UnsupportedModelError for a model without supported experts, listing the supported families; MeshError if the
    model is patched already or its experts hold no weights; StoreError if ``store`` holds anything; ValueError for an
    unknown field or value; TypeError if ``model`` is not a loaded model.
    """
    check_model(model)
    config = with_fields(config, fields)
    if config.max_error is not None:
        raise ValueError(
            f"max_error={config.max_error} compares formats by a checkpoint's files, and a loaded model has none: "
            "give it to from_pretrained, or give weights= the format that torch-mesh plan --memory chooses."
        )
    if config.tables not in ("auto", "off"):
        raise ValueError(
            f"tables={config.tables!r} leaves embedding tables in their files, and those of a loaded model are in "
            "memory: give it to from_pretrained."
        )
    if config.mirrors:
        raise ValueError(
            f"mirrors={config.mirrors!r} names copies of files, and the experts of a loaded model are in memory: give "
            "it to from_pretrained."
        )
    check_undivided(model)
    layers = find_experts(model)
    _check_patchable(model, layers)
    source = LoadedModelSource(model, layers, config)
    check(model, layers, config, source)
    if FORMATS[source.weights].holds_bf16 and not source.exact:
        dtypes = " and ".join(sorted(map(str, source.dtypes)))
        warnings.warn(f"The experts are {dtypes} and are rounded to bf16.", stacklevel=2)
    assemble(model, layers, config, source)
    return model


def unpatch(model: Model, lossy: bool = False) -> Model:
    """Restore a patched model's own experts modules, in place, and return the same model. A module around it will do.

    Parameters get the values that they would have without torch_mesh, in the dtype to which the model was cast
    meanwhile, as by ``model.float()``, on the device of the modules around them. Raises MeshError if weights were
    rounded or are a checkpoint's codes (any format but bf16 and bf12 of bf16 weights), unless ``lossy``: then
    parameters get the rounded values; MemoryError, before anything is changed, if they do not fit into memory. After an
    error or Ctrl-C the same call continues. A ``generate`` that speculates meanwhile, on another thread, ends with
    PoolClosedError.
    """
    check_model(model)
    if not _is_patched(model):
        raise MeshError(f"{type(model).__name__} is not patched: there is nothing to undo.")
    _check_not_adapted(model)
    if not lossy:
        _check_exact(model)
    for _, table in table_modules(model):
        check_room(table.weight)
    _check_memory(model)
    vars(model)[_UNPATCHING] = True  # if interrupted, the model counts as patched until the last step
    # In a caller's inference mode parameters would be inference tensors, with which nothing trains.
    with torch.inference_mode(False), torch.no_grad():
        for mode in reversed(MODES):
            mode.uninstall(model)
        for layer in find_experts(model):
            if isinstance(layer.module, MeshExperts):
                restore(layer, device_around(model, layer.path))
        _tie_weights(model)  # a packed head, and experts that are tied to others
    # Also restored modules: an earlier call may have been interrupted.
    for module in model.modules():
        drop_attributes(module)
    return model


def _tie_weights(model: nn.Module) -> None:
    """As transformers' ``tie_weights``, which fails for modules that PEFT has wrapped."""
    whole: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is None:
        return
    # Modules come after their wrappers, and so take their places.
    modules = {_without_wrappers(path): module for path, module in whole.named_modules(remove_duplicate=False)}
    for pair in whole.get_expanded_tied_weights_keys(all_submodels=True).items():
        (target, _, name), (source, _, of_source) = (_without_wrappers(each).rpartition(".") for each in pair)
        setattr(modules[target], name, getattr(modules[source], of_source))


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)


def _is_patched(model: nn.Module) -> bool:
    return any(isinstance(module, PackedModule) or has_attributes(module) for module in model.modules())


def _check_not_adapted(model: nn.Module) -> None:
    """Raises MeshError for adapters on experts: their wrapper computes with a pool only."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), MeshExperts):
            raise MeshError(
                f"{name} has adapters on its experts, which work on patched experts only. Save the adapters with "
                "save_pretrained(folder), remove them with unload(), call torch_mesh.unpatch, and load them with "
                "PeftModel.from_pretrained(model, folder)."
            )


def _check_exact(model: nn.Module) -> None:
    rounded = {module._mesh_pool.weights for module in patched_modules(model) if not module._mesh_pool.exact}
    rounded |= {linear._mesh_format for _, linear in packed_linears(model) if not linear.exact}
    weights: list[Any] = [table.weight for _, table in table_modules(model)]
    rounded |= {weight.format for weight in weights if isinstance(weight, PackedTableWeight) and not weight.exact}
    if rounded and all(map(is_passthrough, rounded)):
        raise MeshError(
            f"The weights are the checkpoint's codes ({' and '.join(sorted(map(short_name, rounded)))}), not values of "
            "the model's dtype: unpatch(model, lossy=True) rounds their values to it."
        )
    if rounded:
        raise MeshError(
            f"Weights were rounded to {' and '.join(sorted(rounded))}, or are a checkpoint's codes of it, so that "
            "their original values are not in memory. Load the model again to have those, or pass lossy=True to "
            "continue with the rounded values."
        )


def _check_memory(model: nn.Module) -> None:
    """Raises MemoryError if the unpacked weights do not fit in memory beside the smallest pool."""
    needed = _bytes_to_unpack(model)
    sizes = [pool.engine.describe_size() for pool in pools_of(model) if pool.guarded]
    evictable = sum(size["slot_bytes"] - size["min_slots"] * size["record_bytes"] for size in sizes)
    if (free := shortage(needed - evictable)) is not None:
        raise MemoryError(
            f"Unpacked, the weights take {needed:,} bytes more, but the machine and its memory cgroups have "
            f"{free + evictable:,} left, with what the pool can free. The model stays patched. Free memory, or save "
            "the model with model.save_pretrained(folder), which writes piece by piece."
        )


def _bytes_to_unpack(model: nn.Module) -> int:
    """Bytes that experts, tables and packed linear layers of the CPU take in addition when they are unpacked."""
    experts = {layer.path: layer.nbytes for layer in find_experts(model) if isinstance(layer.module, MeshExperts)}
    tables = {path: table.weight.nbytes for path, table in table_modules(model)}
    linears = {path: linear.weight.nbytes - linear._mesh_packed.nbytes for path, linear in packed_linears(model)}
    added = experts | tables | linears
    return sum(nbytes for path, nbytes in added.items() if device_around(model, path).type == "cpu")


def _check_patchable(model: nn.Module, layers: list[ExpertsLayer]) -> None:
    if _is_patched(model):
        raise MeshError(
            f"{type(model).__name__} is patched already. To change its configuration call torch_mesh.unpatch(model) "
            "first."
        )
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is quantized by {quantizer.quantization_config.quant_method!s}. torch_mesh takes "
            "bf16, fp16 and fp32 weights and quantizes them itself: load the original without quantization_config."
        )
    for layer in layers:
        for name, parameter in layer.parameters.items():
            if parameter.is_meta:
                raise MeshError(
                    f"{layer.path}.{name} holds no weights: it was never initialized or loaded, or is offloaded. Load "
                    "the model to the CPU or a GPU first, or pass quantization_config=torch_mesh.MeshConfig(...) to "
                    "from_pretrained."
                )
            if parameter.dtype not in WEIGHT_DTYPES:
                raise UnsupportedModelError(
                    f"{layer.path}.{name} is {parameter.dtype}; supported are {', '.join(map(str, WEIGHT_DTYPES))}."
                )
