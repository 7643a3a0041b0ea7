"""torch's quantized CPU products on the layer of layer_peers.py, two per expert with the rest of the layer in eager
mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layer import EXPERTS, HIDDEN, TOP_K, Array, Layer, Variant, weights
from serve import serve
from torch_tensors import bf16, to_numpy

INT4_GROUP = 128
Linear = Callable[[torch.Tensor], torch.Tensor]


def int4_linear(weight: torch.Tensor) -> tuple[Linear, int]:
    """[out, in] in float32 -> a linear in 4 bits with a scale and a zero per group, and its bytes."""
    out, depth = weight.shape
    groups = weight.view(out, depth // INT4_GROUP, INT4_GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    nibbles = (groups / scale).round_().clamp_(-8, 7).add_(8).to(torch.int32).view(out, depth)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    scales = torch.stack((scale[..., 0].T, torch.zeros_like(scale[..., 0].T)), -1).contiguous().to(torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, INT4_GROUP, scales), _bytes(packed, scales)


def int8_linear(weight: torch.Tensor) -> tuple[Linear, int]:
    """[out, in] in float32 -> a linear in 8 bits with a scale per output, and its bytes."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    values = (weight / scale).round_().to(torch.int8)
    scales = scale[:, 0].to(torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, values, scales), _bytes(values, scales)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def expert(gate_up: Linear, down: Linear) -> Linear:
    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return down(torch.nn.functional.silu(gate).mul_(up))

    return run


def rows_by_expert(ids: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return (expert, its tokens) for each expert that is used. It is computed beforehand, since routing is not
    measured."""
    used = ids.unique().tolist()
    return [(index, (ids == index).nonzero()[:, 0]) for index in used]


def variant(make: Callable[[torch.Tensor], tuple[Linear, int]], distinct: list[list[torch.Tensor]]) -> Variant:
    experts, total = [], 0
    for index in range(EXPERTS):
        (gate_up, gate_up_bytes), (down, down_bytes) = (make(matrix) for matrix in distinct[index % len(distinct)])
        experts.append(expert(gate_up, down))
        total += gate_up_bytes + down_bytes

    def prepare(x: Array, ids: Array) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
        return bf16(x), rows_by_expert(torch.from_numpy(ids))

    @torch.inference_mode()
    def forward(arguments: tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        x, used = arguments
        output = torch.zeros(len(x), HIDDEN)
        for index, tokens in used:
            output.index_add_(0, tokens, experts[index](x[tokens]).float(), alpha=1 / TOP_K)
        return output.to(torch.bfloat16)

    return Variant(prepare, forward, to_numpy, total)


def open_layer(setup: dict[str, Any]) -> Layer:
    torch.set_num_threads(setup["threads"])
    distinct = [list(pair) for pair in zip(*map(torch.from_numpy, weights(setup["seed"])), strict=True)]
    return Layer(
        {"int4pack": variant(int4_linear, distinct), "int8pack": variant(int8_linear, distinct)}, setup["seed"]
    )


if __name__ == "__main__":
    serve(open_layer)
