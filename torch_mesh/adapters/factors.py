"""The two factors of an adapter on one projection of a layer's experts, as the ops take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..errors import MeshError
from ..hf.expert_parallel import Share
from ..models.families import ExpertsLayer
from .ranks import own_experts


class Factors(NamedTuple):
    """What is added to a projection of expert e: scaling * (x · a[e]^T) · b[e].

    a [experts, rank, in]; b [experts, rank, halves, intermediate], gate first, or [experts, rank, hidden] for down_proj.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def rank_of(weight: torch.Tensor, experts: int, *, second: bool, where: str) -> int:
    """The rank of lora_A [rank * experts, in] or, if ``second``, of lora_B [out, rank * experts].

    PEFT notes a rank when it makes an adapter, and hotswap_adapter puts weights of another one there. Raises MeshError,
    which names ``where``, for weights that are not of so many experts.
    """
    ranks = weight.size(1 if second else 0)
    if ranks % experts:
        what = "columns in lora_B" if second else "rows in lora_A"
        raise MeshError(
            f"{where} has an adapter with {ranks} {what}, which must be a multiple of its {experts} experts. Load an "
            "adapter that was made for this model."
        )
    return ranks // experts


def widened(lora_a: torch.Tensor, experts: int, rank: int, where: str) -> torch.Tensor:
    """``lora_a`` [own rank * experts, in] as [rank * experts, in], with zeros behind the rows of each expert.

    It stays as it is where its own rank is not below ``rank``. Raises MeshError as ``rank_of`` does.
    """
    own = rank_of(lora_a, experts, second=False, where=where)
    if own >= rank:
        return lora_a
    by_expert = lora_a.reshape(experts, own, -1)
    return nn.functional.pad(by_expert, (0, 0, 0, rank - own)).flatten(0, 1)


def factors_of(
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    experts: int,
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
    Raises MeshError for weights that are not of ``experts`` experts, or of different ranks.
    """
    where = f"{layer.path}.{parameter}"
    rank = rank_of(lora_a, experts, second=False, where=where)
    other = rank_of(lora_b, experts, second=True, where=where)
    if rank != other:
        raise MeshError(
            f"{where} has an adapter of which lora_A has the rank {rank} and lora_B the rank {other}: they must be "
            "equal. Load both from one file."
        )
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
