"""Compiled decode steps: options for transformers' ``generate``, and caches that do not trigger recompilation at each
step."""

from __future__ import annotations

import copy
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.generation import GenerationMixin
from transformers.utils.generic import is_flash_attention_requested

from torch_mesh import _C
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf.generation_compat import (
    COMPILED_STATE,
    PLAIN_MODES,
    PREPARE_CACHE,
    PREPARE_STATIC_CACHE,
    can_compile,
    compile_on_all_devices,
    given_cache,
)

Model = TypeVar("Model", bound=nn.Module)

# Attributes of a model, patched or not: so without patching's prefix.
_OPTIONS, _OWNER = "_compiled_steps_config", "_compiled_steps_owner"
_SHORTEST = 128  # minimum capacity of a cache in tokens
SLACK = _C.MAX_DECODE_ROWS - 1  # tokens that a step may draft


def compile(model: Model, **options: Any) -> Model:
    """Let ``model.generate`` compile its decode steps, on the CPU too; returns the same model.

    Greedy search and sampling then use a static cache whose length is a power of two: prompts that fit the longest so
    far compile nothing again. Calls with a cache, a ``cache_implementation`` but "static", ``prefill_chunk_size``
    or ``disable_compile=True`` are not compiled, nor are assistants and flash attention. ``options`` are those of
    transformers' ``CompileConfig``; a call may give its own ``compile_config``. The first call compiles for up to two
    minutes. ``unpatch`` ends it.

    Raises UnsupportedModelError for a model without ``generate`` or that transformers cannot compile; TypeError for an
    unknown option.
    """
    name = type(model).__name__
    generates: Any = model
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"{name} has no generate of transformers' own. For a PeftModel compile get_base_model(); "
            "torch.compile(model) compiles any forward."
        )
    if not can_compile(model):
        raise UnsupportedModelError(
            f"transformers cannot compile the decode steps of {name}: leave out --compile, or torch_mesh.compile."
        )
    # One graph per cache length; a graph for all lengths could not unroll loops.
    mode = "default" if options.get("options") is None else None  # torch refuses both
    attributes = vars(generates)
    attributes[_OPTIONS] = CompileConfig(**{"mode": mode, "dynamic": False, **options})
    attributes[PREPARE_CACHE] = types.MethodType(_prepare_cache, model)
    attributes[PREPARE_STATIC_CACHE] = types.MethodType(_prepare_static_cache, model)
    return model


def uninstall_compile(model: nn.Module) -> None:
    for module in model.modules():
        if _OPTIONS not in vars(module):
            continue
        for name in (
            PREPARE_CACHE,
            PREPARE_STATIC_CACHE,
            *COMPILED_STATE,
            _OWNER,
            _OPTIONS,  # last: an interrupted call can be repeated
        ):
            vars(module).pop(name, None)


def cache_length(model: nn.Module, tokens: int) -> int:
    """Return the number of tokens that the cache of a ``generate`` of so many tokens has room for."""
    attributes = vars(model)
    if _OPTIONS not in attributes:
        return tokens
    return max(_SHORTEST, 1 << (tokens - 1).bit_length(), attributes.get(COMPILED_STATE[2], 0))


def _prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces transformers' method."""
    attributes = vars(model)
    if attributes.get(_OWNER) != id(model):  # a copy, whose _compiled_call would run the original
        attributes.pop(COMPILED_STATE[0], None)
        attributes[_OWNER] = id(model)
    free = (
        generation_mode in PLAIN_MODES
        and generation_config.cache_implementation in (None, "static")
        and generation_config.use_cache is not False
        and not generation_config.disable_compile
        and generation_config.prefill_chunk_size is None  # with chunks, those of a prompt would be compiled too
        # Assistants crop the cache; static caches support that from transformers 5.24 on.
        and not generation_config.is_assistant
        and not is_flash_attention_requested(model.config)  # generate has already dropped the mask for it
        and given_cache(model_kwargs) is None
    )
    if free:
        generation_config.cache_implementation = "static"
        config = copy.copy(generation_config.compile_config or attributes[_OPTIONS])  # the caller's stays as it is
        compile_on_all_devices(config)
        generation_config.compile_config = config
    theirs: Any = getattr(type(model), PREPARE_CACHE)
    return theirs(model, generation_config, model_kwargs, generation_mode, *args, **kwargs)


def _prepare_static_cache(model: Any, *args: Any, max_cache_len: int, **kwargs: Any) -> Any:
    """Replaces transformers' method."""
    theirs: Any = getattr(type(model), PREPARE_STATIC_CACHE)
    cache = theirs(model, *args, max_cache_len=cache_length(model, max_cache_len), **kwargs)
    if isinstance(cache, StaticCache):
        cache.layers[:] = [
            SteadySlidingLayer(layer.max_cache_len, SLACK, layer.is_croppable)
            if type(layer) is StaticSlidingWindowLayer
            else layer
            for layer in cache.layers
        ]
    return cache


class SteadySlidingLayer(StaticSlidingWindowLayer):
    """transformers' sliding window layer, with its token count in a tensor only.

    The original counts in an int, which makes torch.compile recompile every step. This layer keeps ``slack`` tokens
    more than the ``window``, hidden by the mask, which steps can add and rewind. ``is_croppable``: the cache is no
    longer than the window.
    """

    def __init__(self, window: int, slack: int = 0, is_croppable: bool = False) -> None:
        super().__init__(max_cache_len=window + slack, sliding_window=window + slack)
        self.slack = slack
        self._max_length = 0  # before a rewind: tokens more than max_cache_len earlier are lost
        self._never_moves = is_croppable

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # an attribute of its other bases
        """Whether ``crop`` takes any number of tokens."""
        return self._never_moves

    @property
    def cumulative_length_int(self) -> int:
        return int(self.cumulative_length)

    @cumulative_length_int.setter
    def cumulative_length_int(self, value: int) -> None:
        pass  # ``update`` sets the tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens = key_states.shape[-2]
        if tokens > 1 + self.slack:  # a prompt, which is not compiled
            length = int(self.cumulative_length) + tokens
            states = super().update(key_states, value_states, *args, **kwargs)
            self.cumulative_length.fill_(length)
            return states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        last = self.max_cache_len - 1
        moved = (self.cumulative_length + tokens - self.max_cache_len).clamp(0, tokens)
        kept_rows = (torch.arange(last + 1, device=self.device) + moved).clamp(max=last)
        first = self.cumulative_length.clamp(max=self.max_cache_len - tokens)
        positions = first + torch.arange(tokens, device=self.device)
        keys: Any = self.keys
        values: Any = self.values
        for kept, new in ((keys, key_states), (values, value_states)):
            kept.copy_(kept.index_select(2, kept_rows))
            kept.index_copy_(2, positions, new)
        self.cumulative_length.add_(tokens)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """``rewind``, with transformers' sign: a negative number, of tokens to drop."""
        length = int(self.cumulative_length)
        reached = max(self._max_length, length)
        limit = self.slack - (reached - length) if reached > self.max_cache_len else length
        if not -limit <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop({tokens_to_remove}) of a sliding window that can drop its last {limit} tokens: give "
                f"{-limit} to 0, or use a DynamicCache."
            )
        self.rewind(-tokens_to_remove)

    def rewind(self, tokens: int) -> None:
        """Drop the last ``tokens``, at most ``slack``, of the last update. No window reaches the freed entries."""
        length = int(self.cumulative_length)
        self._max_length = max(self._max_length, length)
        moved = max(length - self.max_cache_len, 0) - max(length - tokens - self.max_cache_len, 0)
        kept: Any
        for kept in (self.keys, self.values) if moved else ():
            kept.copy_(kept.roll(moved, dims=-2))
        self.cumulative_length.sub_(tokens)

    def reset(self) -> None:
        super().reset()
        self._max_length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length > 1 + self.slack:
            return super().get_mask_sizes(query_length)
        return self.max_cache_len, max(int(self.cumulative_length) + query_length - self.max_cache_len, 0)

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0
