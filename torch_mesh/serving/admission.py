"""Refuse requests that exceed the model's positions or the memory for their keys and values.

Requests are refused, never truncated.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from torch_mesh.hf.compat import attention_of
from torch_mesh.hf.compile import cache_length
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.hf.torch_compat import FakeTensorMode
from torch_mesh.modules.experts import patched_modules
from torch_mesh.serving.errors import RequestTooLongError
from torch_mesh.system.memory import left_bytes

_LOG = logging.getLogger(__name__)

# Memory that stays free, as for the pools' guard: half of what resident="auto" leaves.
RESERVE_BYTES = 256 << 20
_PROBES = (3, 5)  # tokens: fewer than any window, so that all layers' caches grow between the two
# Bytes for each head and each pair of a prompt's token with a key, where attention is not fused. Measured: 7.3 for
# gpt-oss with eager attention, 10.8 for DeepSeek V3.
_EAGER_PAIR_BYTES = 8
_UNEVEN_PAIR_BYTES = 11
_MASK_PAIR_BYTES = 2  # one mask for all heads


@dataclass(frozen=True)
class LayerSize:
    """Size of one layer's cache: constant bytes, and bytes for each token, of at most ``window``."""

    fixed: int
    per_token: int
    window: int | None

    def nbytes(self, tokens: int) -> int:
        return self.fixed + self.per_token * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True)
class Needs:
    """Memory of a sequence. ``pair_bytes``: for each pair of a prompt's token and a key, while a layer computes."""

    layers: tuple[LayerSize, ...]
    token_bytes: int  # for each token of a prompt, while it is computed
    pair_bytes: int
    positions: int | None  # maximum number of positions of the model

    def cache(self, tokens: int) -> int:
        return sum(layer.nbytes(tokens) for layer in self.layers)

    def peak(self, computed: int, prompt: int, tokens: int) -> int:
        """Bytes for a sequence of ``tokens``, of whose ``prompt`` the last ``computed`` are not cached."""
        joined = max((layer.nbytes(tokens) for layer in self.layers), default=0)  # a layer's old keys beside the new
        return self.cache(tokens) + joined + computed * (self.token_bytes + prompt * self.pair_bytes)


def find_needs(model: Any, keeps_windows: bool) -> Needs:
    """``keeps_windows``: sliding window layers keep older tokens too, so that a sequence can be rewound."""
    config = model.config.get_text_config(decoder=True)
    small, large = (_cache_of(model, tokens) for tokens in _PROBES)
    layers = []
    for first, second in zip(small, large, strict=True):
        less, more = (sum(_sizes(layer)) for layer in (first, second))
        per_token = max(0, more - less) // (_PROBES[1] - _PROBES[0])
        window = first.sliding_window if getattr(first, "is_sliding", False) and not keeps_windows else None
        layers.append(LayerSize(max(0, less - per_token * _PROBES[0]), per_token, window))
    first_layer = config.per_layer_config[0]
    pair_bytes = _MASK_PAIR_BYTES
    if attention_of(config) == "eager":
        pair_bytes += first_layer.num_attention_heads * _EAGER_PAIR_BYTES
    elif getattr(first_layer, "kv_lora_rank", None) is not None:
        pair_bytes += first_layer.num_attention_heads * _UNEVEN_PAIR_BYTES
    # Hidden states and residual, norms, queries, keys and values, and a dense layer's gate and up.
    widths = 8 * config.hidden_size + 3 * (getattr(first_layer, "intermediate_size", None) or 0)
    positions = getattr(config, "max_position_embeddings", None)
    return Needs(tuple(layers), widths * model.dtype.itemsize, pair_bytes, positions)


class Admission:
    """Checks for a model on the CPU; on a GPU only positions are checked."""

    def __init__(self, model: Any, needs: Needs) -> None:
        self.needs = needs
        self._model = model
        self._pools = {module._mesh_pool for module in patched_modules(model)}
        self._on_cpu = model.device.type == "cpu"

    def free_bytes(self) -> int:
        """Bytes for keys and values, including what guarded pools would release. Negative if the reserve is in use."""
        free = left_bytes() - RESERVE_BYTES
        for pool in self._pools:
            if pool.guarded:
                size = pool.engine.describe_size()
                free += (size["slots"] - size["min_slots"]) * size["record_bytes"]
        return free

    def check(self, prompt: int, new: int, *, known: int, held: int, other: int = 0) -> None:
        """Raises RequestTooLongError for a prompt of so many tokens that does not fit with ``new`` ones.

        ``known``: cached tokens. ``held``: bytes of keys that can be dropped for it, or are its own. ``other``: bytes
        that it takes beside those of the sequence.
        """
        check_positions(self.needs.positions, prompt, new)
        if not self._on_cpu:
            return
        free = max(0, self.free_bytes() + held - other)

        def peak(computed: int, read: int, tokens: int) -> int:
            return self.needs.peak(computed, read, cache_length(self._model, tokens))

        needed = peak(prompt - known, prompt, prompt + new)
        if needed <= free:
            return
        room = _largest(new, lambda fewer: peak(prompt - known, prompt, prompt + fewer) <= free)
        if room > 0:
            advice = f"Ask for at most {room:,} new tokens"
        else:
            rows = _largest(prompt - known, lambda more: peak(more, known + more, known + more + new) <= free)
            advice = f"A prompt of {known + rows:,} tokens would fit with as many to generate: shorten it"
        raise RequestTooLongError(
            f"This request has {prompt:,} tokens and {new:,} to generate: that takes {needed:,} bytes of memory, "
            f"and {free:,} are left. {advice}, or give a smaller --resident.",
            room,
        )


def shorten(config: GenerationConfig, error: RequestTooLongError) -> bool:
    """Lower the limit of ``config``, which no client gave, to what fits. False if that is a single token already."""
    limit: int = config.max_new_tokens
    config.max_new_tokens = max(1, min(limit - 1, error.room))
    return config.max_new_tokens < limit


def check_positions(positions: int | None, prompt: int, new: int) -> None:
    """Raises RequestTooLongError for more tokens than the model has positions."""
    if positions is None or prompt + new <= positions:
        return
    room = positions - prompt
    advice = f"ask for at most {room:,} new tokens" if room > 0 else "shorten the prompt"
    raise RequestTooLongError(
        f"This request has {prompt:,} tokens and {new:,} to generate, but the model supports {positions:,} "
        f"(max_position_embeddings): {advice}.",
        room,
    )


def check_blocks(capacity: int, prompt: int, new: int) -> None:
    """Raises RequestTooLongError for a request longer than all blocks of continuous batching, which would end
    batching."""
    if prompt + new > capacity:
        room = capacity - prompt
        advice = f"Ask for at most {room:,} new tokens" if room > 0 else "Shorten the prompt"
        raise RequestTooLongError(
            f"This request has {prompt:,} tokens and {new:,} to generate, but all blocks of keys hold "
            f"{capacity:,}. {advice}, or give a larger --cb-num-blocks, or a smaller --resident.",
            room,
        )


def _cache_of(model: Any, tokens: int) -> list[Any]:
    """The layers of the cache that the model makes for this many tokens, without computing or reading experts if
    possible."""
    try:
        return _computed(model, tokens, FakeTensorMode(allow_non_fake_inputs=True))
    except Exception as error:  # noqa: BLE001  # a family may read values, which fake tensors lack
        _LOG.info("The cache size of a token is found by computing some: %s", error)
        return _computed(model, tokens, nullcontext())


def _computed(model: Any, tokens: int, mode: AbstractContextManager[Any]) -> list[Any]:
    with torch.no_grad(), mode:
        ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)
        return list(model(input_ids=ids, use_cache=True)[CACHE_NAME].layers)


def _sizes(layer: Any) -> Iterator[int]:
    """Bytes of each tensor of a cache's layer."""
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (each.numel() * each.itemsize for each in inner if isinstance(each, Tensor))


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to ``limit`` that fits, if all smaller ones do."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))
