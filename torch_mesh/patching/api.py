"""``patch`` and ``unpatch``: a loaded model's experts go into a pool, and come back."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import MeshConfig, with_fields
from ..errors import MeshError, UnsupportedModelError
from ..formats import FORMATS, is_passthrough, short_name
from ..hf.parallelism_checks import check_undivided
from ..hf.saving import PatchedModelQuantizer
from ..models.families import WEIGHT_DTYPES, ExpertsLayer, check_model, find_experts
from ..modules.dense import packed_linears
from ..modules.experts import MeshExperts, PackedModule, drop_attributes, has_attributes, patched_modules, restore
from ..modules.packed_weight import device_of
from ..modules.tables import check_room, table_modules
from .expert_source import LoadedModelSource
from .modes import MODES
from .pipeline import assemble, check

Model = TypeVar("Model", bound=nn.Module)

_UNPATCHING = "_mesh_unpatching"


def patch(model: Model, config: MeshConfig | None = None, **fields: Any) -> Model:
    """Moves the experts of a loaded model into a pool, in place, and returns the same model.

    ``fields`` are those of MeshConfig and beat ``config``'s. The weights that are packed are those in memory. If all
    experts are to stay resident and no ``store`` is named they are packed in memory, layer by layer, each layer's
    parameters being freed when it is done; otherwise they are written to ``store``, or to an unnamed one in the cache
    folder that goes with the process. So are, in every case, those of another format (``gpu.weights``,
    ``lossy.fallback``). No forward of the model may run meanwhile: its weights move away under it. An error, or Ctrl-C,
    makes the model what it was; the originals of layers that have been packed in memory and rounded are gone by then,
    and a warning says so; where there is no memory to unpack such layers, they stay patched, and a warning says that.

    Raises UnsupportedModelError for a model without supported experts, listing the supported families; MeshError if the
    model is patched already or its experts hold no weights; ValueError for a wrong field or value, TypeError for what
    is no loaded model.
    """
    check_model(model)
    config = with_fields(config, fields)
    if config.max_error is not None:
        raise ValueError(
            f"max_error={config.max_error} compares formats by a checkpoint's files, and a loaded model has none: "
            "give it "
            "to from_pretrained, or name a format, which torch-mesh plan --memory finds."
        )
    check_undivided(model)
    layers = find_experts(model)
    _check_patchable(model, layers)
    source = LoadedModelSource(model, layers, config)
    check(model, layers, config, source)
    if FORMATS[source.weights].holds_bf16 and layers[0].dtype != torch.bfloat16:
        warnings.warn(f"The experts are {layers[0].dtype} and are rounded to bf16.", stacklevel=2)
    assemble(model, layers, config, source, PatchedModelQuantizer(config, pre_quantized=False))
    return model


def unpatch(model: Model, lossy: bool = False) -> Model:
    """Gives a patched model its own experts modules back, in place, and returns the same model.

    The parameters get the values that the model would have without torch_mesh. Where the pool does not have those
    (int8, int4, or fp16 and fp32 weights that were rounded to bf16), raises MeshError unless ``lossy``: then they get
    the rounded ones. They come back in the dtype to which the model was cast meanwhile, as by ``model.float()``. After
    an error or Ctrl-C the same call goes on.
    """
    check_model(model)
    if not _is_patched(model):
        raise MeshError(f"{type(model).__name__} is not patched: there is nothing to undo.")
    _check_not_adapted(model)
    if not lossy:
        _check_exact(model)
    for _, table in table_modules(model):
        check_room(table.weight)
    device = device_of(model)
    vars(model)[_UNPATCHING] = (
        True  # so that an interrupted call leaves a model that counts as patched, until the very last step
    )
    for mode in reversed(MODES):
        mode.uninstall(model, device)
    for layer in find_experts(model):
        if isinstance(layer.module, MeshExperts):
            restore(layer, device)
    tied: Any = model
    if hasattr(tied, "tie_weights"):
        tied.tie_weights()  # a head that was packed on its own, and experts that are tied to others
    # What an earlier, interrupted call left in restored modules, too.
    for module in model.modules():
        drop_attributes(module)
    return model


def _is_patched(model: nn.Module) -> bool:
    """Whether anything of it is, be it what an interrupted ``unpatch`` left."""
    return any(isinstance(module, PackedModule) or has_attributes(module) for module in model.modules())


def _check_not_adapted(model: nn.Module) -> None:
    """The wrapper around adapted experts computes with a pool, and none but a pool takes what it passes on."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), MeshExperts):
            raise MeshError(
                f"{name} has adapters on its experts, which need them patched. Keep them with "
                "save_pretrained(folder), take them away with "
                "unload(), call torch_mesh.unpatch then, and put them around the plain model with "
                "PeftModel.from_pretrained(model, folder)."
            )


def _check_exact(model: nn.Module) -> None:
    rounded = {module._mesh_pool.weights for module in patched_modules(model) if not module._mesh_pool.exact}
    rounded |= {linear._mesh_format for _, linear in packed_linears(model) if not linear.exact}
    if rounded and all(map(is_passthrough, rounded)):
        raise MeshError(
            f"The weights are the checkpoint's own codes, as {' and '.join(sorted(map(short_name, rounded)))}: "
            "unpatch(model, lossy=True) rounds what they stand for to the model's dtype."
        )
    if rounded:
        raise MeshError(
            f"Weights were rounded to {' and '.join(sorted(rounded))}, or are a checkpoint's codes of it, and their "
            "original values are not in memory in "
            "the model's dtype. Load the model anew to have those, or pass lossy=True to go on with what is there, "
            "rounded to it."
        )


def _check_patchable(model: nn.Module, layers: list[ExpertsLayer]) -> None:
    if _is_patched(model):
        raise MeshError(
            f"{type(model).__name__} is patched already. To change its configuration call torch_mesh.unpatch(model) "
            "first."
        )
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is quantised by {quantizer.quantization_config.quant_method!s}. torch_mesh "
            "takes bf16, fp16 and fp32 weights and quantises them itself: load the original without "
            "quantization_config."
        )
    for layer in layers:
        for name, parameter in layer.parameters.items():
            if parameter.is_meta:
                raise MeshError(
                    f"{layer.path}.{name} holds no weights: it was never initialised or loaded, or is offloaded. Load "
                    "the "
                    "model to the CPU or a GPU first, or pass quantization_config=torch_mesh.MeshConfig(...) to "
                    "from_pretrained."
                )
            if parameter.dtype not in WEIGHT_DTYPES:
                raise UnsupportedModelError(
                    f"{layer.path}.{name} is {parameter.dtype}; supported are {', '.join(map(str, WEIGHT_DTYPES))}."
                )
