"""Which experts are on GPUs: a number of each layer, a mask, or those used most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torch_mesh.routing.profiles import profile_of_trace
from torch_mesh.routing.traces import Trace
from torch_mesh.statistics.counters import Stats

# Records of each of the two streaming buffers for prompts. Both together take at most an eighth of the slots, from 16
# slots on.
_MAX_BATCH = 8
_SLOTS_PER_BATCH = 16
# Experts that move at a time under gpu.placement="dynamic", and so the number of spare slots.
MOVED_TOGETHER = 4


@dataclass(frozen=True)
class Placement:
    """The experts of each layer on a device: bool [experts] and the device."""

    here: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    weights: str  # their format there
    streaming: str | tuple[float, float, float] = "auto"  # MeshConfig.gpu.streaming
    dynamic: bool = False  # MeshConfig.gpu.placement

    @property
    def count(self) -> int:
        return sum(int(layer.sum()) for layer in self.here)

    def count_on(self, device: torch.device) -> int:
        return sum(int(here.sum()) for here, where in zip(self.here, self.devices, strict=True) if where == device)

    def batch_on(self, device: torch.device) -> int:
        """Records of each of the two streaming buffers there; 0 without any."""
        return batch_beside(self.count_on(device)) if self._partly(device) and self.streaming != "off" else 0

    def spare_on(self, device: torch.device) -> int:
        """Empty slots there for moving experts; 0 under static placement."""
        return MOVED_TOGETHER if self._partly(device) and self.dynamic else 0

    def slots_on(self, device: torch.device) -> int:
        """Occupied and spare slots."""
        return self.count_on(device) + self.spare_on(device)

    def on_gpu(self, layers: int, layer_indices: Sequence[int]) -> torch.Tensor | None:
        """bool [layers, experts]: the experts that a pool of ``layers`` layers need not hold; None without any.
        ``layer_indices``: the model's layers in that pool."""
        if self.count == 0:
            return None
        mask = torch.zeros((layers, self.here[0].numel()), dtype=torch.bool)
        mask[list(layer_indices)] = torch.stack(self.here)
        return mask

    def needs_pool(self, weights: str) -> bool:
        """Whether placed experts have another format than ``weights``."""
        return self.count > 0 and self.weights != weights

    def _partly(self, device: torch.device) -> bool:
        return any(not here.all() for here, where in zip(self.here, self.devices, strict=True) if where == device)

    def cpu_slots(self, slots: int, every: int, min_slots: int) -> int:
        """``slots``, limited to the experts that are not on a GPU."""
        return min(slots, max(min_slots, every - self.count))


def check_beside_gpu(*, lossy_modes: str, prefill: str) -> None:
    """Raises ValueError for settings that exclude experts on a GPU: lossy modes, which would treat these as cold,
    and windows, which read whole layers."""
    if lossy_modes:
        raise ValueError(f"lossy {lossy_modes} and gpu.experts exclude each other: choose one.")
    if prefill == "window":
        raise ValueError("prefill='window' reads whole layers and excludes gpu.experts: leave prefill at 'auto'.")


def hottest_experts(usage: Stats | Trace, per_layer: int) -> torch.Tensor:
    """The ``per_layer`` most used experts of each layer, as a mask for ``MeshConfig.gpu.experts``: bool [layers,
    experts].

    ``usage`` is ``torch_mesh.stats(model)`` after some work, or a trace of ``torch_mesh.load_trace``. Raises ValueError
    if a layer has fewer experts, or without usage.
    """
    if isinstance(usage, Trace):
        counts = profile_of_trace(usage).uses
    else:
        counts = np.array([layer.experts.accesses for layer in usage.per_layer])
    if counts.sum() == 0:
        raise ValueError("no expert has been used yet: run the model before calling hottest_experts.")
    if not 0 <= per_layer <= counts.shape[1]:
        raise ValueError(f"per_layer={per_layer} must be in [0, {counts.shape[1]}], the number of experts of a layer.")
    return torch.stack([_hottest(layer, per_layer) for layer in counts])


def given_experts(
    wanted: str | int | tuple[tuple[bool, ...], ...],
    layers: int,
    experts: int,
    uses: npt.NDArray[np.int64] | None,
) -> tuple[torch.Tensor, ...]:
    """The experts that ``gpu.experts=wanted``, a number or mask, names. Raises ValueError if it does not fit the
    model."""
    if isinstance(wanted, tuple):
        return _from_mask(wanted, layers, experts)
    if int(wanted) > experts:
        raise ValueError(f"gpu.experts={wanted}, but a layer has {experts} experts: give at most that many, or 'auto'.")
    return from_counts([int(wanted)] * layers, experts, uses)


def from_counts(counts: Sequence[int], experts: int, uses: npt.NDArray[np.int64] | None) -> tuple[torch.Tensor, ...]:
    """The ``counts`` most used experts of each layer; without ``uses``, the first ones."""
    if uses is None:
        return tuple(torch.arange(experts) < count for count in counts)
    return tuple(_hottest(of_layer, count) for of_layer, count in zip(uses, counts, strict=True))


def _from_mask(mask: tuple[tuple[bool, ...], ...], layers: int, experts: int) -> tuple[torch.Tensor, ...]:
    if len(mask) != layers or any(len(row) != experts for row in mask):
        raise ValueError(
            f"gpu.experts is a mask of {len(mask)} layers by {len(mask[0])} experts; the model's has to be [{layers}, "
            f"{experts}]."
        )
    return tuple(torch.tensor(row) for row in mask)


def _hottest(uses: npt.NDArray[np.int64], count: int) -> torch.Tensor:
    """bool [experts]: the ``count`` most used, the first ones among equals."""
    mask = torch.zeros(len(uses), dtype=torch.bool)
    mask[np.argsort(-uses, kind="stable")[:count].copy()] = True
    return mask


def batch_beside(slots: int) -> int:
    """Records of one streaming buffer beside so many slots."""
    return min(_MAX_BATCH, max(1, slots // _SLOTS_PER_BATCH))
