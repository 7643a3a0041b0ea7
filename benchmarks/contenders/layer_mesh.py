"""torch_mesh's op on the layer of layer_peers.py."""

from __future__ import annotations

from typing import Any

import torch
from layer import EXPERTS, Array, Layer, Variant, weights
from op_layer import ResidentLayer
from serve import serve
from torch_tensors import bf16, to_numpy

FORMATS = ("bf16", "int8", "int4")
GROUP_SIZE = 64


def variant(own: ResidentLayer) -> Variant:
    def prepare(x: Array, ids: Array) -> tuple[torch.Tensor, ...]:
        return bf16(x), torch.from_numpy(ids), torch.full(ids.shape, 1 / ids.shape[1])

    def forward(arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return own(*arguments)

    return Variant(prepare, forward, to_numpy, EXPERTS * own.record_bytes)


def open_layer(setup: dict[str, Any]) -> Layer:
    threads, seed = setup["threads"], setup["seed"]
    torch.set_num_threads(threads)
    experts = list(zip(*map(bf16, weights(seed)), strict=True))
    return Layer({form: variant(ResidentLayer(form, GROUP_SIZE, threads, experts)) for form in FORMATS}, seed)


if __name__ == "__main__":
    serve(open_layer)
