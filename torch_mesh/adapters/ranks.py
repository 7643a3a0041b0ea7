"""Adapters on experts that are divided among ranks: each rank has those of all experts, and computes with those of its own.

So what PEFT, an optimiser and Trainer do with parameters is what they do in one process, on each rank alike: seeds, files, moments, the norm of
gradients. The gradients of a rank's own experts are right as they are; in the backward the ranks give one another theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import MeshError
from ..hf.expert_parallel import Share, gathered, lost_ranks

_SAMPLED = 64  # values, by which ranks compare what they have
_TOLERANCE = 0.01  # of the largest of them: processors of other kinds round differently


def own_experts(first: torch.Tensor, second: torch.Tensor, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two stacks [routed, ...] the views [own, ...]. Gradients are of the whole stacks, and the same on all ranks, which all have to take them."""
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return _OwnExperts.apply(first, second, share)
    own = slice(share.experts.start, share.experts.stop)
    return first[own], second[own]


class _OwnExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks = share.ranks
        own = slice(share.experts.start, share.experts.stop)
        return first[own], second[own]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *own: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # One message for both. Experts are the first dimension and ranks have them in order: what is gathered lies as the whole does.
        message = torch.cat([gradient.reshape(-1) for gradient in own])
        everyone = message.new_empty(ctx.ranks, message.numel())
        with lost_ranks("the gradients of adapters on experts"):
            torch.distributed.all_gather_into_tensor(everyone.view(-1), message)
        parts = everyone.split([gradient.numel() for gradient in own], dim=1)
        wholes = [
            part.reshape(ctx.ranks * gradient.size(0), *gradient.shape[1:])
            for part, gradient in zip(parts, own, strict=True)
        ]
        return *wholes, None


def check_same(path: str, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raises MeshError on all ranks unless their hidden states ``x`` and adapters' ``weights`` for the parameter ``path`` agree. All have to call it.

    Ranks compute one batch together, and keep what they have in common each for itself: nothing later would show that it differs.
    """
    mine = (tuple(x.shape), _sample(x), [tuple(weight.shape) for weight in weights], [_sample(w) for w in weights])
    everyone = gathered(mine, path)
    shape, states, shapes, values = everyone[0]
    for rank, other in enumerate(everyone):
        if other[2] != shapes or not all(map(_agree, other[3], values)):
            raise MeshError(
                f"{path}: the adapters of ranks 0 and {rank} begin with different values, and would stay different. Load the same file on all ranks, or "
                "call torch.manual_seed with the same seed on each before get_peft_model."
            )
        if other[0] != shape or not _agree(other[1], states):
            raise MeshError(
                f"{path}: ranks 0 and {rank} were given different batches (hidden states {list(shape)} and {list(other[0])}). Ranks compute one batch together: "
                "give each of them the same, without a sampler that divides the data."
            )


def _sample(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu()


def _agree(value: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float(expected.nan_to_num().abs().amax()) if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)
