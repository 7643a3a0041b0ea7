"""The plan of one of several ranks, which divide the experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..config import MeshConfig
from .sizes import Sizes


@dataclass(frozen=True)
class RankPlan:
    """What is different where ranks divide the experts. All else in a plan is then of one rank."""

    ranks: int
    experts: int  # of each layer, on each rank
    busiest: (
        float  # of a token's experts, those on the rank that has most of them: the others wait for it in each layer
    )
    sum_bytes: (
        int  # of a token's outputs in bf16, which the ranks add up in each layer; the network's time is not known
    )


def check_ranks(
    sizes: Sizes, config: MeshConfig, ranks: int, overlap: float | None, card: tuple[int, int] | None
) -> None:
    """Raises ValueError for what cannot be divided into ``ranks``, or does not go with them."""
    experts = sizes.shape.experts
    if experts % ranks:
        raise ValueError(f"ranks={ranks}: the {experts} experts of a layer cannot be divided evenly among them")
    if config.lossy.modes or card is not None or overlap is not None:
        raise ValueError(
            "ranks: lossy modes and experts on a card do not go with them, and overlap is of a whole model's routing. "
            "Leave those out."
        )
    if sizes.left_alone:
        raise ValueError(f"ranks: the model has experts of several shapes ({sizes.left_alone}), which are not divided")


def divided(sizes: Sizes, ranks: int) -> tuple[Sizes, RankPlan]:
    """The sizes of one rank, and what is different there."""
    shape = sizes.shape
    own = dataclasses.replace(shape, experts=shape.experts // ranks)
    of_rank = dataclasses.replace(sizes, shape=own, all_experts_bytes=sizes.all_experts_bytes // ranks)
    busiest = _busiest(shape.experts, shape.top_k, ranks)
    return of_rank, RankPlan(ranks, own.experts, busiest, sum_bytes=2 * shape.hidden)


def _busiest(experts: int, top_k: int, ranks: int) -> float:
    """Of a token that draws its experts at random, how many are on the rank with most of them, on average: of some
    thousand draws, always the same."""
    draws = np.random.default_rng(0).random((4096, experts)).argpartition(top_k - 1)[:, :top_k]
    owners = draws // (experts // ranks)
    return float(np.stack([(owners == rank).sum(1) for rank in range(ranks)]).max(0).mean())
