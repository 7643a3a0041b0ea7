"""The part of a layer's experts that is on a GPU: launches of the Triton kernels (``triton_kernels``).

Activations are bf16, sums fp32. Weights are exact: integers, levels, FP8 and FP4 fit bf16, and the scale multiplies a
group's sum. Requires triton; TRITON_INTERPRET=1 runs it on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch_mesh.ops import launches
from torch_mesh.ops.device import DeviceLayer, DeviceRecord
from torch_mesh.ops.launches import BLOCK_COLUMNS, REDUCE_COLUMNS, Launch
from torch_mesh.ops.triton_kernels import activate_splits, down_few, down_many, gate_up_few, gate_up_many, reduce


def experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer, sentinels: bool, dtype: torch.dtype
) -> Tensor:
    """The part of a layer's output from experts on the device: [tokens, hidden] in ``dtype``.

    x [tokens, hidden], topk_ids and topk_weights [tokens, k] are on the device of ``layer``. Choices of experts that
    are not there add nothing. Ids outside [0, experts) make their token NaN, unless they are ``sentinels``, which add
    nothing.
    """
    return DeviceForward(x, topk_ids, topk_weights, layer, sentinels).compute(dtype)


class DeviceForward:
    """The rows of a forward, grouped by expert once: for the records of ``layer``, and for a prompt's as they
    arrive."""

    def __init__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer, sentinels: bool) -> None:
        self._layer, self._sentinels = layer, sentinels
        (tokens, top_k), record = topk_ids.shape, layer.record
        rows = x.to(torch.bfloat16).contiguous().view(torch.int16)
        ids = topk_ids.to(torch.int64).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        each = max(1, layer.workspace // max(1, top_k * (4 * record.hidden + 2 * _width(record))))
        parts = [slice(begin, begin + each) for begin in range(0, tokens, each)] if topk_ids.numel() else []
        self._shape, self._device = (tokens, record.hidden), x.device
        with torch.cuda.device_of(x):
            self._chunks = [
                (part, _Chunk(rows[part], ids[part], weights[part], layer.table.numel(), record.gate_up_format))
                for part in parts
            ]

    def compute(self, dtype: torch.dtype) -> Tensor:
        """The part that the layer's experts on the device add: [tokens, hidden]."""
        if not self._chunks:
            return torch.zeros(self._shape, dtype=dtype, device=self._device)
        out = torch.empty(self._shape, dtype=dtype, device=self._device)
        self._compute(self._layer.record, self._layer.records, self._layer.table, out, False)
        return out

    def add(self, record: DeviceRecord, records: Tensor, table: Tensor, out: Tensor) -> None:
        """Add to ``out``, float32 [tokens, hidden], the part of the experts that ``table`` finds in ``records``."""
        self._compute(record, records, table, out, True)

    def _compute(self, record: DeviceRecord, records: Tensor, table: Tensor, out: Tensor, add: bool) -> None:
        with torch.cuda.device_of(out):
            for part, chunk in self._chunks:
                chunk.compute(record, records.view(torch.int32), table, self._sentinels, out[part], add)


def _width(record: DeviceRecord) -> int:
    """Columns of an activated row, in whole blocks."""
    return triton.cdiv(record.intermediate, BLOCK_COLUMNS) * BLOCK_COLUMNS


class _Chunk:
    """A chunk of as many tokens as the workspace has room for."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: int, format: str) -> None:
        self._x, self._ids, self._weights, self._experts = x, ids, weights, experts
        tiles = launches.uses_tiles(ids.numel(), experts)
        self._rows = launches.tile_rows(format, ids.numel(), experts) if tiles else 0
        self._grouping = _group(ids.view(-1), experts, self._rows) if self._rows else None

    def compute(
        self, record: DeviceRecord, records: Tensor, table: Tensor, sentinels: bool, out: Tensor, add: bool
    ) -> None:
        tokens, top_k = self._ids.shape
        activated = torch.empty((tokens * top_k, _width(record)), dtype=torch.int16, device=self._x.device)
        compute = self._few if self._grouping is None else self._many
        products = compute(record, records, table, activated)
        bits = out.dtype == torch.bfloat16
        to = out.view(torch.int16) if bits else out
        reduce[tokens, triton.cdiv(record.hidden, REDUCE_COLUMNS)](
            products,
            self._ids,
            self._weights,
            table,
            to,
            tokens * top_k,
            top_k,
            self._experts,
            record.hidden,
            SPLITS=products.size(0),
            SENTINELS=sentinels,
            ADD=add,
            BITS=bits,
            CHOICES=triton.next_power_of_2(top_k),
            COLUMNS=REDUCE_COLUMNS,
            **_options(launches.ELEMENTWISE),
        )

    def _few(self, record: DeviceRecord, records: Tensor, table: Tensor, activated: Tensor) -> Tensor:
        """Fills ``activated`` [pairs, width]; returns products [splits, pairs, hidden]."""
        gate_up, down = (_of_few(format) for format in (record.gate_up_format, record.down_format))
        (pairs, width), experts, device = activated.shape, self._experts, activated.device
        place = self._ids, table, records
        group = {"GROUP": record.group_size, "BIAS": record.bias}
        constants = {"ACTIVATION": record.activation, "GATED": record.gated}

        blocks = width // BLOCK_COLUMNS
        splits = launches.splits(pairs, blocks * record.halves, record.hidden)
        partial = torch.empty((splits, pairs, record.halves, width), dtype=torch.float32, device=device)
        sizes = pairs, *self._gate_up_sizes(record)
        gate_up_few[pairs, blocks, splits](
            self._x, *place, activated, partial, *sizes, SPLITS=splits, **group, **constants, **gate_up
        )
        if splits > 1:
            shape = pairs, experts, record.intermediate, width, record.words, record.gate_up_bias
            constants |= {"BIAS": record.bias, "SPLITS": splits, **_options(launches.ELEMENTWISE)}
            activate_splits[pairs, blocks](*place, partial, activated, *shape, **constants)

        blocks = triton.cdiv(record.hidden, BLOCK_COLUMNS)
        splits = launches.splits(pairs, blocks, record.intermediate)
        products = torch.empty((splits, pairs, record.hidden), dtype=torch.float32, device=device)
        sizes = pairs, *self._down_sizes(record)
        down_few[pairs, blocks, splits](activated, *place, products, *sizes, SPLITS=splits, **group, **down)
        return products

    def _many(self, record: DeviceRecord, records: Tensor, table: Tensor, activated: Tensor) -> Tensor:
        """Fills ``activated`` [pairs, width]; returns products [1, pairs, hidden]."""
        gate_up = {"FORMAT": record.gate_up_format, **_options(launches.MANY[record.gate_up_format])}
        down = {"FORMAT": record.down_format, **_options(launches.MANY[record.down_format])}
        pairs, width = activated.shape
        assert self._grouping is not None
        tiles = self._grouping[-1].numel()
        place = *self._grouping, table, records
        tile = {"GROUP": record.group_size, "BIAS": record.bias, "ROWS": self._rows}
        constants = {"ACTIVATION": record.activation, "GATED": record.gated}

        grid = tiles, width // BLOCK_COLUMNS
        gate_up_many[grid](self._x, *place, activated, *self._gate_up_sizes(record), **tile, **constants, **gate_up)

        products = torch.empty((1, pairs, record.hidden), dtype=torch.float32, device=activated.device)
        grid = tiles, triton.cdiv(record.hidden, BLOCK_COLUMNS)
        down_many[grid](activated, *place, products, *self._down_sizes(record), **tile, **down)
        return products

    def _gate_up_sizes(self, record: DeviceRecord) -> tuple[int, ...]:
        """The arguments of both gate_up kernels from ``top_k`` on."""
        shape = record.hidden, record.intermediate, _width(record), record.steps(record.hidden)
        return self._ids.size(1), self._experts, *shape, record.words, record.gate_up_block, record.gate_up_bias

    def _down_sizes(self, record: DeviceRecord) -> tuple[int, ...]:
        """The arguments of both down kernels from ``experts`` on."""
        shape = record.hidden, record.intermediate, _width(record), record.steps(record.intermediate)
        return self._experts, *shape, record.words, record.down, record.down_block, record.down_bias


def _group(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, starts, tile_experts and tile_rows for gate_up_many, with as many tiles as the worst routing needs."""
    device = ids.device
    known = (ids >= 0) & (ids < experts)
    grouped, order = torch.sort(torch.where(known, ids, experts), stable=True)
    starts = torch.searchsorted(grouped, torch.arange(experts + 1, device=device))
    tiles = (starts[1:] - starts[:-1] + rows - 1) // rows
    ends = tiles.cumsum(0)
    tile = torch.arange(ids.numel() // rows + min(experts, ids.numel()), device=device)
    tile_experts = torch.searchsorted(ends, tile, right=True)
    known_experts = tile_experts.clamp(max=experts - 1)
    tile_rows = starts[known_experts] + (tile - (ends - tiles)[known_experts]) * rows
    return order, starts, tile_experts, tile_rows


def _of_few(format: str) -> dict[str, int | bool | str]:
    launch = launches.FEW[format]
    return {"FORMAT": format, "STAGES": launch.stages, **_options(launch)}


def _options(launch: Launch) -> dict[str, int | bool]:
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
