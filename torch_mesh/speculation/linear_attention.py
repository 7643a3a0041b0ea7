"""Linear attention while tokens are drafted: one token after the other, with the state behind each.

The state of such a layer is all tokens so far in one: nothing can be cut from it. Nor may its mixer take several tokens at once, for then it computes in
chunks (of 64 tokens, padded), whose sums have another order than those of single tokens, and the state that they leave would be another one for good.
So each drafted token passes through the mixer by itself, as in plain decoding, while experts, attention and everything else take all of them together.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

_CACHE = ("cache_params", "past_key_values")  # how mixers call it
_State = list[Tensor]


def is_linear(layer: Any) -> bool:
    """Whether a layer of a cache has the state of linear attention, of a state space model or of a convolution, and no keys."""
    return type(layer) is LinearAttentionLayer


def why_not_one_by_one(model: nn.Module, cache: Any) -> str:
    """Why the linear attention of ``model`` cannot go back in ``cache``; empty: it can, or there is none."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not is_linear(layer):
            return f"a cache of {type(layer).__name__} has keys and a state for all tokens so far in one layer, which does not go back to an earlier token"
        # Several states have several modules; before transformers 5.23 a layer did not count them.
        if is_linear(layer) and (getattr(layer, "number_of_states", 0) != 1 or len(_mixers(model, index)) != 1):
            return f"it is not plain which module of layer {index} has the state of its linear attention, which cannot go back without that"
    return ""


def _mixers(model: nn.Module, index: int) -> list[nn.Module]:
    """The modules that have a layer's state: the innermost ones of that layer that take a cache."""
    generates: Any = model
    decoder: nn.Module = generates.get_decoder() if hasattr(model, "get_decoder") else model
    found = [module for module in decoder.modules() if vars(module).get("layer_idx") == index and _cache_name(module)]
    return [module for module in found if not any(other in found for other in list(module.modules())[1:])]


def _cache_name(module: nn.Module) -> str:
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE if name in parameters), "")


class LinearAttention:
    """The mixers of ``model`` while ``cache`` is drafted into: from the constructor, behind the prompt, to ``finish``."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self._cache = cache
        self._states: dict[
            int, list[_State]
        ] = {}  # of layers: before a forward, and behind each of its tokens but the last
        self._before: dict[int, list[Tensor]] = {}  # what mixers gave for all tokens but the last
        self._hooks: list[Any] = []
        for index, layer in enumerate(cache.layers):
            if is_linear(layer):
                (mixer,) = _mixers(model, index)
                self._hooks.append(mixer.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.append(mixer.register_forward_hook(self._leave, with_kwargs=True))

    def _enter(self, mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every token but the last; returns the arguments for that one."""
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens = hidden.shape[1]
        if tokens == 1 or not self._is_own(mixer, kwargs):
            return None
        index = mixer.layer_idx
        layer = self._cache.layers[index]
        states = self._states[index] = [_copied(layer)]
        before: list[Tensor] = []
        self._before[index] = before
        for token in range(tokens - 1):
            one, by_name = _one(args, kwargs, token)
            before.append(mixer.forward(*one, **by_name))
            states.append(_copied(layer))
        return _one(args, kwargs, tokens - 1)

    def _leave(self, mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not self._is_own(mixer, kwargs) or mixer.layer_idx not in self._before:
            return None
        return torch.cat([*self._before.pop(mixer.layer_idx), output], dim=1)

    def _is_own(self, mixer: Any, kwargs: dict[str, Any]) -> bool:
        return kwargs.get(_cache_name(mixer)) is self._cache

    def take_back(self, tokens: int) -> None:
        """Forgets the last ``tokens`` of the last forward, one of several tokens if there are any to forget."""
        for index, states in self._states.items() if tokens else ():
            _restore(self._cache.layers[index], states[-tokens])
        self._forget()

    def go_back(self) -> None:
        """To before the last forward of several tokens, which failed somewhere."""
        for index, states in self._states.items():
            _restore(self._cache.layers[index], states[0])
        self._forget()

    def _forget(self) -> None:
        self._states.clear()
        self._before.clear()

    def finish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._forget()


def _one(args: tuple[Any, ...], kwargs: dict[str, Any], token: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one token. The mask of padding is dropped as transformers drops it for one token: what is drafted is none."""
    kwargs = kwargs | {"attention_mask": None}
    if args:
        return (args[0][:, token : token + 1], *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"][:, token : token + 1]}


def _tensors(layer: Any) -> list[Tensor]:
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def _copied(layer: Any) -> _State:
    return [state.clone() for state in _tensors(layer)]


def _restore(layer: Any, state: _State) -> None:
    for kept, tensor in zip(_tensors(layer), state, strict=True):
        kept.copy_(tensor)
