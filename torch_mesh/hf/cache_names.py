"""What transformers calls a cache: ``cache`` from 5.24 on; before that ``past_key_values``, and to some mixers ``cache_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

NAMES = ("cache", "past_key_values", "cache_params")

# The one that generate, its outputs and what a model returns go by.
NAME = "cache" if any(field.name == "cache" for field in fields(GenerateDecoderOnlyOutput)) else "past_key_values"


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache in the arguments of a forward or of ``generate``, under any name: newer versions take the older ones too. None: there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)
