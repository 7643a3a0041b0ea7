"""Embedding tables in files, and the engine that reads their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_mesh import _C, _testing
from torch_mesh.formats import FORMATS
from torch_mesh.store.header import read_header


@dataclass
class RowFiles:
    """Tables in the layout of a checkpoint (each in two shards) or of a store."""

    tables: Sequence[Tensor]
    files: list[Path]
    described: list[dict[str, Any]]

    def open(self, *, cache: int = 1 << 20, faults: dict[str, float] | None = None, **options: Any) -> _C.Tables:
        defaults: dict[str, Any] = {"verify": True, "timeout": 60.0, "io": "auto"}
        if faults is not None:
            defaults["interpose"] = _testing.faults(**faults)
        tables: Any = [about | {"cache_bytes": cache} for about in self.described]
        files = [(str(path), path.stat().st_size) for path in self.files]
        return _C.Tables(files=files, tables=tables, **defaults | options)


def handle_of(tables: _C.Tables, table: int = 0) -> Tensor:
    return torch.tensor([tables.id, table])


def _salt(number: int) -> bytes:
    return bytes([number] * 16)


def _bytes_of(table: Tensor) -> Any:
    return table.contiguous().view(torch.uint8).numpy()


def raw_files(folder: Path, *tables: Tensor) -> RowFiles:
    files, described = [], []
    for number, table in enumerate(tables):
        stretches = []
        for shard, rows in enumerate(table.split(-(-len(table) // 2))):
            path = folder / f"raw-{number}-{shard}.safetensors"
            save_file({"before": torch.zeros(shard + 3, dtype=torch.uint8), "rows": rows.contiguous()}, path)
            stretches.append((len(files), read_header(path).tensors["rows"].offset, len(rows)))
            files.append(path)
        described.append(_description(number, table, table[0].nbytes, False, stretches))
    return RowFiles(tables, files, described)


def padded_files(folder: Path, *tables: Tensor) -> RowFiles:
    path, described, content = folder / "padded", [], np.zeros(4096, np.uint8)
    for number, table in enumerate(tables):
        row_bytes = table[0].nbytes
        padded = _C.pad_rows(_salt(number), 0, row_bytes, _bytes_of(table))
        stretches = [(0, len(content), len(table))]
        described.append(_description(number, table, _C.padded_row_bytes(row_bytes), True, stretches))
        content = np.concatenate([content, padded, np.zeros(-len(padded) % 4096, np.uint8)])
    path.write_bytes(content.tobytes())
    return RowFiles(tables, [path], described)


def coded_files(weights: str, folder: Path, *tables: Tensor) -> RowFiles:
    """Tables as codes in a store's layout. ``tables`` of the result are their decoded values."""
    path, described, content, values = folder / weights, [], np.zeros(4096, np.uint8), []
    for number, table in enumerate(tables):
        coded = _C.code_rows(weights, 0, table.float().numpy())
        row_bytes = coded.shape[1]
        padded = _C.pad_rows(_salt(number), 0, row_bytes, coded.reshape(-1))
        about = _description(number, table, _C.padded_row_bytes(row_bytes), True, [(0, len(content), len(table))])
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[table.dtype]
        described.append(about | {"row_bytes": row_bytes, "codes": (weights, dtype, table.size(1))})
        content = np.concatenate([content, padded, np.zeros(-len(padded) % 4096, np.uint8)])
        values.append(torch.from_numpy(decoded(weights, coded, table.size(1))).to(table.dtype))
    path.write_bytes(content.tobytes())
    return RowFiles(values, [path], described)


def decoded(weights: str, coded: Any, dim: int) -> Any:
    """Decode rows of codes to float64 [rows, dim], by the layout of csrc/tables/row_codes.h."""
    group = FORMATS[weights].table_group or dim
    scales_bytes = 2 * -(-dim // group)
    words = np.ascontiguousarray(coded[:, :scales_bytes]).view(np.uint16).astype(np.uint32) << 16
    scales = np.repeat(words.view(np.float32).astype(np.float64), group, axis=1)[:, :dim]
    codes = coded[:, scales_bytes:]
    if weights == "int4":
        nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)[:, :dim]
        return (nibbles.astype(np.float64) - 8) * scales
    return codes.view(np.int8).astype(np.float64) * scales


def _description(number: int, table: Tensor, stride: int, checked: bool, stretches: list[Any]) -> dict[str, Any]:
    return {
        "name": f"table{number}.weight",
        "row_bytes": table[0].nbytes,
        "codes": None,
        "stride": stride,
        "has_checksums": checked,
        "salt": _salt(number),
        "stretches": stretches,
    }
