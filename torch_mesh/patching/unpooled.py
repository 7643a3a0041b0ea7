"""Load what stays in memory: experts of other shapes than the pool's (docs/decisions/0035), and whole tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_mesh.models.families import ExpertsLayer, describe_unpooled, unpooled_layers
from torch_mesh.models.tables import TableLayer
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.modules.packed_weight import device_around
from torch_mesh.modules.tables import packed_table
from torch_mesh.pool.row_tables import RowTables
from torch_mesh.store.checkpoint import CheckpointExperts


def load_unpooled(model: nn.Module, found: Sequence[tuple[ExpertsLayer, CheckpointExperts]]) -> None:
    """Load the parameters of the layers that ``find_unpooled`` found, which are on the meta device.

    transformers cannot load them: it may convert both kinds of experts from the same tensors, and the pooled ones are
    detached.
    """
    for layer, experts in found:
        _load(layer, experts, device_around(model, layer.path))


def _load(layer: ExpertsLayer, experts: CheckpointExperts, device: torch.device) -> None:
    parameters = layer.parameters
    values = {name: torch.empty_like(parameter, device="cpu") for name, parameter in parameters.items()}
    with torch.no_grad():
        for index in range(layer.num_experts):
            layer.expert(index, values).copy_(experts.read_expert(0, index))
    for name, parameter in parameters.items():
        layer.module._parameters[name] = nn.Parameter(values[name].to(device), requires_grad=parameter.requires_grad)


def load_tables(model: nn.Module, layers: Sequence[TableLayer], reader: RowTables) -> None:
    """Load whole tables from a store's files of rows, which transformers cannot read."""
    for index, layer in enumerate(layers):
        module: Any = layer.module
        values = packed_table(layer, reader, index).unpacked().to(device_around(model, layer.path))
        module._parameters["weight"] = nn.Parameter(values, requires_grad=layer.weight.requires_grad)


def warn_of_unpooled(model: nn.Module, layers: Sequence[ExpertsLayer]) -> None:
    """Warn once of experts outside the pool, and note them for ``print(model)``."""
    others = unpooled_layers(model)
    if not others:
        return
    note = describe_unpooled(others)
    module: Any = layers[0].module
    assert isinstance(module, MeshExperts)
    module._mesh_pool.unpooled = note
    warnings.warn(
        f"{type(model).__name__} has experts of several shapes, and a pool holds one shape: that of {layers[0].kind}. "
        f"These stay in memory, unpacked: {note}.",
        stacklevel=5,
    )
