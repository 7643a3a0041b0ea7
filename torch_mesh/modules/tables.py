"""The replacement of an embedding whose table stays in files: the same module, without its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.models.tables import TableLayer
from torch_mesh.modules.experts import PackedModule, change_class, drop_attributes, mixed_class, restore_weight
from torch_mesh.modules.packed_weight import FrozenWeight, as_parameter, device_around
from torch_mesh.pool.row_tables import RowTables
from torch_mesh.system.memory import shortage

_READ_BYTES = 64 << 20  # of a whole table, in memory beside it


class MeshEmbedding(PackedModule, nn.Embedding):
    """An ``nn.Embedding`` that reads its rows from files. Mixed in behind the class that it replaces, whose own forward
    may do more than look rows up. Frozen."""

    _mesh_tables: RowTables
    _mesh_table: int  # the table's index in _mesh_tables
    _mesh_handle: torch.Tensor  # an attribute, not a buffer: .to() must not move it
    _mesh_stored_dtype: torch.dtype
    _mesh_dtype: torch.dtype  # the weight's; a compiled forward should not read the weight for it
    _mesh_class: type[nn.Module]  # the original class

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., embedding_dim], on their device."""
        rows = torch.ops.torch_mesh.gather_rows(
            input.cpu(), self._mesh_handle, self.embedding_dim, self._mesh_stored_dtype
        )
        return rows.to(input.device, self._mesh_dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        weight: Any = self._parameters["weight"]
        self._mesh_dtype = weight.dtype
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._mesh_tables.describe(self._mesh_table)}"


class PackedTableWeight(FrozenWeight):
    """The weight of a ``MeshEmbedding``. Arithmetic on it raises: it would read the whole table."""

    otherwise = "or open the model with tables='off', or with names of other tables"
    handle: torch.Tensor
    tables: RowTables
    table: int

    def __init__(
        self, handle: torch.Tensor, shape: torch.Size, dtype: torch.dtype, tables: RowTables, table: int
    ) -> None:
        self.handle = self._identity = handle
        self.tables, self.table = tables, table
        self.path, self.format = tables.tables[table].name, tables.tables[table].weights or "rows in files"
        self.exact = not tables.tables[table].weights

    def unpacked(self) -> torch.Tensor:
        """Read the whole table. Raises MemoryError if it does not fit in memory."""
        check_room(self)
        values = torch.empty(self.shape, dtype=self.dtype)
        for rows in self._parts():
            values[rows] = self._read(rows)
        return values

    def _equals(self, source: torch.Tensor) -> bool:
        if source.shape != self.shape:
            return False
        for rows in self._parts():
            part = source._read(rows) if isinstance(source, PackedTableWeight) else source[rows].detach()
            if not torch.equal(self._read(rows), part.to("cpu", self.dtype)):
                return False
        return True

    def _parts(self) -> Iterator[slice]:
        rows, dim = self.shape
        each = max(1, _READ_BYTES // (dim * self.tables.tables[self.table].dtype.itemsize))
        return (slice(first, min(first + each, rows)) for first in range(0, rows, each))

    def _read(self, rows: slice) -> torch.Tensor:
        return self.tables.read(self.table, rows.start, rows.stop).to(self.dtype)

    def alias(self, dtype: torch.dtype | None = None) -> PackedTableWeight:
        return PackedTableWeight(self.handle, self.shape, dtype or self.dtype, self.tables, self.table)

    def _for_arithmetic(self) -> torch.Tensor:
        raise MeshError(
            f"{self.path} is read from files row by row, and something was to compute with all of it: code that reads "
            "the embedding's weight. Open the model with tables='off', or with names of other tables, to have it in "
            "memory."
        )

    # torch.compile keeps this context as long as the compiled code, so it names the tables instead of holding them.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["handle"], (self.shape, self.dtype, self.tables.engine_id, self.table)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> PackedTableWeight:
        shape, dtype, engine_id, table = context
        return PackedTableWeight(inner["handle"], shape, dtype, RowTables.by_id[engine_id], table)


def check_room(weight: torch.Tensor) -> None:
    """Raises MemoryError if a table does not fit in memory."""
    if (free := shortage(weight.nbytes)) is not None:
        path = weight.path if isinstance(weight, PackedTableWeight) else "the table"
        raise MemoryError(
            f"{path} takes {weight.nbytes:,} bytes as an ordinary tensor, and the machine and its memory cgroups have "
            f"{free:,} left: its rows are in the checkpoint's files. To save the model, copy the "
            "folder that it was opened from."
        )


def install_table(table: TableLayer, tables: RowTables, index: int) -> None:
    """Make ``table.module`` read its rows from table ``index`` of ``tables``."""
    module: Any = table.module
    weight = table.weight
    handle = tables.handle(index)
    module._mesh_tables, module._mesh_table, module._mesh_handle = tables, index, handle
    module._mesh_stored_dtype, module._mesh_dtype = tables.tables[index].dtype, weight.dtype
    module._mesh_parameters = ("weight",)
    module._mesh_class = type(module)
    module._parameters["weight"] = as_parameter(packed_table(table, tables, index), weight.requires_grad)
    change_class(module, mixed_class(MeshEmbedding, type(module), is_behind=True))


def packed_table(table: TableLayer, tables: RowTables, index: int) -> PackedTableWeight:
    weight = table.weight
    return PackedTableWeight(tables.handle(index), weight.shape, weight.dtype, tables, index)


def table_modules(model: nn.Module) -> Iterator[tuple[str, MeshEmbedding]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, MeshEmbedding))


def tables_of(model: nn.Module) -> list[RowTables]:
    """The tables that a model's embeddings read, each once."""
    return list({id(module._mesh_tables): module._mesh_tables for _, module in table_modules(model)}.values())


def restore_tables(model: nn.Module) -> None:
    """Reverse ``install_table`` for all tables, which are read into memory. Raises MemoryError if they do not fit."""
    for path, embedding in list(table_modules(model)):
        module: Any = embedding
        restore_weight(module, device_around(model, path))
        change_class(module, module._mesh_class)
        drop_attributes(module)
