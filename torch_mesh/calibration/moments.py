"""Second moments of the inputs of an expert's projections, and their factorization for packing.

Rows are weighted by the square of their routing weight, as are their errors in the layer's output. An expert with few
rows is regularized: to its own moments are added those of the whole layer, as ``PRIOR`` x inputs further rows. These
get ``PRIOR_DAMPING`` of the median power on their diagonal, which shrinks correlations and limits the harm when the
expert serves another kind of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_mesh.errors import MeshError

# Chosen by perplexity of examples/mesh-tiny at 2 to 4 bits, benchmarks/calibration.py: docs/decisions/0057.
DAMPING = 0.1
PRIOR = 1.0
PRIOR_DAMPING = 1.0  # "doubt" in METHOD and docs/decisions/0057
METHOD = f"ldlq 1 damping={DAMPING} prior={PRIOR} doubt={PRIOR_DAMPING}"  # changes whenever records would
_AT_ONCE = 4096  # rows in fp32
_SAMPLE = 512  # rows of a layer, for the intermediates of experts that did not see them


@dataclass(frozen=True)
class InputMoments:
    """Input statistics of one projection for ``torch.ops.torch_mesh.pack_calibrated``: feedback fp32 [inputs, inputs],
    importance fp32 [inputs]."""

    feedback: torch.Tensor
    importance: torch.Tensor


class Moments:
    """The mean of w x^T x over weighted rows x, which measures a product's squared error."""

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
        """fp32 [inputs, inputs]; zeros without rows."""
        return self._sum / self._weight if self._weight > 0 else self._sum


def blended(own: Moments, shared: torch.Tensor) -> torch.Tensor:
    """An expert's moments from its own and the layer's."""
    prior = PRIOR * len(shared)
    fraction = own.rows / (own.rows + prior)
    return torch.lerp(_with_power(shared, PRIOR_DAMPING), own.mean(), fraction)


def _with_power(moments: torch.Tensor, fraction: float) -> torch.Tensor:
    """``moments`` with a fraction of the inputs' median power added to the diagonal.

    The median, because large models have a few inputs that are a thousand times as strong as the others.
    """
    power = moments.diagonal()
    positive = power[power > 0]
    added = moments.clone()
    if len(positive):
        added.diagonal().add_(fraction * positive.median())
    return added


def in_batches(
    rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Call ``use(rows in fp32, their weights)`` on bounded batches of the ``chosen`` rows."""
    for some, own in zip(chosen.split(_AT_ONCE), weights.split(_AT_ONCE), strict=True):
        use(rows[some].float(), own)


def sample_of(count: int) -> torch.Tensor:
    """Evenly spaced rows among ``count``."""
    return torch.linspace(0, count - 1, min(count, _SAMPLE)).long()


def feedback_of(moments: torch.Tensor, streams: int = 1, step: int = 1) -> InputMoments:
    """The factors of H = M D M^T with H the damped ``moments``: M^T and the diagonal of D, see
    csrc/kernels/pack_calibrated.h.

    Inputs are in the order of a format's codes (``_C.calibration_order``): those of one of the ``streams`` (k, k +
    streams ...) after those of another. ``step`` inputs of a stream are coded together; M has unit blocks on its
    diagonal for them. Raises MeshError for moments that are not finite.
    """
    power = moments.diagonal()
    damped = _with_power(moments, DAMPING)
    if not bool(torch.isfinite(damped).all()):
        raise MeshError("the text makes hidden states that are not finite, or overflow fp32 when squared")
    if not bool((power > 0).any()):  # no data: all inputs count alike
        return InputMoments(torch.zeros_like(moments), torch.ones_like(power))
    inputs = torch.arange(len(power))
    parts = [inputs[first::streams] for first in range(streams)]
    order = torch.cat(parts)
    damped = damped[order][:, order]
    # H = R R^T with R upper triangular, from the factor of H with reversed inputs.
    reverse = damped.flip(0, 1)
    factor, failed = torch.linalg.cholesky_ex(reverse)
    # If a few inputs are much stronger than the others and correlated, fp32 rounding exceeds the damping. Add more of
    # each input's own power.
    fraction = 2.0**-24
    while bool(failed):
        fraction *= 4
        exact = reverse.double()
        exact.diagonal().mul_(1 + fraction)
        factor, failed = torch.linalg.cholesky_ex(exact)
    upper = factor.float().flip(0, 1)
    scale = upper.diagonal()
    single = InputMoments((upper / scale).T.contiguous(), scale.square())
    if step == 1:
        return single
    return _in_steps(single, [len(piece) for part in parts for piece in part.split(step)])


def _in_steps(single: InputMoments, counts: list[int]) -> InputMoments:
    """Block factors from factors for single inputs: M B^-1 and the diagonal of B D B^T, B being the diagonal blocks of
    M of sizes ``counts``."""
    feedback, importance = single.feedback.clone(), single.importance.clone()
    first = 0
    for count in counts:
        own = slice(first, first + count)
        first += count
        block = torch.tril(single.feedback[own, own], -1)  # B^T without its unit diagonal
        block.diagonal().fill_(1)
        feedback[own] = torch.linalg.solve_triangular(block, feedback[own], upper=False, unitriangular=True)
        importance[own] = single.importance[own] @ block.square()
    return InputMoments(feedback, importance)
