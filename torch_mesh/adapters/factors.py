"""The two factors of an adapter on one projection of a layer's experts, as the ops take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..expert_parallel import Share
from ..families import ExpertsLayer
from .ranks import own_experts


class Factors(NamedTuple):
    """What is added to a projection of expert e: scaling * (x · a[e]^T) · b[e].

    a [experts, rank, in]; b [experts, rank, halves, intermediate], gate first, or [experts, rank, hidden] for down_proj.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def factors_of(
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    rank: int,
    scaling: float,
    *,
    layer: ExpertsLayer,
    parameter: str,
    swapped: bool,
    share: Share | None = None,
) -> Factors:
    """Views of PEFT's two weights for ``parameter`` of ``layer``, whose module is not looked at.

    Of lora_a [rank * experts, in] an expert's rows stand together, of lora_b [out, rank * experts] its columns are ``experts`` apart. ``swapped``:
    PEFT took the parameter for [experts, out, in]. If it is not, what PEFT trains as the first factor is the second one, and so the other way round.
    Of a rank the weights are of all experts, and what comes back is of those of its ``share``.
    """
    experts = lora_b.size(1) // rank
    by_expert = lora_a.view(experts, rank, -1)
    by_rank = lora_b.t().view(rank, experts, -1).transpose(0, 1)
    if share is not None:
        by_expert, by_rank = own_experts(by_expert, by_rank, share)
    a, b = (by_expert, by_rank) if swapped != layer.is_transposed else (by_rank, by_expert)
    a, b = a[: layer.num_experts], b[: layer.num_experts]  # the parameter may have rows of experts that compute nothing
    if parameter == layer.parameter_names[0]:
        halves = 2 if layer.has_gate else 1
        if layer.is_concatenated:
            b = b.unflatten(-1, (halves, layer.intermediate))
        else:
            b = b.unflatten(-1, (layer.intermediate, halves)).transpose(-1, -2)
    return Factors(a, b, scaling)


def together(factors: list[Factors]) -> Factors:
    """Those of several adapters as one, whose rank is the sum of theirs."""
    if len(factors) == 1:
        return factors[0]
    return Factors(
        torch.cat([each.a for each in factors], 1), torch.cat([each.b * each.scaling for each in factors], 1), 1.0
    )
