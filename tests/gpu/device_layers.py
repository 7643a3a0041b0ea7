"""Tiny experts on the device: on a card, or on the CPU where Triton is interpreted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from tiny_pools import Spec, TinyExperts
from torch import Tensor
from torch_mesh.ops.device import DeviceLayer, DeviceRecord, SharedDevice

from torch_mesh.formats import FORMATS

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_record(spec: Spec) -> DeviceRecord:
    assert spec.activation is not None
    allowed = FORMATS[spec.weights].group_sizes
    return DeviceRecord(
        spec.weights,
        spec.group_size if spec.group_size in allowed else allowed[0],
        spec.hidden,
        spec.intermediate,
        spec.gated,
        spec.bias,
        spec.activation,
    )


def device_layer(
    experts: TinyExperts,
    hot: Collection[int],
    layer: int = 0,
    workspace: int = 64 << 20,
    shared: SharedDevice | None = None,
) -> DeviceLayer:
    """The ``hot`` experts in slots in random order, and two more slots full of NaN, which must not be read."""
    record = device_record(experts.spec)
    slots = torch.randperm(len(hot) + 2)[: len(hot)]
    records = torch.full((len(hot) + 2, record.words * 4), 0xFF, dtype=torch.uint8)
    table = torch.full((experts.spec.experts,), -1, dtype=torch.int32)
    for slot, expert in zip(slots.tolist(), hot, strict=True):
        records[slot] = experts.records[layer][expert]
        table[expert] = slot
    here = table >= 0
    on_device = records.to(DEVICE), table.to(DEVICE)
    return DeviceLayer(record, *on_device, here, bool(here.all()), workspace, layer, shared)


def on_device(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]
