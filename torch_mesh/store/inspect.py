"""Describe a store or a raw checkpoint, for printing and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_mesh.formats import FORMATS
from torch_mesh.store.checkpoint import checkpoint_files, find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import source_name
from torch_mesh.store.dense_codes import StoredMatrix, stored_codes
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.manifest import is_store, open_store
from torch_mesh.store.tables import tables_in_files


def describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``kind`` is 'store' or 'checkpoint'; sizes are bytes; other keys are the same for both."""
    folder = Path(folder)
    return _describe_store(folder) if is_store(folder) else _describe_checkpoint(folder)


def _describe_store(folder: Path) -> dict[str, Any]:
    manifest = open_store(folder).manifest
    shape = manifest.shape
    return {
        "kind": "store",
        "folder": str(folder),
        "format_version": FORMATS[manifest.weights].version,
        "store_id": manifest.store_id.hex(),
        "source": manifest.source_name,
        "weights": manifest.weights,
        "group_size": manifest.group_size or None,
        "calibration": None if manifest.calibration is None else asdict(manifest.calibration),
        **asdict(shape),
        "expert_bytes": manifest.record_bytes,
        "all_experts_bytes": manifest.record_bytes * shape.layers * shape.experts,
        "other_bytes": sum(file.bytes for file in manifest.other_files),
        "table_weights": manifest.tables or None,
        "tables": _tables(folder, meta_model(read_config(folder))) if (folder / "config.json").is_file() else {},
        "dense_codes": _bytes_by_format(stored_codes(folder).values()),
        "files": [file.name for file in manifest.record_files],
        "reads_per_expert": 1,
        "modules": list(manifest.modules),
    }


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint_files(folder)  # reports missing weights before a missing config
    config = read_config(folder)
    model = meta_model(config)
    experts = find_checkpoint_experts(folder, model)
    shape = experts.shape
    root = folder.parent if is_gguf(folder) else folder
    return {
        "kind": "checkpoint",
        "folder": str(folder),
        "model_type": config.model_type,
        "source": source_name(folder),
        "weights": experts.format,
        "group_size": None,
        "calibration": None,
        **asdict(shape),
        "expert_bytes": experts.expert_bytes,
        "all_experts_bytes": experts.all_experts_bytes,
        "other_bytes": sum(tensor.bytes for _, tensors in experts.other_tensors for tensor in tensors),
        "table_weights": None,
        "tables": _tables(folder, model),
        "dense_codes": {},
        "files": [os.path.relpath(header.path, root) for header in experts.headers],
        "reads_per_expert": experts.reads_per_expert,
        "modules": list(experts.modules),
    }


def _tables(folder: Path, model: Any) -> dict[str, int]:
    """Bytes of the embedding tables that stay in the files, by their modules."""
    return {layer.path: stored.nbytes for layer, stored in tables_in_files(folder, model, "auto")}


def _bytes_by_format(codes: Iterable[StoredMatrix]) -> dict[str, int]:
    """Bytes by format of a store's codes of linear layers, which lie beside the layers' values."""
    sizes: dict[str, int] = {}
    for matrix in codes:
        sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.tensor.bytes
    return sizes
