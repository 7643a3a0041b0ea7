"""Validate options of ``generate``, which transformers accepts unchecked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig


SEQUENCE_COUNTS = ("num_beams", "num_beam_groups", "num_return_sequences")  # that generate computes together


class OptionError(ValueError):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Kind:
    """The allowed values: in words after "give", and as a test."""

    words: str
    fits: Callable[[Any], bool]


def is_whole(value: Any) -> bool:
    """A 64-bit integer, as torch takes it: JSON integers are unbounded."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    """A finite float; Python also reads NaN and infinity from JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_id(value: Any) -> bool:
    return is_whole(value) and value >= -1  # -1: none, for some models and continuous batching


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_id, value))


def whole(minimum: int) -> Kind:
    return Kind(f"a whole number, {minimum} or more", lambda value: is_whole(value) and value >= minimum)


BOOL = Kind("True or False", lambda value: isinstance(value, bool))
_ABOVE_ZERO = Kind("a number above 0", lambda value: is_number(value) and value > 0)
FACTOR = Kind("a number from 0.001 to 1,000", lambda value: is_number(value) and 0.001 <= value <= 1000)  # of logits
_NUMBER = Kind("a number", is_number)
FRACTION = Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
TEMPERATURE = Kind("0 or a larger number", lambda value: is_number(value) and value >= 0)
_PART = Kind("a number above 0, up to 1", lambda value: is_number(value) and 0 < value <= 1)
_CUT = Kind("a number from 0 to below 1", lambda value: is_number(value) and 0 <= value < 1)
_IDS = Kind("a list of token ids, such as [1,2]", _is_ids)
_ID = Kind("a token id, or a list of them, such as [1,2]", lambda value: _is_ids(value) or _is_id(value))
TEXTS = Kind(
    "text, or a list of texts",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value)),
)

# transformers' own defaults. It warns if greedy decoding, which uses none of them, has others.
_UNUSED_IN_GREEDY = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_MIN_TEMPERATURE = 1e-5  # lower temperatures are 0: logits would overflow, and sampling fail

# transformers alone knows the values of other options.
_KINDS = {
    "max_new_tokens": whole(1),
    "min_new_tokens": whole(0),
    "min_length": whole(0),
    "max_time": _ABOVE_ZERO,
    "stop_strings": TEXTS,
    "do_sample": BOOL,
    "num_beams": whole(1),
    "num_beam_groups": whole(1),
    "num_return_sequences": whole(1),
    "use_cache": BOOL,
    "temperature": TEMPERATURE,
    "top_k": whole(0),
    "top_p": FRACTION,
    "min_p": FRACTION,
    "top_h": _PART,
    "typical_p": _PART,
    "epsilon_cutoff": _CUT,
    "eta_cutoff": _CUT,
    "repetition_penalty": FACTOR,
    "length_penalty": _NUMBER,
    "no_repeat_ngram_size": whole(0),
    "renormalize_logits": BOOL,
    "remove_invalid_values": BOOL,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "pad_token_id": _ID,
    "bos_token_id": _ID,
    "eos_token_id": _ID,
    "forced_bos_token_id": _ID,
    "forced_eos_token_id": _ID,
    "token_healing": BOOL,
    "guidance_scale": Kind("a number from -1,000 to 1,000", lambda value: is_number(value) and abs(value) <= 1000),
    "prompt_lookup_num_tokens": whole(1),
    "max_matching_ngram_size": whole(1),
    "output_attentions": BOOL,
    "output_hidden_states": BOOL,
    "output_scores": BOOL,
    "output_logits": BOOL,
    "return_dict_in_generate": BOOL,
    "disable_compile": BOOL,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises OptionError for an invalid option. None means not given."""
    if options.get("max_length") is not None:
        raise OptionError("max_length", "max_length counts the prompt too: give max_new_tokens instead.")
    for name, value in options.items():
        kind = _KINDS.get(name)
        if kind is not None and value is not None and not kind.fits(value):
            raise OptionError(name, f"{name} is {value!r}: give {kind.words}.")


def normalize_options(config: GenerationConfig, model: GenerationConfig) -> None:
    """Normalize ``config`` for generate: 2.0 where a client says 2, greedy for temperatures near 0.

    ``model``: the model's own defaults, which a client cannot fix. Raises OptionError for invalid options of the
    client.
    """
    check_options({name: value for name, value in vars(config).items() if value != getattr(model, name, None)})
    if config.temperature is not None and config.temperature < _MIN_TEMPERATURE:
        config.do_sample = False
    if not (model.do_sample if config.do_sample is None else config.do_sample):
        for name, unused in _UNUSED_IN_GREEDY.items():
            setattr(config, name, unused)
    for name in ("temperature", "repetition_penalty"):
        if (value := getattr(config, name, None)) is not None:
            setattr(config, name, float(value))
