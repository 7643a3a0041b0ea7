"""Choose the experts of a model that go to its layers' GPUs, by config, profile and free memory."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torch_mesh.config_fields import MIN_CAPABILITY, GpuFields
from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.formats import FORMATS, GPU_FORMATS, formats_of_fewer_bits, short_name
from torch_mesh.gpu.placement import Placement, from_counts, given_experts
from torch_mesh.gpu.planning import SEVERAL_ACTIVATIONS, UNFUSED, plan_gpu
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.modules.packed_weight import device_around
from torch_mesh.pool.expert_pool import record_bytes
from torch_mesh.routing.profiles import check_fits, load_profile
from torch_mesh.store.convert import checked_group_size


@dataclass(frozen=True)
class _RecordSizes:
    """Bytes of one expert's record: resident on the GPU, and streamed for prompts."""

    on_gpu: int
    in_memory: int
    formats: tuple[str, ...]  # the formats of both


def format_on_gpu(gpu: GpuFields, weights: str) -> str:
    """The format on the GPU of experts that are in ``weights`` in memory."""
    return weights if gpu.weights == "auto" else gpu.weights


def without_kernels(*formats: str) -> str:
    """Why a GPU cannot compute records in these formats; empty if it can."""
    for weights in formats:
        if not FORMATS[weights].gpu:
            allowed = ", ".join(map(repr, GPU_FORMATS))
            return f"there are no GPU kernels for {short_name(weights)} records: give weights= one of {allowed}."
    return ""


def check_gpu_weights(gpu: GpuFields, stored: str | None = None) -> None:
    """Raises ValueError for ``gpu.weights`` without experts on a GPU, or that the stored format ``stored`` cannot
    give."""
    if gpu.weights == "auto":
        return
    given = f"gpu.weights={gpu.weights!r}"
    if gpu.experts == 0:
        raise ValueError(f"{given} sets the format of experts on a GPU, but gpu.experts is 0: set gpu.experts.")
    if stored is None or gpu.weights == stored:
        return
    fewer = [name for name in formats_of_fewer_bits(stored) if FORMATS[name].gpu]
    if gpu.weights not in fewer:
        raise ValueError(
            f"{given} has no fewer bits than the {stored} of this converted checkpoint and gains no precision: give "
            f"{', '.join(map(repr, (*fewer, 'auto')))}, or the original checkpoint with weights={stored!r} and store= "
            "naming this one."
        )


def choose_experts(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    gpu: GpuFields,
    *,
    profile: str | None,
    other_group_size: int,
    weights: str,
    group_size: int,
    stored_layers: int,
    layer_indices: Sequence[int],
) -> Placement:
    """Resolve ``gpu.experts`` for this model on its current devices.

    ``weights`` and ``group_size`` are of the records in memory, which have ``stored_layers`` layers,
    ``other_group_size`` of those in another format. The model's layers are ``layer_indices`` of ``stored_layers``.
    ``profile``: a file.

    Raises MeshError if experts cannot be placed (no GPU, no Triton), UnsupportedModelError for a family whose experts
    run unfused, ValueError for a mask or number that does not fit the model, MemoryError for more than the device
    holds. "auto" then places none, with a warning if the model is on a GPU.
    """
    devices = tuple(device_around(model, layer.path) for layer in layers)
    experts = layers[0].num_experts
    wanted = gpu.experts
    gpu_weights = format_on_gpu(gpu, weights)
    in_memory = record_bytes(layers, weights, group_size)
    other = gpu_weights != weights
    size = _RecordSizes(
        on_gpu=record_bytes(layers, gpu_weights, checked_group_size(gpu_weights, other_group_size))
        if other
        else in_memory,
        in_memory=in_memory,
        formats=(gpu_weights, weights),
    )
    uses = None if gpu.experts == 0 else _uses(profile, stored_layers, layers, layer_indices)
    if wanted == "auto":
        here = from_counts(_automatic_counts(layers, devices, size, gpu), experts, uses)
    else:
        here = given_experts(wanted, len(layers), experts, uses)
    placement = Placement(here, devices, gpu_weights, gpu.streaming, gpu.placement == "dynamic")
    if placement.dynamic and placement.count == 0 and wanted != "auto":
        raise ValueError(
            "gpu.placement='dynamic' moves experts among slots on a GPU, but gpu.experts is 0: set gpu.experts."
        )
    if placement.count > 0:
        _check_possible(layers, placement, size)
    return placement


def _uses(
    path: str | None, stored_layers: int, layers: Sequence[ExpertsLayer], layer_indices: Sequence[int]
) -> npt.NDArray[np.int64] | None:
    """Uses of each layer's experts by the profile in ``path``, [layers, experts]. Raises MeshError for a profile of
    another model."""
    if path is None:
        return None
    profile = load_profile(path)
    top_k = max(layer.top_k for layer in layers)
    check_fits(profile, path, stored_layers, layers[0].num_experts, top_k)
    return profile.uses[list(layer_indices)]


def _automatic_counts(
    layers: Sequence[ExpertsLayer], devices: Sequence[torch.device], size: _RecordSizes, gpu: GpuFields
) -> list[int]:
    counts = [0] * len(layers)
    usable = [device for device in dict.fromkeys(devices) if _holds_experts(device)]
    if usable and (obstacle := _obstacle(layers, usable, size)):
        warnings.warn(f"gpu.experts='auto' places none: {obstacle}", stacklevel=5)
        return counts
    for device in usable:
        its_own = [index for index, where in enumerate(devices) if where == device]
        free, total = _device_memory(device)
        free += sum(_bytes_on(layers[index], device) for index in its_own)  # patching frees these
        plan = plan_gpu(
            free,
            total,
            len(its_own),
            layers[0].num_experts,
            max(layer.top_k for layer in layers),
            size.on_gpu,
            size.in_memory,
            gpu.streaming != "off",
            gpu.placement == "dynamic",
        )
        if plan.status == "too small":
            warnings.warn(f"gpu.experts='auto' places none on {device}: {plan.advice}", stacklevel=5)
        for index, count in zip(its_own, plan.counts, strict=True):
            counts[index] = count
    return counts


def _check_possible(layers: Sequence[ExpertsLayer], placement: Placement, size: _RecordSizes) -> None:
    if obstacle := _obstacle(layers, placement.devices, size):
        raise UnsupportedModelError(f"gpu.experts cannot be used here: {obstacle}")
    for device in dict.fromkeys(placement.devices):
        wanted = placement.count_on(device)
        if wanted == 0:
            continue
        if not _holds_experts(device):
            raise MeshError(
                f"gpu.experts names experts of layers on {device}, but experts go to their layer's device. Pass "
                "device_map='cuda' to from_pretrained, or move the model before torch_mesh.patch."
            )
        free = _device_memory(device)[0]
        free += sum(
            _bytes_on(layer, where) for layer, where in zip(layers, placement.devices, strict=True) if where == device
        )
        needed = placement.slots_on(device) * size.on_gpu + 2 * placement.batch_on(device) * size.in_memory
        if needed > free:
            raise MemoryError(
                f"gpu.experts needs {needed:,} bytes for {wanted} experts and spare slots, but {device} has {free:,} "
                "left: give fewer, or 'auto'."
            )


def _obstacle(layers: Sequence[ExpertsLayer], devices: Sequence[torch.device], size: _RecordSizes) -> str:
    """Why no GPU can compute these experts; empty if one can."""
    if layers[0].fused_activation is None:
        return UNFUSED
    if len({layer.fused_activation for layer in layers}) > 1:
        return SEVERAL_ACTIVATIONS
    if problem := without_kernels(*size.formats):
        return problem
    if importlib.util.find_spec("triton") is None:
        return "there is no triton, which CUDA builds of torch bring along: pip install triton."
    for device in dict.fromkeys(devices):
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            return f"{device} has compute capability {found[0]}.{found[1]}, and the kernels need {MIN_CAPABILITY[0]}.0."
    return ""


def _holds_experts(device: torch.device) -> bool:
    return device.type == "cuda"


def _device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes. Memory that torch's allocator has reserved but not used counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _bytes_on(layer: ExpertsLayer, device: torch.device) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters.values() if parameter.device == device)
