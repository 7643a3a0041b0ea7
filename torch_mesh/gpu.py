"""Experts on GPUs: how many fit, which ones, and putting them there. What runs there: ops/experts_split.py; docs/gpu.md."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from . import _C
from .config import LEAST_CAPABILITY, MeshConfig
from .errors import MeshError, UnsupportedModelError
from .families import ExpertsLayer
from .foresight.profiles import check_fits, load_profile
from .foresight.traces import Trace
from .ops.device import DeviceLayer, DeviceRecord, SharedDevice, place
from .ops.streaming import Costs
from .other_format import BITS, Records, open_other
from .packed_weight import PackedWeight
from .pool import ExpertPool, record_bytes
from .statistics.counters import Stats
from .store.convert import checked_group_size
from .store.progress import progress_bar

# What gpu_experts="auto" leaves free: the KV cache, activations, what else runs on the card.
_RESERVE_BYTES = 2 << 30
_RESERVE_SHARE = 8  # one part of the card in so many
# torch's allocator takes large blocks in whole pages of this size.
_ALLOCATION = 2 << 20
# Of each of the two buffers through which prompts bring experts up: enough records for copies to go on beside products. Both take
# an eighth of the slots at most, from 16 slots on.
_MOST_BATCH = 8
_SLOTS_PER_BATCH = 16
# Experts that move at a time under gpu_placement="dynamic", and so slots that are kept spare.
_MOVED_TOGETHER = 4
# Slots of a pool that only reads what lies on GPUs.
GPU_POOL_SLOTS = 8
# Forwards of its layer for which an expert has to be wanted before it moves.
_PATIENCE = 32
_BY_PROJECTION = (
    "the experts of this family have a gate, activation or norm of their own and run by projection, on the CPU."
)
# Rows of an expert by which the CPU's time is measured, beside one.
_MANY_ROWS = 32


@dataclass(frozen=True)
class GpuPlan:
    """How many experts a card holds. ``counts``: of each layer. Bytes; advice as in ``Plan``."""

    status: Literal["ok", "below recommended", "too small", "nothing to do"]
    advice: str
    counts: tuple[int, ...]
    spare: int  # slots that hold nothing, for experts that move
    buffers: int  # records of the two buffers through which prompts bring others up; 0 where all fit
    expert_bytes: int  # of all that are placed and the buffers, as torch's allocator takes them
    reserve_bytes: int
    loads: bool = True  # False: loading the model so would raise

    @property
    def placed(self) -> int:
        """Experts on the card."""
        return sum(self.counts)


@dataclass(frozen=True)
class Placement:
    """Which of each layer's experts go to which device: bool [experts] and the device, for each of a model's layers."""

    here: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    weights: str  # their format there
    streaming: str | tuple[float, float, float] = "auto"  # MeshConfig.gpu_streaming
    dynamic: bool = False  # MeshConfig.gpu_placement

    @property
    def count(self) -> int:
        return sum(int(layer.sum()) for layer in self.here)

    def count_on(self, device: torch.device) -> int:
        return sum(int(here.sum()) for here, where in zip(self.here, self.devices, strict=True) if where == device)

    def batch_on(self, device: torch.device) -> int:
        """Records of each of the two buffers there; 0 without any."""
        return _batch(self.count_on(device)) if self._partly(device) and self.streaming != "off" else 0

    def spare_on(self, device: torch.device) -> int:
        """Slots there that hold nothing, for experts on their way; 0 where none move."""
        return _MOVED_TOGETHER if self._partly(device) and self.dynamic else 0

    def slots_on(self, device: torch.device) -> int:
        """Those that hold experts and those that are spare."""
        return self.count_on(device) + self.spare_on(device)

    def elsewhere(self, layers: int, places: Sequence[int]) -> torch.Tensor | None:
        """bool [layers, experts]: what a pool of ``layers`` need not hold, of which the model's layers are ``places``; None: nothing."""
        if self.count == 0:
            return None
        mask = torch.zeros((layers, self.here[0].numel()), dtype=torch.bool)
        mask[list(places)] = torch.stack(self.here)
        return mask

    def needs_pool(self, weights: str) -> bool:
        """Whether what is placed has other records than those of ``weights``."""
        return self.count > 0 and self.weights != weights

    def _partly(self, device: torch.device) -> bool:
        return any(not here.all() for here, where in zip(self.here, self.devices, strict=True) if where == device)

    def adjusted(self, config: MeshConfig) -> MeshConfig:
        """``config`` for the pool that keeps the others. A window would read a layer as a whole, what is on a GPU included.

        Raises ValueError for ``prefill="window"`` and for lossy modes, to which an expert on a GPU would look cold.
        """
        if self.count == 0:
            return config
        check_beside_gpu(config)
        return config.replace(prefill="off")

    def cpu_slots(self, slots: int, every: int, least: int) -> int:
        """Of ``slots``, those that a pool has a use for when no expert is kept twice."""
        return min(slots, max(least, every - self.count))


def check_beside_gpu(config: MeshConfig) -> None:
    """Raises ValueError for what does not go with experts on a GPU."""
    if config.lossy:
        raise ValueError(f"{config.lossy} does not go with gpu_experts: choose one of the two.")
    if config.prefill == "window":
        raise ValueError("prefill='window' reads whole layers and does not go with gpu_experts; leave it at 'auto'.")


@dataclass(frozen=True)
class _RecordSizes:
    """Bytes of one expert's record: as it lies on a card, and as prompts bring others up."""

    there: int
    up: int


def plan_gpu(
    free: int,
    total: int,
    layers: int,
    experts: int,
    top_k: int,
    record_bytes: int,
    up_bytes: int | None = None,
    streaming: bool = True,
    dynamic: bool = False,
) -> GpuPlan:
    """What ``gpu_experts="auto"`` places on a card that has ``free`` of its ``total`` bytes left, for ``layers`` layers on it.

    The same number in each layer, and one more in the first ones as far as that goes. Recommended are as many as a token uses.
    ``streaming``: beside them lie two buffers for prompts, ``dynamic``: and spare slots, unless all experts fit. ``up_bytes``: of a record as
    prompts bring it up, if not ``record_bytes`` as on the card.
    """
    reserve = max(_RESERVE_BYTES, total // _RESERVE_SHARE)
    budget = max(0, free - reserve)
    every = layers * experts
    slots = min(every, _whole(budget) // record_bytes)
    spare = buffers = 0
    if 0 < slots < every:
        spare, buffers = _MOVED_TOGETHER * dynamic, 2 * _batch(slots) * streaming
        left = budget - _allocated(buffers * (up_bytes or record_bytes))
        slots = max(0, min(slots, _whole(left) // record_bytes) - spare)
    if slots == 0:
        spare = buffers = 0
    counts = tuple(slots // layers + (layer < slots % layers) for layer in range(layers))
    taken = _taken(slots + spare, record_bytes, buffers, up_bytes or record_bytes)
    return GpuPlan(*_verdict(slots, layers, experts, top_k, record_bytes), counts, spare, buffers, taken, reserve)


def plan_config(
    config: MeshConfig, free: int, total: int, layers: int, experts: int, top_k: int, record_bytes: int, up_bytes: int
) -> GpuPlan:
    """``plan_gpu`` for a config, whose ``gpu_experts`` may also be a number or a mask: then those, or none if they do not fit.

    ``record_bytes``: of ``gpu_weights``, ``up_bytes``: of ``weights``. A negative ``free`` is what the rest of the model lacks. Raises
    ValueError for a number or a mask that does not fit the model.
    """
    if free < 0:
        advice = f"The rest of the model alone needs {-free:,} bytes more than the card has: leave it in memory."
        return _no_plan(layers, advice, loads=False)
    streaming, dynamic = config.gpu_streaming != "off", config.gpu_placement == "dynamic"
    if config.gpu_experts == "auto":
        return plan_gpu(free, total, layers, experts, top_k, record_bytes, up_bytes, streaming, dynamic)
    card = (torch.device("cuda"),) * layers
    here = _given_experts(config, layers, experts, None)
    placement = Placement(here, card, config.gpu_weights, config.gpu_streaming, dynamic)
    if placement.count == 0:
        return _no_plan(layers, "gpu_experts names none.", loads=not dynamic)
    spare, buffers = placement.spare_on(card[0]), 2 * placement.batch_on(card[0])
    taken = _taken(placement.slots_on(card[0]), record_bytes, buffers, up_bytes)
    if taken > free:
        left = f"beside the rest of the model the card has {free:,} left"
        return _no_plan(layers, f"gpu_experts needs {taken:,} bytes, but {left}: give fewer, or 'auto'.", loads=False)
    verdict = _verdict(placement.count, layers, experts, top_k, record_bytes)
    return GpuPlan(*verdict, tuple(int(layer.sum()) for layer in here), spare, buffers, taken, 0)


def plan_by_projection(config: MeshConfig, layers: int) -> GpuPlan:
    """For experts that run on the CPU only. Raises UnsupportedModelError where the config insists on some."""
    if config.gpu_experts != "auto":
        raise UnsupportedModelError(f"gpu_experts cannot be had here: {_BY_PROJECTION}")
    return _no_plan(layers, f"gpu_experts='auto' places none: {_BY_PROJECTION}", loads=True)


def _no_plan(layers: int, advice: str, loads: bool) -> GpuPlan:
    return GpuPlan("too small", advice, (0,) * layers, 0, 0, 0, 0, loads)


def _whole(size: int) -> int:
    """What of so many bytes one allocation can be."""
    return max(0, size) // _ALLOCATION * _ALLOCATION


def _allocated(size: int) -> int:
    """What an allocation of so many bytes takes."""
    return -(-size // _ALLOCATION) * _ALLOCATION


def _taken(slots: int, record_bytes: int, buffers: int, up_bytes: int) -> int:
    """What slots and a prompt's buffers take, each an allocation of its own."""
    return _allocated(slots * record_bytes) + _allocated(buffers * up_bytes)


def _batch(slots: int) -> int:
    """Records of one of a prompt's buffers beside so many slots."""
    return min(_MOST_BATCH, max(1, slots // _SLOTS_PER_BATCH))


def _verdict(slots: int, layers: int, experts: int, top_k: int, record_bytes: int) -> tuple[Any, str]:
    if slots == layers * experts:
        return "nothing to do", "All experts fit on the card: no forward waits for the CPU."
    if slots == 0:
        return "too small", f"Beside the rest of the model no expert of {record_bytes:,} bytes fits on the card."
    if slots >= layers * top_k:
        return "ok", f"{slots} of {layers * experts} experts fit on the card; the CPU computes the others."
    return "below recommended", (
        f"{slots} of {layers * experts} experts fit on the card, and a token uses {layers * top_k}: it saves the CPU little."
    )


def hottest_experts(usage: Stats | Trace, per_layer: int) -> torch.Tensor:
    """The ``per_layer`` experts of each layer that were used most, as a mask for ``MeshConfig(gpu_experts=)``: bool [layers, experts].

    ``usage`` is ``torch_mesh.stats(model)`` after some work, or a routing trace (``torch_mesh.load_trace``). Of experts that
    were used equally often the first count as hotter. Raises ValueError if there are fewer experts, or no usage.
    """
    if isinstance(usage, Trace):
        counts = np.stack(
            [np.bincount(usage.ids[:, layer].ravel(), minlength=usage.experts) for layer in range(usage.layers)]
        )
    else:
        counts = np.array([layer.experts.accesses for layer in usage.per_layer])
    if counts.sum() == 0:
        raise ValueError("no expert has been used yet: run the model before asking which of its experts are hottest.")
    if not 0 <= per_layer <= counts.shape[1]:
        raise ValueError(f"per_layer={per_layer} must be in [0, {counts.shape[1]}], the number of experts of a layer.")
    return torch.stack([_hottest(layer, per_layer) for layer in counts])


def format_on_gpu(config: MeshConfig, weights: str) -> str:
    """Of experts that are in ``weights`` in memory."""
    return weights if config.gpu_weights == "auto" else config.gpu_weights


def check_gpu_weights(config: MeshConfig, stored: str | None = None) -> None:
    """Raises ValueError for ``gpu_weights`` that nothing is placed in, or that the only records at hand, ``stored``, cannot give."""
    if config.gpu_weights == "auto":
        return
    given = f"gpu_weights={config.gpu_weights!r}"
    if config.gpu_experts == 0:
        raise ValueError(f"{given} says how experts lie on a GPU, and gpu_experts gives it none: set gpu_experts.")
    if stored is not None and config.gpu_weights != stored and BITS[config.gpu_weights] >= BITS[stored]:
        raise ValueError(
            f"{given} has no fewer bits than the {stored} of this converted checkpoint, and would be no more precise: give a format of fewer "
            f"bits, 'auto', or the original checkpoint with weights={stored!r} and store= naming this one."
        )


def choose_experts(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    config: MeshConfig,
    weights: str,
    group_size: int,
    stored_layers: int | None = None,
    places: Sequence[int] | None = None,
) -> Placement:
    """What ``config.gpu_experts`` comes to for this model, where it is now.

    ``weights`` and ``group_size`` are of the records in memory, which have ``stored_layers`` layers, and those of the model at ``places``, if
    they are not all its own. So has ``config.profile``.

    Raises MeshError where experts are asked for that cannot be placed (no GPU, no Triton), UnsupportedModelError for a family
    whose experts run by projection, ValueError for a mask or number that does not fit the model, MemoryError for more than
    the device holds. "auto" takes none instead, and says so where the model is on a GPU.
    """
    devices = tuple(device_of(model, layer) for layer in layers)
    experts = layers[0].num_experts
    wanted = config.gpu_experts
    there = format_on_gpu(config, weights)
    size = _RecordSizes(
        there=record_bytes(layers, there, checked_group_size(there, config.group_size)),
        up=record_bytes(layers, weights, group_size),
    )
    uses = _uses(config, stored_layers or len(layers), layers, places)
    if wanted == "auto":
        here = _from_counts(_automatic_counts(layers, devices, size, config), experts, uses)
    else:
        here = _given_experts(config, len(layers), experts, uses)
    placement = Placement(here, devices, there, config.gpu_streaming, config.gpu_placement == "dynamic")
    if placement.dynamic and placement.count == 0 and wanted != "auto":
        raise ValueError(
            "gpu_placement='dynamic' moves experts among slots on a GPU, and gpu_experts gives it none: set gpu_experts."
        )
    if placement.count > 0:
        _check_possible(layers, placement, size)
    return placement


def open_gpu_pool(layers: Sequence[ExpertsLayer], config: MeshConfig, records: Records) -> ExpertPool:
    """Reads what lies on GPUs, where that is in another format than in memory."""
    only_read = config.replace(guard="off", quotas="off", io="auto" if config.io == "mmap" else config.io)
    slots = min(GPU_POOL_SLOTS, records.layers * layers[0].num_experts)
    return open_other(layers, only_read, records, slots=slots, least_slots=1)


def gpu_pool_bytes(layers: Sequence[ExpertsLayer], placement: Placement, weights: str, config: MeshConfig) -> int:
    """What its slots take beside a pool in ``weights``; 0 without one."""
    if not placement.needs_pool(weights):
        return 0
    there = placement.weights
    return GPU_POOL_SLOTS * record_bytes(layers, there, checked_group_size(there, config.group_size))


def move_experts(
    layers: Sequence[ExpertsLayer], pool: ExpertPool, placement: Placement, gpu_pool: ExpertPool | None = None
) -> None:
    """Copies the chosen experts of patched layers to their devices, and gives up their slots in the pool.

    ``gpu_pool`` reads their records where those are in another format than the pool's. No layer knows of it before all are copied. What placing
    has read does not count in statistics.
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
                place_of = record, records[device], tables[device], taken[device]
                placed.append((layer.module, _copy_layer(layer.module, pool, source, shared[device], here, *place_of)))
                taken[device] += int(here.sum())
            progress(sum(taken.values()) * record.words * 4, placement.count * record.words * 4)
    for device in devices:
        partial = [layer for _, layer in placed if layer.shared is shared[device] and not layer.complete]
        if batch := placement.batch_on(device):
            buffers = _empty_records(2 * batch, up, device)
            shared[device].lend(buffers[:batch], buffers[batch:], up)
            shared[device].costs = _costs(pool, partial[0], shared[device], placement.streaming)
        if spare := placement.spare_on(device):
            moving = [any(layer.index == index for layer in partial) for index in range(pool.layers)]
            shared[device].move_between(
                source.handle(0), records[device], tables[device], moving, spare, patience=_PATIENCE
            )
    if any(of_device.mover is not None for of_device in shared.values()):
        pool.moves_from = None if source is pool else source
    for module, on_device in placed:
        pool.device_layers.append(on_device)
        place(module._mesh_handle, on_device)
        module._mesh_device = on_device.records.device
    pool.engine.reset_stats()
    for of_device in shared.values():
        of_device.reset_stats()


def _device_record(pool: ExpertPool) -> DeviceRecord:
    shape = pool.geometry
    assert shape.activation is not None
    group_size = 0 if pool.weights == "bf16" else pool.group_size
    sizes = shape.hidden, shape.intermediate, shape.has_gate, shape.has_bias
    return DeviceRecord(pool.weights, group_size, *sizes, shape.activation)


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
    if not pool.in_memory:  # then the pool is the only other place where they are
        torch.ops.torch_mesh.evict(module._mesh_handle, chosen)
    table = tables[module._mesh_layer]
    table[chosen.to(table.device)] = torch.arange(first, first + len(chosen), dtype=torch.int32, device=table.device)
    complete = bool(here.all())
    return DeviceLayer(record, records, table, here, complete, pool.workspace, module._mesh_layer, shared)


def _costs(
    pool: ExpertPool, layer: DeviceLayer, shared: SharedDevice, streaming: str | tuple[float, float, float]
) -> Costs:
    """By which prompts choose what comes up: as given, or measured with ``layer``'s experts."""
    if not isinstance(streaming, str):
        return Costs(*streaming)
    uplift = shared.uplift
    assert uplift is not None
    cold = (~layer.here).nonzero().flatten()[: min(uplift.batch, pool.slots)].tolist()

    def bring() -> None:
        with torch.cuda.device_of(layer.records), uplift.turn(shared.stream()) as turn:
            turn.bring(layer.index, cold)
        if shared.device.type == "cuda":
            torch.cuda.synchronize(shared.device)

    copy = _seconds(bring) / len(cold)
    one, many = _expert_seconds(pool, layer.index, cold)
    if not pool.in_memory:  # nobody has asked for them
        torch.ops.torch_mesh.evict(pool.handle(layer.index), torch.tensor(cold))
    row = max(0.0, many - one) / (_MANY_ROWS - 1)
    return Costs(copy, row, max(0.0, one - row))


def _expert_seconds(pool: ExpertPool, layer: int, experts: list[int]) -> tuple[float, float]:
    """What the CPU takes for an expert of one row and of ``_MANY_ROWS``, in a pool apart: neither heat nor a profile shall know of it."""
    shape, count = pool.geometry, len(experts)
    engine = _C.Engine(
        layers=1,
        experts=count,
        format=pool.weights,
        group_size=pool.group_size,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        gated=shape.has_gate,
        bias=shape.has_bias,
        activation=shape.activation,
        slots=count,
        policy="lru",
        verify="never",
        io="threads",
        threads=pool.threads,
        workspace=pool.workspace,
        timeout=pool.timeout,
        source=None,
    )
    try:
        for place, expert in enumerate(experts):
            engine.fill(0, place, pool.engine.read_record(layer, expert))
        handle = torch.tensor([engine.id, 0, engine.generation])

        def seconds(rows: int) -> float:
            ids = torch.arange(count).repeat(rows).unsqueeze(1)
            x, weights = torch.ones((len(ids), shape.hidden), dtype=torch.bfloat16), torch.ones(ids.shape)
            return _seconds(lambda: torch.ops.torch_mesh.experts(x, ids, weights, handle)) / count

        return seconds(1), seconds(_MANY_ROWS)
    finally:
        engine.close()


def _seconds(run: Callable[[], object]) -> float:
    """The least of three, after one that is not counted."""
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def _uses(
    config: MeshConfig, stored_layers: int, layers: Sequence[ExpertsLayer], places: Sequence[int] | None
) -> npt.NDArray[np.int64] | None:
    """Of each layer's experts by the config's profile, [layers, experts]. Raises MeshError for one of another model."""
    if config.profile is None or config.gpu_experts == 0:
        return None
    profile = load_profile(config.profile)
    top_k = max(layer.top_k for layer in layers)
    check_fits(profile, config.profile, stored_layers, layers[0].num_experts, top_k)
    return profile.uses[list(range(len(layers)) if places is None else places)]


def _from_counts(counts: Sequence[int], experts: int, uses: npt.NDArray[np.int64] | None) -> tuple[torch.Tensor, ...]:
    """So many of each layer: those of most uses, or the first."""
    if uses is None:
        return tuple(torch.arange(experts) < count for count in counts)
    return tuple(_hottest(of_layer, count) for of_layer, count in zip(uses, counts, strict=True))


def _hottest(uses: npt.NDArray[np.int64], count: int) -> torch.Tensor:
    """bool [experts]: the ``count`` of most uses; of those with as many the first."""
    mask = torch.zeros(len(uses), dtype=torch.bool)
    mask[np.argsort(-uses, kind="stable")[:count].copy()] = True
    return mask


def _given_experts(
    config: MeshConfig, layers: int, experts: int, uses: npt.NDArray[np.int64] | None
) -> tuple[torch.Tensor, ...]:
    """What a number or a mask of ``gpu_experts`` names. Raises ValueError if it does not fit the model."""
    wanted = config.gpu_experts
    if isinstance(wanted, tuple):
        return _from_mask(wanted, layers, experts)
    if int(wanted) > experts:
        raise ValueError(f"gpu_experts={wanted}, but a layer has {experts} experts: give at most so many, or 'auto'.")
    return _from_counts([int(wanted)] * layers, experts, uses)


def _from_mask(mask: tuple[tuple[bool, ...], ...], layers: int, experts: int) -> tuple[torch.Tensor, ...]:
    if len(mask) != layers or any(len(row) != experts for row in mask):
        raise ValueError(
            f"gpu_experts is a mask of {len(mask)} layers by {len(mask[0])} experts; the model's has to be [{layers}, {experts}]."
        )
    return tuple(torch.tensor(row) for row in mask)


def _automatic_counts(
    layers: Sequence[ExpertsLayer], devices: Sequence[torch.device], size: _RecordSizes, config: MeshConfig
) -> list[int]:
    counts = [0] * len(layers)
    usable = [device for device in dict.fromkeys(devices) if _holds_experts(device)]
    if usable and (obstacle := _obstacle(layers, usable)):
        warnings.warn(f"gpu_experts='auto' places none: {obstacle}", stacklevel=5)
        return counts
    for device in usable:
        its_own = [index for index, where in enumerate(devices) if where == device]
        free, total = _device_memory(device)
        free += sum(_bytes_on(layers[index], device) for index in its_own)  # which patching gives back
        plan = plan_gpu(
            free,
            total,
            len(its_own),
            layers[0].num_experts,
            max(layer.top_k for layer in layers),
            size.there,
            size.up,
            config.gpu_streaming != "off",
            config.gpu_placement == "dynamic",
        )
        if plan.status == "too small":
            warnings.warn(f"gpu_experts='auto' places none on {device}: {plan.advice}", stacklevel=5)
        for index, count in zip(its_own, plan.counts, strict=True):
            counts[index] = count
    return counts


def _check_possible(layers: Sequence[ExpertsLayer], placement: Placement, size: _RecordSizes) -> None:
    if obstacle := _obstacle(layers, placement.devices):
        raise UnsupportedModelError(f"gpu_experts cannot be had here: {obstacle}")
    for device in dict.fromkeys(placement.devices):
        wanted = placement.count_on(device)
        if wanted == 0:
            continue
        if not _holds_experts(device):
            raise MeshError(
                f"gpu_experts names experts of layers that are on {device}: experts go where their layer is when it is patched. "
                "Pass device_map='cuda' to from_pretrained, or move the model before torch_mesh.patch."
            )
        free = _device_memory(device)[0]
        free += sum(
            _bytes_on(layer, where) for layer, where in zip(layers, placement.devices, strict=True) if where == device
        )
        needed = placement.slots_on(device) * size.there + 2 * placement.batch_on(device) * size.up
        if needed > free:
            raise MemoryError(
                f"gpu_experts needs {needed:,} bytes for {wanted} experts and others on their way, but {device} has {free:,} "
                "left: give fewer, or 'auto'."
            )


def _obstacle(layers: Sequence[ExpertsLayer], devices: Sequence[torch.device]) -> str:
    """Why no GPU can compute these experts, or nothing."""
    if layers[0].fused_activation is None:
        return _BY_PROJECTION
    if importlib.util.find_spec("triton") is None:
        return "there is no triton, which CUDA builds of torch bring along: pip install triton."
    for device in dict.fromkeys(devices):
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
            return (
                f"{device} has compute capability {found[0]}.{found[1]}, and the kernels need {LEAST_CAPABILITY[0]}.0."
            )
    return ""


def _holds_experts(device: torch.device) -> bool:
    return device.type == "cuda"


def _device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes. What torch's allocator has reserved and not handed out is free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def device_of(model: nn.Module, layer: ExpertsLayer) -> torch.device:
    """Where a layer computes: that of its experts or, when those are nowhere, of its router, or of the model."""
    beside = model.get_submodule(layer.path.rpartition(".")[0])
    for module in (layer.module, beside, model):
        for parameter in module.parameters():
            if not parameter.is_meta and not isinstance(parameter, PackedWeight):
                return parameter.device
    return torch.device("cpu")


def _bytes_on(layer: ExpertsLayer, device: torch.device) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters.values() if parameter.device == device)
