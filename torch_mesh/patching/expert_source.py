"""The sources of a model's experts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.models.tables import TableLayer
from torch_mesh.modules.dense import Blocks
from torch_mesh.patching.rollback import PatchUndo, Undo
from torch_mesh.pool.row_tables import RowTables, tables_memory
from torch_mesh.pool.secondary_pool import Records, other_config, packed_format
from torch_mesh.store.convert import checked_group_size, convert_model
from torch_mesh.store.disk_cache import unnamed_folder
from torch_mesh.store.mirrors import find_copies
from torch_mesh.store.progress import progress_bar
from torch_mesh.store.tables import StoredTable


@dataclasses.dataclass(frozen=True)
class TableSource:
    """Embeddings whose rows stay in files, and their files."""

    layers: Sequence[TableLayer]
    stored: Sequence[StoredTable]

    def memory(self, cache_bytes: int | None) -> int:
        return tables_memory([table.nbytes for table in self.stored], cache_bytes)


def open_tables(stored: Sequence[StoredTable], config: MeshConfig) -> RowTables:
    """The reader of the rows of tables in files."""
    return RowTables(
        stored,
        cache_bytes=config.table_cache_bytes,
        verify=config.verify,
        timeout=config.residency.timeout,
        io=config.io,
    )


class ExpertSource:
    """The source of a model's experts.

    ``weights``, ``group_size`` and ``exact`` are those of the pool. Its records have ``layers`` layers, of which the
    model's are ``layer_indices``; ``resident`` is a fraction of ``counted`` layers.
    """

    undo: Undo
    weights: str
    group_size: int
    exact: bool
    layers: int = 0  # 0 until they are known
    counted: int
    layer_indices: Sequence[int]
    expert_range: ExpertRange | None = None  # the experts of this rank; None: all
    only_format: str | None = None  # format of the stored records, if there are no originals
    freed: int = 0  # bytes that the model frees when the pool is open
    staging: int = 0  # bytes of reading buffers beside the pool
    tables: TableSource | None = None  # embeddings whose rows stay in files
    blocks: Blocks | None = None  # codes of matrices outside the experts, if they are kept
    copies: Sequence[Sequence[str]] = ()  # for each file of the pool's records the paths of its copies on other drives

    def records(self, weights: str) -> contextlib.AbstractContextManager[Records]:
        """The records in ``weights``. Open them in the context: an open file outlives a temporary store."""
        raise NotImplementedError

    def check_other(self, weights: str) -> None:
        """Raises StoreError if there can be no records in another format for a second pool."""

    def stays_in_memory(self, slots: int) -> bool:
        """Whether ``slots`` hold all experts, and are filled from the model's parameters."""
        return False


class RecordSource(ExpertSource):
    """Experts of a model that is being opened, whose records are read from files."""

    def __init__(self, exact: bool, only_format: str | None = None) -> None:
        self.undo = Undo()
        self.exact = exact
        self.only_format = only_format

    def set_records(self, records: Records, mirrors: Sequence[str]) -> None:
        """Set the records in the pool's format, and find their copies in the folders ``mirrors``."""
        self.copies = find_copies(records.source_arguments["files"], mirrors)
        if self.expert_range is not None:
            own = self.expert_range.source_arguments(records.source_arguments)
            records = dataclasses.replace(records, source_arguments=own)
        self._records = records
        self.weights, self.group_size = records.weights, records.group_size
        self.layers = self.counted = records.layers
        self.layer_indices = records.layer_indices
        self.staging = _C.Source(**records.source_arguments).staging_bytes

    @property
    def stored(self) -> bool:
        """Whether the records are in a store."""
        return self._records.store is not None

    def records(self, weights: str) -> contextlib.AbstractContextManager[Records]:
        return contextlib.nullcontext(self._records if weights == self.weights else self.other_records(weights))

    def other_records(self, weights: str) -> Records:
        """The records in another format, which are converted if necessary."""
        raise NotImplementedError


class LoadedModelSource(ExpertSource):
    """The experts of a model in memory."""

    def __init__(self, model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig) -> None:
        self._model = model
        self.config = config
        self._all = sum(layer.num_experts for layer in layers)
        parameters = (parameter for layer in layers for parameter in layer.parameters.values())
        self.freed = sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")
        self.weights = packed_format(config.weights)
        self.group_size = checked_group_size(self.weights, config.group_size)
        self.dtypes = {
            parameter.dtype
            for layer in layers
            for name, parameter in layer.parameters.items()
            if not name.endswith("_bias")  # records hold biases in fp32
        }
        self.exact = FORMATS[self.weights].holds_bf16 and self.dtypes == {torch.bfloat16}
        self.layers = self.counted = len(layers)
        self.layer_indices = range(len(layers))
        self.undo: PatchUndo = PatchUndo(model, config)

    def stays_in_memory(self, slots: int) -> bool:
        return slots == self._all and self.config.store is None

    @contextlib.contextmanager
    def records(self, weights: str) -> Iterator[Records]:
        config = self.config if weights == self.weights else other_config(self.config, weights)
        with _store_folder(config) as folder:
            fingerprint = self.undo.new_store(folder)
            with progress_bar(f"Packing experts to {weights}") as progress:
                store = convert_model(
                    self._model,
                    folder,
                    weights,
                    config.group_size,
                    fingerprint=fingerprint,
                    private=config.store is None,
                    progress=progress,
                ).store
            yield Records.of_store(store, self.layer_indices)


@contextlib.contextmanager
def _store_folder(config: MeshConfig) -> Iterator[Path]:
    if config.store is not None:
        yield Path(config.store)
        return
    with unnamed_folder() as folder:
        yield folder / "experts"
