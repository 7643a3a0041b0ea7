"""One layer of experts in memory, without a model, for the benchmarks of ops.

The shapes are Qwen3-30B-A3B's. The weights of a few experts are repeated for all. Each expert has its own memory, and a
layer's records are many times larger than any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from codes import pack_random_codes
from synthetic import WEIGHT_STD, Shape

import torch_mesh
from torch_mesh import _C, _testing
from torch_mesh.formats import PASSTHROUGH_FORMATS
from torch_mesh.models.families import ExpertTensors, Geometry
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.store.convert import pack_expert
from torch_mesh.store.manifest import open_store
from torch_mesh.store.mirrors import find_copies

SHAPE = Shape()
HIDDEN, INTERMEDIATE = SHAPE.hidden, SHAPE.intermediate
EXPERTS, TOP_K = SHAPE.experts, SHAPE.experts_per_token
WEIGHTS_PER_EXPERT = 3 * HIDDEN * INTERMEDIATE
# Records of a checkpoint's codes: format, group size, reference format, its group size, and the required fraction of
# the reference's speed.
CODES = (
    ("mxfp4", 32, "lut4", 32, 0.95),
    ("nvfp4", 16, "lut4", 32, 0.95),
    ("fp8", 128, "bf16", 0, 0.85),
    ("fp8", 32, "bf16", 0, 0.85),
    ("int4_fp16", 64, "int4", 64, 0.95),
)
# The same for formats whose speed is in weights per second, since decoding them takes arithmetic. The required
# fractions are those of one row and of many.
BY_WEIGHTS = (
    ("bf12", 0, "bf16", 0, 1.1, 0.95),
    ("tcq3", 128, "int4", 64, 0.8, 0.9),
    ("tcq2", 128, "int4", 64, 0.8, 0.9),
)


def random_expert(generator: torch.Generator, shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [2 * intermediate, hidden] and down [hidden, intermediate] in bf16."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(WEIGHT_STD).to(torch.bfloat16)

    return weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate)


def random_routing(tokens: int, generator: torch.Generator, shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_ids [tokens, k], distinct in a row, and topk_weights [tokens, k] that add up to 1."""
    top_k = shape.experts_per_token
    ids = torch.rand(tokens, shape.experts, generator=generator).topk(top_k).indices
    return ids, torch.full((tokens, top_k), 1 / top_k)


class ResidentLayer:
    """A layer whose expert e is ``experts[e % len(experts)]`` of (gate_up, down), packed and always resident."""

    def __init__(
        self,
        weights: str,
        group_size: int,
        threads: int,
        experts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        shape: Shape = SHAPE,
    ) -> None:
        config = torch_mesh.MeshConfig(threads=threads)
        self.pool = ExpertPool(
            _geometry(shape),
            1,
            shape.experts,
            config,
            activations=["silu"],
            weights=weights,
            group_size=group_size,
            exact=False,
        )
        records = [pack(expert, weights, group_size, shape) for expert in experts]
        for expert in range(shape.experts):
            self.pool.engine.fill(0, expert, records[expert % len(records)].numpy())
        self.record_bytes = records[0].numel()
        self.handle = self.pool.handle(0)

    def __call__(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return torch.ops.torch_mesh.experts(x, topk_ids, topk_weights, self.handle)

    def read(self, experts: Sequence[int]) -> None:
        """Read the records of distinct experts with the computing threads."""
        _testing.sum_records(self.pool.engine, 0, experts)


def _geometry(shape: Shape) -> Geometry:
    return Geometry(shape.experts, shape.hidden, shape.intermediate, has_gate=True, has_bias=False, fused=True)


def pack(
    expert: tuple[torch.Tensor, torch.Tensor], weights: str, group_size: int, shape: Shape = SHAPE
) -> torch.Tensor:
    """Return the expert's record. For formats to which values are not rounded it has random codes, different for each
    expert."""
    gate_up, down = expert
    if weights in PASSTHROUGH_FORMATS:
        generator = torch.Generator().manual_seed(int(gate_up[0, 0].view(torch.int16)) % (1 << 16))
        return pack_random_codes(weights, group_size, shape.hidden, shape.intermediate, generator, std=WEIGHT_STD)
    gate, up = gate_up.chunk(2)
    return pack_expert(ExpertTensors(gate, up, down, None, None, None), weights, group_size)


def store_engine(folder: Path, *, mirrors: Sequence[str] = (), **options: Any) -> _C.Engine:
    """Return an engine on the records of a converted checkpoint, with as many threads as torch. ``options`` are further
    arguments of ``_C.Engine``."""
    store = open_store(folder)
    manifest, shape = store.manifest, store.manifest.shape
    arguments = store.source_arguments()
    return _C.Engine(
        layers=shape.layers,
        experts=shape.experts,
        format=manifest.weights,
        group_size=manifest.group_size,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        gated=shape.gated,
        bias=shape.bias,
        activation=shape.activation,
        threads=0,
        timeout=60.0,
        source=_C.Source(**arguments, copies=find_copies(arguments["files"], mirrors)),
        **options,
    )
