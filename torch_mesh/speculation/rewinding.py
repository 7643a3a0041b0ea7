"""Rewind caches to before rejected drafts."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from torch_mesh.hf import cache_state
from torch_mesh.hf.compile import SteadySlidingLayer
from torch_mesh.hf.generation_compat import is_stateful
from torch_mesh.hf.kv_cache import GrowingLayer, record_past, stop_recording
from torch_mesh.speculation.linear_attention import LinearAttention, is_linear, linear_unsupported_reason

# Older versions have no base of quantized layers (up to 5.19), and no layers without keys (up to 5.22).
_QUANTISED: Any = getattr(cache_utils, "BaseQuantizedLayer", None) or cache_utils.QuantizedLayer
_DUMMY: Any = getattr(cache_utils, "DummyLayer", ())


def rewind_unsupported_reason(model: nn.Module, cache: Any) -> str:
    """Why ``cache`` of ``model`` cannot be rewound; empty if it can."""
    if not isinstance(cache, DynamicCache | StaticCache):
        return f"a {type(cache).__name__} cannot be rewound to an earlier token"
    if reason := linear_unsupported_reason(model, cache):
        return reason
    linear = [is_linear(layer) for layer in cache.layers]
    if any(linear) and isinstance(cache, StaticCache):
        return (
            "linear attention can be rewound in dynamic caches only (with torch_mesh.compile: "
            "generate(disable_compile=True))"
        )
    if is_stateful(model) and not any(linear):
        return f"{type(model).__name__} has a state for all tokens so far, which cannot be rewound"
    for layer in (layer for layer in cache.layers if not is_linear(layer)):
        if isinstance(layer, _QUANTISED):
            return "a quantized cache cannot go back to an earlier token"
        if not _is_rewindable(layer):
            hint = " (torch_mesh.compile gives one that does)" if getattr(layer, "is_sliding", False) else ""
            return f"a cache of {type(layer).__name__} does not go back to an earlier token{hint}"
    return ""


def _is_rewindable(layer: Any) -> bool:
    if isinstance(layer, StaticLayer):
        return type(layer) is StaticLayer or isinstance(layer, SteadySlidingLayer)
    return isinstance(layer, (DynamicLayer, _DUMMY) if _DUMMY else DynamicLayer) and layer.is_croppable


class Rewinding:
    """A cache during drafting: call ``rewind`` after each forward, with 0 too, and ``finish`` at the end.

    Create it after the prompt: sliding window layers keep all tokens of a forward until they are accepted.
    """

    def __init__(self, model: nn.Module, cache: Cache) -> None:
        layers: list[Any] = [layer for layer in cache.layers if not is_linear(layer)]
        self._cache, self._layers = cache, layers
        self._linear = LinearAttention(model, cache)
        sliding = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
        # Layers whose caller wants earlier keys, and more of them than transformers' crop leaves.
        self._recorded = {id(layer) for layer in sliding if layer.record_past}
        self._recording: list[Any] = [layer for layer in sliding if not layer.record_past]
        for layer in self._recording:
            record_past(layer)
        self._windows: list[Any] = [layer for layer in sliding if layer.is_initialized]
        self._count_rows()

    def _count_rows(self) -> None:
        """Count the rows of windows, to which the next forward appends."""
        self._window_rows = {id(layer): layer.keys.shape[-2] for layer in self._windows}

    def length(self) -> int:
        """Tokens in the cache; 0 if it has linear attention alone, which does not count them."""
        counted = any(isinstance(layer, CacheLayerMixin) for layer in self._layers)
        return int(self._cache.get_seq_length()) if counted else 0

    def rewind(self, tokens: int) -> None:
        self._linear.rewind(tokens)
        for layer in self._layers:
            self._rewind(layer, tokens)
        self._count_rows()

    def go_back(self, length: int) -> None:
        """Return to ``length`` tokens after a failed forward, which may have updated some layers, and some tensors of a
        layer. Linear attention is restored only if the forward had several tokens."""
        self._linear.go_back()
        for layer in self._layers:
            if not layer.is_initialized or (_DUMMY and isinstance(layer, _DUMMY)):
                continue
            if cache_state.has_rows(layer):
                cache_state.keep_first(layer, self._window_rows.get(id(layer), length))
                if cache_state.is_window(layer):
                    layer.cumulative_length = length
            else:
                self._rewind(layer, max(int(layer.get_seq_length()) - length, 0))

    def _rewind(self, layer: Any, tokens: int) -> None:
        if isinstance(layer, SteadySlidingLayer | GrowingLayer):
            layer.rewind(tokens)
        elif isinstance(layer, StaticLayer):
            layer.cumulative_length.sub_(tokens)
        elif id(layer) in self._recorded:
            if tokens:
                layer.keys, layer.values = layer.keys[..., :-tokens, :], layer.values[..., :-tokens, :]
                layer.cumulative_length -= tokens
        else:
            layer.crop(-tokens)

    def finish(self) -> None:
        self._linear.finish()
        for layer in self._recording:
            stop_recording(layer)
