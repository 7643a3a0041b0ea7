"""Files with the inputs of each layer's experts while a text runs through a model: a row for each token.

A row is top-k ids (int32), top-k routing weights (fp32), the hidden state (bf16), and zeros up to a multiple of 8
bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torch_mesh.system.atomic_files import FILE_MODE, new_file

_STATE = "calibration.json"
_ALIGNMENT = 8  # rows are padded to a multiple of these bytes


@dataclass(frozen=True)
class LayerRows:
    """Rows of one layer: ids int64 [rows, k], weights fp32 [rows, k], hidden bf16 [rows, hidden], memory-mapped."""

    ids: torch.Tensor
    weights: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class RowFiles:
    """The files of all layers in one folder. ``tokens``: those of the text; ``rows_per_token``: rows of a layer for
    each token."""

    layers: int
    top_k: int
    hidden: int
    tokens: int
    rows_per_token: int = 1

    @property
    def row_bytes(self) -> int:
        return -(-(8 * self.top_k + 2 * self.hidden) // _ALIGNMENT) * _ALIGNMENT

    @property
    def bytes(self) -> int:
        """Upper bound for all files."""
        return self.layers * self.tokens * self.rows_per_token * self.row_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (_STATE, *map(self._name, range(self.layers)))

    def resume(self, folder: Path) -> int:
        """The number of complete sequences in ``folder``; drops others."""
        done, rows = self._state(folder)
        for layer, count in enumerate(rows):
            with (folder / self._name(layer)).open("ab") as stream:
                stream.truncate(count * self.row_bytes)
        return done

    def rows(self, folder: Path) -> list[int]:
        return [(folder / self._name(layer)).stat().st_size // self.row_bytes for layer in range(self.layers)]

    def append(self, folder: Path, layer: int, rows: LayerRows) -> int:
        """Append rows; returns their bytes."""
        table = torch.zeros(len(rows.ids), self.row_bytes, dtype=torch.uint8)
        ids, weights, hidden = self._parts(table)
        chosen = rows.ids.shape[1]  # some layers have fewer than top-k
        ids[:, :chosen] = rows.ids
        ids[:, chosen:] = -1
        weights[:, :chosen] = rows.weights
        hidden.copy_(rows.hidden)
        with (folder / self._name(layer)).open("ab") as stream:
            stream.write(table.numpy().data)
        return table.nbytes

    def complete(self, folder: Path, sequences: int) -> None:
        """Record durably that the rows of so many sequences are complete."""
        for layer in range(self.layers):
            descriptor = os.open(folder / self._name(layer), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        with new_file(folder / _STATE, "w") as stream:
            json.dump({"sequences": sequences, "rows": self.rows(folder)}, stream)

    def read(self, folder: Path, layer: int) -> LayerRows:
        path = folder / self._name(layer)
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            table = torch.empty(0, self.row_bytes, dtype=torch.uint8)
        else:
            table = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c").reshape(-1, self.row_bytes))
        ids, weights, hidden = self._parts(table)
        return LayerRows(ids.long(), weights.clone(), hidden)

    def _parts(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, weights and hidden states in rows of bytes."""
        middle, end = 4 * self.top_k, 8 * self.top_k
        hidden = table[:, end : end + 2 * self.hidden]
        return (
            table[:, :middle].view(torch.int32),
            table[:, middle:end].view(torch.float32),
            hidden.view(torch.bfloat16),
        )

    def _state(self, folder: Path) -> tuple[int, list[int]]:
        nothing = 0, [0] * self.layers
        try:
            state = json.loads((folder / _STATE).read_text())
            done, rows = int(state["sequences"]), [int(count) for count in state["rows"]]
            whole = len(rows) == self.layers and all(
                count <= there for count, there in zip(rows, self.rows(folder), strict=True)
            )
        except (OSError, ValueError, TypeError, KeyError):
            return nothing
        return (done, rows) if whole else nothing

    @staticmethod
    def _name(layer: int) -> str:
        return f"calibration-{layer:05d}.rows"
