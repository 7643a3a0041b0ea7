"""How many experts fit in memory and on a GPU, and the memory that they take."""

from __future__ import annotations

from pathlib import Path

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS, formats_of_fewer_bits
from torch_mesh.gpu.choosing import format_on_gpu, without_kernels
from torch_mesh.gpu.placement import check_beside_gpu
from torch_mesh.gpu.placing import GPU_POOL_SLOTS
from torch_mesh.gpu.planning import SEVERAL_ACTIVATIONS, UNFUSED, GpuPlan, plan_fields, plan_on_cpu
from torch_mesh.lossy.fallback import split_slots
from torch_mesh.modules.dense import packs
from torch_mesh.planning.sizes import Sizes, bytes_in, fallback_record_bytes
from torch_mesh.pool.row_tables import vocabulary_in_files
from torch_mesh.system.memory import auto_budget, auto_margin, resident_slots


def _gpu_record_bytes(sizes: Sizes, config: MeshConfig) -> int:
    return bytes_in(sizes, config, format_on_gpu(config.gpu, sizes.weights))


def planned_gpu_pool_bytes(sizes: Sizes, config: MeshConfig) -> int:
    """Bytes; 0 if formats agree."""
    other = format_on_gpu(config.gpu, sizes.weights) != sizes.weights
    return GPU_POOL_SLOTS * _gpu_record_bytes(sizes, config) if other else 0


def on_card(folder: Path, sizes: Sizes, config: MeshConfig, free: int, total: int) -> GpuPlan:
    """Plan the experts on a GPU of ``total`` bytes, beside the unpacked rest of the model. Raises ValueError if the
    size of the rest is unknown, or if ``dense`` packs it."""
    shape = sizes.shape
    if sizes.dense_bytes_loading is None:
        raise ValueError(
            f"{folder} has no config.json, so that the size of the rest of the model on the GPU is unknown: give a "
            "converted checkpoint."
        )
    if packs(config.dense):
        raise ValueError(
            f"dense={config.dense!r} is for the CPU, and on a GPU the rest of the model is not packed: leave dense out."
        )
    if shape.activation is None:
        return plan_on_cpu(config.gpu, shape.layers, UNFUSED)
    if isinstance(shape.activation, tuple):
        return plan_on_cpu(config.gpu, shape.layers, SEVERAL_ACTIVATIONS)
    if problem := without_kernels(format_on_gpu(config.gpu, sizes.weights), sizes.weights):
        return plan_on_cpu(config.gpu, shape.layers, problem)
    gpu_record_bytes = _gpu_record_bytes(sizes, config)
    left = free - sizes.dense_bytes_loading
    layout = shape.layers, shape.experts, shape.top_k
    planned = plan_fields(config.gpu, left, total, *layout, gpu_record_bytes, sizes.expert_bytes)
    if planned.placed > 0:
        check_beside_gpu(lossy_modes=config.lossy.modes, prefill=config.prefill)
    return planned


def fitting_slots(
    sizes: Sizes, config: MeshConfig, available: int | None, on_gpu: int, gpu_pool: int
) -> tuple[int | None, int, str]:
    """How many experts and fallback experts will be resident; None and 0, and why, if a token's experts do not fit.

    None without a reason if that is unknown: of a shared pool, and for "auto" without a config.json."""
    if config.shared is not None:
        return None, 0, ""
    shape = sizes.shape
    reserved = _reserved_bytes(sizes, config, gpu_pool)
    top_k = min(shape.top_k, shape.experts)
    needed = top_k * sizes.expert_bytes
    if config.resident == "auto":
        if available is None:
            return None, 0, ""
        if (budget := auto_budget(available, reserved)) < needed:
            taken = (
                f"Python and the rest of the model leave {max(0, available):,} bytes; workspace and buffers take "
                f"{reserved:,}, and {auto_margin(available - reserved):,} stay free"
            )
            left = f"{max(0, budget):,} bytes are left for experts, but one token of one layer needs {needed:,}"
            advice = f"give more memory{or_fewer_bits(sizes)}, or a smaller workspace."
            return None, 0, f"{taken}. So {left}: {advice}"
    try:
        slots = resident_slots(
            config.resident,
            layers=shape.layers,
            experts=shape.experts,
            top_k=top_k,
            record_bytes=sizes.expert_bytes,
            reserved=reserved,
            # Without a config.json the available memory is unknown: a given size counts as available.
            available=available if available is not None else shape.layers * shape.experts * sizes.expert_bytes,
        )
        slots = min(slots, max(top_k, shape.layers * shape.experts - on_gpu))
        split = split_slots(
            slots,
            fallback=config.lossy.fallback,
            resident=config.resident,
            experts=shape.layers * shape.experts,
            top_k=top_k,
            record_bytes=sizes.expert_bytes,
            fallback_bytes=fallback_record_bytes(sizes, config),
        )
        return *split, ""
    except (ValueError, MemoryError) as error:
        return None, 0, str(error)


def _reserved_bytes(sizes: Sizes, config: MeshConfig, gpu_pool: int) -> int:
    return config.workspace_bytes + sizes.staging_bytes + sizes.table_memory_bytes + gpu_pool


def vocabulary_stays_in_files(sizes: Sizes, config: MeshConfig, available: int) -> bool:
    """Whether opening leaves the rows of the input embedding in files. ``available``: bytes beside the process."""
    if sizes.dense_bytes is None or not config.chooses_tables or config.shared is not None:
        return False
    free = available - sizes.dense_bytes + sizes.vocabulary_bytes - _reserved_bytes(sizes, config, gpu_pool=0)
    return vocabulary_in_files(sizes.vocabulary_bytes, sizes.all_experts_bytes, free)


def margin_bytes(sizes: Sizes, config: MeshConfig, available: int | None, gpu_pool: int) -> int | None:
    """Bytes of ``available`` that ``resident="auto"`` leaves free; None for another ``resident``, or if unknown."""
    if config.resident != "auto" or available is None:
        return None
    return auto_margin(available - _reserved_bytes(sizes, config, gpu_pool))


def tokens_per_chunk(sizes: Sizes, config: MeshConfig) -> int | None:
    """Tokens of a prompt that fit in ``workspace`` at a time; None for unfused experts."""
    shape = sizes.shape
    if shape.activation is None:
        return None
    layout = (sizes.weights, sizes.group_size or 0, *shape.sizes)
    return _C.tokens_per_chunk(*layout, shape.top_k, config.workspace_bytes)


def peak_bytes(sizes: Sizes, config: MeshConfig, process: int, slots: int | None, fallback_bytes: int) -> int | None:
    """The larger of the memory while loading and that while running, with ``slots`` experts and ``fallback_bytes``;
    None if unknown."""
    if slots is None or sizes.dense_bytes is None or sizes.dense_bytes_loading is None:
        return None
    pool = slots * sizes.expert_bytes + fallback_bytes + sizes.staging_bytes
    running = sizes.dense_bytes + pool + sizes.table_memory_bytes + config.workspace_bytes
    return process + max(running, sizes.dense_bytes_loading)


def or_fewer_bits(sizes: Sizes) -> str:
    """The end of advice to give more memory; empty if no format has fewer bits."""
    fewer: dict[float, str] = {}  # one format for each number of bits
    for name in formats_of_fewer_bits(sizes.weights):
        if FORMATS[name].matrices is None:
            fewer.setdefault(FORMATS[name].bits, name)
    return f", or take weights in {' or '.join([*fewer.values()][:2])}" if fewer else ""
