"""Check which models can rewind rejected drafts, and so speculate or assist."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.generation import GenerationMixin

from torch_mesh.hf.generation_compat import has_dynamic_cache
from torch_mesh.hf.parallelism_checks import divided_sizes
from torch_mesh.speculation.rewinding import rewind_unsupported_reason


def model_unsupported_reason(model: Any) -> str:
    """Why no call of this model's ``generate`` can speculate; empty if some can."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder and a decoder"
    if divided_sizes(model):
        return f"{name} is divided among processes, whose clocks would draft different numbers of tokens"
    return ""


def standalone_unsupported_reason(model: Any) -> str:
    """Why ``model`` cannot rewind the cache that ``generate`` would make for it; empty if it can."""
    generates = isinstance(model, GenerationMixin)
    if not generates:
        return "it has no generate of transformers' own"
    if reason := model_unsupported_reason(model):
        return reason
    if not has_dynamic_cache(model):
        return "it has a cache of its own, which cannot be rewound to an earlier token"
    return rewind_unsupported_reason(model, new_cache(model))


def new_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))
