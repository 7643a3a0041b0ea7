"""What options of ``generate`` may be. transformers takes most as they come, and fails, or does as if they were another, when a request is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig


class OptionError(ValueError):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class _Kind:
    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_whole(value) and value >= -1  # which is none, to some models and to continuous batching


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_id, value))


def _whole(least: int) -> _Kind:
    return _Kind(f"a whole number, {least} or more", lambda value: _is_whole(value) and value >= least)


_BOOL = _Kind("True or False", lambda value: isinstance(value, bool))
_ABOVE_ZERO = _Kind("a number above 0", lambda value: _is_number(value) and 0 < value < float("inf"))
_NUMBER = _Kind("a number", lambda value: _is_number(value) and abs(value) < float("inf"))
_SHARE = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_PART = _Kind("a number above 0, up to 1", lambda value: _is_number(value) and 0 < value <= 1)
_CUT = _Kind("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
_IDS = _Kind("a list of token ids, such as [1,2]", _is_ids)
_ID = _Kind("a token id, or a list of them, such as [1,2]", lambda value: _is_ids(value) or _is_id(value))
_TEXTS = _Kind(
    "text, or a list of texts",
    lambda value: isinstance(value, str) or isinstance(value, list) and all(isinstance(each, str) for each in value),
)

# Of those that are not here, transformers alone knows what they may be.
_KINDS = {
    "max_new_tokens": _whole(1),
    "min_new_tokens": _whole(0),
    "max_length": _whole(1),
    "min_length": _whole(0),
    "max_time": _ABOVE_ZERO,
    "stop_strings": _TEXTS,
    "do_sample": _BOOL,
    "num_beams": _whole(1),
    "num_return_sequences": _whole(1),
    "use_cache": _BOOL,
    "temperature": _Kind("0 or a larger number", lambda value: _is_number(value) and 0 <= value < float("inf")),
    "top_k": _whole(0),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": _PART,
    "typical_p": _PART,
    "epsilon_cutoff": _CUT,
    "eta_cutoff": _CUT,
    "repetition_penalty": _ABOVE_ZERO,
    "length_penalty": _NUMBER,
    "no_repeat_ngram_size": _whole(0),
    "renormalize_logits": _BOOL,
    "remove_invalid_values": _BOOL,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "pad_token_id": _ID,
    "bos_token_id": _ID,
    "eos_token_id": _ID,
    "forced_bos_token_id": _ID,
    "forced_eos_token_id": _ID,
    "token_healing": _BOOL,
    "guidance_scale": _NUMBER,
    "prompt_lookup_num_tokens": _whole(1),
    "max_matching_ngram_size": _whole(1),
    "output_attentions": _BOOL,
    "output_hidden_states": _BOOL,
    "output_scores": _BOOL,
    "output_logits": _BOOL,
    "return_dict_in_generate": _BOOL,
    "disable_compile": _BOOL,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises OptionError for one that is not what it has to be. None is as if it were not given."""
    for name, value in options.items():
        kind = _KINDS.get(name)
        if kind is not None and value is not None and not kind.fits(value):
            raise OptionError(name, f"{name} is {value!r}: give {kind.words}.")


def settle(config: GenerationConfig, model: GenerationConfig) -> None:
    """As generate takes it: it wants 2.0 where a client says 2, and knows no temperature of 0. Raises OptionError for a client's.

    ``model``: what its makers say, which is not the client's to mend.
    """
    check_options({name: value for name, value in vars(config).items() if value != getattr(model, name, None)})
    if config.temperature == 0:
        config.do_sample = False
    for name in ("temperature", "repetition_penalty"):
        if (value := getattr(config, name, None)) is not None:
            setattr(config, name, float(value))
