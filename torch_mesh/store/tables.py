"""Locate the rows of an embedding table: in the tensors of a checkpoint, or padded in a store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import core_model_loading

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.tables import TableLayer, find_tables
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import Tensor, read_headers, store_error
from torch_mesh.store.manifest import is_same_name, is_store
from torch_mesh.store.mapping import model_names, parameter_tensors
from torch_mesh.store.table_files import ROW_DTYPES, RowStretch, StoredTable, tables_of_store
from torch_mesh.store.weight_files import weight_files

_WORDS = re.compile(r"\.(qweight|weight_packed)$")


def tables_in_files(
    folder: Path,
    model: Any,
    choice: str | int | tuple[str, ...],
    key_mapping: Mapping[str, str] | None = None,
    *,
    vocabularies: bool = False,
) -> list[tuple[TableLayer, StoredTable]]:
    """The tables that ``MeshConfig.tables`` chooses, and the location of their rows in ``folder``. ``vocabularies``
    adds input embeddings.

    Tables that cannot be read there are left out. Raises UnsupportedModelError if such a table is named, and as
    ``find_tables`` and ``find_stored_tables`` do.
    """
    found = find_tables(model, choice, vocabularies=vocabularies)
    stored = find_stored_tables(folder, model, found, key_mapping)
    kept = []
    for layer in found:
        located = stored[layer.path]
        if isinstance(located, StoredTable):
            kept.append((layer, located))
        elif isinstance(choice, tuple):
            raise UnsupportedModelError(f"tables names {layer.path}, which has to stay in memory: {located}.")
    return kept


def find_stored_tables(
    folder: Path, model: Any, tables: Sequence[TableLayer], key_mapping: Mapping[str, str] | None = None
) -> dict[str, StoredTable | str]:
    """For each table, by path: the location of its rows in the folder's weight files, or why they cannot be read there.

    ``model`` has all parameters, perhaps on the meta device. Raises ``StoreError`` for damaged files and for an
    incomplete table.
    """
    if not tables:
        return {}
    own = {layer.path: table for layer, table in packed_tables(folder, model, tables)}
    if is_gguf(folder):
        return dict.fromkeys((table.path for table in tables), "GGUF files keep tables in formats of their own")
    headers = read_headers(weight_files(folder))
    # Packed words of a table are found as its weight is; their dtype then says that rows cannot be read.
    tensors = {
        _WORDS.sub(".weight", name): (header.path, tensor)
        for header in headers
        for name, tensor in header.tensors.items()
    }
    found = parameter_tensors(model, tensors, {table.name for table in tables} - own.keys(), key_mapping)
    others = [table for table in tables if table.path not in own]
    return own | {table.path: _stored(folder, table, found.get(table.name, []), tensors) for table in others}


def packed_tables(folder: Path, model: Any, tables: Iterable[TableLayer]) -> list[tuple[TableLayer, StoredTable]]:
    """The tables that are only in a store's files of rows. Raises ``StoreError`` for a table of another shape."""
    stored = tables_of_store(folder) if is_store(folder) else []
    if not stored:
        return []
    # ``model`` may be of another class than the store's config names, whose tensors transformers renames.
    renamed = model_names(model, [table.name for table in stored])
    found = []
    for layer in tables:
        for table in stored:
            if is_same_name(table.name, layer.name) or renamed[table.name][0] == layer.name:
                if (table.rows, table.dim) != tuple(layer.weight.shape):
                    raise store_error(
                        folder,
                        f"{table.name} is {table.rows} x {table.dim}, and the model's {tuple(layer.weight.shape)}",
                    )
                found.append((layer, table))
    return found


def _stored(
    folder: Path,
    table: TableLayer,
    sources: Sequence[tuple[str, Any]],
    tensors: Mapping[str, tuple[Path, Tensor]],
) -> StoredTable | str:
    if not sources:
        raise store_error(folder, f"no tensor of the checkpoint holds {table.name}: incomplete, or of another model")
    converters = {id(converter): converter for _, converter in sources}
    if len(converters) > 1 or not all(_joins_rows(converter) for converter in converters.values()):
        return f"transformers makes it of {sources[0][0]} and others by more than joining rows"
    parts = [tensors[name] for name, _ in sources]
    dtypes = {tensor.dtype for _, tensor in parts}
    if len(dtypes) > 1 or not dtypes <= ROW_DTYPES.keys():
        return f"its tensors are {', '.join(sorted(dtypes))}, and rows are read in one of {', '.join(ROW_DTYPES)}"
    rows, dim = table.weight.shape
    if any(len(tensor.shape) != 2 or tensor.shape[1] != dim for _, tensor in parts):
        raise store_error(
            folder, f"{sources[0][0]} has the shape {parts[0][1].shape}, where {table.name} has {dim} columns"
        )
    found = sum(tensor.shape[0] for _, tensor in parts)
    if found != rows:
        raise store_error(
            folder,
            f"{table.name} has {found} of {rows} rows, beginning with {sources[0][0]}: incomplete?",
        )
    dtype = ROW_DTYPES[dtypes.pop()]
    stretches = tuple(RowStretch(path, tensor.offset, tensor.shape[0]) for path, tensor in parts if tensor.shape[0])
    names = tuple(name for name, _ in sources)
    return StoredTable(table.name, dim, dtype, dim * dtype.itemsize, None, stretches, names)


def _joins_rows(converter: Any) -> bool:
    """Whether a converter joins tensors along their rows and does nothing else. ``converter`` None: the tensor is only
    renamed."""
    if converter is None:
        return True
    single = len(converter.source_patterns) == len(converter.target_patterns) == 1
    return single and all(
        isinstance(operation, core_model_loading.Concatenate) and operation.dim == 0
        for operation in converter.operations
    )
