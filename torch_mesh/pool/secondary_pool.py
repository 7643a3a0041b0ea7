"""A second pool and store of the same experts in another format, for fallback experts and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.models.families import ExpertsLayer, common_geometry, pool_activations
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.store.manifest import Store


def packed_format(weights: str) -> str:
    """The format that unpacked experts are packed to with ``weights=``."""
    return "bf16" if weights == "auto" else weights


def other_config(config: MeshConfig, weights: str) -> MeshConfig:
    """The config for a store in the format ``weights``, beside ``config.store`` if that is set."""
    store = None if config.store is None else f"{Path(config.store)}-{weights}"
    return config.replace(weights=weights, store=store)


@dataclass(frozen=True)
class Records:
    """The source of experts in one format."""

    weights: str
    group_size: int
    layers: int
    layer_indices: list[int]  # indices of the model's layers in the source
    source_arguments: dict[str, Any]
    store: Store | None  # the store with the records, if any

    @property
    def identity(self) -> str:
        """Equal for equal records in all processes. For a checkpoint's own files: their names, sizes and times."""
        if self.store is not None:
            return self.store.manifest.values_fingerprint
        files = [(Path(path), size) for path, size in self.source_arguments["files"]]
        described = [f"{path.name} {size} {path.stat().st_mtime_ns}" for path, size in files]
        return " ".join([self.weights, str(self.group_size), *described])

    @classmethod
    def of_store(cls, store: Store, layer_indices: Sequence[int]) -> Records:
        """The records of a store in which the model's layers are ``layer_indices``."""
        manifest = store.manifest
        arguments = store.source_arguments()
        return cls(manifest.weights, manifest.group_size, manifest.shape.layers, list(layer_indices), arguments, store)


def open_other(
    layers: Sequence[ExpertsLayer], config: MeshConfig, records: Records, *, slots: int, min_slots: int
) -> ExpertPool:
    """Open the second pool. Profiles, early experts and mirrors apply to the main pool only."""
    config = config.replace(
        mirrors=(),
        profile=None,
        prefill="off",
        lossy={"routing_bias": 0.0},
        residency={"early_experts": "off"},
    )
    return ExpertPool(
        common_geometry(layers),
        records.layers,
        slots,
        config,
        activations=pool_activations(layers, records.layer_indices, records.layers),
        weights=records.weights,
        group_size=records.group_size,
        exact=False,
        source=_C.Source(**records.source_arguments),
        layer_indices=records.layer_indices,
        min_slots=min_slots,
        store=records.store,
        identity=records.identity,
    )
