"""Put a model's experts into a pool: the sequence that ``patch``, ``from_pretrained`` and ``Experts.from_store`` share.

They differ in their ``ExpertSource``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_mesh import _C
from torch_mesh.adapters.registration import watch as watch_peft
from torch_mesh.config import MeshConfig, fixed_config
from torch_mesh.errors import prefix_errors_with
from torch_mesh.gpu.choosing import choose_experts
from torch_mesh.gpu.placement import Placement, check_beside_gpu
from torch_mesh.gpu.placing import GPU_POOL_SLOTS, gpu_pool_bytes
from torch_mesh.hf.parallelism_checks import check_forwards
from torch_mesh.hf.saving import PatchedModelQuantizer
from torch_mesh.lossy.fallback import split_slots
from torch_mesh.models.families import ExpertsLayer, common_geometry, find_experts, pool_activations
from torch_mesh.modules.dense import dense_bytes
from torch_mesh.modules.experts import install
from torch_mesh.modules.packed_weight import device_of
from torch_mesh.patching.expert_source import ExpertSource, LoadedModelSource
from torch_mesh.patching.modes import MODES, Patching
from torch_mesh.patching.rollback import undone_on_error
from torch_mesh.pool.expert_pool import ExpertPool, min_slots, pool_slots, record_bytes
from torch_mesh.pool.secondary_pool import Records, open_other
from torch_mesh.prefetch.lookahead import check_predictor
from torch_mesh.statistics.log import start_log
from torch_mesh.store.convert import checked_group_size


def check(model: nn.Module, layers: list[ExpertsLayer], config: MeshConfig, source: ExpertSource) -> None:
    """Raises for settings of ``config`` that exclude each other or the model, before anything is read or written."""
    patching = Patching(model, layers, config, source)
    for mode in MODES:
        mode.check(patching)
    # Called for its errors. Later there are as many layers or more, and less memory.
    pool_slots(layers, config, stored_layers=len(layers), weights=source.weights, group_size=source.group_size)


def assemble(
    model: nn.Module,
    layers: list[ExpertsLayer],
    config: MeshConfig,
    source: ExpertSource,
    quantizer: PatchedModelQuantizer | None = None,
) -> None:
    """Patch a model that has passed ``check``, and whose other weights are loaded.

    ``quantizer`` is that of ``from_pretrained``. Checks come before the first change. After an error or Ctrl-C
    ``source.undo`` reverts the changes.
    """
    check_forwards(layers)
    check_predictor(layers, config.predictor, model)
    placement = choose_experts(
        model,
        layers,
        config.gpu,
        profile=config.profile,
        other_group_size=config.group_size,
        weights=source.weights,
        group_size=source.group_size,
        stored_layers=source.layers,
        layer_indices=source.layer_indices,
    )
    if placement.count > 0:  # "auto" may have placed some
        check_beside_gpu(lossy_modes=config.lossy.modes, prefill=config.prefill)
    if placement.needs_pool(source.weights):
        source.check_other(placement.weights)
    slots, fallback_slots = _choose_slots(model, layers, config, source, placement)
    watch_peft()
    patching = Patching(model, layers, config, source, quantizer, placement, patch_heads=_patch_heads)
    # In a caller's inference mode handles, packed and restored weights would be inference tensors, with which nothing
    # trains.
    with torch.inference_mode(False), torch.no_grad(), undone_on_error(source.undo):
        for mode in MODES:
            if mode.before_pool:
                mode.install(patching)
        _fill_pool(patching, slots, fallback_slots)
        for mode in MODES:
            if not mode.before_pool:
                mode.install(patching)


def _fill_pool(patching: Patching, slots: int, fallback_slots: int) -> None:
    model, layers, config, source = patching.model, patching.layers, patching.config, patching.source
    placement: Any = patching.placement
    undo = source.undo
    if placement.needs_pool(source.weights):
        with source.records(placement.weights) as others:
            patching.gpu_pool = undo.closing(_open_gpu_pool(layers, config, others))
    pool = patching.pool = _open_pool(layers, config, source, placement, slots, fallback_slots)
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    if config.stats.file is not None:
        start_log(pool, name, source.layer_indices, file=config.stats.file, every=config.stats.every)
    for layer, index in zip(layers, source.layer_indices, strict=True):
        device = device_of(layer.module)
        if pool.in_memory:
            for expert in range(layer.num_experts):
                with prefix_errors_with(f"{layer.path}, expert {expert}"):
                    pool.fill(index, expert, layer.expert(expert))
        install(layer, pool, index)
        if pool.in_memory:
            undo.free(layer, device)
    features = {"lossy (docs/lossy.md)": pool.lossy, "gpu (docs/gpu.md)": placement.count}
    first: Any = layers[0].module
    first._mesh_experimental = ", ".join(name for name, used in features.items() if used)


def _patch_heads(heads: nn.Module, resident: float, threads: str | int) -> None:
    """Patch the MTP layers of a patched model, which transformers opens when it first drafts with them.

    The model's settings do not apply to them, nor do their variables in the environment.
    """
    config = fixed_config(weights="int8", resident=resident, threads=threads, attention="model")
    layers = find_experts(heads)
    source = LoadedModelSource(heads, layers, config)
    check(heads, layers, config, source)
    assemble(heads, layers, config, source)


def _choose_slots(
    model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig, source: ExpertSource, placement: Placement
) -> tuple[int, int]:
    packed: Any = {"weights": source.weights, "group_size": source.group_size}
    dense_freed, dense_taken = dense_bytes(
        model, layers, dense=config.dense, group_size=config.group_size, blocks=source.blocks
    )
    tables = 0 if source.tables is None else source.tables.memory(config.table_cache_bytes)
    gpu_pool = gpu_pool_bytes(layers, placement, source.weights, config.group_size)
    kept = source.undo.keeps_originals  # until patching is done
    slots = pool_slots(
        layers,
        config,
        stored_layers=source.counted,
        **packed,
        freed=source.freed + (dense_freed if kept else 0),
        regained=0 if kept else dense_freed,
        staging=source.staging + gpu_pool + dense_taken + tables,
    )
    if not source.stays_in_memory(slots):
        slots = placement.cpu_slots(slots, source.layers * layers[0].num_experts, min_slots(layers))
    fallback = config.lossy.fallback
    if fallback == "none":
        return slots, 0
    return split_slots(
        slots,
        fallback=fallback,
        resident=config.resident,
        experts=source.layers * layers[0].num_experts,
        top_k=min_slots(layers),
        record_bytes=record_bytes(layers, **packed),
        fallback_bytes=record_bytes(layers, fallback, checked_group_size(fallback, config.group_size)),
    )


def _open_gpu_pool(layers: Sequence[ExpertsLayer], config: MeshConfig, records: Records) -> ExpertPool:
    slots = min(GPU_POOL_SLOTS, records.layers * layers[0].num_experts)
    return open_other(layers, config.replace(residency={"guard": "off"}), records, slots=slots, min_slots=1)


def _open_pool(
    layers: Sequence[ExpertsLayer],
    config: MeshConfig,
    source: ExpertSource,
    placement: Placement,
    slots: int,
    fallback_slots: int,
) -> ExpertPool:
    fixed: Any = {
        "activations": pool_activations(layers, source.layer_indices, source.layers),
        "weights": source.weights,
        "group_size": source.group_size,
        "exact": source.exact,
        "min_slots": min_slots(layers),
    }
    geometry = common_geometry(layers)
    if placement.count > 0:
        config = config.replace(prefill="off")
    if source.stays_in_memory(slots):
        return source.undo.closing(ExpertPool(geometry, source.layers, slots, config, **fixed))
    fallback = None
    if fallback_slots > 0:
        with source.records(config.lossy.fallback) as low:
            fallback = open_other(layers, config, low, slots=fallback_slots, min_slots=min_slots(layers))
            source.undo.closing(fallback)
    with source.records(source.weights) as records:
        pool = ExpertPool(
            geometry,
            records.layers,
            slots,
            config,
            **fixed,
            source=_C.Source(**records.source_arguments, copies=source.copies),
            layer_indices=records.layer_indices,
            fallback=fallback,
            on_gpu=placement.on_gpu(records.layers, records.layer_indices),
            store=records.store,
            expert_range=source.expert_range,
            identity=records.identity,
        )
        return source.undo.closing(pool)
