"""The limits of the layer of layer_peers.py on this machine: a plain read of its records, and torch's square
products."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from decode_op import expert_groups
from op_layer import TOP_K, WEIGHTS_PER_EXPERT, ResidentLayer, random_expert
from prefill_op import rate, square_product
from serve import serve

ROWS = 512


class Limits:
    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        expert = random_expert(torch.Generator().manual_seed(setup["seed"]))
        self.layer = ResidentLayer("int4", 64, setup["threads"], [expert])
        self.groups = expert_groups(0)
        operations = 2.0 * ROWS * TOP_K * WEIGHTS_PER_EXPERT
        self.products = {name: square_product(operations, getattr(torch, name)) for name in ("float32", "bfloat16")}

    def facts(self) -> dict[str, Any]:
        return {}

    def measure(self, limit: str, calls: int) -> dict[str, Any]:
        """Return the median rate of some calls: GB/s of "read", GFLOP/s of the product in a dtype."""
        run = self._read if limit == "read" else self.products[limit]
        return {"rate": statistics.median(run() for _ in range(calls))}

    def _read(self) -> float:
        experts = next(self.groups)
        return rate(TOP_K * self.layer.record_bytes, lambda: self.layer.read(experts))


if __name__ == "__main__":
    serve(Limits)
