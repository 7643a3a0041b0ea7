"""Tool calls in answers: what JSON and UTF-8 cannot write is no call, so that every answer can be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_mesh.serving.answer_parser import Content, Piece, Reasoning, parser_of
from torch_mesh.serving.tool_formats import AnswerFormat, Call, answer_format

BY_JSON = answer_format("<tool_call>", "")
BY_CHANNELS = answer_format("<|channel|>commentary<|message|>", "")
BY_TAGS = answer_format("<tool_call> <function=", "")
NOT_JSON = ("NaN", "-Infinity", "1e999", r'"\ud83d"', "[NaN]", "9" * 5000)


def _read(
    format: AnswerFormat, text: str, continues: bool = False, schemas: dict[str, Any] | None = None
) -> list[Piece]:
    parser = parser_of(format, schemas or {}, "", continues)
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


@pytest.mark.parametrize("schema", [None, 1, {}, {"properties": 1}, {"properties": {"a": 1}}])
def test_a_parameter_without_a_schema_is_json(schema: Any) -> None:
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert _read(BY_TAGS, text, schemas={"f": schema}) == [Call("f", '{"a": 1}')]


def test_numbers_and_characters_of_json_are_arguments() -> None:
    value = r'{"a": [1e308, -0.5], "b": "\ud83d\ude00"}'
    (call,) = _read(BY_JSON, f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>')
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": [1e308, -0.5], "b": "\N{GRINNING FACE}"}


def test_an_answer_in_channels_goes_on_where_the_prompt_has_begun_it() -> None:
    assert _read(BY_CHANNELS, " world<|return|>", continues=True) == [Content(" world")]
    more = " world<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    assert _read(BY_CHANNELS, more, continues=True) == [Content(" world"), Reasoning("Hm")]
    forced = "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    assert _read(BY_CHANNELS, forced, continues=True) == [Call("f", "{}")]
    assert _read(BY_CHANNELS, " world<|return|>") == []  # between messages


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json",  # as the chat template shows earlier calls
        "<|channel|>analysis to=functions.f code",
        "<|channel|>commentary to=functions.f<|constrain|>json",
    ],
)
def test_calls_in_channels(header: str) -> None:
    call = f'{header}<|message|>{{"a": "to=functions.g"}}<|call|>'
    expected = Call("f", '{"a": "to=functions.g"}')
    assert _read(BY_CHANNELS, call) == [expected]
    text = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{call}"
    assert _read(BY_CHANNELS, text) == [Reasoning("Hm"), expected]
    parser = parser_of(BY_CHANNELS, {}, "")
    pieces = [piece for character in text for piece in parser.push(character)]
    assert [*pieces, *parser.end()] == [Reasoning("H"), Reasoning("m"), expected]


def test_a_message_whose_end_is_missing_ends_with_the_next() -> None:
    final = "<|channel|>final<|message|>Hi<|return|>"
    for mark in ("<|start|>assistant", ""):
        text = f"<|channel|>analysis<|message|>Hm{mark}{final}"
        assert _read(BY_CHANNELS, text) == [Reasoning("Hm"), Content("Hi")]
        parser = parser_of(BY_CHANNELS, {}, "")
        pieces = [piece for character in text for piece in parser.push(character)]
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "Hi"


def test_a_header_without_a_channel_names_no_call_of_the_next() -> None:
    text = "<|start|>assistant<|message|>to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    assert _read(BY_CHANNELS, text) == [Content("Hi")]


STRING, NULL, WHOLE = {"type": "string"}, {"type": "null"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        *((each, "text") for each in (STRING, {"anyOf": [STRING]}, {"enum": ["a", "1"]}, {"const": "1"})),
        ({"type": ["string", "null"]}, "text or null"),
        ({"anyOf": [STRING, NULL]}, "text or null"),
        ({"oneOf": [{"anyOf": [STRING, {"enum": ["x"]}]}, NULL]}, "text or null"),
        ({"enum": ["a", None]}, "text or null"),
        ({"anyOf": [STRING, WHOLE]}, "text or whole"),
        ({"anyOf": [{"type": "number"}, {"const": "x"}]}, "text or whole"),
        ({"anyOf": [STRING, {"$ref": "#/$defs/a"}]}, "JSON"),
        ({"enum": ["a", {}, 1, None, True]}, "JSON"),
        *((each, "JSON") for each in ({}, None, {"type": "object", "enum": ["a"]}, {"anyOf": 1}, {"type": {}})),
    ],
)
def test_a_parameter_has_a_type_that_its_schema_allows(schema: Any, expected: str) -> None:
    schemas = {"f": {"type": "object", "properties": {"a": schema}}}
    kept = {"text": set(), "text or null": {"null"}, "text or whole": {"123"}}
    for value in ("123", "null", '{"a": 1}', "true", "plain"):
        text = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
        (call,) = _read(BY_TAGS, text, schemas=schemas)
        as_json = value != "plain" and value in kept.get(expected, {value})
        wanted = json.loads(value) if as_json else value
        assert isinstance(call, Call) and json.loads(call.arguments) == {"a": wanted}, value


# A value that contains the marks by which its family ends a call.
MARKED: dict[str, tuple[AnswerFormat, str, str]] = {
    "JSON": (
        BY_JSON,
        '<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>',
        '"</tool_call> \\" </tool_call>',
    ),
    "lists of JSON": (
        answer_format("<TOOLCALL>", ""),
        '<TOOLCALL>[{"name": "f", "arguments": {"a": %s}}]</TOOLCALL>',
        "</TOOLCALL>",
    ),
    "Coder": (
        BY_TAGS,
        "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
        "<function=g></function> </tool_call>\n</function>",
    ),
    "GLM": (
        answer_format("<tool_call> <arg_key>", ""),
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "<tool_call>g</tool_call>",
    ),
    "MiniMax": (
        answer_format("<minimax:tool_call> <invoke name=", ""),
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">%s</parameter>\n</invoke>\n</minimax:tool_call>',
        'x </invoke> </minimax:tool_call> <invoke name="g">',
    ),
    "Gemma": (
        answer_format("<|tool_call> call:", ""),
        '<|tool_call>call:f{a:<|"|>%s<|"|>}<tool_call|>',
        "{b:1} <tool_call|>",
    ),
}


@pytest.mark.parametrize("family", MARKED)
def test_a_value_may_contain_the_marks_of_calls(family: str) -> None:
    format, call, value = MARKED[family]
    text = call % (json.dumps(value) if "JSON" in family else value)
    expected = [
        Content("Look:"),
        Call("f", json.dumps({"a": value})),
        Content("end"),
        Call("f", json.dumps({"a": value})),
    ]
    together = f"Look: {text} end {text}"
    assert _read(format, together) == expected
    parser = parser_of(format, {}, "")
    assert _joined([piece for character in together for piece in parser.push(character)] + parser.end()) == expected


def _joined(pieces: list[Piece]) -> list[Piece]:
    """``pieces`` with texts that follow each other as one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and isinstance(piece, Content) and isinstance(last := joined[-1], Content):
            joined[-1] = Content(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize("family", MARKED)
def test_a_value_without_an_end_does_not_hide_later_calls(family: str) -> None:
    format, call, _ = MARKED[family]
    value = "1" if "JSON" not in family else '"1"'
    whole = call % value
    assert format.tools is not None
    cut = whole.replace("</parameter>", "").replace("</arg_value>", "").replace('"}', "}").replace('1<|"|>', "1")
    assert cut != whole
    (call_found,) = _read(format, whole)
    assert isinstance(call_found, Call)
    found = _joined(_read(format, f"{cut}{whole}"))
    assert found == [Content(cut), call_found]


def test_a_value_without_an_end_does_not_take_in_the_next_call_of_its_block() -> None:
    first, second = "<parameter=a>\n1\n", "<parameter=a>\n2\n</parameter>\n"
    block = f"<tool_call>\n<function=f>\n{first}</function>\n<function=g>\n{second}</function>\n</tool_call>"
    assert _read(BY_TAGS, block) == [Content(block)]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "string"}, "True", "True"),
        ({}, "None", "None"),
        ({"allOf": [{"type": "string"}]}, "12", "12"),
        ({"allOf": [{"minimum": 1}, {"type": ["integer", "string"]}, {"type": "integer"}]}, "12", 12),
        ({"$ref": "#/$defs/chain"}, "12", "12"),
        ({"$ref": "#/$defs/a~1b%20c"}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}, "12", "12"),
        ({"$ref": "#/$defs/loop"}, "12", 12),
    ],
)
def test_a_parameter_between_tags_is_typed_by_all_of_its_schema(schema: Any, text: str, value: Any) -> None:
    definitions = {
        "chain": {"$ref": "#/$defs/text"},
        "text": {"type": "string"},
        "a/b c": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
    }
    schemas = {"f": {"type": "object", "$defs": definitions, "properties": {"a": schema}}}
    call = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert _read(BY_TAGS, call, schemas=schemas) == [Call("f", json.dumps({"a": value}))]


@pytest.mark.parametrize("key", ["max-results", "2fa", "$filter", "a.b", "na\u00efve", "with blank"])
def test_keys_of_gemma_need_no_quotes(key: str) -> None:
    text = f'<|tool_call>call:f{{{key}:3, b:{{{key}:<|"|>x:1<|"|>}},c:[None,True]}}<tool_call|>'
    (call,) = _read(answer_format("<|tool_call> call:", ""), text)
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {key: 3, "b": {key: "x:1"}, "c": [None, True]}


@pytest.mark.parametrize("given", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'])
def test_a_call_without_arguments_has_none(given: str) -> None:
    assert _read(BY_JSON, f'<tool_call>{{"name": "f"{given}}}</tool_call>') == [Call("f", "{}")]


def test_a_name_of_kimi_may_have_colons() -> None:
    format = answer_format("<|tool_call_begin|> <|tool_call_argument_begin|>", "")
    text = "<|tool_call_begin|>functions.mcp:get:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert _read(format, text) == [Call("mcp:get", "{}")]


BROKEN = "<tool_call><function=f><parameter=a>\n1\n</function></tool_call>"
GOOD = "<tool_call><function=g><parameter=b>\n2\n</parameter></function></tool_call>"


def test_a_broken_call_and_prose_do_not_hide_a_good_call() -> None:
    text = f"{BROKEN}\nNow the next.\n{GOOD}"
    assert _joined(_read(BY_TAGS, text)) == [Content(f"{BROKEN}\nNow the next."), Call("g", '{"b": 2}')]
    broken = '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>'
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for prose in ('The 5" disk.', "The disk."):
        found = _joined(_read(BY_JSON, f"{broken}\n{prose}\n{good}"))
        assert found == [Content(f"{broken}\n{prose}"), Call("g", "{}")]


def test_a_parameter_without_an_end_does_not_take_in_the_next() -> None:
    text = "<tool_call><function=f><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function></tool_call>"
    assert _read(BY_TAGS, text) == [Content(text)]


def test_a_second_mark_after_a_value_changes_nothing() -> None:
    text = "<tool_call><function=f><parameter=a>\n1\n</parameter>\n</parameter></function></tool_call>"
    assert _read(BY_TAGS, text) == [Call("f", '{"a": 1}')]


class _Counted(str):
    """Counts the characters in which a mark is searched."""

    searched = 0

    def find(self, sub: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(sub, start, len(self) if end is None else end)
        _Counted.searched += (len(self) if found < 0 else found) - start
        return found


def test_marks_in_a_long_value_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's stream would wait for a search of the whole call at each token."""
    format, length = BY_TAGS, 20_000
    assert format.tools is not None
    followed = 0
    follow = type(format.tools).follow

    def count(self: Any, text: str, position: int, stop: int) -> tuple[bool, int]:
        nonlocal followed
        followed += stop - position
        return follow(self, text, position, stop)

    monkeypatch.setattr(type(format.tools), "follow", count)
    parser = parser_of(format, {}, "")
    pieces = parser.push("<tool_call><function=f><parameter=a>\n</tool_call>")
    for _ in range(length // 10):
        parser._text = _Counted(parser._text)  # type: ignore[union-attr]
        pieces += parser.push("some text ")
    pieces += parser.push("\n</parameter></function></tool_call>")
    (call,) = pieces
    assert isinstance(call, Call) and len(json.loads(call.arguments)["a"]) == length + len("</tool_call>")
    assert _Counted.searched < 10 * length and followed < 2 * length


@pytest.mark.parametrize("key", ['a">b', "a -> b", 'size (")', "a.b"])
def test_a_key_may_have_marks_that_do_not_end_it(key: str) -> None:
    value = "x</tool_call>y"
    glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    (call,) = _read(MARKED["GLM"][0], glm)
    assert isinstance(call, Call) and json.loads(call.arguments) == {key: value}
    if ">" not in key:
        coder = f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>"
        (call,) = _read(BY_TAGS, coder)
        assert isinstance(call, Call) and json.loads(call.arguments) == {key: value}


def test_a_value_does_not_take_in_a_parameter_without_a_name() -> None:
    text = "<tool_call><function=f><parameter=a>\n1\n<parameter=>\n2\n</parameter></function></tool_call>"
    assert _read(BY_TAGS, text) == [Content(text)]


def _text(pieces: list[Piece], kind: type) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind) and not isinstance(piece, Call))


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("tools", ["", "<tool_call>"])
@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("Write <think> before it. ", "Write <think> before it. ", ""),
        (" \n<think>Hm.</think>\nWrite <think>x</think>.", "Write <think>x</think>.", "Hm."),
        ("<think>Hm.</think>Yes.", "Yes.", "Hm."),
        ("<thin ice", "<thin ice", ""),
    ],
)
def test_reasoning_begins_before_any_content(text: str, content: str, reasoning: str, tools: str, step: int) -> None:
    parser = parser_of(answer_format(f"<think></think>{tools}", ""), {} if tools else None, "")
    pieces = [piece for start in range(0, len(text), step) for piece in parser.push(text[start : start + step])]
    pieces += parser.end()
    assert (_text(pieces, Content), _text(pieces, Reasoning)) == (content, reasoning)
    parser = parser_of(answer_format("<think></think>", ""), None, "", continues=True)
    assert _text([*parser.push("<think>a"), *parser.end()], Content) == "<think>a"


@pytest.mark.parametrize("step", [1, 100])
def test_reasoning_may_follow_a_call(step: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for between, content, reasoning in (("\n", "Sure.y", "x"), ("\nSo ", "Sure.So <think>x</think>y", "")):
        text = f"Sure.\n{call}{between}<think>x</think>y"
        parser = parser_of(answer_format("<think></think><tool_call>", ""), {"f": None}, "")
        pieces = [piece for start in range(0, len(text), step) for piece in parser.push(text[start : start + step])]
        pieces += parser.end()
        assert (_text(pieces, Content), _text(pieces, Reasoning)) == (content, reasoning)
        assert [piece for piece in pieces if isinstance(piece, Call)] == [Call("f", "{}")]


@pytest.mark.parametrize("step", [1, 100])
@pytest.mark.parametrize("rest", ["<tool_call>{", "<tool_call>none</tool_call>\nNo."])
def test_white_space_before_what_is_no_call_is_content(rest: str, step: int) -> None:
    parser, text = parser_of(BY_JSON, {}, ""), f"Look:\n\n{rest}"
    pieces = [piece for start in range(0, len(text), step) for piece in parser.push(text[start : start + step])]
    assert _text([*pieces, *parser.end()], Content) == text
