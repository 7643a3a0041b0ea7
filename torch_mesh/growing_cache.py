"""Caches of keys and values that grow in place.

transformers' dynamic cache copies the keys and values of all layers for every token: of 48 layers with 1,024 tokens a twelfth of a token's time
(docs/decisions/0066).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_HANDLE = "_mesh_growing_cache"  # attribute of a model whose caches grow in place
_LEAST_ROOM = 32  # tokens; memory that nothing was written to is not taken


class _Room:
    """Memory with room behind what was appended last. Whoever holds an earlier part never sees it change."""

    def __init__(self) -> None:
        self.filled: Tensor | None = None  # its front part; None: there is no memory yet
        self._all = torch.empty(0)

    def append(self, kept: Tensor, new: Tensor) -> Tensor:
        """What ``torch.cat([kept, new], dim=-2)`` gives, of [batch, heads, tokens, dim] each; ``kept`` is copied unless it is ``filled``."""
        before = kept.shape[-2] if kept.dim() == 4 else 0  # transformers begins with a tensor of no dimension
        after = before + new.shape[-2]
        if kept is not self.filled or after > self._all.shape[-2] or _is_sealed(self._all):
            self._all = new.new_empty((*new.shape[:-2], after + max(_LEAST_ROOM, after // 8), new.shape[-1]))
            if before:
                self._all[..., :before, :] = kept
        self._all[..., before:after, :] = new
        self.filled = self._all[..., :after, :]
        return self.filled

    def take_back(self, tokens: int) -> None:
        """The end of ``filled`` may be written over: nobody has seen it but whoever asks."""
        if self.filled is not None:
            self.filled = self.filled[..., :-tokens, :]


def _is_sealed(tensor: Tensor) -> bool:
    """What inference mode has made cannot be written to outside of it."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


class GrowingLayer(DynamicLayer):
    """transformers' own, but that a new token is written behind the others. What cuts, reorders or replaces the keys is transformers', and
    the next token copies them once."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rooms = _Room(), _Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept_keys: Any = self.keys
        kept_values: Any = self.values
        if not (_can_append(kept_keys, key_states) and _can_append(kept_values, value_states)):
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = self._rooms
        self.keys, self.values = keys.append(kept_keys, key_states), values.append(kept_values, value_states)
        return self.keys, self.values

    def take_back(self, tokens: int) -> None:
        """As ``crop(-tokens)``, of tokens that the last ``update`` has added and nobody else has seen: others take their place without a copy."""
        keys, values = self._rooms
        if tokens and self.keys is keys.filled and self.values is values.filled:
            keys.take_back(tokens)
            values.take_back(tokens)
            self.keys, self.values = keys.filled, values.filled
        else:
            self.crop(-tokens)


def _can_append(kept: Tensor, new: Tensor) -> bool:
    """Not where gradients have to pass, in a graph, on another device, or where ``cat`` would change dtypes or refuse."""
    return (
        kept.is_cpu
        and new.is_cpu
        and kept.dtype == new.dtype
        and new.dim() == 4
        and (kept.numel() == 0 or kept.shape[:2] + kept.shape[3:] == new.shape[:2] + new.shape[3:])
        and not (torch.is_grad_enabled() and (kept.requires_grad or new.requires_grad))
        and not torch.compiler.is_compiling()
    )


def take_caches(model: nn.Module) -> None:
    """Lets the dynamic caches that ``model`` is called with grow in place."""
    vars(model)[_HANDLE] = model.register_forward_pre_hook(_let_grow, with_kwargs=True)


def undo_caches(model: nn.Module) -> None:
    """The reverse of ``take_caches``. Caches stay what they have become."""
    if handle := vars(model).pop(_HANDLE, None):
        handle.remove()


def _let_grow(_model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if torch.compiler.is_compiling() or not isinstance(cache, DynamicCache):
        return
    if cache.layer_class_to_replicate is DynamicLayer:  # made without a config: layers come as they are asked for
        cache.layer_class_to_replicate = GrowingLayer
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            growing: Any = layer
            growing.__class__ = GrowingLayer
            growing._rooms = _Room(), _Room()
