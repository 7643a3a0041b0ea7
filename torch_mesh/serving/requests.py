"""Check the fields of requests. Each field is honoured, or the request is refused with the field's name."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch_mesh.serving.errors import MissingFieldError, ModelNotFoundError, RequestError, UnknownFieldError
from torch_mesh.serving.generate_options import (
    BOOL,
    FACTOR,
    FRACTION,
    TEMPERATURE,
    TEXTS,
    Kind,
    OptionError,
    check_options,
    is_number,
    is_whole,
    whole,
)
from torch_mesh.serving.left_out import leave_out

CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
# The field with the prompt, by address.
PROMPTS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}

_MAX_DEPTH = 100  # nesting of lists and objects: copying, rendering and printing are recursive

TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
_TEXT_OR_OBJECT = Kind("text or an object", lambda value: isinstance(value, str | dict))
_PENALTY = Kind("a number from -2 to 2", lambda value: is_number(value) and -2 <= value <= 2)
_TOP_LOGPROBS = Kind("a whole number from 0 to 20", lambda value: is_whole(value) and 0 <= value <= 20)
NAME = Kind("a name", lambda value: isinstance(value, str) and value != "")
# Of a function: without white space and what ends a name in some model's calls.
FUNCTION = Kind(
    "a name without white space, quotes, backslashes, brackets and braces",
    lambda value: isinstance(value, str) and re.fullmatch(r"""[^\s"'`\\<>(){}\[\]]+""", value) is not None,
)
ANY = Kind("anything", lambda value: True)
_ADDRESS = Kind('an address, as in {"url": "data:image/png;base64,..."}', TEXT.fits)
_SOUND = Kind('sound in base64, as in {"data": "...", "format": "wav"}', TEXT.fits)
_MAX_COUNT = 128  # answers, or prompts, of a request
_COUNT = Kind(f"a whole number from 1 to {_MAX_COUNT}", lambda value: is_whole(value) and 1 <= value <= _MAX_COUNT)
OUTPUT_LOGPROBS = "message.output_text.logprobs"
# Encrypted reasoning carries reasoning to the next turn for servers that do not show it. This one shows it.
_INCLUDED = (OUTPUT_LOGPROBS, "reasoning.encrypted_content")
_INCLUDE = Kind(
    f"a list with {' and '.join(_INCLUDED)} at most",
    lambda value: isinstance(value, list) and all(each in _INCLUDED for each in value),
)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(is_whole(each) and each >= 0 for each in value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    several = isinstance(value, list) and 1 <= len(value) <= _MAX_COUNT
    return several and (all(isinstance(each, str) for each in value) or all(map(_is_ids, value)))


def only(*allowed: Any) -> Kind:
    """The kind of a field that may only ask for the server's own behaviour."""
    shown = " or ".join(json.dumps(each) for each in allowed)
    words = (
        f"{shown}, or leave it out: this server supports nothing else"
        if allowed
        else "null, or leave it out: this server does not support it"
    )
    return Kind(words, lambda value: any(type(value) is type(each) and value == each for each in allowed))


_COMMON = {
    "temperature": TEMPERATURE,
    "top_p": FRACTION,
    "stream": BOOL,
    # Hints, and names for the client's own use, change no answer.
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
    "service_tier": TEXT,  # the answer says that it is the default one
}
_SAMPLING = {
    "max_tokens": whole(1),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": OBJECT,
    "stop": TEXTS,
    "n": _COUNT,
    "seed": Kind("a whole number of 64 bits", is_whole),
    "stream_options": OBJECT,
    # These are not in OpenAI's API.
    "top_k": whole(0),
    "min_p": FRACTION,
    "repetition_penalty": FACTOR,
    "generation_config": Kind("an object of generate's options, as JSON text", lambda value: isinstance(value, str)),
}
_CHAT_FIELDS = {
    "chat_template_kwargs": OBJECT,
    "parallel_tool_calls": BOOL,
    "store": only(False),
    "tool_choice": _TEXT_OR_OBJECT,
    "tools": LIST,
    "top_logprobs": _TOP_LOGPROBS,
}
_FIELDS: dict[str, dict[str, Kind]] = {
    COMPLETIONS: {
        **_COMMON,
        **_SAMPLING,
        "prompt": Kind(f"text or token ids, or a list of up to {_MAX_COUNT} of either", _is_prompt),
        "max_tokens": whole(0),
        "suffix": only(""),
        "echo": BOOL,
        "best_of": _COUNT,
        "logprobs": _TOP_LOGPROBS,
    },
    CHAT: {
        **_COMMON,
        **_SAMPLING,
        **_CHAT_FIELDS,
        "messages": Kind("a list of messages, one at least", lambda value: isinstance(value, list) and value != []),
        "max_completion_tokens": whole(1),
        "logprobs": BOOL,
        "reasoning_effort": TEXT,
        "response_format": OBJECT,
        "metadata": OBJECT,
        "audio": only(),
        "function_call": only(),
        "functions": only(),
        "modalities": only(["text"]),
        "prediction": only(),
        "verbosity": only("medium"),
        "web_search_options": only(),
    },
    RESPONSES: {
        **_COMMON,
        **_CHAT_FIELDS,
        "input": Kind(
            "text, or a list of items, one at least", lambda value: isinstance(value, str | list) and value != []
        ),
        "instructions": TEXT,
        "max_output_tokens": whole(1),
        "metadata": OBJECT,  # part of the answer
        "client_metadata": OBJECT,  # hints of Codex, as those of _COMMON
        "access_programs": OBJECT,
        "include": _INCLUDE,
        "reasoning": OBJECT,
        "stream_options": OBJECT,
        "text": OBJECT,
        "background": only(False),
        "conversation": only(),
        "max_tool_calls": only(),
        "previous_response_id": only(),
        "prompt": only(),
        "truncation": only("auto", "disabled"),  # what is too long is refused
        "seed": _SAMPLING["seed"],
        "generation_config": _SAMPLING["generation_config"],
    },
}
# Arguments of apply_chat_template that are no variables of the template.
RESERVED_ARGUMENTS = (
    "conversation",
    "messages",  # what templates call the conversation
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenize",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "load_audio_from_video",
    # The processor's own, which may be addresses of files.
    "audio",
    "images",
    "processor_kwargs",
    "videos",
)


def checked_request(kind: str, body: Mapping[str, Any], served: str, vocabulary: int) -> dict[str, Any]:
    """Check the body of a request. Fields that are null are left out.

    ``kind``: CHAT, COMPLETIONS or RESPONSES. ``served``: name of the model. ``vocabulary``: number of the
    model's token ids.

    Raises RequestError for an invalid or unknown field, MissingFieldError for a missing prompt, and ModelNotFoundError
    for another model.
    """
    given = known_fields(body, _FIELDS[kind], (PROMPTS[kind],), served)
    if kind == CHAT:
        for index, message in enumerate(given["messages"]):
            _check_message(f"messages[{index}]", message, "messages")
        if given.get("top_logprobs") is not None and not given.get("logprobs"):
            raise RequestError("top_logprobs needs logprobs: true.", "top_logprobs")
        limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
        if len(set(limits.values())) > 1:
            both = " and ".join(f"{name} is {value}" for name, value in limits.items())
            raise RequestError(f"{both}: give one of them.", "max_completion_tokens")
    elif kind == RESPONSES:
        _check_input(given["input"])
    elif kind == COMPLETIONS:
        _check_completion(given, vocabulary)
    for index, tool in enumerate(given.get("tools", ())):
        check_tool = _check_response_tool if kind == RESPONSES else _check_tool
        check_tool(f"tools[{index}]", tool)
    options = given.get("stream_options", {})
    allowed = {"include_usage": BOOL, "include_obfuscation": only(False)}
    for name, value in options.items():
        if name not in allowed or (name == "include_usage" and kind == RESPONSES):
            raise RequestError(
                f"stream_options has {name!r}, which this server does not support: leave it out.", "stream_options"
            )
        if value is not None:
            check(f"stream_options.{name}", value, allowed[name], "stream_options")
    if options and not given.get("stream"):
        raise RequestError("stream_options is for streams: give stream: true, or leave it out.", "stream_options")
    _check_template_kwargs(given.get("chat_template_kwargs", {}))
    _check_generation_config(given.get("generation_config"), vocabulary)
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"], vocabulary)
    if "stop" in given:  # an empty text ends an answer with its first token
        stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        given["stop"] = [text for text in stops if text]
    return given


def _check_completion(given: Mapping[str, Any], vocabulary: int) -> None:
    prompt = given["prompt"]
    if prompt == "" or (isinstance(prompt, list) and "" in prompt):
        raise wrong("prompt", "prompt", "", "some text, or some token ids")
    ids = prompt if _is_ids(prompt) else [each for part in prompt for each in part] if _is_ids(prompt[0]) else []
    if too_large := [each for each in ids if each >= vocabulary]:
        raise wrong("prompt", "a token of prompt", too_large[0], f"token ids of the model, 0 to {vocabulary - 1}")
    if given.get("max_tokens") == 0 and not given.get("echo"):
        raise wrong("max_tokens", "max_tokens", 0, "1 or more, or echo: true, to score a prompt")
    if given.get("echo") and given.get("stream"):
        raise RequestError("echo is for answers that are not streamed: leave out stream.", "echo")
    best, several = given.get("best_of"), given.get("n", 1)
    if best is not None and (best < several or (best > several and given.get("stream"))):
        raise wrong("best_of", "best_of", best, f"n or more ({several}), and n in a stream")


def known_fields(
    body: Mapping[str, Any], fields: Mapping[str, Kind], needed: Sequence[str], served: str
) -> dict[str, Any]:
    """The given fields without ``model``, checked. Raises as ``checked_request``."""
    check_values(body)
    check_model(body.get("model"), served)
    given = {name: value for name, value in body.items() if value is not None and name != "model"}
    for name, value in given.items():
        if name not in fields:
            raise UnknownFieldError(f"This address has no field {name!r}: leave it out.", name)
        check(name, value, fields[name], name)
    for name in needed:
        if name not in given:
            raise MissingFieldError(f"{name} is missing: give {fields[name].words}.", name)
    return given


def check_model(model: Any, served: str) -> None:
    """Raises RequestError for an invalid name, ModelNotFoundError for another model; None is the served one."""
    if model is not None and not isinstance(model, str):
        raise wrong("model", "model", model, f"{served!r}, or leave it out")
    if model not in (None, served):
        raise ModelNotFoundError(
            f"There is no model {model!r}: this server has {served!r} and opens no other model.", "model"
        )


def check_values(body: Mapping[str, Any]) -> None:
    """Raises RequestError for text that is not valid Unicode, numbers that are not finite, and deep nesting.

    Python reads all of them from JSON, and the answer could not repeat them.
    """
    for field, content in body.items():
        left = [(content, 0)]
        while left:
            value, depth = left.pop()
            if depth > _MAX_DEPTH:
                raise RequestError(f"{field} has lists or objects nested more than {_MAX_DEPTH} deep.", field)
            if isinstance(value, dict):
                left += ((inner, depth + 1) for pair in value.items() for inner in pair)
            elif isinstance(value, list):
                left += ((inner, depth + 1) for inner in value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{field} has the number {value}, which is not JSON: give a finite one.", field)
            elif isinstance(value, str) and not _is_unicode(value):
                raise RequestError(
                    f"{field} has half of a surrogate pair, which is not text. Encode it as UTF-8.", field
                )


def _is_unicode(text: str) -> bool:
    """Whether ``text`` has no half of a surrogate pair. Pictures make it megabytes long."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "video_url", "audio_url")
_PARTS = (*_TEXT_PARTS, *_MEDIA_PARTS, "refusal", "input_audio")
_PART_FIELDS = {"type": ANY, "cache_control": ANY}
_DETAIL = {"detail": only("auto", "high", "original", "low")}


def _check_message(where: str, message: Any, field: str) -> None:
    check(where, message, OBJECT, field)
    check(f"{where}.role", message.get("role"), TEXT, field)
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise wrong(field, f"{where}.content", content, "text, or a list of parts")
    _check_content(f"{where}.content", content, field)
    for name in ("tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            check(f"{where}.{name}", message[name], TEXT, field)
    calls = message.get("tool_calls")
    if calls is None:
        return
    check(f"{where}.tool_calls", calls, LIST, field)
    for index, call in enumerate(calls):
        path = f"{where}.tool_calls[{index}]"
        check(path, call, OBJECT, field)
        check_names(path, call, ("id", "type", "index", "function", "name", "arguments"), field)
        if call.get("id") is not None:
            check(f"{path}.id", call["id"], TEXT, field)
        function = call.get("function") or call
        check(f"{path}.function", function, OBJECT, field)
        for name, kind in _CALL_FIELDS.items():
            check(f"{path}.function.{name}", function.get(name), kind, field)


def _check_content(where: str, content: Any, field: str) -> None:
    if content is None or isinstance(content, str):
        return
    check(where, content, Kind("text, or a list of parts", lambda value: isinstance(value, list)), field)
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        check(path, part, OBJECT, field)
        kind = part.get("type")
        check(f"{path}.type", kind, TEXT, field)
        if kind in _TEXT_PARTS:
            earlier = {"annotations": ANY, "logprobs": ANY} if kind == "output_text" else {}
            check_object(path, part, field, {"text": TEXT}, _PART_FIELDS | earlier)
        elif kind in _MEDIA_PARTS:
            name = "image_url" if kind == "input_image" else kind
            given = part.get(name)
            # Only pictures accept a bare URL.
            address = given.get("url") if isinstance(given, dict) else given if name == "image_url" else None
            check(f"{path}.{name}", address, _ADDRESS, field)
            check_object(path, part, field, {name: ANY}, _PART_FIELDS | _DETAIL)
            if isinstance(given, dict):
                check_object(f"{path}.{name}", given, field, {"url": TEXT}, _DETAIL)
            if "low" in (part.get("detail"), given.get("detail") if isinstance(given, dict) else None):
                leave_out("detail", "Pictures are processed in the model's own size, whatever their detail is.")
        elif kind == "refusal":
            check(f"{path}.refusal", part.get("refusal"), TEXT, field)
        elif kind == "input_audio":
            given = part.get("input_audio")
            data = given.get("data") if isinstance(given, dict) else given
            check(f"{path}.input_audio", data, _SOUND, field)
            check_object(path, part, field, {"input_audio": ANY}, _PART_FIELDS)
            if isinstance(given, dict):
                check_object(f"{path}.input_audio", given, field, {"data": TEXT}, {"format": ANY})
        else:
            raise wrong(field, f"{path}.type", kind, "text, image_url, video_url, audio_url or input_audio")


def _are_arguments(value: Any) -> bool:
    """Whether ``value`` is the arguments of a call. None and blank text stand for no arguments."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, dict)


_CALL_FIELDS = {"name": TEXT, "arguments": Kind("an object, as JSON text", _are_arguments)}
_ITEM_FIELDS = {"type": ANY, "id": ANY, "status": ANY}


def is_parts(content: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an input of the Responses API is the parts of one message, not a list of items."""
    return "role" not in content[0] and content[0].get("type") in _PARTS


def _check_input(content: Any) -> None:
    """The Responses API's input: text, the parts of one message, or messages and other items of earlier answers."""
    if isinstance(content, str):
        return
    for index, item in enumerate(content):
        check(f"input[{index}]", item, OBJECT, "input")
    if is_parts(content):
        _check_content("input", content, "input")
        return
    for index, item in enumerate(content):
        where, kind = f"input[{index}]", item.get("type")
        if kind == "reasoning":
            check_object(where, item, "input", {}, _ITEM_FIELDS | {"content": LIST})
            for part in item.get("content") or ():
                check(f"{where}.content", part, OBJECT, "input")
                check(f"{where}.content.text", part.get("text"), TEXT, "input")
        elif "role" in item:
            check_names(where, item, (*_ITEM_FIELDS, "role", "content"), "input")
            _check_message(where, item, "input")
        elif kind == "function_call":
            check_object(where, item, "input", {"call_id": TEXT, **_CALL_FIELDS}, _ITEM_FIELDS | {"namespace": TEXT})
        elif kind == "function_call_output":
            check_object(where, item, "input", {"call_id": TEXT}, _ITEM_FIELDS | {"output": ANY})
            _check_content(f"{where}.output", item.get("output"), "input")
        else:
            allowed = "a message, reasoning, function_call or function_call_output"
            raise wrong("input", f"{where}.type", kind, f"{allowed}; or parts of one message alone")


def _check_tool(where: str, tool: Any) -> None:
    check(where, tool, OBJECT, "tools")
    check(f"{where}.type", tool.get("type", "function"), only("function"), "tools")
    function = tool.get("function", tool)  # the Responses API has no inner level
    check(f"{where}.function", function, OBJECT, "tools")
    if function is not tool:
        check_names(where, tool, ("type", "function", "cache_control"), "tools")
    check(f"{where}.function.name", function.get("name"), FUNCTION, "tools")
    for name, kind in (("parameters", OBJECT), ("description", TEXT), ("strict", BOOL)):
        if (value := function.get(name)) is not None:
            check(f"{where}.function.{name}", value, kind, "tools")


def _check_response_tool(where: str, tool: Any) -> None:
    """A function, a namespace of functions, or a tool of another type, which is left out later."""
    check(where, tool, OBJECT, "tools")
    kind = tool.get("type", "function")
    check(f"{where}.type", kind, TEXT, "tools")
    if kind == "function":
        _check_tool(where, tool)
    elif kind == "namespace":
        check_object(where, tool, "tools", {"type": ANY, "name": NAME, "tools": LIST}, {"description": TEXT})
        for index, inner in enumerate(tool["tools"]):
            _check_tool(f"{where}.tools[{index}]", inner)


def leave_out_tools(kinds: Sequence[str], functions: Sequence[dict[str, Any]]) -> None:
    """Leave out tools of other ``kinds`` than functions, and ``defer_loading`` of ``functions``. Raises RequestError if
    there are no functions beside."""
    if kinds and not functions:
        raise RequestError(
            f"tools has only {', '.join(kinds)}, which this server does not run: give functions too.", "tools"
        )
    for kind in kinds:
        leave_out(f"tools ({kind})", "The model is offered functions only, and no tools of other types.")
    for function in functions:
        if function.pop("defer_loading", False):
            leave_out("tools.defer_loading", "The model is offered deferred tools like all others.")


def _check_template_kwargs(arguments: Mapping[str, Any]) -> None:
    for name in RESERVED_ARGUMENTS:
        if name in arguments:
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which the server sets: give variables of the chat template only.",
                "chat_template_kwargs",
            )


def _check_generation_config(text: str | None, vocabulary: int) -> None:
    if text is None:
        return
    from transformers import GenerationConfig

    try:
        options = json.loads(text)
        check("generation_config", options, OBJECT, "generation_config")
        check_names("generation_config", options, vars(GenerationConfig()), "generation_config")
        check_options(options)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            if any(token >= vocabulary for token in options.get(name) or ()):
                raise OptionError(
                    name, f"{name} is {options[name]!r}: give token ids of the model, 0 to {vocabulary - 1}."
                )
        GenerationConfig(**options)
    except RequestError:
        raise
    except OptionError as error:
        raise RequestError(str(error), error.name) from error
    except Exception as error:  # the type depends on the option
        raise RequestError(
            f"generation_config is invalid: {error}. Give an object of generate's options, as JSON text.",
            "generation_config",
        ) from error


def _logit_bias(given: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        # The length first: int refuses text of thousands of digits.
        if not token.isdecimal() or len(token) > len(str(vocabulary)) or int(token) >= vocabulary:
            raise wrong("logit_bias", "a key of logit_bias", token, f"token ids of the model, 0 to {vocabulary - 1}")
        if not is_number(bias) or abs(bias) > 100:
            raise wrong("logit_bias", f"logit_bias[{token!r}]", bias, "a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def check(where: str, value: Any, kind: Kind, field: str) -> None:
    """Raises RequestError for a value of the wrong kind, with its path within ``field``."""
    if not kind.fits(value):
        raise wrong(field, where, value, kind.words)


def check_object(
    where: str, value: Any, field: str, needed: Mapping[str, Kind], optional: Mapping[str, Kind] = {}
) -> None:
    """Raises RequestError unless ``value`` is an object with all ``needed`` fields, and no others but ``optional``."""
    check(where, value, OBJECT, field)
    check_names(where, value, needed.keys() | optional.keys(), field)
    for name, kind in {**needed, **optional}.items():
        if name in needed or value.get(name) is not None:
            check(f"{where}.{name}", value.get(name), kind, field)


def check_names(where: str, value: Mapping[str, Any], known: Collection[str], field: str) -> None:
    """Raises UnknownFieldError for a name in ``value`` that is not ``known``, unless it is null or an empty list."""
    for name, given in value.items():
        if name not in known and given is not None and given != []:
            raise UnknownFieldError(f"{where} has {name!r}, which this server does not support: leave it out.", field)


def wrong(field: str, where: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{where} is {reprlib.repr(value)}: give {allowed}.", field)
