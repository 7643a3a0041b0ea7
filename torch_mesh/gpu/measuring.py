"""Measure what streaming and computing an expert cost."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from torch_mesh import _C
from torch_mesh.ops.device import DeviceLayer, SharedDevice
from torch_mesh.ops.streaming import Costs
from torch_mesh.pool.expert_pool import ExpertPool

# Rows of an expert in the second measurement on the CPU; the first has one.
_MANY_ROWS = 32


def streaming_costs(
    pool: ExpertPool, layer: DeviceLayer, shared: SharedDevice, streaming: str | tuple[float, float, float]
) -> Costs:
    """The costs as given, or measured with ``layer``'s experts."""
    if not isinstance(streaming, str):
        return Costs(*streaming)
    uplift = shared.uplift
    assert uplift is not None
    cold = (~layer.here).nonzero().flatten()[: min(uplift.batch, pool.slots)].tolist()

    def bring() -> None:
        with torch.cuda.device_of(layer.records), uplift.turn(shared.stream()) as turn:
            turn.bring(layer.index, cold)
        if shared.device.type == "cuda":
            torch.cuda.synchronize(shared.device)

    copy = _seconds(bring) / len(cold)
    one, many = _expert_seconds(pool, layer.index, cold)
    if not pool.in_memory:  # only if they were never read
        torch.ops.torch_mesh.evict(pool.handle(layer.index), torch.tensor(cold))
    row = max(0.0, many - one) / (_MANY_ROWS - 1)
    return Costs(copy, row, max(0.0, one - row))


def _expert_seconds(pool: ExpertPool, layer: int, experts: list[int]) -> tuple[float, float]:
    """Seconds on the CPU for an expert of one row and of ``_MANY_ROWS``, in a separate pool that affects neither heat
    nor profiles."""
    shape, count = pool.geometry, len(experts)
    engine = _C.Engine(
        layers=1,
        experts=count,
        format=pool.weights,
        group_size=pool.group_size,
        **shape.sizes._asdict(),
        activation=None if pool.activations is None else pool.activations[layer],
        slots=count,
        policy="lru",
        verify="never",
        io="threads",
        threads=pool.threads,
        workspace=pool.workspace,
        timeout=pool.timeout,
        source=None,
    )
    try:
        for index, expert in enumerate(experts):
            engine.fill(0, index, pool.engine.read_record(layer, expert))
        handle = torch.tensor([engine.id, 0], device="cpu")

        def seconds(rows: int) -> float:
            ids = torch.arange(count, device="cpu").repeat(rows).unsqueeze(1)
            x = torch.ones((len(ids), shape.hidden), dtype=torch.bfloat16, device="cpu")
            weights = torch.ones(ids.shape, device="cpu")
            return _seconds(lambda: torch.ops.torch_mesh.experts(x, ids, weights, handle)) / count

        return seconds(1), seconds(_MANY_ROWS)
    finally:
        engine.close()


def _seconds(run: Callable[[], object]) -> float:
    """The minimum of three calls, after a warm-up."""
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
