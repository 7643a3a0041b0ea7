"""Tool calls in answers: what JSON and UTF-8 cannot write is no call, so that every answer can be sent."""

from __future__ import annotations

import json

import pytest

from torch_mesh.serving.tool_calls import AnswerFormat, Call, Content, Piece, Reasoning, answer_format, parser_of

BY_JSON = answer_format("<tool_call>", "")
BY_CHANNELS = answer_format("<|channel|>commentary<|message|>", "")
BY_TAGS = answer_format("<tool_call> <function=", "")
NOT_JSON = ("NaN", "-Infinity", "1e999", r'"\ud83d"', "[NaN]", "9" * 5000)


def _read(format: AnswerFormat, text: str, continues: bool = False) -> list[Piece]:
    parser = parser_of(format, {}, "", continues)
    return [*parser.push(text), *parser.end()]


@pytest.mark.parametrize("value", NOT_JSON)
def test_arguments_that_json_cannot_write_are_content(value: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    assert _read(BY_JSON, text) == [Content(text)]


def test_a_name_that_utf8_cannot_write_is_content() -> None:
    text = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    assert _read(BY_JSON, text) == [Content(text)]


@pytest.mark.parametrize("value", NOT_JSON)
def test_a_parameter_that_json_cannot_write_is_text(value: str) -> None:
    (call,) = _read(BY_TAGS, f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>")
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": value}


def test_numbers_and_characters_of_json_are_arguments() -> None:
    value = r'{"a": [1e308, -0.5], "b": "\ud83d\ude00"}'
    (call,) = _read(BY_JSON, f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>')
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": [1e308, -0.5], "b": "\N{GRINNING FACE}"}


def test_an_answer_in_channels_goes_on_where_the_prompt_has_begun_it() -> None:
    assert _read(BY_CHANNELS, " world<|return|>", continues=True) == [Content(" world")]
    more = " world<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    assert _read(BY_CHANNELS, more, continues=True) == [Content(" world"), Reasoning("Hm")]
    forced = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    assert _read(BY_CHANNELS, forced, continues=True) == [Call("f", "{}")]
    assert _read(BY_CHANNELS, " world<|return|>") == []  # between messages
