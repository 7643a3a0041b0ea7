"""The private names of transformers' ``generate`` that torch_mesh uses. See ``compat.py``."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from transformers import cache_utils, modeling_layers
from transformers.generation import GenerationMode, candidate_generator
from transformers.generation.utils import GenerateDecoderOnlyOutput

from torch_mesh.hf.compat import Name, names_of

_BATCHING = "transformers.generation.continuous_batching.continuous_api"
NAMES: tuple[Name, ...] = (
    *names_of("transformers.generation.utils.GenerationMixin", "_prefill", "_optimize_model_for_decode"),
    *names_of("transformers.generation.utils.GenerationMixin", "_update_model_kwargs_for_generation"),
    *names_of("transformers.generation.utils.GenerationMixin", "_valid_auto_compile_criteria"),
    *names_of("transformers.generation.utils.GenerationMixin", "_supports_default_dynamic_cache"),
    *names_of(
        "transformers.generation.utils.GenerationMixin", "_prepare_cache_for_generation", "_prepare_static_cache"
    ),
    *names_of("transformers.generation.utils.GenerationMixin", "_get_candidate_generator"),
    *names_of("transformers.generation.utils", "_pad_token_tensor", "_previous_max_cache_length", in_source=True),
    *names_of("transformers.modeling_utils", "_compiled_call", "_last_compile_config", in_source=True),
    *names_of("transformers.generation.configuration_utils", "_compile_all_devices", in_source=True),
    *names_of("transformers.modeling_utils.PreTrainedModel", "_can_compile_fullgraph", "_is_stateful"),
    # Of continuous batching: without an underscore, but not documented.
    *names_of(f"{_BATCHING}.ContinuousBatchingManager", "output_router", in_source=True),
    *names_of(f"{_BATCHING}.OutputRouter", "result_handlers", "output_queue", in_source=True),
)

# One forward for each token of one sequence. Others draft tokens or keep several sequences.
PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

# Multi-token prediction
MtpCache: Any = cache_utils.MtpCache
MtpModel: Any = modeling_layers.MtpModel
MtpCandidateGenerator: Any = candidate_generator.MTPCandidateGenerator

# Methods that may be overridden on an instance
GET_CANDIDATE_GENERATOR = "_get_candidate_generator"
PREPARE_CACHE, PREPARE_STATIC_CACHE = "_prepare_cache_for_generation", "_prepare_static_cache"
# State of generate on a model that it compiled
COMPILED_STATE = ("_compiled_call", "_last_compile_config", "_previous_max_cache_length")

# The names of a cache in the arguments of a forward: ``cache`` from 5.24 on; before that ``past_key_values``, and for
# some mixers ``cache_params``.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The name in generate, its outputs and a model's outputs.
CACHE_NAME = "cache" if any(field.name == "cache" for field in fields(GenerateDecoderOnlyOutput)) else "past_key_values"


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache in these arguments, under any of its names; None without one."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def prefill(model: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The outputs for a prompt, as ``generate`` computes them."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def next_kwargs(model: Any, outputs: Any, model_kwargs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments of the forward that follows ``outputs``."""
    following: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, model_kwargs, **options)
    return following


def decoding(model: Any) -> AbstractContextManager[Any]:
    """Within, the model is set up for decode steps."""
    context: AbstractContextManager[Any] = model._optimize_model_for_decode()
    return context


def compiles_steps(model: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """Whether ``generate`` would compile decode steps."""
    return bool(model._valid_auto_compile_criteria(model_kwargs, generation_config))


def pad_token(generation_config: Any) -> Any:
    """The padding token as a tensor that ``generate`` made; None without one."""
    return generation_config._pad_token_tensor


def has_dynamic_cache(model: Any) -> bool:
    """Whether ``generate`` makes the standard dynamic cache for ``model``."""
    return bool(model._supports_default_dynamic_cache())


def is_stateful(model: Any) -> bool:
    """Whether a model has one state for all tokens so far."""
    return bool(getattr(model, "_is_stateful", False))


def can_compile(model: Any) -> bool:
    """Whether transformers compiles the decode steps of ``model`` in one graph."""
    return bool(getattr(model, "_can_compile_fullgraph", False))


def forget_request(manager: Any, request: str) -> None:
    """Free what continuous batching keeps of a request that has ended before its last output: its handler, and outputs
    that no handler takes."""
    router = manager.output_router
    router.result_handlers.pop(request, None)
    with contextlib.suppress(queue.Empty):
        while True:
            router.output_queue.get_nowait()


def compile_on_all_devices(config: Any) -> None:
    config._compile_all_devices = True
