"""Experts as in a checkpoint: bf16 matrices at unaligned offsets of a file."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from tiny_pools import Spec, ops

from torch_mesh import _C


class RawExperts:
    """Random bf16 experts in a file: gate and up in one piece, down in another. ``records`` are the same, packed.

    Replaces ``TinyExperts`` where an engine is opened.
    """

    def __init__(self, spec: Spec, path: Path) -> None:
        assert spec.weights == "bf16" and spec.gated and not spec.bias
        self.spec = spec
        self._path = path
        self._extents = np.zeros((spec.layers, spec.experts, 2, 3), dtype=np.int64)
        self.records: list[list[torch.Tensor]] = []
        with path.open("wb") as file:
            for layer in range(spec.layers):
                self.records.append([])
                for expert in range(spec.experts):
                    gate_up = (torch.randn(2 * spec.intermediate, spec.hidden) * spec.hidden**-0.5).bfloat16()
                    down = (torch.randn(spec.hidden, spec.intermediate) * spec.intermediate**-0.5).bfloat16()
                    for piece, matrix in enumerate((gate_up, down)):
                        file.write(bytes(2 * (1 + (layer + 7 * expert + piece) % 500)))
                        data = matrix.view(torch.uint8).numpy().tobytes()
                        self._extents[layer, expert, piece] = 0, file.tell(), len(data)
                        file.write(data)
                    gate, up = gate_up.split(spec.intermediate)
                    self.records[layer].append(ops.pack(gate, up, down, None, None, None, "bf16", 0))

    @functools.cached_property
    def source(self) -> _C.Source:
        hidden, intermediate = self.spec.hidden, self.spec.intermediate
        view = {"piece": 0, "row_stride": hidden, "column_stride": 1}
        return _C.Source(
            files=[(str(self._path), self._path.stat().st_size)],
            extents=self._extents,
            checksums=None,
            store_id=bytes(16),
            raw_dtype="bf16",
            raw_views=[
                {
                    "gate": {**view, "offset": 0},
                    "up": {**view, "offset": intermediate * hidden},
                    "down": {"piece": 1, "offset": 0, "row_stride": intermediate, "column_stride": 1},
                }
            ],
        )
