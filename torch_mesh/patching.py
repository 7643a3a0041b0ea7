"""``patch`` and ``unpatch``: a loaded model's experts go into a pool, and come back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from . import _C
from .announce import announce, withdraw
from .attention import check_attention, take_attention
from .cache import unnamed_folder
from .config import MeshConfig
from .dense import dense_bytes, pack_dense, packed_linears, restore_dense
from .errors import MeshError, UnsupportedModelError
from .fallback import check_fallback, split_pool
from .families import WEIGHT_DTYPES, ExpertsLayer, common_geometry, find_experts
from .foresight.lookahead import check_predictor, connect
from .foresight.profiles import check_profile
from .gpu.choosing import check_gpu_weights, choose_experts
from .gpu.placement import Placement
from .gpu.placing import gpu_pool_bytes, move_experts, open_gpu_pool
from .left_alone import announce_left_alone
from .lossy import check_lossy, make_lossy, undo_lossy
from .modules import MeshExperts, PackedModule, drop_attributes, has_attributes, install, patched_modules, restore
from .other_format import Records, open_other, other_config
from .packed_weight import PackedWeight
from .pool import ExpertPool, least_slots, pool_slots
from .saving import PatchedModelQuantizer, attach_quantizer, detach_quantizer
from .store.convert import checked_group_size, convert_model
from .store.manifest import Store
from .store.progress import progress_bar
from .undivided import check_forwards, check_undivided
from .undo import Undo, undone_on_error

Model = TypeVar("Model", bound=nn.Module)

_UNPATCHING = "_mesh_unpatching"


def patch(model: Model, config: MeshConfig | None = None, **fields: Any) -> Model:
    """Moves the experts of a loaded model into a pool, in place, and returns the same model.

    ``fields`` are those of MeshConfig and beat ``config``'s. The weights that are packed are those in memory. If all experts are to
    stay resident and no ``store`` is named they are packed in memory, layer by layer, each layer's parameters being freed when it is
    done; otherwise they are written to ``store``, or to an unnamed one in the cache folder that goes with the process. So are, in every case,
    those of another format (``gpu_weights``, ``fallback``).
    No forward of the model may run meanwhile: its weights move away under it. An error, or Ctrl-C, makes the model what it was; the originals of layers
    that have been packed in memory and rounded are gone by then, and a warning says so; where there is no memory to unpack such layers, they stay
    patched, and a warning says that.

    Raises UnsupportedModelError for a model without supported experts, listing the supported families; MeshError if the
    model is patched already or its experts hold no weights; ValueError for a wrong field or value.
    """
    config = (config or MeshConfig()).replace(**fields)
    check_undivided(model)
    layers = find_experts(model)
    _check_patchable(model, layers)
    check_attention(model, config)
    check_predictor(layers, config, model)
    check_profile(config, layers)
    check_lossy(model, layers, config)
    weights = "bf16" if config.weights == "auto" else config.weights
    check_fallback(model, layers, config, weights)
    check_gpu_weights(config)
    if weights == "bf16" and layers[0].dtype != torch.bfloat16:
        warnings.warn(f"The experts are {layers[0].dtype} and are rounded to bf16.", stacklevel=2)
    group_size = checked_group_size(weights, config.group_size)
    placement = choose_experts(model, layers, config, weights, group_size)
    for_pool = placement.adjusted(config)
    dense_freed, dense_taken = dense_bytes(model, layers, config)
    slots = pool_slots(
        layers,
        config,
        stored_layers=len(layers),
        weights=weights,
        group_size=group_size,
        freed=_cpu_bytes(layers) + dense_freed,
        staging=gpu_pool_bytes(layers, placement, weights, config) + dense_taken,
    )
    with undone_on_error(model, config) as undo:
        pack_dense(model, layers, config)  # before the pool, which takes what memory is left
        if config.store is None and slots == _experts(layers) and config.io != "mmap":
            gpu_pool = _open_gpu_pool(model, layers, config, weights, placement, undo)  # before the weights are gone
            pool = _patch_in_memory(layers, for_pool, weights, group_size, undo)
        else:
            slots = placement.cpu_slots(slots, _experts(layers), least_slots(layers))
            pool, gpu_pool = _patch_on_disk(model, layers, for_pool, weights, group_size, slots, placement, undo)
        finish(model, layers, config, pool, placement, gpu_pool, PatchedModelQuantizer(config, pre_quantized=False))
    return model


def finish(
    model: nn.Module,
    layers: list[ExpertsLayer],
    config: MeshConfig,
    pool: ExpertPool,
    placement: Placement,
    gpu_pool: ExpertPool | None,
    quantizer: PatchedModelQuantizer,
) -> None:
    """What comes after the layers are installed, however their weights came into the pool."""
    make_lossy(model, layers, config)
    take_attention(model, config)
    move_experts(layers, pool, placement, gpu_pool)
    announce_left_alone(model, layers)
    attach_quantizer(model, quantizer)
    announce(model, config)


def unpatch(model: Model, lossy: bool = False) -> Model:
    """Gives a patched model its own experts modules back, in place, and returns the same model.

    The parameters get the values that the model would have without torch_mesh. Where the pool does not have those (int8,
    int4, or fp16 and fp32 weights that were rounded to bf16), raises MeshError unless ``lossy``: then they get the rounded ones.
    They come back in the dtype to which the model was cast meanwhile, as by ``model.float()``. After an error or Ctrl-C the same call goes on.
    """
    if not _is_patched(model):
        raise MeshError(f"{type(model).__name__} is not patched: there is nothing to undo.")
    if not lossy:
        _check_exact(model)
    device = _device(model)
    vars(model)[_UNPATCHING] = (
        True  # so that an interrupted call leaves a model that counts as patched, until the very last step
    )
    detach_quantizer(model)
    withdraw(model)
    undo_lossy(model)
    restore_dense(model, device)
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


def _check_exact(model: nn.Module) -> None:
    rounded = {module._mesh_pool.weights for module in patched_modules(model) if not module._mesh_pool.exact}
    rounded |= {linear._mesh_format for _, linear in packed_linears(model) if not linear.exact}
    if rounded:
        raise MeshError(
            f"Weights were rounded to {' and '.join(sorted(rounded))}, and their original values are not in memory. "
            "Load the model anew to have those, or pass lossy=True to go on with the rounded ones."
        )


def _check_patchable(model: nn.Module, layers: list[ExpertsLayer]) -> None:
    if _is_patched(model):
        raise MeshError(
            f"{type(model).__name__} is patched already. To change its configuration call torch_mesh.unpatch(model) first."
        )
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is quantised by {quantizer.quantization_config.quant_method!s}. torch_mesh "
            "takes bf16, fp16 and fp32 weights and quantises them itself: load the original without quantization_config."
        )
    check_forwards(layers)
    for layer in layers:
        for name, parameter in layer.parameters.items():
            if parameter.is_meta:
                raise MeshError(
                    f"{layer.path}.{name} holds no weights: it was never initialised or loaded, or is offloaded. Load the "
                    "model to the CPU or a GPU first, or pass quantization_config=torch_mesh.MeshConfig(...) to from_pretrained."
                )
            if parameter.dtype not in WEIGHT_DTYPES:
                raise UnsupportedModelError(
                    f"{layer.path}.{name} is {parameter.dtype}; supported are {', '.join(map(str, WEIGHT_DTYPES))}."
                )


def _patch_in_memory(
    layers: list[ExpertsLayer], config: MeshConfig, weights: str, group_size: int, undo: Undo
) -> ExpertPool:
    pool = _open_pool(layers, config, weights, group_size, slots=_experts(layers), source=None)
    undo.pools.append(pool)
    for index, layer in enumerate(layers):
        device = _device(layer.module)
        for expert in range(layer.num_experts):
            pool.fill(index, expert, layer.expert(expert))
        install(layer, pool, index)
        undo.free(layer, device)
    return pool


def _patch_on_disk(
    model: nn.Module,
    layers: list[ExpertsLayer],
    config: MeshConfig,
    weights: str,
    group_size: int,
    slots: int,
    placement: Placement,
    undo: Undo,
) -> tuple[ExpertPool, ExpertPool | None]:
    """The pool, and that which reads what lies on GPUs, where there is one."""
    where: Any = {"stored_layers": len(layers), "weights": weights, "group_size": group_size}
    slots, stand_ins = split_pool(layers, config, slots, **where)
    with _packed(model, config, undo) as records:
        fallback = None
        if stand_ins > 0:
            with _packed(model, other_config(config, config.fallback), undo) as low:
                fallback = open_other(layers, config, low, slots=stand_ins, least_slots=least_slots(layers))
                undo.pools.append(fallback)
        gpu_pool = _open_gpu_pool(model, layers, config, weights, placement, undo)
        source = _C.Source(**records.source_arguments)
        elsewhere = placement.elsewhere(records.layers, records.places)
        pool = _open_pool(layers, config, weights, group_size, slots, source, fallback, elsewhere, records.store)
        undo.pools.append(pool)
    for index, layer in enumerate(layers):
        install(layer, pool, index)
    connect(model, layers, config)
    return pool, gpu_pool


def _open_pool(
    layers: list[ExpertsLayer],
    config: MeshConfig,
    weights: str,
    group_size: int,
    slots: int,
    source: _C.Source | None,
    fallback: ExpertPool | None = None,
    elsewhere: torch.Tensor | None = None,
    store: Store | None = None,
) -> ExpertPool:
    return ExpertPool(
        common_geometry(layers),
        len(layers),
        slots,
        config,
        weights=weights,
        group_size=group_size,
        exact=weights == "bf16" and layers[0].dtype == torch.bfloat16,
        source=source,
        least_slots=least_slots(layers),
        fallback=fallback,
        elsewhere=elsewhere,
        store=store,
    )


def _open_gpu_pool(
    model: nn.Module,
    layers: list[ExpertsLayer],
    config: MeshConfig,
    weights: str,
    placement: Placement,
    undo: Undo,
) -> ExpertPool | None:
    if not placement.needs_pool(weights):
        return None
    with _packed(model, other_config(config, placement.weights), undo) as records:
        pool = open_gpu_pool(layers, config, records)
        undo.pools.append(pool)
        return pool


@contextmanager
def _packed(model: nn.Module, config: MeshConfig, undo: Undo) -> Iterator[Records]:
    """The experts in a store, to be opened within: whoever has its files open keeps them when an unnamed one loses their names."""
    weights = "bf16" if config.weights == "auto" else config.weights
    with _store_folder(config) as folder:
        fingerprint = undo.new_store(folder)
        with progress_bar(f"Packing experts to {weights}") as progress:
            store = convert_model(
                model,
                folder,
                weights,
                config.group_size,
                fingerprint=fingerprint,
                private=config.store is None,
                progress=progress,
            ).store
        yield Records.of_store(store, range(store.manifest.shape.layers))


@contextmanager
def _store_folder(config: MeshConfig) -> Iterator[Path]:
    if config.store is not None:
        yield Path(config.store)
        return
    with unnamed_folder() as folder:
        yield folder / "experts"


def _experts(layers: list[ExpertsLayer]) -> int:
    return sum(layer.num_experts for layer in layers)


def _cpu_bytes(layers: list[ExpertsLayer]) -> int:
    parameters = (parameter for layer in layers for parameter in layer.parameters.values())
    return sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")


def _device(model: nn.Module) -> torch.device:
    """Where the model computes: the device of the first parameter that has one."""
    for parameter in model.parameters():
        if not parameter.is_meta and not isinstance(parameter, PackedWeight):
            return parameter.device
    return torch.device("cpu")
