"""KV caches that grow in place.

transformers' dynamic cache copies all keys and values for every token: docs/decisions/0066.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from torch_mesh.hf.generation_compat import given_cache

_HANDLE = "_mesh_growing_cache"  # attribute of a model whose caches grow in place
_MIN_ROOM = 32  # tokens; memory is only committed when written


class _Room:
    """Memory of which ``filled`` tokens belong to the latest tensor. Earlier tensors see no change."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # [batch, heads, tokens, dim]
        self.filled = 0

    def append(self, new: Tensor) -> Tensor:
        """``new`` behind the filled part; returns all of it."""
        before, count = self.filled, new.shape[-2]
        self.memory.narrow(-2, before, count).copy_(new)
        return self.first(before + count)

    def first(self, tokens: int) -> Tensor:
        self.filled = tokens
        part = self.memory.narrow(-2, 0, tokens)
        key = id(part)
        _ROOMS[key] = weakref.ref(part, partial(_ROOMS.pop, key)), self
        return part


# By the id of a tensor while it lives. Not by layer: the owner of a tensor frees its memory. An attribute of the tensor
# would be pickled with it. torch's WeakTensorKeyDictionary takes a fiftieth of a small model's step.
_ROOMS: dict[int, tuple[weakref.ref[Tensor], _Room]] = {}


def _room_of(tensor: Tensor) -> _Room | None:
    found = _ROOMS.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


def _append(kept: Tensor, new: Tensor) -> Tensor:
    """``torch.cat([kept, new], dim=-2)`` of [batch, heads, tokens, dim] tensors; in place if ``kept`` has room."""
    before = kept.shape[-2] if kept.dim() == 4 else 0  # transformers begins with a 1-d empty tensor
    after = before + new.shape[-2]
    room = _room_of(kept)
    if room is None or room.filled != before or after > room.memory.shape[-2] or _is_sealed(room.memory):
        room = _Room(new.new_empty((*new.shape[:-2], _with_room(after), new.shape[-1])))
        if before:
            room.append(kept)
    return room.append(new)


def room_for(part: Tensor, tokens: int) -> Tensor:
    """An empty tensor for ``tokens`` rows like those of ``part`` [batch, heads, any, dim], with room behind it."""
    room = _Room(part.new_empty((*part.shape[:-2], _with_room(tokens), part.shape[-1])))
    return room.first(tokens)


def _with_room(tokens: int) -> int:
    return tokens + max(_MIN_ROOM, tokens // 8)


def _is_sealed(tensor: Tensor) -> bool:
    """Inference tensors cannot be written to outside of inference mode."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


class GrowingLayer(DynamicLayer):
    """transformers' layer, but appending tokens in place. After cropping, reordering or replacing the keys the next
    token copies them once."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept_keys: Any = self.keys
        kept_values: Any = self.values
        if not (_can_append(kept_keys, key_states) and _can_append(kept_values, value_states)):
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = _append(kept_keys, key_states), _append(kept_values, value_states)
        return self.keys, self.values

    def rewind(self, tokens: int) -> None:
        """``crop(-tokens)`` for tokens of the last ``update`` that no other object uses: later tokens overwrite them
        without a copy."""
        if not self.is_initialized:  # its keys are those of another layer
            return
        held: Any = self.keys, self.values
        rooms = [_room_of(each) for each in held]
        if tokens and all(room and room.filled == each.shape[-2] for room, each in zip(rooms, held, strict=True)):
            self.keys, self.values = (room.first(room.filled - tokens) for room in rooms if room)
        else:
            self.crop(-tokens)


class RecordedWindow(DynamicSlidingWindowLayer):
    """A window that returns what its mask counts after several forwards without a crop; transformers 5.17 returns all
    keys."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[..., -visible:, :], values[..., -visible:, :]


def record_past(layer: Any) -> None:
    """Make a sliding window ``layer`` keep earlier keys until it is cropped."""
    layer.activate_past_recording()
    if type(layer) is DynamicSlidingWindowLayer:
        layer.__class__ = RecordedWindow


def stop_recording(layer: Any) -> None:
    """Reverse ``record_past``."""
    layer.record_past = False
    if type(layer) is RecordedWindow:
        layer.__class__ = DynamicSlidingWindowLayer  # type: ignore[assignment]  # mypy narrows layer to RecordedWindow


def _can_append(kept: Tensor, new: Tensor) -> bool:
    """False with gradients, which may need the old tensors; under compilation; across devices; where ``cat`` would
    change dtypes or raise."""
    return (
        kept.is_cpu
        and new.is_cpu
        and kept.dtype == new.dtype
        and new.dim() == 4
        and (kept.numel() == 0 or _same_but_tokens(kept.shape, new.shape))
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _same_but_tokens(first: torch.Size, second: torch.Size) -> bool:
    return first[0] == second[0] and first[1] == second[1] and first[3:] == second[3:]


def install_caches(model: nn.Module) -> None:
    """Let the dynamic caches that ``model`` is called with grow in place."""
    vars(model)[_HANDLE] = model.register_forward_pre_hook(_let_grow, with_kwargs=True)


def uninstall_caches(model: nn.Module) -> None:
    """Reverse ``install_caches``, but for existing caches."""
    for module in model.modules():
        if handle := vars(module).pop(_HANDLE, None):
            handle.remove()


def _let_grow(_model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    cache = given_cache(kwargs)
    if torch.compiler.is_compiling() or not isinstance(cache, DynamicCache):
        return
    if cache.layer_class_to_replicate is DynamicLayer:  # made without a config: layers are added on demand
        cache.layer_class_to_replicate = GrowingLayer
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            growing: Any = layer
            growing.__class__ = GrowingLayer
