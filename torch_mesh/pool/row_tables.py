"""Embedding tables whose rows are read from files: the engine that reads them, and its owner."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import torch

from torch_mesh import _C
from torch_mesh.errors import MeshError
from torch_mesh.pool.expert_pool import close_engine, notice_exit
from torch_mesh.store.checkpoint import TORCH_DTYPES
from torch_mesh.store.tables import StoredTable
from torch_mesh.system.memory import auto_budget, auto_margin

# The fraction of rows that "auto" caches: n-grams repeat as words do, so that few rows serve most look-ups.
_CACHED_FRACTION = 64
_MIN_CACHE, _MAX_CACHE = 16 << 20, 1 << 30
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Size of the buffers that rows are read into (csrc/tables/tables.cpp).
STAGING_BYTES = 8 << 20


def divided_cache(tables: Sequence[int], cache_bytes: int | None) -> list[int]:
    """Bytes of each table's row cache. ``tables``: bytes of each table; ``cache_bytes``: of all caches together, or
    None to choose by the tables' sizes."""
    every = sum(tables)
    if cache_bytes is None:
        cache_bytes = min(max(every // _CACHED_FRACTION, _MIN_CACHE), _MAX_CACHE)
    return [cache_bytes * table // every for table in tables]


def tables_memory(tables: Sequence[int], cache_bytes: int | None) -> int:
    """Memory of tables of these sizes in bytes: row caches and buffers."""
    return sum(divided_cache(tables, cache_bytes)) + STAGING_BYTES if tables else 0


def vocabulary_in_files(vocabulary: int, experts: int, free: int) -> bool:
    """Whether memory is short for an input embedding of ``vocabulary`` bytes, which transformers maps from its file.

    ``free``: bytes that are left for ``experts`` bytes of experts and the page cache. Memory is short if
    ``resident="auto"`` would not hold all experts, and the page cache could not hold the embedding in the memory that
    is then left free: each look-up would wait for a page, and drop others.
    """
    return auto_budget(free, 0) < experts and auto_margin(free) < vocabulary


class RowTables:
    """The tables of a model. Its modules hold references, and copies of a model share them. Closed with the last
    reference."""

    by_id: ClassVar[weakref.WeakValueDictionary[int, RowTables]] = weakref.WeakValueDictionary()  # open ones

    def __init__(
        self, tables: Sequence[StoredTable], *, cache_bytes: int | None, verify: str, timeout: float, io: str
    ) -> None:
        self.tables = tuple(tables)
        paths = list(dict.fromkeys(stretch.path for table in tables for stretch in table.stretches))
        numbers = {path: number for number, path in enumerate(paths)}
        caches = divided_cache([table.nbytes for table in tables], cache_bytes)
        self.engine = _C.Tables(
            files=[(str(path), path.stat().st_size) for path in paths],
            tables=[
                {
                    "name": table.name,
                    "row_bytes": table.row_bytes,
                    "codes": (table.weights, _DTYPE_NAMES[table.dtype], table.dim) if table.weights else None,
                    "stride": table.stride,
                    "has_checksums": table.salt is not None,
                    "salt": table.salt or bytes(16),
                    "stretches": [(numbers[each.path], each.offset, each.rows) for each in table.stretches],
                    "cache_bytes": cache,
                }
                for table, cache in zip(tables, caches, strict=True)
            ],
            verify=verify != "never",
            timeout=timeout,
            io=io,
        )
        self.engine_id = self.engine.id
        self.by_id[self.engine_id] = self
        self._finalizer = weakref.finalize(self, close_engine, self.engine, os.getpid())
        notice_exit()

    def close(self) -> None:
        """Close the engine before its last reference is gone. No module may use the tables any more."""
        self._finalizer()

    def handle(self, table: int) -> torch.Tensor:
        """int64 [tables, table]: the handle of a table, an argument of the ops."""
        return torch.tensor([self.engine.id, table], dtype=torch.int64, device="cpu")

    def read(self, table: int, first: int, last: int) -> torch.Tensor:
        """Rows [first, last): their values as in the files, or what their codes stand for."""
        about = self.tables[table]
        ids = torch.arange(first, last, device="cpu")
        return torch.ops.torch_mesh.gather_rows(ids, self.handle(table), about.dim, about.dtype)

    def describe(self, table: int) -> str:
        """Part of a line for print(model)."""
        about = self.engine.describe()
        cached, weights = about["cache_rows"][table], self.tables[table].weights
        return f"rows from files{f' in {weights}' if weights else ''}, {cached} of {self.tables[table].rows} cached"

    def __deepcopy__(self, memo: dict[int, object]) -> RowTables:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise MeshError(
            "A model whose embedding tables are in files cannot be pickled: open the checkpoint in the other process."
        )
