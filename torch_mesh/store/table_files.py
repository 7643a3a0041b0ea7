"""Embedding tables in a store: files of rows, each with its checksum and padded, so that one read fetches one row."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_mesh.formats import TABLE_FORMATS
from torch_mesh.store.dtypes import DTYPES, FLOATS, NAMES
from torch_mesh.store.header import encode_header, parse_json, read_header, read_into, store_error
from torch_mesh.store.manifest import read_manifest
from torch_mesh.store.store_plan import Chunk, NewFile, Piece

ROW_DTYPES = {name: DTYPES[name] for name in FLOATS}
_NAME = re.compile(r"mesh-tables-\d{5}-of-\d{5}\.safetensors")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class RowStretch:
    """Consecutive rows in a file, from byte ``offset`` on."""

    path: Path
    offset: int
    rows: int


@dataclass(frozen=True)
class StoredTable:
    """An embedding table in files. Sizes are in bytes."""

    name: str  # the parameter's
    dim: int
    dtype: torch.dtype  # the values'
    stride: int  # bytes from one row to the next
    salt: bytes | None  # salt of the checksum after each row; None: no checksums
    stretches: tuple[RowStretch, ...]  # in the order of the rows
    tensors: tuple[str, ...]  # the checkpoint's tensors with the table; empty in a store's own files
    weights: str = ""  # the format of the rows' codes; empty: rows are values

    @property
    def rows(self) -> int:
        return sum(stretch.rows for stretch in self.stretches)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the files."""
        from torch_mesh import _C

        return _C.coded_row_bytes(self.weights, self.dim) if self.weights else self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def is_table_file(name: str) -> bool:
    """Whether a store's file of this name holds rows of a table."""
    return _NAME.fullmatch(name) is not None


def table_files(
    tables: Sequence[StoredTable], fingerprint: str, max_file_bytes: int, weights: str = ""
) -> list[NewFile]:
    """The files of a store for tables of a checkpoint, which ``fingerprint`` identifies. ``weights``: the format to
    which rows are rounded; empty: they stay unchanged.

    Making the files raises ``StoreError`` for a value that is not finite and has no code.
    """
    from torch_mesh import _C

    parts = []
    for table in tables:
        row_bytes = replace(table, weights=weights).row_bytes
        rows = max(1, max_file_bytes // _C.padded_row_bytes(row_bytes))
        parts += [(table, first, min(rows, table.rows - first)) for first in range(0, table.rows, rows)]
    return [
        _table_file(f"mesh-tables-{number + 1:05d}-of-{len(parts):05d}.safetensors", *part, fingerprint, weights)
        for number, part in enumerate(parts)
    ]


def _table_file(name: str, table: StoredTable, first: int, rows: int, fingerprint: str, weights: str) -> NewFile:
    from torch_mesh import _C

    row_bytes = replace(table, weights=weights).row_bytes
    stride = _C.padded_row_bytes(row_bytes)
    identity = f"{fingerprint}\0{table.name}" + (f"\0{weights}" if weights else "")
    salt = hashlib.blake2b(identity.encode(), digest_size=16).digest()
    dtype = NAMES[table.dtype]
    # Releases that do not know codes look for "dtype", and refuse the file.
    values = {"weights": weights, "values": dtype} if weights else {"dtype": dtype}
    about = {"first_row": first, "dim": table.dim, **values, "salt": salt.hex()}
    size = rows * stride
    header = encode_header(
        [(table.name, "U8", (rows, stride), size)], {"format": "torch_mesh", "table": json.dumps(about)}
    )

    def chunks() -> Iterator[Chunk]:
        yield header
        each = max(1, _CHUNK_BYTES // table.row_bytes)
        for begin in range(first, first + rows, each):
            count = min(each, first + rows - begin)
            made = read_rows(table, begin, count)
            if weights:
                made = _coded(table, begin, made, weights)
            yield _C.pad_rows(salt, begin, row_bytes, made).data

    return NewFile(name, len(header) + size, chunks, tuple(_pieces(table, first, rows)))


def read_rows(table: StoredTable, first: int, count: int) -> npt.NDArray[np.uint8]:
    """Rows [first, first + count) of a checkpoint's table, concatenated.

    Raises ``StoreError`` for a truncated file.
    """
    rows = np.empty(count * table.row_bytes, dtype=np.uint8)
    into = rows.data
    for path, offset, size in _pieces(table, first, count):
        read_into(path, offset, into[:size])
        into = into[size:]
    return rows


def _coded(table: StoredTable, first: int, rows: npt.NDArray[np.uint8], weights: str) -> npt.NDArray[np.uint8]:
    """Encode rows of values; the first one is row ``first``."""
    from torch_mesh import _C

    values = torch.from_numpy(rows).view(table.dtype).view(-1, table.dim).float()
    try:
        return _C.code_rows(weights, first, values.numpy()).reshape(-1)
    except ValueError as problem:
        path = next(_pieces(table, first, 1))[0]
        raise store_error(
            path, f"{table.name}: {problem}. Leave --tables out to keep the table's rows as they are"
        ) from None


def _pieces(table: StoredTable, first: int, count: int) -> Iterator[Piece]:
    """The ranges of rows [first, first + count) of a checkpoint's table."""
    for stretch in table.stretches:
        skipped = min(first, stretch.rows)
        taken = min(count, stretch.rows - skipped)
        first, count = first - skipped, count - taken
        if taken:
            yield stretch.path, stretch.offset + skipped * table.row_bytes, taken * table.row_bytes


def tables_of_store(folder: Path) -> list[StoredTable]:
    """The tables that a store has in files of their own. Raises ``StoreError`` for inconsistent files."""
    names = sorted(file.name for file in read_manifest(folder).other_files if is_table_file(file.name))
    parts: dict[str, list[tuple[int, StoredTable]]] = {}
    for name in names:
        first, part = _read_part(folder / name)
        parts.setdefault(part.name, []).append((first, part))
    return [_joined(folder, sorted(each, key=lambda placed: placed[0])) for each in parts.values()]


def _read_part(path: Path) -> tuple[int, StoredTable]:
    header = read_header(path)
    try:
        (tensor,) = header.tensors.values()
        about: dict[str, Any] = parse_json(header.metadata["table"].encode())
        if not isinstance(about, dict):
            raise TypeError(f"its description is {about!r}, not an object")
        rows, stride = tensor.shape
        weights = about.get("weights", "")
        if weights not in ("", *TABLE_FORMATS):
            raise ValueError(f"{weights!r} rows; this release reads {', '.join(TABLE_FORMATS)}")
        dtype, salt = ROW_DTYPES[about["values" if weights else "dtype"]], bytes.fromhex(about["salt"])
        first, dim = int(about["first_row"]), int(about["dim"])
    except (KeyError, ValueError, TypeError) as problem:
        raise store_error(path, f"is no file of a table's rows ({problem}): convert the model with --force") from None
    stretches = (RowStretch(path, tensor.offset, rows),)
    return first, StoredTable(tensor.name, dim, dtype, stride, salt, stretches, (), weights)


def _joined(folder: Path, parts: Sequence[tuple[int, StoredTable]]) -> StoredTable:
    """The table of these parts in order. Each part comes with the number of its first row."""
    whole, expected = parts[0][1], 0
    stretches: list[RowStretch] = []
    for first, part in parts:
        if first != expected or replace(part, stretches=()) != replace(whole, stretches=()):
            raise store_error(folder, f"rows of {part.name} from {expected} on are missing, or of another conversion")
        expected += part.rows
        stretches += part.stretches
    return replace(whole, stretches=tuple(stretches))
