"""Linear attention in steps: its state after each drafted token, or after some tokens of a prompt.

The state of such a layer combines all tokens so far and cannot be cut. Several tokens at once would sum in another
order. Therefore drafted tokens pass through the mixer one by one, while everything else processes them together. A
prompt passes through the mixer in a few parts, to keep the states between them.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from torch_mesh.hf.cache_state import layer_states
from torch_mesh.hf.generation_compat import CACHE_NAMES
from torch_mesh.modules.experts import change_class, mixed_class

_STEPS = "_mesh_steps"  # attribute of a cache whose mixers process their tokens in steps
_State = list[dict[int, Tensor | None]]


def is_linear(layer: Any) -> bool:
    """Whether a cache layer has the state of linear attention, a state space model or a convolution, and no keys."""
    return type(layer) is LinearAttentionLayer


def linear_unsupported_reason(model: nn.Module, cache: Any) -> str:
    """Why the linear attention of ``model`` cannot be rewound in ``cache``; empty if it can, or if there is none."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not is_linear(layer):
            return (
                f"a cache of {type(layer).__name__} has keys and a state for all tokens so far in one layer, which "
                "cannot be rewound"
            )
        # Several states have several modules; before transformers 5.23 a layer did not count them.
        if is_linear(layer) and (getattr(layer, "number_of_states", 0) != 1 or len(_mixers(model, index)) != 1):
            return (
                f"the module with the linear attention state of layer {index} is ambiguous, so that it cannot be "
                "rewound"
            )
    return ""


def _mixers(model: nn.Module, index: int) -> list[nn.Module]:
    """The modules with a layer's state: the innermost ones of that layer that take a cache."""
    generates: Any = model
    decoder: nn.Module = generates.get_decoder() if hasattr(model, "get_decoder") else model
    found = [module for module in decoder.modules() if vars(module).get("layer_idx") == index and _cache_name(module)]
    return [module for module in found if not any(other in found for other in list(module.modules())[1:])]


def _cache_name(module: nn.Module) -> str:
    if isinstance(module, SteppedMixer):
        return module._mesh_cache_name
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


class SteppedMixer(nn.Module):
    """Mixed into the class of a mixer: processes tokens as the cache's steps say, and is unchanged without any.

    A mixin, since torch's hooks may not change while another thread's forward runs.
    """

    _mesh_cache_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        steps: LinearAttention | Checkpoints | None = getattr(kwargs.get(self._mesh_cache_name), _STEPS, None)
        return forward(*args, **kwargs) if steps is None else steps.step(self, forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (type(self).__bases__[1],), *reduced[2:]


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _step_mixer(mixer: nn.Module) -> None:
    with _lock:
        cls = type(mixer)
        if issubclass(cls, SteppedMixer):
            return
        stepped = mixed_class(SteppedMixer, cls, keeps_name=True)
        stepped._mesh_cache_name = _cache_name(mixer)
        change_class(mixer, stepped)


def uninstall_linear_attention(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, SteppedMixer):
            change_class(module, type(module).__bases__[1])


_lock = threading.Lock()


class LinearAttention:
    """The linear attention of ``model`` while drafting into ``cache``: from the constructor, after the prompt, to
    ``finish``."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self._cache = cache
        self._states: dict[
            int, list[_State]
        ] = {}  # per layer: states before a forward, and after each of its tokens but the last
        linear = [index for index, layer in enumerate(cache.layers) if is_linear(layer)]
        for index in linear:
            (mixer,) = _mixers(model, index)
            _step_mixer(mixer)
        if linear:
            setattr(cache, _STEPS, self)

    def step(self, mixer: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Call ``forward`` on hidden states [texts, tokens, hidden], token by token."""
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens = hidden.shape[1]
        if tokens == 1:
            result: Tensor = forward(*args, **kwargs)
            return result
        layer = self._cache.layers[mixer.layer_idx]
        states = self._states[mixer.layer_idx] = []
        found: list[Tensor] = []
        for token in range(tokens):
            states.append(_copied(layer))
            one, by_name = _part(args, kwargs, token, token + 1)
            found.append(forward(*one, **by_name))
        return torch.cat(found, dim=1)

    def rewind(self, tokens: int) -> None:
        """Drop the last ``tokens`` of the last forward."""
        for index, states in self._states.items() if tokens else ():
            _restore(self._cache.layers[index], states[-tokens])
        self._states.clear()

    def go_back(self) -> None:
        """Restore the state before the last forward of several tokens."""
        for index, states in self._states.items():
            if states:  # otherwise copying them failed
                _restore(self._cache.layers[index], states[0])
        self._states.clear()

    def finish(self) -> None:
        vars(self._cache).pop(_STEPS, None)
        self._states.clear()


class Checkpoints:
    """The states of linear attention after some of a prompt's tokens, while it is computed into ``cache``.

    Args:
        start: tokens in the cache.
        positions: numbers of tokens, ascending and above ``start``, after which states are kept.
    """

    def __init__(self, model: nn.Module, cache: Any, start: int, positions: Sequence[int]) -> None:
        self._cache, self._positions = cache, positions
        self._done = {index: start for index, layer in enumerate(cache.layers) if is_linear(layer)}
        self._states: dict[int, dict[str, Tensor]] = {position: {} for position in positions}
        mixers = {index: _mixers(model, index) for index in self._done}
        if not positions or any(len(found) != 1 for found in mixers.values()):
            return  # several modules of a layer could have its state
        for (mixer,) in mixers.values():
            _step_mixer(mixer)
        setattr(cache, _STEPS, self)

    def step(self, mixer: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Call ``forward`` on hidden states [1, tokens, hidden], in parts that end at the positions."""
        index = mixer.layer_idx
        before = self._done[index]
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        self._done[index] = before + tokens
        within = [position - before for position in self._positions if before < position <= before + tokens]
        if not within:
            whole: Tensor = forward(*args, **kwargs)
            return whole
        found: list[Tensor] = []
        for start, end in itertools.pairwise(dict.fromkeys([0, *within, tokens])):
            part, by_name = _part(args, kwargs, start, end)
            found.append(forward(*part, **by_name))
            if end in within:
                self._states[before + end] |= layer_states(self._cache, index)
        return torch.cat(found, dim=1)

    def finish(self) -> dict[int, dict[str, Tensor]]:
        """The states by position, for positions that all layers have reached."""
        vars(self._cache).pop(_STEPS, None)
        return {
            position: states
            for position, states in self._states.items()
            if {int(name.partition(".")[0]) for name in states} == self._done.keys()
        }


def _part(
    args: tuple[Any, ...], kwargs: dict[str, Any], start: int, end: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for some tokens. transformers drops padding masks for single tokens; these have no padding."""
    kwargs = kwargs | {"attention_mask": None}
    if args:
        return (args[0][:, start:end], *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"][:, start:end]}


def _states(layer: Any) -> list[dict[int, Tensor | None]]:
    return [layer.conv_states, layer.recurrent_states]


def _copied(layer: Any) -> _State:
    return [{key: None if state is None else state.clone() for key, state in each.items()} for each in _states(layer)]


def _restore(layer: Any, copied: _State) -> None:
    """Restore in place, for compiled steps. States of convolutions grow while transformers records them."""
    for states, kept in zip(_states(layer), copied, strict=True):
        for key, state in kept.items():
            now = states[key]
            if now is None or state is None or now.shape != state.shape:
                states[key] = state
            else:
                now.copy_(state)
