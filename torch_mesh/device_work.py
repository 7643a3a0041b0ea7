"""What a model's forwards have under way on GPUs: waiting for it, and the buffers of those that are captured."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .errors import MeshError
from .modules import patched_modules
from .ops.device import SharedDevice
from .stats import shared_devices_of


def synchronize(model: nn.Module) -> None:
    """Waits until the host has computed its share of all forwards so far, and raises what that failed with since the last error.

    What failed is NaN in the output. The GPU itself is not waited for, nor what a captured graph does at a replay: that is what
    ``torch.cuda.synchronize()`` is for, and an error of it is raised here afterwards. Raises MeshError for a model that is not
    patched or has no experts on a GPU, ReadError and the like for a failed read, ValueError for a wrong expert id.
    """
    for device in _devices(model):
        device.host.synchronize()


def set_capture_batch_sizes(model: nn.Module, sizes: Iterable[int]) -> None:
    """Buffers for the forwards that ``torch.cuda.graph`` captures: of so many tokens each, in place of those that were set before.

    To be called before the capture, which may allocate nothing. One set serves all layers and all graphs of that size, which therefore have
    to be launched in one stream. Graphs that were captured before keep the buffers that they have; ``[]`` sets none.
    Raises MeshError for a model that is not patched or has no experts on a GPU, ValueError for
    sizes that are not positive integers or are given twice.
    """
    wanted = list(sizes)
    wrong = [size for size in wanted if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 31]
    if wrong or len(set(wanted)) < len(wanted):
        raise ValueError(f"sizes={wanted!r} are no batch sizes: give distinct positive numbers of tokens, or none.")
    devices = _devices(model)
    top_k = max(module._mesh_pool.top_k for module in patched_modules(model))
    for device in devices:
        device.host.set_capture_sizes(wanted, top_k)


def capture_batch_sizes(model: nn.Module) -> list[int]:
    """The sizes that ``set_capture_batch_sizes`` has set, in its order. Raises MeshError as that does."""
    return _devices(model)[0].host.capture_sizes()


def _devices(model: nn.Module) -> list[SharedDevice]:
    devices = shared_devices_of(model)
    if not devices:
        raise MeshError(
            f"{type(model).__name__} has no experts on a GPU: nothing of it is under way there, and nothing of it can be captured. "
            "See MeshConfig(gpu_experts=)."
        )
    return devices
