"""The plan of one rank, where ranks divide the experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from torch_mesh.config import MeshConfig
from torch_mesh.planning.sizes import Sizes


@dataclass(frozen=True)
class RankPlan:
    """The figures that differ if ranks divide the experts. All others in a plan are then those of one rank."""

    ranks: int
    experts: int  # of each layer, on each rank
    busiest: float  # a token's experts on the rank with most of them, for which the others wait in each layer
    sum_bytes: int  # a token's outputs in bf16, which the ranks sum in each layer; the network's time is not planned


def check_ranks(
    sizes: Sizes, config: MeshConfig, ranks: int, overlap: float | None, card: tuple[int, int] | None
) -> None:
    """Raises ValueError for experts that cannot be divided, and for settings that exclude ranks."""
    experts = sizes.shape.experts
    if experts % ranks:
        raise ValueError(
            f"ranks={ranks}: the {experts} experts of a layer cannot be divided evenly: give a divisor of {experts}."
        )
    if config.lossy.modes or card is not None or overlap is not None:
        raise ValueError(
            f"ranks={ranks} excludes lossy modes and experts on a GPU, and overlap is of a whole model's routing: "
            "leave those out."
        )
    if sizes.unpooled:
        raise ValueError(
            f"ranks={ranks}: the model has experts of several shapes ({sizes.unpooled}), which ranks do not divide."
        )


def divided(sizes: Sizes, ranks: int) -> tuple[Sizes, RankPlan]:
    shape = sizes.shape
    own = dataclasses.replace(shape, experts=shape.experts // ranks)
    of_rank = dataclasses.replace(sizes, shape=own, all_experts_bytes=sizes.all_experts_bytes // ranks)
    busiest = _busiest(shape.experts, shape.top_k, ranks)
    return of_rank, RankPlan(ranks, own.experts, busiest, sum_bytes=2 * shape.hidden)


def _busiest(experts: int, top_k: int, ranks: int) -> float:
    """The mean number of a token's experts on the rank with most of them, for random routing: from a few thousand draws
    with a fixed seed."""
    draws = np.random.default_rng(0).random((4096, experts)).argpartition(top_k - 1)[:, :top_k]
    owners = draws // (experts // ranks)
    return float(np.stack([(owners == rank).sum(1) for rank in range(ranks)]).max(0).mean())
