"""The two factors of an adapter on one projection of a layer's experts, as the ops take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from torch_mesh.adapters.ranks import own_experts
from torch_mesh.errors import MeshError
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.models.families import ExpertsLayer


class Factors(NamedTuple):
    """An adapter: adds scaling * (x · a[e]^T) · b[e] to a projection of expert e.

    a [experts, rank, in]; b [experts, rank, halves, intermediate], gate first, or [experts, rank, hidden] for
    down_proj.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def rank_of(weight: torch.Tensor, experts: int, *, second: bool, where: str) -> int:
    """The rank of lora_A [rank * experts, in] or, if ``second``, of lora_B [out, rank * experts].

    Read from the weight, since hotswap_adapter may load another rank than PEFT noted. Raises MeshError, naming
    ``where``, if the weight does not fit ``experts``.
    """
    ranks = weight.size(1 if second else 0)
    if ranks % experts:
        what = "columns in lora_B" if second else "rows in lora_A"
        raise MeshError(
            f"{where} has an adapter with {ranks} {what}, which must be a multiple of its {experts} experts. Load an "
            "adapter made for this model."
        )
    return ranks // experts


def padded_to_rank(lora_a: torch.Tensor, experts: int, rank: int, where: str) -> torch.Tensor:
    """``lora_a`` [own rank * experts, in] as [rank * experts, in], padding each expert's rows with zeros.

    Unchanged if its own rank is not below ``rank``. Raises MeshError as ``rank_of`` does.
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
    expert_range: ExpertRange | None = None,
) -> Factors:
    """Views of PEFT's two weights for ``parameter`` of ``layer``; the layer's module is not used.

    lora_a is [rank * experts, in], lora_b [out, rank * experts]. ``swapped``: PEFT treated the parameter as [experts,
    out, in]; if not, its first factor is our second. With an ``expert_range`` the weights are of all experts and the
    result is of the rank's own. Raises MeshError for weights that do not fit.
    """
    where = f"{layer.path}.{parameter}"
    rank = rank_of(lora_a, experts, second=False, where=where)
    other = rank_of(lora_b, experts, second=True, where=where)
    if rank != other:
        raise MeshError(
            f"{where} has an adapter with lora_A of rank {rank} and lora_B of rank {other}: they must be equal. Load "
            "both from one file."
        )
    by_expert = lora_a.view(experts, rank, -1)
    by_rank = lora_b.t().view(rank, experts, -1).transpose(0, 1)
    if expert_range is not None:
        by_expert, by_rank = own_experts(by_expert, by_rank, expert_range)
    a, b = (by_expert, by_rank) if swapped != layer.is_transposed else (by_rank, by_expert)
    a, b = a[: layer.num_experts], b[: layer.num_experts]  # the parameter may have rows of identity experts
    if parameter == layer.parameter_names[0]:
        halves = 2 if layer.has_gate else 1
        if layer.is_concatenated:
            b = b.unflatten(-1, (halves, layer.intermediate))
        else:
            b = b.unflatten(-1, (layer.intermediate, halves)).transpose(-1, -2)
    return Factors(a, b, scaling)


def concatenated(factors: list[Factors]) -> Factors:
    """Several adapters as one, whose rank is the sum of theirs."""
    if len(factors) == 1:
        return factors[0]
    return Factors(
        torch.cat([each.a for each in factors], 1), torch.cat([each.b * each.scaling for each in factors], 1), 1.0
    )
