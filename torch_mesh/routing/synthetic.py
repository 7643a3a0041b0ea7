"""Synthetic routing with the locality of real models: per-prompt topics that drift.

An expert's logit is a sum of Gaussian parts that depend on hidden states shared by all layers: the model's bias, the
prompt's topic, and AR(1) states that drift from token to token, plus noise of each layer. Only relative variances
matter.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from torch_mesh.routing.traces import Trace

# Variance by decay per token; model and prompt do not drift. Fitted to the overlap of DeepSeek-V2-Lite's tokens at
# distances of 1 to 96, then lowered until lru, lfu and belady agree too.
VARIANCES = {"model": 0.014, "prompt": 0.08, "0.985": 0.084, "0.9": 0.022, "0.4": 0.46}
_FASTEST = "0.4"
_MAX_SHARED = 0.98
_HIDDEN = 24  # dimensions of each hidden state
_BLOCK = 512  # tokens whose logits exist at a time


def synthetic_trace(
    *,
    layers: int = 26,
    experts: int = 64,
    top_k: int = 6,
    prompts: int = 70,
    prompt_tokens: int = 295,
    overlap: float | None = None,
    seed: int = 0,
) -> Trace:
    """Routing of ``prompts`` sequences of about ``prompt_tokens`` tokens each.

    ``overlap`` is the fraction of a token's experts that the next token uses too; by default as in DeepSeek-V2-Lite.
    Raises ValueError for an overlap below chance or above 0.95, and for impossible sizes.
    """
    if min(layers, experts, top_k, prompts, prompt_tokens) < 1 or top_k > experts:
        raise ValueError(
            f"a trace needs at least one of everything and top_k <= experts; got {layers=}, {experts=}, {top_k=}, "
            f"{prompts=}, {prompt_tokens=}"
        )
    rng = np.random.default_rng(seed)
    variances = _variances(experts, top_k, overlap)
    lengths = rng.integers(math.ceil(prompt_tokens / 2), prompt_tokens + prompt_tokens // 2 + 1, prompts)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    states = np.concatenate(
        [_states(rng, offsets, decay) * variance**0.5 for decay, variance in variances.items()], axis=1
    )
    directions = rng.standard_normal((states.shape[1], layers * experts), np.float32) / _HIDDEN**0.5
    noise = max(0.0, 1 - sum(variances.values())) ** 0.5
    ids = np.empty((offsets[-1], layers, top_k), np.int32)
    for first in range(0, len(ids), _BLOCK):
        logits = states[first : first + _BLOCK] @ directions
        logits += noise * rng.standard_normal(logits.shape, np.float32)
        by_layer = logits.reshape(-1, layers, experts)
        ids[first : first + _BLOCK] = np.argpartition(-by_layer, top_k - 1, axis=2)[..., :top_k]
    return Trace("synthetic", ids, offsets, experts)


def _states(rng: np.random.Generator, offsets: npt.NDArray[np.int64], decay: str) -> npt.NDArray[np.float32]:
    """[tokens, _HIDDEN], of unit variance."""
    tokens = int(offsets[-1])
    if decay == "model":
        return np.repeat(rng.standard_normal((1, _HIDDEN), np.float32), tokens, axis=0)
    if decay == "prompt":
        topics = rng.standard_normal((len(offsets) - 1, _HIDDEN), np.float32)
        return np.repeat(topics, np.diff(offsets), axis=0)
    steps = rng.standard_normal((tokens, _HIDDEN), np.float32)
    keep = float(decay)
    fresh = math.sqrt(1 - keep * keep)
    begins = set(offsets[:-1].tolist())
    for token in range(tokens):
        if token not in begins:
            steps[token] = keep * steps[token - 1] + fresh * steps[token]
    return steps


def correlation_for(overlap: float, experts: int, top_k: int) -> float:
    """The correlation of two Gaussian logits at which two tokens share ``overlap`` of their experts."""
    rng = np.random.default_rng(0)
    first, other = rng.standard_normal((2, max(1, 262144 // experts), experts), np.float32)
    chosen = _largest(first, top_k)

    def shared(correlation: float) -> float:
        second = correlation * first + math.sqrt(1 - correlation**2) * other
        return float((chosen & _largest(second, top_k)).sum() / chosen.sum())

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if shared(middle) < overlap else (low, middle)
    return low


def _largest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.bool_]:
    chosen = np.zeros(values.shape, bool)
    np.put_along_axis(chosen, np.argpartition(-values, count - 1, axis=1)[:, :count], True, axis=1)
    return chosen


def check_overlap(overlap: float, experts: int, top_k: int) -> None:
    """Raises ValueError for an overlap that no routing has, or that is above 0.95."""
    if not top_k / experts <= overlap <= 0.95:
        raise ValueError(f"overlap must be between chance, {top_k / experts:.3f}, and 0.95; got {overlap}")


def _variances(experts: int, top_k: int, overlap: float | None) -> dict[str, float]:
    """VARIANCES, scaled for the overlap; if the noise is used up, the fastest part becomes slower."""
    if overlap is None:
        return VARIANCES
    check_overlap(overlap, experts, top_k)
    wanted = correlation_for(overlap, experts, top_k)
    if wanted <= 0:
        return dict.fromkeys(VARIANCES, 0.0)
    lasting = {
        decay: variance * (1 if decay in ("model", "prompt") else float(decay)) for decay, variance in VARIANCES.items()
    }
    scale = min(wanted / sum(lasting.values()), _MAX_SHARED / sum(VARIANCES.values()))
    variances = {decay: variance * scale for decay, variance in VARIANCES.items()}
    fast = variances.pop(_FASTEST)
    slow = scale * (sum(lasting.values()) - lasting[_FASTEST])
    keep = (wanted - slow) / fast
    if keep >= 1:
        raise ValueError(f"an overlap of {overlap} leaves no variance between tokens; give less")
    return {**variances, repr(keep): fast}
