"""Adapters with expert parallelism: each rank has the adapters of all experts and computes with those of its own.

The backward gathers the gradients of each rank's own experts (docs/decisions/0055).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_mesh.errors import MeshError
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.system.collectives import gathered, lost_ranks

_SAMPLED = 64  # values that ranks compare
_TOLERANCE = 0.01  # relative to the largest: different CPUs round differently


def own_experts(
    first: torch.Tensor, second: torch.Tensor, expert_range: ExpertRange
) -> tuple[torch.Tensor, torch.Tensor]:
    """The views [own, ...] of two stacks [routed, ...]. Gradients are those of the whole stacks and equal on all
    ranks; every rank has to run the backward."""
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return _OwnExperts.apply(first, second, expert_range)
    return first[expert_range.own], second[expert_range.own]


class _OwnExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: torch.Tensor, second: torch.Tensor, expert_range: ExpertRange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks = expert_range.ranks
        return first[expert_range.own], second[expert_range.own]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *own: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # One message for both. Experts are the first dimension and ranks are in order: the concatenation is the whole
        # stack.
        message = torch.cat([gradient.reshape(-1) for gradient in own])
        gathered_message = message.new_empty(ctx.ranks, message.numel())
        with lost_ranks("the gradients of adapters on experts"):
            torch.distributed.all_gather_into_tensor(gathered_message.view(-1), message)
        parts = gathered_message.split([gradient.numel() for gradient in own], dim=1)
        wholes = [
            part.reshape(ctx.ranks * gradient.size(0), *gradient.shape[1:])
            for part, gradient in zip(parts, own, strict=True)
        ]
        return *wholes, None


def check_same(path: str, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raises MeshError on all ranks unless their hidden states ``x`` and adapter ``weights`` for the parameter ``path``
    agree. A collective call.
    """
    mine = (tuple(x.shape), _sample(x), [tuple(weight.shape) for weight in weights], [_sample(w) for w in weights])
    samples = gathered(mine, path)
    shape, states, shapes, values = samples[0]
    for rank, other in enumerate(samples):
        if other[2] != shapes or not all(map(_agree, other[3], values)):
            raise MeshError(
                f"{path}: the adapters of ranks 0 and {rank} have different initial values. Load the same file on all "
                "ranks, or call torch.manual_seed with the same seed on each before get_peft_model."
            )
        if other[0] != shape or not _agree(other[1], states):
            raise MeshError(
                f"{path}: ranks 0 and {rank} got different batches (hidden states {list(shape)} and "
                f"{list(other[0])}). Give all ranks the same batch, without a sampler that divides the data."
            )


def _sample(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu()


def _agree(value: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float(expected.nan_to_num().abs().amax()) if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)
