"""``experts_split``: a layer whose experts are partly on the device of the hidden states, partly in the pool.

Implemented in Python because it launches Triton kernels. A second stream copies the host's part down to a host node and
its sum back up (csrc/gpu/host_share.h).

The output is the fp32 sum of these parts, rounded once: the device's own, then each batch in order, then the host's.
Each part adds a token's choices in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_mesh.ops import launches
from torch_mesh.ops.device import DeviceLayer, SharedDevice, find
from torch_mesh.ops.experts import check_shapes
from torch_mesh.ops.streaming import choose_streamed

if TYPE_CHECKING:
    from torch_mesh.ops.experts_triton import DeviceForward

_library = torch.library.Library("torch_mesh", "FRAGMENT")
# x, topk_ids, topk_weights and the result as in `experts`, on the device where the layer's experts were placed. A
# failed read or an id outside [0, experts) in the host's part makes the output, or a part of it, NaN; the next forward
# of the pool, or torch_mesh.synchronize(model), raises the error. If all experts are on the device, ids are not checked
# and the token of an invalid id becomes NaN. torch.cuda.graph captures this op. torch.compile breaks its own graphs
# around it, since they would be captured for sizes that set_capture_batch_sizes does not know.
_library.define(
    "experts_split(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, bool sentinels=False) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)

_HOST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.impl(_library, "experts_split", "CompositeExplicitAutograd")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False) -> Tensor:
    return SplitForward(x, topk_ids, topk_weights, find(handle), sentinels).finish()


class SplitForward:
    """One forward in the current stream; call ``finish`` in the same stream.

    Keeps the tensors that device and host use alive until they are joined in stream order.
    """

    def __init__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer, sentinels: bool = False
    ) -> None:
        _check_inputs(x, topk_ids, topk_weights, layer)
        assert layer.shared is not None
        self._layer, self._shared, self._like = layer, layer.shared, x
        self._stream = self._shared.stream()
        self.ticket: int | None = None  # ticket of the host's part, until it is joined
        with torch.cuda.device_of(x), self._shared.enqueuing:
            if layer.index == self._shared.leader:
                self._shared.step()
            if layer.complete or topk_ids.numel() == 0:
                if layer.complete:
                    self._shared.count_complete()
                self._result = _on_device(x, topk_ids, topk_weights, layer, sentinels).compute(x.dtype)
            else:
                self._begin(x, topk_ids, topk_weights, sentinels)

    def _begin(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, sentinels: bool) -> None:
        layer = self._layer
        rows = (x if x.dtype in _HOST_DTYPES else x.float()).contiguous()
        ids = topk_ids.to(torch.int64).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        table, batches = _streamed(ids, layer, self._shared)
        self._host = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self._kept = rows, ids, weights, table
        self.ticket = self._shared.host.submit(*self._kept, self._host, layer.index, sentinels, self._stream)
        try:
            forward = _on_device(rows, ids, weights, layer, sentinels)
            self._result = forward.compute(torch.float32)
            if batches:
                self._stream_up(batches, forward)
        except BaseException:
            self._join()
            raise

    def _stream_up(self, batches: list[tuple[list[int], Tensor]], forward: DeviceForward) -> None:
        shared = self._shared
        assert shared.uplift is not None and shared.buffers is not None and shared.up is not None
        with shared.uplift.turn(self._stream) as turn:
            for experts, table in batches:
                buffer = shared.buffers[turn.bring(self._layer.index, experts)]
                forward.add(shared.up, buffer, table, self._result)

    def finish(self) -> Tensor:
        """[tokens, hidden] in the dtype of ``x``. Only the current stream waits for the host's part."""
        if self.ticket is not None:
            with torch.cuda.device_of(self._like):
                self._join()
                out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
                self._result = torch.add(self._result, self._host, out=out)
        return self._result

    def _join(self) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self._shared.host.join(ticket, self._stream)

    def __del__(self) -> None:
        if (
            getattr(self, "ticket", None) is not None
        ):  # the caller dropped the forward: its memory must not be reused before the host is done
            self._join()


def _on_device(x: Tensor, ids: Tensor, weights: Tensor, layer: DeviceLayer, sentinels: bool) -> DeviceForward:
    from torch_mesh.ops.experts_triton import DeviceForward  # Triton is installed wherever experts are on a GPU

    return DeviceForward(x, ids, weights, layer, sentinels)


def _streamed(ids: Tensor, layer: DeviceLayer, shared: SharedDevice) -> tuple[Tensor, list[tuple[list[int], Tensor]]]:
    """The table for the host's part, and the batches of streamed experts, each with the table that finds them.

    Waits for the device once, for prompts only.
    """
    experts, uplift, costs = layer.table.numel(), shared.uplift, shared.costs
    if uplift is None or costs is None or not launches.uses_tiles(ids.numel(), experts) or shared.capturing():
        return layer.table, []
    seen = torch.cat((ids.view(-1), layer.table.to(torch.int64))).cpu()
    routed, table = seen[:-experts], seen[-experts:]
    rows = torch.bincount(routed[(routed >= 0) & (routed < experts)], minlength=experts)
    chosen = choose_streamed(rows.masked_fill(table >= 0, 0).tolist(), *costs)
    if not chosen:
        return layer.table, []
    batches = [chosen[first : first + uplift.batch] for first in range(0, len(chosen), uplift.batch)]
    tables = torch.full((1 + len(batches), experts), -1, dtype=torch.int32)
    tables[0] = table
    tables[0, chosen] = 0  # the host only checks whether an expert is on the device
    for index, batch in enumerate(batches, start=1):
        tables[index, batch] = torch.arange(len(batch), dtype=torch.int32)
    tables = tables.to(ids.device)
    return tables[0], list(zip(batches, tables[1:], strict=True))


def _check_inputs(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer) -> None:
    check_shapes(x, topk_ids, topk_weights)
    hidden, device = layer.record.hidden, layer.records.device
    if x.size(1) != hidden:
        raise ValueError(f"x must be [tokens, hidden={hidden}]; got {list(x.shape)}")
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the layer's experts were placed on {device}")
    if topk_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_ids has dtype {topk_ids.dtype}; allowed: int64, int32")
    for name, tensor in (("x", x), ("topk_weights", topk_weights)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: a floating dtype")


@torch.library.register_fake("torch_mesh::experts_split")
def _(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, sentinels: bool = False) -> Tensor:
    check_shapes(x, topk_ids, topk_weights)
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.sentinels = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """As for ``experts``, on the CPU: the pool has every expert, those on the device included."""
    x_grad, weights_grad = torch.ops.torch_mesh.experts_backward(grad, *ctx.saved_tensors, ctx.sentinels)
    return x_grad, None, weights_grad, None, None


torch.library.register_autograd("torch_mesh::experts_split", _backward, setup_context=_keep, lib=_library)
