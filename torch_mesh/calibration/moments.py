"""The second moments of what an expert's projections see, and what packing makes of them.

Rows count by the square of their routing weight, as their errors do in the layer's output. An expert that few of a text's tokens reached is not known by them: its
moments are those of its own rows and, as if they were ``PRIOR`` x inputs further rows, those of all the layer's, doubted: with ``DOUBT`` of the median power added to each
input's own, so that less is made of what inputs have in common: a text of another kind than the expert is for then does less harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import MeshError

# By perplexity of examples/mesh-tiny at 2 to 4 bits, benchmarks/calibration.py: docs/decisions/0057.
DAMPING = 0.1
PRIOR = 1.0
DOUBT = 1.0
METHOD = f"ldlq 1 damping={DAMPING} prior={PRIOR} doubt={DOUBT}"  # changes with whatever changes records
_AT_ONCE = 4096  # rows in fp32
_SAMPLE = 512  # of a layer's rows, for what its experts that did not see them would make of them


@dataclass(frozen=True)
class InputMoments:
    """Of one projection, as ``torch.ops.torch_mesh.pack_calibrated`` takes them: feedback fp32 [inputs, inputs], importance fp32 [inputs]."""

    feedback: torch.Tensor
    importance: torch.Tensor


class Moments:
    """The mean of w x^T x over weighted rows x, by which a product's squared error is measured."""

    def __init__(self, inputs: int) -> None:
        self._sum = torch.zeros(inputs, inputs)
        self._weight = 0.0
        self.rows = 0

    def add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """``rows`` [n, inputs], ``weights`` [n]."""
        scaled = rows.float() * weights.sqrt().unsqueeze(-1)
        self._sum.addmm_(scaled.T, scaled)
        self._weight += float(weights.sum())
        self.rows += len(rows)

    def mean(self) -> torch.Tensor:
        """fp32 [inputs, inputs]; zeros where no row counts."""
        return self._sum / self._weight if self._weight > 0 else self._sum


def blended(own: Moments, shared: torch.Tensor) -> torch.Tensor:
    """An expert's moments where it saw ``own.rows`` rows and a layer's are ``shared``."""
    prior = PRIOR * len(shared)
    share = own.rows / (own.rows + prior)
    return torch.lerp(_with_power(shared, DOUBT), own.mean(), share)


def _with_power(moments: torch.Tensor, share: float) -> torch.Tensor:
    """``moments`` with a share of the inputs' median power added to the power of each.

    The median, since a few inputs that are a thousand times as strong as all others, which large models have, would make the mean their own. Inputs that are always zero do
    not count for it.
    """
    power = moments.diagonal()
    some = power[power > 0]
    added = moments.clone()
    if len(some):
        added.diagonal().add_(share * some.median())
    return added


def in_batches(
    rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Calls ``use(rows in fp32, their weights)`` for a bounded number of the ``chosen`` rows at a time."""
    for some, own in zip(chosen.split(_AT_ONCE), weights.split(_AT_ONCE), strict=True):
        use(rows[some].float(), own)


def sample_of(count: int) -> torch.Tensor:
    """Evenly spaced rows among ``count``."""
    return torch.linspace(0, count - 1, min(count, _SAMPLE)).long()


def feedback_of(moments: torch.Tensor, streams: int = 1, step: int = 1) -> InputMoments:
    """The factors of H = M D M^T, H being damped ``moments``: M^T and the diagonal of D, see csrc/kernels/pack_calibrated.h. The inputs are in the
    order that a format goes through them (``_C.calibration_order``): those of one of the ``streams`` (k, k + streams ...) after those of another. Of those that it
    chooses the codes of together, ``step`` of a stream, M has unit blocks on its diagonal.

    Raises MeshError for moments that are not finite.
    """
    power = moments.diagonal()
    damped = _with_power(moments, DAMPING)
    if not bool(torch.isfinite(damped).all()):
        raise MeshError("the text makes hidden states that are not finite, or too large to be squared in fp32")
    if not bool((power > 0).any()):  # nothing is known: every input counts alike
        return InputMoments(torch.zeros_like(moments), torch.ones_like(power))
    inputs = torch.arange(len(power))
    parts = [inputs[first::streams] for first in range(streams)]
    order = torch.cat(parts)
    damped = damped[order][:, order]
    # H = R R^T with R upper triangular, from the factor of H with its inputs in reverse.
    reverse = damped.flip(0, 1)
    factor, failed = torch.linalg.cholesky_ex(reverse)
    # Where a few inputs are many times the others and depend on each other, what fp32 has rounded in their sums exceeds the damping. More of each
    # input's own power makes up for it: with as much as there are inputs no matrix fails.
    share = 2.0**-24
    while bool(failed):
        share *= 4
        exact = reverse.double()
        exact.diagonal().mul_(1 + share)
        factor, failed = torch.linalg.cholesky_ex(exact)
    upper = factor.float().flip(0, 1)
    scale = upper.diagonal()
    single = InputMoments((upper / scale).T.contiguous(), scale.square())
    if step == 1:
        return single
    return _in_steps(single, [len(some) for part in parts for some in part.split(step)])


def _in_steps(single: InputMoments, counts: list[int]) -> InputMoments:
    """Of factors for one input at a time, those for so many inputs in each step: M B^-1 and the diagonal of B D B^T, B being the blocks of M on its diagonal."""
    feedback, importance = single.feedback.clone(), single.importance.clone()
    first = 0
    for count in counts:
        own = slice(first, first + count)
        first += count
        block = torch.tril(single.feedback[own, own], -1)  # B^T without its diagonal, which is 1
        block.diagonal().fill_(1)
        feedback[own] = torch.linalg.solve_triangular(block, feedback[own], upper=False, unitriangular=True)
        importance[own] = single.importance[own] @ block.square()
    return InputMoments(feedback, importance)
