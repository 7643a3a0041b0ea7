"""The contents of a dynamic cache's layers, as named tensors that can be restored.

- *rows*: of each token, in full attention: keys and values, MLA's latent, keys of an indexer.
- *window rows*: of the last tokens, in a sliding window.
- *states*: of all tokens so far together, in linear attention and convolutions.

A name is ``layer.attribute`` or ``layer.attribute.number``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerationMixin

from torch_mesh.hf.generation_compat import has_dynamic_cache
from torch_mesh.hf.kv_cache import room_for
from torch_mesh.models.families import CONTINUED_STATES

# Class names, since some of these classes are in a model's own file.
_FULL = frozenset({"DynamicLayer", "GrowingLayer", "DynamicIndexedLayer", "MiniMaxM3VLSparseCacheLayer"})
_WINDOW = frozenset({"DynamicSlidingWindowLayer", "RecordedWindow"})
_LINEAR, _EMPTY = "LinearAttentionLayer", "DummyLayer"
# Tensors with a row for each token, in the last dimension but one.
_ROWS = ("keys", "values", "indexer_keys", "idx_keys")
_POSITIONS = "indexer_position_ids"  # has a column for each token; ``rows`` gives rows of one number
_STATES = ("conv_states", "recurrent_states")
Tensors = dict[str, Tensor]


def is_full(layer: Any) -> bool:
    return type(layer).__name__ in _FULL


def is_window(layer: Any) -> bool:
    return type(layer).__name__ in _WINDOW


def has_state(layer: Any) -> bool:
    return type(layer).__name__ == _LINEAR


def has_rows(layer: Any) -> bool:
    return is_full(layer) or is_window(layer)


def unsupported_reason(model: Any) -> str:
    """Why the contents of this model's caches cannot be saved, restored and continued; empty if they can."""
    config = model.config.get_text_config(decoder=True)
    if isinstance(model, GenerationMixin) and not has_dynamic_cache(model):
        return "the model has caches of its own"
    layers = DynamicCache(config=config).layers
    for layer in layers:
        if not (has_rows(layer) or has_state(layer) or type(layer).__name__ == _EMPTY):
            return f"what a {type(layer).__name__} holds is not known"
    if not any(map(has_rows, layers)):
        return "there is no attention beside linear attention, whose cache does not count tokens"
    if any(map(has_state, layers)) and config.model_type not in CONTINUED_STATES:
        return "linear attention is not known to continue from its state with several tokens"
    # Until transformers 5.22 a layer did not say how many states it has.
    if not all(hasattr(layer, "number_of_states") for layer in layers if has_state(layer)):
        return "linear attention needs transformers 5.23 or later"
    # Transformers 5.17 has this family's positions on the cache as a whole, where a forward appends to them.
    has_positions = all(hasattr(layer, _POSITIONS) for layer in layers if hasattr(layer, "indexer_keys"))
    if config.model_type == "qwen4_exp_text" and not has_positions:
        return "its indexer keeps positions outside of the layers in this transformers; 5.24 does not"
    return ""


def length(cache: Any) -> int | None:
    """Tokens in ``cache``; None if its layers differ, as after a forward that failed."""
    lengths = {int(layer.get_seq_length()) for layer in cache.layers if has_rows(layer)}
    return lengths.pop() if len(lengths) == 1 else None


def tensors_of(layer: Any) -> list[Tensor]:
    """All tensors of ``layer``."""
    named = [getattr(layer, name, None) for name in (*_ROWS, _POSITIONS)]
    named += [state for name in _STATES for state in (getattr(layer, name, None) or {}).values()]
    return [tensor for tensor in named if tensor is not None]


def rows(cache: Any, windows: bool) -> Tensors:
    """The rows of layers with full attention or, if ``windows``, with sliding windows: [..., tokens, dim], up to the
    last token. Views of the cache's current tensors."""
    kind = is_window if windows else is_full
    found: Tensors = {}
    for index, layer in enumerate(cache.layers):
        if kind(layer):
            found |= {f"{index}.{name}": rows for name in _ROWS if (rows := getattr(layer, name, None)) is not None}
            if (positions := getattr(layer, _POSITIONS, None)) is not None:
                found[f"{index}.{_POSITIONS}"] = positions.unsqueeze(-1)
    return found


def keep_first(layer: Any, tokens: int) -> None:
    """Drop all but the first ``tokens`` rows of each tensor of ``layer``."""
    for name in _ROWS:
        if (held := getattr(layer, name, None)) is not None:
            setattr(layer, name, held[..., :tokens, :])
    if (positions := getattr(layer, _POSITIONS, None)) is not None:
        setattr(layer, _POSITIONS, positions[..., :tokens])


def states(cache: Any) -> Tensors:
    """Copies of all layers' states."""
    return {name: tensor for index in range(len(cache.layers)) for name, tensor in layer_states(cache, index).items()}


def layer_states(cache: Any, index: int) -> Tensors:
    """Copies of one layer's states."""
    layer = cache.layers[index]
    return {
        f"{index}.{name}.{number}": state.clone()
        for name in (_STATES if has_state(layer) else ())
        for number, state in getattr(layer, name).items()
        if state is not None
    }


def window_rows(cache: Any, tokens: int) -> dict[str, int]:
    """The number of rows before token ``tokens`` that each layer with a window needs, by the layer's number."""
    layers = enumerate(cache.layers)
    return {str(index): min(layer.sliding_window - 1, tokens) for index, layer in layers if is_window(layer)}


def room_of(part: Tensor, tokens: int) -> Tensor:
    """An empty tensor for ``tokens`` rows like those of ``part``, behind which further ones can be appended in
    place."""
    return room_for(part, tokens) if part.dim() == 4 else part.new_empty((*part.shape[:-2], tokens, part.shape[-1]))


def restore(cache: Any, tokens: int, held: Tensors) -> None:
    """Put back rows and states of the first ``tokens`` into an empty ``cache``."""
    by_layer: dict[int, dict[str, Any]] = {}
    for name, tensor in held.items():
        number, _, attribute = name.partition(".")
        by_layer.setdefault(int(number), {})[attribute] = tensor
    for index, given in by_layer.items():
        layer = cache.layers[index]
        if has_state(layer):
            _restore_states(layer, given)
            continue
        layer.lazy_initialization(given["keys"], given["values"])
        if "indexer_keys" in given:
            layer.lazy_initialization_indexer(given["indexer_keys"])
        for attribute, tensor in given.items():
            setattr(layer, attribute, tensor.squeeze(-1) if attribute == _POSITIONS else tensor)
        if is_window(layer):
            layer.cumulative_length = tokens


def _restore_states(layer: Any, given: dict[str, Tensor]) -> None:
    for name, state in given.items():
        attribute, _, text = name.rpartition(".")
        number = int(text)
        layer.lazy_initialization(**{attribute: state}, state_idx=number)
        getattr(layer, attribute)[number].copy_(state)
        layer.has_previous_state[number] = True
