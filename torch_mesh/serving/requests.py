"""Validate the fields of a request. transformers checks few of them, and fails or ignores them later.

Covers all fields of OpenAI's API that transformers reads, and those that it ignores with a warning.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from torch_mesh.serving.errors import MissingFieldError, ModelNotFoundError, RequestError
from torch_mesh.serving.generation import (
    BOOL,
    SHARE,
    TEMPERATURE,
    TEXTS,
    Kind,
    OptionError,
    check_options,
    is_number,
    is_whole,
    whole,
)

CHAT, COMPLETIONS, RESPONSES, DECISIONS = "chat", "completions", "responses", "decisions"
# The field with the prompt, by address.
PROMPTS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", DECISIONS: "state"}

_DEEPEST = 100  # nesting of lists and objects: copying, rendering and printing are recursive

_TEXT = Kind("text", lambda value: isinstance(value, str))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_LIST = Kind("a list", lambda value: isinstance(value, list))
_TEXT_OR_OBJECT = Kind("text or an object", lambda value: isinstance(value, str | dict))
_PENALTY = Kind("a number from -2 to 2", lambda value: is_number(value) and -2 <= value <= 2)
# transformers multiplies by one more than it.
_FREQUENCY_PENALTY = Kind("a number from -0.99 to 2", lambda value: is_number(value) and -0.99 <= value <= 2)

_COMMON = {
    "temperature": TEMPERATURE,
    "top_p": SHARE,
    "seed": Kind("a whole number of 64 bits", is_whole),
    "stream": BOOL,
    "stream_options": _OBJECT,
    "generation_config": Kind("an object of generate's options, as JSON text", lambda value: isinstance(value, str)),
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
}
_PENALTIES = {
    "max_tokens": whole(1),
    "frequency_penalty": _FREQUENCY_PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": _OBJECT,
    "stop": TEXTS,
    "n": whole(1),
}
_OF_MESSAGES = {
    "chat_template_kwargs": _OBJECT,
    "metadata": _OBJECT,
    "parallel_tool_calls": BOOL,
    "service_tier": _TEXT,
    "store": BOOL,
    "tool_choice": _TEXT_OR_OBJECT,
    "tools": _LIST,
    "top_logprobs": whole(0),
}
_FIELDS: dict[str, dict[str, Kind]] = {
    COMPLETIONS: {
        **_COMMON,
        **_PENALTIES,
        "prompt": Kind(
            "text; each prompt in a request of its own, and no token ids", lambda value: isinstance(value, str)
        ),
        "suffix": _TEXT,
        "echo": BOOL,
        "best_of": whole(1),
        "logprobs": whole(0),
    },
    CHAT: {
        **_COMMON,
        **_PENALTIES,
        **_OF_MESSAGES,
        "messages": Kind("a list of messages, one at least", lambda value: isinstance(value, list) and value != []),
        "max_completion_tokens": whole(1),
        "audio": _OBJECT,
        "function_call": _TEXT_OR_OBJECT,
        "functions": _LIST,
        "logprobs": BOOL,
        "modalities": TEXTS,
        "prediction": _OBJECT,
        "reasoning_effort": _TEXT,
        "response_format": _OBJECT,
        "verbosity": _TEXT,
        "web_search_options": _OBJECT,
    },
    RESPONSES: {
        **_COMMON,
        **_OF_MESSAGES,
        "input": Kind(
            "text, or a list of items, one at least", lambda value: isinstance(value, str | list) and value != []
        ),
        "instructions": _TEXT,
        "max_output_tokens": whole(1),
        "background": BOOL,
        "conversation": _TEXT_OR_OBJECT,
        "include": TEXTS,
        "max_tool_calls": whole(1),
        "previous_response_id": _TEXT,
        "prompt": _OBJECT,
        "reasoning": _OBJECT,
        "text": _OBJECT,
        "truncation": _TEXT,
    },
    DECISIONS: {},  # transformers checks these
}
# Arguments of apply_chat_template that transformers sets.
_TAKEN = (
    "conversation",
    "add_generation_prompt",
    "tools",
    "return_tensors",
    "return_dict",
    "tokenize",
    "load_audio_from_video",
)


def checked_request(kind: str, body: Mapping[str, Any], served: str, vocabulary: int) -> dict[str, Any]:
    """Check the body of a request, and convert it for transformers' handler. Null fields are dropped.

    ``kind``: CHAT, COMPLETIONS, RESPONSES or DECISIONS. ``served``: name of the model. ``vocabulary``: number of the
    model's token ids.

    Raises RequestError for an invalid field, MissingFieldError without a prompt, and ModelNotFoundError for another
    model.
    """
    check_values(body)
    _check_model(body.get("model"), served)
    if kind == DECISIONS:
        return dict(body)
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        field = _FIELDS[kind].get(name)
        if field is not None and not field.fits(value):
            raise _wrong(name, name, value, field.words)
    asked = PROMPTS[kind]
    if asked not in given:
        raise MissingFieldError(f"{asked} is missing: give {_FIELDS[kind][asked].words}.", asked)
    if kind == CHAT:
        for index, message in enumerate(given["messages"]):
            _check_message(f"messages[{index}]", message, "messages")
    elif kind == RESPONSES:
        _check_input(given["input"])
        given.setdefault("stream", False)  # OpenAI's default; transformers' handler streams by default
    for index, tool in enumerate(given.get("tools", ())):
        _check_tool(f"tools[{index}]", tool)
    _check_template_kwargs(given.get("chat_template_kwargs", {}))
    _check_generation_config(given.get("generation_config"))
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"], vocabulary)
    if "stop" in given:  # an empty text ends an answer with its first token
        stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        given["stop"] = [text for text in stops if text]
    return {name: value for name, value in given.items() if value or name not in ("logit_bias", "stop")}


def check_model_name(model: Any, served: str) -> None:
    """Raises RequestError for an invalid name; None stands for the served model."""
    if model is not None and not isinstance(model, str):
        raise _wrong("model", "model", model, f"{served!r}, or leave it out")


def _check_model(model: Any, served: str) -> None:
    check_model_name(model, served)
    if model not in (None, served):
        raise ModelNotFoundError(
            f"The model {model!r} is not here. This server has {served!r} and opens no other model.", "model"
        )


def check_values(body: Mapping[str, Any]) -> None:
    """Raises RequestError for text that no tokenizer takes, and for lists and objects nested too deep."""
    for field, content in body.items():
        left = [(content, 0)]
        while left:
            value, depth = left.pop()
            if depth > _DEEPEST:
                raise RequestError(f"{field} has lists or objects nested more than {_DEEPEST} deep.", field)
            if isinstance(value, dict):
                left += ((inner, depth + 1) for pair in value.items() for inner in pair)
            elif isinstance(value, list):
                left += ((inner, depth + 1) for inner in value)
            elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
                raise RequestError(
                    f"{field} has half of a surrogate pair, which is not text. Encode it as UTF-8.", field
                )


def _check_message(where: str, message: Any, field: str) -> None:
    _check(where, message, _OBJECT, field)
    _check(f"{where}.role", message.get("role"), _TEXT, field)
    _check_content(f"{where}.content", message.get("content"), field)
    calls = message.get("tool_calls")
    if calls is None:
        return
    _check(f"{where}.tool_calls", calls, _LIST, field)
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        _check(place, call, _OBJECT, field)
        function = call.get("function") or call
        _check(f"{place}.function", function, _OBJECT, field)
        _check_call(f"{place}.function", function, field)


def _check_content(where: str, content: Any, field: str) -> None:
    if content is None or isinstance(content, str):
        return
    _check(where, content, Kind("text, or a list of parts", lambda value: isinstance(value, list)), field)
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        _check(place, part, _OBJECT, field)
        kind = part.get("type")
        _check(f"{place}.type", kind, _TEXT, field)
        if kind in ("text", "input_text", "output_text"):
            _check(f"{place}.text", part.get("text"), _TEXT, field)
        elif kind in ("image_url", "input_image", "video_url", "audio_url"):
            name = "image_url" if kind == "input_image" else kind
            given = part.get(name)
            # Only pictures may be given by a bare address.
            address = given.get("url") if isinstance(given, dict) else given if name == "image_url" else None
            _check(f"{place}.{name}", address, Kind('an address, as in {"url": "https://..."}', _TEXT.fits), field)
        elif kind == "input_audio":
            given = part.get("input_audio")
            data = given.get("data") if isinstance(given, dict) else given
            _check(
                f"{place}.input_audio",
                data,
                Kind('sound in base64, as in {"data": "...", "format": "wav"}', _TEXT.fits),
                field,
            )


def _check_call(where: str, call: Mapping[str, Any], field: str) -> None:
    """Check a call of an earlier answer of the model."""
    _check(f"{where}.name", call.get("name"), _TEXT, field)
    _check(f"{where}.arguments", call.get("arguments"), Kind("an object, as JSON text", _is_json_object), field)


def _is_json_object(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, dict)


def _check_input(content: Any) -> None:
    """The Responses API's input: text, the parts of one message, or messages and other items of earlier answers."""
    if isinstance(content, str):
        return
    for index, item in enumerate(content):
        _check(f"input[{index}]", item, _OBJECT, "input")
    if "role" not in content[0]:  # transformers distinguishes the two kinds of list so
        _check_content("input", content, "input")
        return
    for index, item in enumerate(content):
        where, kind = f"input[{index}]", item.get("type")
        if kind == "reasoning":
            parts = item.get("content") or []
            _check(f"{where}.content", parts, _LIST, "input")
            for part in parts:
                _check(f"{where}.content", part, _OBJECT, "input")
                _check(f"{where}.content.text", part.get("text"), _TEXT, "input")
        elif "role" in item:
            _check_message(where, item, "input")
        elif kind == "function_call":
            _check(f"{where}.call_id", item.get("call_id"), _TEXT, "input")
            _check_call(where, item, "input")
        elif kind == "function_call_output":
            _check(f"{where}.call_id", item.get("call_id"), _TEXT, "input")
            _check_content(f"{where}.output", item.get("output"), "input")
        else:
            known = "a message, reasoning, function_call or function_call_output"
            raise _wrong("input", f"{where}.type", kind, known)


def _check_tool(where: str, tool: Any) -> None:
    _check(where, tool, _OBJECT, "tools")
    if (function := tool.get("function")) is not None:
        _check(f"{where}.function", function, _OBJECT, "tools")
        _check(f"{where}.function.name", function.get("name"), _TEXT, "tools")


def _check_template_kwargs(arguments: Mapping[str, Any]) -> None:
    for name in _TAKEN:
        if name in arguments:
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which the server sets: give variables of the chat template only.",
                "chat_template_kwargs",
            )


def _check_generation_config(text: str | None) -> None:
    if text is None:
        return
    from transformers import GenerationConfig

    try:
        options = json.loads(text)
        _check("generation_config", options, _OBJECT, "generation_config")
        check_options(options)
        GenerationConfig(**options)
    except RequestError:
        raise
    except OptionError as error:
        raise RequestError(str(error), error.name) from error
    except Exception as error:  # any kind, depending on the option
        raise RequestError(
            f"generation_config is invalid: {error}. Give an object of generate's options, as JSON text.",
            "generation_config",
        ) from error


def _logit_bias(given: Mapping[str, Any], vocabulary: int) -> dict[str, float]:
    """Biases as floats, since transformers rejects integers."""
    biases = {}
    for token, bias in given.items():
        if not token.isdecimal() or int(token) >= vocabulary:
            raise RequestError(
                f"logit_bias has {token!r}: give token ids of the model, 0 to {vocabulary - 1}.", "logit_bias"
            )
        if not is_number(bias) or abs(bias) > 100:
            raise _wrong("logit_bias", f"logit_bias[{token!r}]", bias, "a number from -100 to 100")
        biases[token] = float(bias)
    return biases


def _check(where: str, value: Any, kind: Kind, field: str) -> None:
    if not kind.fits(value):
        raise _wrong(field, where, value, kind.words)


def _wrong(field: str, where: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{where} is {reprlib.repr(value)}: give {allowed}.", field)
