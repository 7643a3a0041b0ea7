"""Put experts on GPUs. For their forwards see ops/experts_split.py and docs/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_mesh.formats import FORMATS
from torch_mesh.gpu.measuring import streaming_costs
from torch_mesh.gpu.placement import Placement
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.ops.device import DeviceLayer, DeviceRecord, SharedDevice, register
from torch_mesh.pool.expert_pool import ExpertPool, record_bytes
from torch_mesh.store.convert import checked_group_size
from torch_mesh.store.progress import progress_bar

# Slots of a pool that only reads experts for GPUs.
GPU_POOL_SLOTS = 8
# Number of forwards of its layer for which an expert has to be wanted before it moves.
_PATIENCE = 32


def gpu_pool_bytes(layers: Sequence[ExpertsLayer], placement: Placement, weights: str, group_size: int) -> int:
    """Bytes of the slots of a pool that reads experts for GPUs in groups of ``group_size``; 0 if they have the format
    of those in memory."""
    if not placement.needs_pool(weights):
        return 0
    gpu_weights = placement.weights
    return GPU_POOL_SLOTS * record_bytes(layers, gpu_weights, checked_group_size(gpu_weights, group_size))


def move_experts(
    layers: Sequence[ExpertsLayer], pool: ExpertPool, placement: Placement, gpu_pool: ExpertPool | None = None
) -> None:
    """Copy the chosen experts of patched layers to their devices, and evict them from the pool.

    ``gpu_pool`` reads their records if the formats differ. Layers switch over when all are copied. Statistics do not
    count these reads.
    """
    if placement.count == 0:
        return
    try:
        _move(layers, pool, placement, pool if gpu_pool is None else gpu_pool)
    finally:
        pool.engine.warm_up()


def _move(layers: Sequence[ExpertsLayer], pool: ExpertPool, placement: Placement, source: ExpertPool) -> None:
    record, up = _device_record(source), _device_record(pool)
    devices = [device for device in dict.fromkeys(placement.devices) if placement.count_on(device) > 0]
    shared = {device: SharedDevice(pool.handle(0), device) for device in devices}
    records = {device: _empty_records(placement.slots_on(device), record, device) for device in devices}
    tables = {
        device: torch.full((pool.layers, pool.geometry.num_experts), -1, dtype=torch.int32, device=device)
        for device in devices
    }
    taken = dict.fromkeys(devices, 0)
    placed: list[tuple[Any, DeviceLayer]] = []
    with progress_bar("Copying experts to the GPU") as progress:
        for layer, here, device in zip(layers, placement.here, placement.devices, strict=True):
            if device in records:
                copying = record, records[device], tables[device], taken[device]
                placed.append((layer.module, _copy_layer(layer.module, pool, source, shared[device], here, *copying)))
                taken[device] += int(here.sum())
            progress(sum(taken.values()) * record.words * 4, placement.count * record.words * 4)
    for device in devices:
        partial = [layer for _, layer in placed if layer.shared is shared[device] and not layer.complete]
        if batch := placement.batch_on(device):
            buffers = _empty_records(2 * batch, up, device)
            shared[device].lend(buffers[:batch], buffers[batch:], up)
            shared[device].costs = streaming_costs(pool, partial[0], shared[device], placement.streaming)
        if spare := placement.spare_on(device):
            moving = [any(layer.index == index for layer in partial) for index in range(pool.layers)]
            shared[device].move_between(
                source.handle(0), records[device], tables[device], moving, spare, patience=_PATIENCE
            )
    if any(of_device.mover is not None for of_device in shared.values()):
        pool.moves_from = None if source is pool else source
    for module, on_device in placed:
        pool.device_layers.append(on_device)
        register(module._mesh_handle, on_device)
        module._mesh_device = on_device.records.device
    pool.engine.reset_stats()
    for of_device in shared.values():
        of_device.reset_stats()


def _device_record(pool: ExpertPool) -> DeviceRecord:
    assert pool.activations is not None and len(set(pool.activations)) == 1
    group_size = 0 if FORMATS[pool.weights].holds_bf16 else pool.group_size
    return DeviceRecord(pool.weights, group_size, *pool.geometry.sizes, pool.activations[0])


def _empty_records(count: int, record: DeviceRecord, device: torch.device) -> torch.Tensor:
    return torch.empty((count, record.words * 4), dtype=torch.uint8, device=device)


def _copy_layer(
    module: Any,
    pool: ExpertPool,
    source: ExpertPool,
    shared: SharedDevice,
    here: torch.Tensor,
    record: DeviceRecord,
    records: torch.Tensor,
    tables: torch.Tensor,
    first: int,
) -> DeviceLayer:
    chosen = here.nonzero().flatten()
    handle, at_a_time = source.handle(module._mesh_layer), max(1, source.slots // 2)
    for slot, expert in enumerate(chosen.tolist(), start=first):
        if (slot - first) % at_a_time == 0:
            torch.ops.torch_mesh.prefetch(handle, chosen[slot - first :][:at_a_time])
        records[slot].copy_(torch.from_numpy(source.engine.read_record(module._mesh_layer, expert)))
    if not pool.in_memory:  # if in memory, the pool is their only other copy
        torch.ops.torch_mesh.evict(module._mesh_handle, chosen)
    table = tables[module._mesh_layer]
    table[chosen.to(table.device)] = torch.arange(first, first + len(chosen), dtype=torch.int32, device=table.device)
    complete = bool(here.all())
    return DeviceLayer(record, records, table, here, complete, pool.workspace, module._mesh_layer, shared)
