"""Expected hit rates, from measurements of other models or a synthetic trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_mesh import _C
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.store.manifest import Shape

# Hits per access by fraction of resident experts, with policy "auto" and no prefetch: docs/decisions/0013. Expected are
# those of DeepSeek-V2-Lite on natural text; mesh-tiny, whose routing is more local, has the others.
_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 1.0)
_EXPECTED_HITS = (0.0, 0.312, 0.535, 0.761, 1.0)
_LOCAL_HITS = (0.0, 0.359, 0.684, 0.911, 1.0)

# The trace of simulated_hit_rate: prompts long enough to repeat experts. Layers are alike, so that a few suffice.
_SIMULATED_LAYERS = 6
_SIMULATED_PROMPTS = 4
_SIMULATED_TOKENS = 256


@dataclass(frozen=True)
class HitRate:
    """Hits per access. ``low`` and ``high`` are not bounds, but those of random and of very local routing."""

    expected: float
    low: float
    high: float


def expected_hit_rate(fraction: float) -> HitRate:
    """The expected hit rate if ``fraction`` of all experts is resident, with policy "auto" and no prefetch.

    Interpolates measurements of DeepSeek-V2-Lite; ``high`` are those of mesh-tiny, and ``low`` is random routing.
    """
    expected, high = (float(np.interp(fraction, _FRACTIONS, hits)) for hits in (_EXPECTED_HITS, _LOCAL_HITS))
    return HitRate(expected=expected, low=fraction, high=high)


def simulated_hit_rate(shape: Shape, fraction: float, overlap: float) -> HitRate:
    """The hit rate of policy "auto" on a synthetic trace in which ``overlap`` of a token's experts serve the next token
    too.

    Takes about a second. Raises ValueError for an overlap below that of random routing or above 0.95.
    """
    layers = min(shape.layers, _SIMULATED_LAYERS)
    trace = synthetic_trace(
        layers=layers,
        experts=shape.experts,
        top_k=shape.top_k,
        prompts=_SIMULATED_PROMPTS,
        prompt_tokens=_SIMULATED_TOKENS,
        overlap=overlap,
    )
    slots = max(shape.top_k, round(fraction * layers * shape.experts))
    result = _C.replay(trace.ids, experts=shape.experts, policy="auto", slots=slots, sequences=trace.offsets[:-1])
    hits = result["hits"][trace.offsets[1] :]
    expected = float(hits.mean()) / (layers * shape.top_k)
    return HitRate(expected=expected, low=min(fraction, expected), high=max(expected, expected_hit_rate(fraction).high))


def known_or_expected(shape: Shape, fraction: float, given: float | None, overlap: float | None) -> HitRate:
    """``given``, or the simulated hit rate of ``overlap``, or the expected one. Raises ValueError for an invalid
    rate or overlap."""
    if given is not None and not 0 <= given <= 1:
        raise ValueError(f"hit_rate={given} must be in [0, 1]")
    if fraction == 1 or (given is None and overlap is None):
        return expected_hit_rate(fraction)
    return HitRate(given, given, given) if given is not None else simulated_hit_rate(shape, fraction, overlap or 0.0)
