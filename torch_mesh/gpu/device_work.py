"""Pending work of a model's forwards on GPUs: waiting, buffers for CUDA graphs, and moving experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.ops.device import SharedDevice, find
from torch_mesh.statistics.stats import shared_devices_of


def synchronize(model: nn.Module) -> None:
    """Wait until the host has computed its part of all forwards so far. Raises the first error since the last one that
    was raised.

    The output of a failed forward is NaN. This waits neither for the GPU nor for replays of a captured graph: call
    ``torch.cuda.synchronize()`` first, then this raises their errors. Raises MeshError for a model without experts on a
    GPU, and the errors of the forwards: ReadError for a failed read, ValueError for an invalid expert id.
    """
    errors = []
    for device in _devices(model):
        try:
            device.host.synchronize()
        except (RuntimeError, ValueError, MemoryError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def set_capture_batch_sizes(model: nn.Module, sizes: Iterable[int]) -> None:
    """Allocate buffers for forwards of these token counts under ``torch.cuda.graph``, replacing earlier sizes.

    Call it before the capture, which may not allocate. One set serves all layers and all graphs of a size; launch those
    in one stream. Graphs captured earlier keep their buffers; ``[]`` sets none. Raises MeshError for a model without
    experts on a GPU, ValueError for sizes that are not distinct positive integers.
    """
    wanted = list(sizes)
    wrong = [size for size in wanted if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 31]
    if wrong or len(set(wanted)) < len(wanted):
        raise ValueError(f"sizes={wanted!r} are not batch sizes: give distinct positive numbers of tokens, or none.")
    devices = _devices(model)
    top_k = max(module._mesh_pool.top_k for module in patched_modules(model))
    for device in devices:
        device.host.set_capture_sizes(wanted, top_k)


def capture_batch_sizes(model: nn.Module) -> list[int]:
    """The sizes that ``set_capture_batch_sizes`` set, in its order. Raises MeshError as that does."""
    return _devices(model)[0].host.capture_sizes()


def place_experts(model: nn.Module, here: torch.Tensor | None = None) -> int:
    """Move experts between the GPUs of their layers and the pool under ``gpu.placement="dynamic"``; returns how many
    moved up.

    With ``here``, bool [layers, experts], exactly those are on the GPUs when the call returns. Without, it starts the
    next step towards what routing uses, without waiting, as each eager forward of a model does; call it between replays
    of a captured graph, in their stream. Raises MeshError for a model without experts on a GPU or with a static
    placement, ValueError for a mask that does not fit the model or a GPU's slots, and the errors of reading experts;
    earlier moves stay.
    """
    devices = [device for device in _devices(model) if device.mover is not None]
    if not devices:
        raise MeshError(
            "no experts of this model move: its placement is static, or all of them are on the GPU. Patch it with "
            "gpu.placement='dynamic' and fewer gpu.experts."
        )
    if here is None:
        return sum(device.step() for device in devices)
    modules = list(patched_modules(model))
    if here.dtype != torch.bool or here.shape != (len(modules), modules[0].num_experts):
        raise ValueError(
            f"here is {here.dtype} {list(here.shape)}; it has to be torch.bool [{len(modules)}, "
            f"{modules[0].num_experts}]."
        )
    placed = [None if module._mesh_device is None else find(module._mesh_handle) for module in modules]
    for row, layer in enumerate(placed):
        moves = layer is not None and layer.shared in devices and not layer.complete
        if not moves and not torch.equal(
            here[row].cpu(), torch.full(here[row].shape, layer is not None and layer.complete)
        ):
            raise ValueError(
                f"experts of MoE layer {row} do not move: either all of them are on the GPU, or none can be."
            )
    moved = 0
    for device in devices:
        assert device.mover is not None
        with device.enqueuing:
            slots = torch.tensor(device.mover.slots_of()).view(-1, here.size(1)) >= 0
            wanted = slots.clone()
            for row, layer in enumerate(placed):
                if layer is not None and layer.shared is device:
                    wanted[layer.index] = here[row].cpu()
            up, down = ((mask.flatten().nonzero().flatten().tolist()) for mask in (wanted & ~slots, slots & ~wanted))
            device.mover.move(up, down, device.stream())
        moved += len(up)
    return moved


def _devices(model: nn.Module) -> list[SharedDevice]:
    devices = shared_devices_of(model)
    if not devices:
        raise MeshError(f"{type(model).__name__} has no experts on a GPU. Set MeshConfig.gpu.experts.")
    return devices
