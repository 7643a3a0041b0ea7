"""The sizes of a model, from headers, config and manifest, through the code that loading uses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS, layer_formats, short_name
from torch_mesh.models.families import ExpertsLayer, common_activation, describe_unpooled, find_experts, unpooled_layers
from torch_mesh.models.tables import TableLayer, find_vocabularies
from torch_mesh.modules.dense import CODES, Blocks, check_dense, dense_bytes, dense_formats, kept_in_fp32
from torch_mesh.pool.conversions import check_converted_for_mirrors
from torch_mesh.pool.row_tables import tables_memory
from torch_mesh.store.checkpoint import (
    TORCH_DTYPES,
    CheckpointExperts,
    checkpoint_files,
    find_checkpoint_experts,
    meta_model,
    read_config,
    shape_of,
)
from torch_mesh.store.convert import checked_group_size, describe_nearest, weights_of_checkpoint
from torch_mesh.store.dense_codes import codes_of_checkpoint, codes_of_store
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.manifest import Manifest, Shape, is_store, open_store
from torch_mesh.store.mirrors import check_mirrors
from torch_mesh.store.tables import StoredTable, tables_in_files


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    weights: str
    group_size: int | None
    expert_bytes: int  # one record in the pool
    all_experts_bytes: int
    dense_bytes: int | None  # all other weights in memory, packed by ``dense=``; None: unknown without a config.json
    dense_bytes_loading: int | None  # the same before packing
    dense_bytes_per_token: int | None  # the part that a token reads: without the embedding and ``unpooled``
    dense_format: str  # the format that ``dense=`` packs most weights to; empty: none
    unpooled_bytes: int | None  # experts of other shapes, which stay outside the pool
    unpooled: str  # description of these experts
    tables: str  # embedding tables that stay in files
    vocabularies: str  # the input embeddings among ``tables``, which stay in files if memory is short
    vocabulary_bytes: int  # size in memory of input embeddings that could stay in files
    table_weights: str  # the format to which rows of ``tables`` are rounded; empty: unchanged
    table_bytes: int  # size of ``tables`` in the files
    table_memory_bytes: int  # cached rows of ``tables``, and buffers
    files: tuple[Path, ...]  # the files with the experts
    staging_bytes: int = 0  # buffers of raw records
    conversion: str = ""  # for a quantized checkpoint: the formats that experts are read as or converted to
    # Format and group size of records that are read from the checkpoint's own files, whatever ``weights`` is.
    own_records: tuple[str, int] | None = None
    own_error: float = 0.0  # error of ``own_records``, relative to the checkpoint's values
    raw_staging_bytes: int = 0  # ``staging_bytes`` if they are read
    exact_in_bf16: bool = True  # False: fp16, fp32 and codes, which bf16 rounds

    @property
    def unused_bytes(self) -> int:
        """Padding of records in smaller formats: slots have the size of the largest."""
        own = layer_formats(self.weights)
        if len(own) == 1:
            return 0
        used = sum(self.shape.record_bytes(each, self.group_size or 0) for each in own)
        return self.all_experts_bytes - used * self.shape.experts

    @property
    def own_codes(self) -> tuple[str, int] | None:
        """``own_records`` of a quantized checkpoint: they hold its codes."""
        return self.own_records if self.conversion else None


def find_sizes(folder: Path, config: MeshConfig, *, vocabularies: bool = False) -> Sizes:
    """The sizes of the model in ``folder`` with ``config``. Arguments, errors: ``locate``, ``LocatedModel.sizes``."""
    return locate(folder).sizes(config, vocabularies=vocabularies)


def locate(folder: Path) -> LocatedModel:
    """Locate the model in ``folder``, from headers, config and manifest alone.

    Raises FileNotFoundError, StoreError and UnsupportedModelError as loading would.
    """
    if not folder.is_dir() and not is_gguf(folder):
        raise FileNotFoundError(f"{folder} is not a folder: give one with a checkpoint or a store, or a GGUF file")
    if is_store(folder):
        manifest = open_store(folder).manifest
        model = meta_model(read_config(folder)) if (folder / "config.json").is_file() else None
        return LocatedModel(folder, manifest, model, None)
    checkpoint_files(folder)  # raises for missing weights before the config is read
    model = meta_model(read_config(folder))
    return LocatedModel(folder, None, model, find_checkpoint_experts(folder, model))


@dataclass(frozen=True)
class LocatedModel:
    """A model on the meta device, and the manifest of its store or its experts in a checkpoint."""

    folder: Path
    manifest: Manifest | None
    model: Any  # None: a store of records only
    experts: CheckpointExperts | None

    def sizes(self, config: MeshConfig, *, vocabularies: bool = False) -> Sizes:
        """The sizes with ``config``.

        ``vocabularies``: input embeddings stay in files too, as ``vocabulary_stays_in_files`` says. Raises
        UnsupportedModelError, StoreError and ValueError as loading would.
        """
        check_mirrors(config.mirrors, config.io)
        if self.manifest is not None:
            return _store_sizes(self.folder, self.manifest, self.model, config, vocabularies)
        assert self.experts is not None
        return _checkpoint_sizes(self.folder, self.experts, self.model, config, vocabularies)


def _store_sizes(folder: Path, manifest: Manifest, model: Any, config: MeshConfig, vocabularies: bool) -> Sizes:
    manifest.check_format(folder, config.weights, config.given_group_size)
    dense: _Rest | None = None
    tables: list[tuple[TableLayer, StoredTable]] = []
    others: list[ExpertsLayer] | None = None
    shape = manifest.shape
    if model is not None:
        dtype = getattr(model.config.get_text_config(), "dtype", None)
        layers = find_experts(model)
        tables = tables_in_files(folder, model, config.tables, vocabularies=vocabularies)
        blocks = codes_of_store(folder, model) if config.dense == CODES else None
        check_dense(config.dense, blocks)
        dense = _dense_bytes(model, layers, tables, config, dtype or torch.bfloat16, blocks)
        others = unpooled_layers(model)
        # Use this build's activations: the build that wrote the store may have fused fewer.
        shape = dataclasses.replace(shape, activation=common_activation(layers))
    files = tuple(folder / file.name for file in manifest.record_files)
    return _sizes(shape, manifest.weights, manifest.group_size, dense, others, tables, config, files)


def _checkpoint_sizes(
    folder: Path, experts: CheckpointExperts, model: Any, config: MeshConfig, vocabularies: bool
) -> Sizes:
    layers = find_experts(model)
    blocks = codes_of_checkpoint(experts, model) if config.dense == CODES else None
    check_dense(config.dense, blocks)
    unconverted = config.store is None
    exact = "bf16" if unconverted else "bf12"
    weights, group_size = weights_of_checkpoint(experts, config.weights, config.given_group_size, exact=exact)
    raw = unconverted and experts.reads_as(weights, group_size)
    if not raw:
        check_converted_for_mirrors(folder, config, experts.fingerprint, weights, group_size)
    staging = (
        0 if experts.own_records is None or not unconverted else _C.Source(**experts.source_arguments()).staging_bytes
    )
    tables = tables_in_files(folder, model, config.tables, vocabularies=vocabularies)
    dense = _dense_bytes(model, layers, tables, config, _dense_dtype(model, experts), blocks)
    others, files = unpooled_layers(model), experts.expert_files
    return dataclasses.replace(
        _sizes(shape_of(layers), weights, group_size, dense, others, tables, config, files),
        staging_bytes=staging if raw else 0,
        conversion=_conversion(experts, config, weights, group_size),
        own_records=experts.own_records,
        own_error=0.0 if experts.own_records is None else experts.nearest().error,
        raw_staging_bytes=staging,
        exact_in_bf16=experts.fits_bf16,
    )


def _conversion(experts: CheckpointExperts, config: MeshConfig, weights: str, group_size: int) -> str:
    if not experts.weights:
        return ""
    if experts.reads_as(weights, group_size):
        kept = experts.nearest()
        if config.store is not None:
            return f"{experts.format} experts are converted to {short_name(weights)}, {kept.why}"
        as_they_are = "as they are, " if kept.exact else ""
        rounded = "" if kept.exact else f", {kept.why}"
        return (
            f"{experts.format} experts are read {as_they_are}in {experts.reads_per_expert} reads each and packed to "
            f"{short_name(weights)}{rounded}; torch-mesh convert makes that one read"
        )
    if config.weights == "auto":
        return describe_nearest(experts, weights)
    return f"{experts.format} experts are converted to {config.weights}"


def _dense_dtype(model: Any, experts: CheckpointExperts) -> torch.dtype:
    if not experts.weights:
        return TORCH_DTYPES[experts.dtype]
    return getattr(model.config.get_text_config(), "dtype", None) or torch.bfloat16


def _sizes(
    shape: Shape,
    weights: str,
    group_size: int,
    dense: _Rest | None,
    others: list[ExpertsLayer] | None,
    tables: list[tuple[TableLayer, StoredTable]],
    config: MeshConfig,
    files: tuple[Path, ...],
) -> Sizes:
    """The sizes of a store, whose records are read as they are."""
    record = shape.record_bytes(weights, group_size)
    return Sizes(
        shape=shape,
        weights=weights,
        group_size=group_size or None,
        expert_bytes=record,
        all_experts_bytes=record * shape.layers * shape.experts,
        dense_bytes=None if dense is None else dense.packed,
        dense_bytes_loading=None if dense is None else dense.loading,
        dense_bytes_per_token=None if dense is None else dense.per_token,
        dense_format="" if dense is None else dense.format,
        unpooled_bytes=None if others is None else sum(layer.nbytes for layer in others),
        unpooled=describe_unpooled(others or ()),
        tables=", ".join(layer.path for layer, _ in tables),
        vocabularies=", ".join(
            layer.path
            for layer, _ in tables
            if config.chooses_tables and dense is not None and layer.path in dense.vocabularies
        ),
        vocabulary_bytes=0 if dense is None else sum(dense.vocabularies.values()),
        table_weights=next((stored.weights for _, stored in tables if stored.weights), ""),
        table_bytes=sum(stored.nbytes for _, stored in tables),
        table_memory_bytes=tables_memory([stored.nbytes for _, stored in tables], config.table_cache_bytes),
        files=files,
    )


@dataclass(frozen=True)
class _Rest:
    """Bytes of all but the pooled experts: packed, as loaded, and read by a token; and the format of most of it."""

    packed: int
    loading: int
    per_token: int
    format: str
    vocabularies: dict[str, int]  # input embeddings of which rows may stay in files, by their paths


def _dense_bytes(
    model: Any,
    layers: list[ExpertsLayer],
    tables: list[tuple[TableLayer, StoredTable]],
    config: MeshConfig,
    dtype: torch.dtype,
    blocks: Blocks | None,
) -> _Rest:
    """Bytes of a model on the meta device, without its pooled experts."""
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if kept_in_fp32(model, name, dtype):
            parameter.data = parameter.data.float()
    experts = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    in_files = {id(layer.weight) for layer, _ in tables}
    kept = [parameter for parameter in model.parameters() if id(parameter) not in experts | in_files]
    loading = sum(parameter.nbytes for parameter in kept)
    options: Any = {"dense": config.dense, "group_size": config.group_size, "blocks": blocks}
    freed, taken = dense_bytes(model, layers, **options, loaded=False)
    packed = loading - freed + taken
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    formats: Counter[str] = Counter()
    for path, format in dense_formats(model, layers, **options).items():
        linear = model.get_submodule(path)
        formats[format] += linear.weight.numel()
        tied = tied and linear is not head  # a packed head is a separate weight
    not_read = 0 if tied or id(embedding) in in_files else embedding.nbytes
    unpooled = sum(layer.nbytes for layer in unpooled_layers(model))
    frequent = formats.most_common(1)
    vocabularies = {table.path: table.nbytes for table in find_vocabularies(model)}
    return _Rest(packed, loading, packed - unpooled - not_read, frequent[0][0] if frequent else "", vocabularies)


def fallback_record_bytes(sizes: Sizes, config: MeshConfig) -> int:
    """Bytes of a fallback record; 0 without ``lossy.fallback``."""
    return 0 if config.lossy.fallback == "none" else bytes_in(sizes, config, config.lossy.fallback)


def bytes_in(sizes: Sizes, config: MeshConfig, weights: str) -> int:
    if weights == sizes.weights:
        return sizes.expert_bytes
    groups = sizes.group_size if FORMATS[sizes.weights].chosen_groups else None
    return sizes.shape.record_bytes(weights, checked_group_size(weights, groups or config.group_size))
