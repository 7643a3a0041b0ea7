"""Hits to expect: what a model's own routing will do cannot be known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import _C
from ..routing.synthetic import synthetic_trace
from ..store.manifest import Shape

# Hits per access with a share of all experts resident, policy "auto", no prefetch: docs/decisions/0013. The expectation
# is that of DeepSeek-V2-Lite on natural text, the less local of the two models; mesh-tiny is the more local one.
_SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
_EXPECTED_HITS = (0.0, 0.312, 0.535, 0.761, 1.0)
_LOCAL_HITS = (0.0, 0.359, 0.684, 0.911, 1.0)

# What simulated_hit_rate replays: prompts long enough for what a prompt repeats to show. Layers are alike, so a few
# stand for all.
_SIMULATED_LAYERS = 6
_SIMULATED_PROMPTS = 4
_SIMULATED_TOKENS = 256


@dataclass(frozen=True)
class HitRate:
    """Hits per expert asked for. ``low`` and ``high`` are no bounds but what random and very local routing would
    give."""

    expected: float
    low: float
    high: float


def expected_hit_rate(share: float) -> HitRate:
    """What to expect with that share of all experts resident, with policy "auto" and before any prefetch.

    Interpolated between what was measured on DeepSeek-V2-Lite. Models differ: mesh-tiny's own text hits far more often
    (``high``), experts drawn at random would hit as often as they are resident (``low``).
    """
    expected, high = (float(np.interp(share, _SHARES, hits)) for hits in (_EXPECTED_HITS, _LOCAL_HITS))
    return HitRate(expected=expected, low=share, high=high)


def simulated_hit_rate(shape: Shape, share: float, overlap: float) -> HitRate:
    """What to expect where ``overlap`` of a token's experts serve the next token, too: policy "auto" on a made-up
    trace.

    The trace has topics and drift (see ``synthetic_trace``), its first prompt only fills the pool. About a second.
    Raises ValueError for an overlap that is less than chance gives or more than 0.95.
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
    slots = max(shape.top_k, round(share * layers * shape.experts))
    result = _C.replay(trace.ids, experts=shape.experts, policy="auto", slots=slots, sequences=trace.offsets[:-1])
    hits = result["hits"][trace.offsets[1] :]
    expected = float(hits.mean()) / (layers * shape.top_k)
    return HitRate(expected=expected, low=min(share, expected), high=max(expected, expected_hit_rate(share).high))


def known_or_expected(shape: Shape, share: float, given: float | None, overlap: float | None) -> HitRate:
    """``given``, or what ``overlap`` is simulated to give, or what to expect. Raises ValueError for what is no rate or
    no overlap."""
    if given is not None and not 0 <= given <= 1:
        raise ValueError(f"hit_rate={given} must be in [0, 1]")
    if share == 1 or (given is None and overlap is None):
        return expected_hit_rate(share)
    return HitRate(given, given, given) if given is not None else simulated_hit_rate(shape, share, overlap or 0.0)
