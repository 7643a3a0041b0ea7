"""Parse tool calls and reasoning in a model's answer, in the format of each family.

A family is recognized by its chat template, which shows the model how to write a call. A new format is an entry of
``FORMATS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mesh.serving.text import first_mark, split_held


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


Piece = Content | Reasoning | Call


class NotACallError(ValueError):
    """The text between the marks of a call is not a call."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        hints: texts that all occur in a chat template of the family.
        begin, end: marks around one call, or around a list of calls.
        read: parses what is between them, given the parameters' JSON schemas by tool. Raises NotACallError.
        before, between, after: text before a call's name, between name and arguments, and after them. Grammars that
            force a call use it.
        header, footer: text around calls, which is not content.
        as_json: the arguments are one JSON object.
        parameter: text before the name of an argument, between name and value, and after the value.
        quotes: special tokens around strings of the arguments.
        shows_ids: the template shows earlier calls by their ids, which are ``functions.NAME:N``, without names.
    """

    hints: tuple[str, ...]
    begin: str
    end: str
    read: Callable[[str, Mapping[str, Any]], list[Call]]
    before: str
    between: str
    after: str
    header: str = ""
    footer: str = ""
    as_json: bool = True
    parameter: tuple[str, str, str] | None = None
    quotes: tuple[str, ...] = ()
    shows_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that are part of calls."""
        inner = re.findall(r"<[|\uff5c][^<>]*[|\uff5c]>", self.before + self.between)
        return (*filter(None, (self.begin, self.end, self.header, self.footer)), *inner, *self.quotes)


def _read_json(text: str, _: Mapping[str, Any]) -> list[Call]:
    """``{"name": ..., "arguments": {...}}``, or a list of them."""
    found = _json(text)
    calls = found if isinstance(found, list) else [found]
    return [_call(each) for each in calls]


def _call(found: Any) -> Call:
    found = found.get("function", found) if isinstance(found, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    if found is None or not isinstance(name, str):
        raise NotACallError("a call without a name")
    given = found.get("arguments", found.get("parameters"))
    return Call(name, _arguments(given))


def _arguments(given: Any) -> str:
    if isinstance(given, str):
        given = _json(given) if given.strip() else {}
    if not isinstance(given, dict):
        raise NotACallError("arguments that are no JSON object")
    return json.dumps(given, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return _loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACallError(str(error)) from error


def _loads(text: str) -> Any:
    """``json.loads`` that also raises ValueError for what no answer can contain: NaN, infinity, lone surrogates."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


def _reader(pattern: str) -> Callable[[str, Mapping[str, Any]], list[Call]]:
    """Read a name and JSON arguments, the groups of ``pattern``."""
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str, _: Mapping[str, Any]) -> list[Call]:
        found = compiled.fullmatch(text.strip())
        if found is None:
            raise NotACallError("no name, or no arguments")
        return [Call(found["name"].strip(), _arguments(found["arguments"]))]

    return read


def _tag_reader(name: str, parameter: str) -> Callable[[str, Mapping[str, Any]], list[Call]]:
    """Read a name, and parameters between tags, with the types of the tool's schema."""
    names, parameters = re.compile(name, re.DOTALL), re.compile(parameter, re.DOTALL)

    def read(text: str, schemas: Mapping[str, Any]) -> list[Call]:
        calls = []
        for call in names.finditer(text):
            schema = schemas.get(call["name"].strip()) or {}
            properties = schema.get("properties") if isinstance(schema, dict) else None
            known = properties if isinstance(properties, dict) else {}
            given = {
                each["key"].strip(): _typed(each["value"], resolved(known.get(each["key"].strip()), schema))
                for each in parameters.finditer(call["body"])
            }
            calls.append(Call(call["name"].strip(), json.dumps(given, ensure_ascii=False)))
        if not calls:
            raise NotACallError("no name")
        return calls

    return read


_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}


def _typed(text: str, schema: Any) -> Any:
    """``text`` as JSON; as it is where it is no JSON, or where the schema allows strings and not what it is as JSON."""
    types = json_types(schema)
    try:
        found = _loads(text)
    except (ValueError, RecursionError):
        return text
    if "string" not in types or None in types:
        return found
    made = _TYPES.get(type(found), "number")
    allowed = {"integer", "number"} if made == "integer" else {made}
    return found if made != "string" and allowed & types else text


def json_types(schema: Any) -> set[str | None]:
    """The types that a JSON schema allows. None among them: any type."""
    if not isinstance(schema, dict):
        return {None}
    if isinstance(named := schema.get("type"), str):
        return {named}
    listed = {name: found for name, found in schema.items() if isinstance(found, list)}
    if "type" in listed:
        return {each for each in listed["type"] if isinstance(each, str)}
    if branches := listed.get("anyOf") or listed.get("oneOf"):
        return set().union(*map(json_types, branches))
    values = [schema["const"]] if "const" in schema else listed.get("enum", [])
    return {_TYPES.get(type(value), "number") for value in values} or {None}


def resolved(schema: Any, root: Any) -> Any:
    """``schema`` with what it and its branches refer to in the definitions of ``root``, one level deep."""
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        found = root
        for name in reference.split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        return {**found, **rest} if isinstance(found, dict) else schema
    branches = {name: schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)}
    return {**schema, **{name: [resolved(each, root) for each in found] for name, found in branches.items()}}


_BARE_KEY = re.compile(r"(?<=[{,])\s*(?P<key>[A-Za-z_]\w*)\s*:")
_QUOTE = '<|"|>'


def _read_gemma(text: str, _: Mapping[str, Any]) -> list[Call]:
    """``call:NAME{key:<|"|>text<|"|>,other:3}``."""
    found = re.fullmatch(r"\s*call:(?P<name>[^{]+)(?P<arguments>\{.*\})\s*", text, re.DOTALL)
    if found is None:
        raise NotACallError("no name, or no arguments")
    parts = found["arguments"].split(_QUOTE)  # every second one is a string
    parts[::2] = [_BARE_KEY.sub(r'"\g<key>":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [Call(found["name"].strip(), _arguments("".join(parts)))]


_ARGUMENTS = '", "arguments": '
_QWEN = ToolFormat(("<tool_call>",), "<tool_call>", "</tool_call>", _read_json, '\n{"name": "', _ARGUMENTS, "}\n")
_GPT_OSS = ToolFormat(  # whose channels _ChannelParser reads
    ("<|channel|>", "commentary"),
    "<|channel|>",
    "<|call|>",
    _reader(r".*?to=functions\.(?P<name>[^\s<]+).*?<\|message\|>(?P<arguments>.*)"),
    "commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
)
# The first whose hints are in the chat template.
FORMATS = (
    ToolFormat(  # Kimi K2
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _reader(r"(?:functions\.)?(?P<name>[^:]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)"),
        "functions.",
        ":0<|tool_call_argument_begin|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        shows_ids=True,
    ),
    ToolFormat(  # DeepSeek V3 and R1
        ("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"),
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        _reader(r"function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n?```"),
        "function<\uff5ctool\u2581sep\uff5c>",
        "\n```json\n",
        "\n```",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    ToolFormat(  # DeepSeek V3.1
        ("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        _reader(r"(?P<name>.+?)<\uff5ctool\u2581sep\uff5c>(?P<arguments>.*)"),
        "",
        "<\uff5ctool\u2581sep\uff5c>",
        "",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    ToolFormat(  # GLM 4.5 and later
        ("<tool_call>", "<arg_key>"),
        "<tool_call>",
        "</tool_call>",
        _tag_reader(
            r"(?P<name>[^<\n]+)(?P<body>.*)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        "",
        "\n",
        "",
        as_json=False,
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat(  # Qwen3-Coder, Qwen3.5, Nemotron-H
        ("<tool_call>", "<function="),
        "<tool_call>",
        "</tool_call>",
        _tag_reader(
            r"<function=(?P<name>[^>]+)>(?P<body>.*?)(?:</function>|$)",
            r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
        "\n<function=",
        ">\n",
        "</function>\n",
        as_json=False,
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    ToolFormat(  # MiniMax M2
        ("<minimax:tool_call>", "<invoke name="),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _tag_reader(
            r'<invoke name="(?P<name>[^"]+)">(?P<body>.*?)</invoke>',
            r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
        ),
        '\n<invoke name="',
        '">\n',
        "</invoke>\n",
        as_json=False,
        parameter=('<parameter name="', '">', "</parameter>\n"),
    ),
    ToolFormat(  # Gemma 4
        ("<|tool_call>", "call:"),
        "<|tool_call>",
        "<tool_call|>",
        _read_gemma,
        "call:",
        "",
        "",
        as_json=False,
        quotes=(_QUOTE,),
    ),
    _QWEN,
    ToolFormat(("<tool_calls>",), "<tool_calls>", "</tool_calls>", _read_json, '[{"name": "', _ARGUMENTS, "}]"),
    ToolFormat(("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", _read_json, '[{"name": "', _ARGUMENTS, "}]"),
    _GPT_OSS,
)
# Families whose checkpoints may have no chat template that shows the format.
_BY_MODEL = {"qwen2_moe": _QWEN, "qwen3_moe": _QWEN, "qwen3_next": _QWEN}

# Marks around reasoning.
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))
_CHANNEL_TOKENS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes tool calls, if it supports them, and reasoning. ``channels``: into channels, as gpt-oss."""

    tools: ToolFormat | None = None
    thinking: tuple[str, str] | None = None
    channels: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the model may reason."""
        return self.thinking is not None or self.channels

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that must be decoded."""
        calls = self.tools.marks if self.tools else ()
        return frozenset((*calls, *(self.thinking or ()), *(_CHANNEL_TOKENS if self.channels else ())))


def answer_format(template: str | None, model_type: str) -> AnswerFormat:
    """Find the format by the chat template, or else by the model's type."""
    text = template or ""
    tools = next((each for each in FORMATS if all(hint in text for hint in each.hints)), None)
    thinking = next((pair for pair in _THINKING if pair[1] in text), None)
    channels = "<|channel|>" in text and "<|message|>" in text
    return AnswerFormat(tools or _BY_MODEL.get(model_type), thinking, channels)


def parser_of(
    format: AnswerFormat, schemas: Mapping[str, Any] | None, prompt_end: str, continues: bool = False
) -> Parser | _ChannelParser:
    """Return an object that divides an answer into content, reasoning and calls while it is generated.

    Args:
        schemas: the parameters' JSON schema by tool. None: calls are content, except in channels.
        prompt_end: the end of the prompt, which may have begun the reasoning.
        continues: the prompt has begun the content.
    """
    return _ChannelParser(continues) if format.channels else Parser(format, schemas, prompt_end)


@dataclass
class Parser:
    """Finds calls and reasoning by the marks around them; see ``parser_of``."""

    format: AnswerFormat
    schemas: Mapping[str, Any] | None
    prompt_end: str
    _state: str = field(default="content", init=False)
    _text: str = field(default="", init=False)
    _blank: str = field(default="", init=False)  # held back: white space before a mark is not content
    _begun: bool = field(default=False, init=False)  # there was text since the last mark

    def __post_init__(self) -> None:
        thinking = self.format.thinking
        if thinking and self.prompt_end.rstrip().endswith(thinking[0].rstrip()):
            self._state = "reasoning"
        self._begun = self._state == "content"

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def end(self) -> list[Piece]:
        """The remaining pieces. An incomplete call is content."""
        text, self._text = self._text, ""
        if self._state == "call" and self.format.tools is not None:
            return [Content(self._blank + self.format.tools.begin + text)]
        kind = Reasoning if self.is_reasoning else Content
        text = self._blank + text if self._begun else text
        return [kind(text)] if text and (self._state == "content" or text.strip()) else []

    def _pieces(self) -> Iterator[Piece]:
        while found := first_mark(self._text, self._marks()):
            position, mark = found
            before, self._text = self._text[:position], self._text[position + len(mark) :]
            if self._state == "call":
                yield from self._call(before)
                continue
            yield from self._text_pieces(before)
            self._blank, self._begun = "", False
            tools, thinking = self.format.tools, self.format.thinking
            if tools is not None and mark == tools.begin:
                self._state = "call"
            elif thinking is not None and mark in thinking:
                self._state = "reasoning" if mark == thinking[0] else "content"
        if self._state != "call":
            ready, self._text = split_held(self._text, self._marks())
            yield from self._text_pieces(ready)

    def _marks(self) -> Sequence[str]:
        """The marks that end the current state."""
        tools, thinking = self.format.tools if self.schemas is not None else None, self.format.thinking
        if self._state == "call":
            return (tools.end,) if tools is not None else ()
        if self.is_reasoning:
            return (thinking[1],) if thinking is not None else ()
        found = (thinking[0],) if thinking is not None else ()
        return (*found, *filter(None, (tools.begin, tools.header, tools.footer))) if tools is not None else found

    def _text_pieces(self, text: str) -> Iterator[Piece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        if not self._marks():
            if text:
                yield Content(text)
            return
        stripped = (self._blank + text).rstrip()
        self._blank = (self._blank + text)[len(stripped) :]
        if stripped:
            yield Reasoning(stripped) if self.is_reasoning else Content(stripped)

    def _call(self, text: str) -> Iterator[Piece]:
        tools = self.format.tools
        assert tools is not None
        self._state = "content"
        try:
            yield from tools.read(text, self.schemas or {})
        except NotACallError:
            self._begun = True
            yield Content(tools.begin + text + tools.end)


class _ChannelParser:
    """gpt-oss's messages: ``<|start|>ROLE<|channel|>NAME<|message|>TEXT``, and then ``<|end|>``, ``<|call|>`` or
    ``<|return|>``. A call's recipient is after the role or after the channel's name."""

    def __init__(self, continues: bool) -> None:
        self._state = "content" if continues else "between"  # where a prompt ends
        self._text = self._header = ""

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def end(self) -> list[Piece]:
        """The remaining pieces. An incomplete call is content."""
        text, self._text = self._text, ""
        return [] if self._state == "between" else list(self._message(text))

    def _pieces(self) -> Iterator[Piece]:
        # The beginning of the next message ends one whose own end is missing.
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
        while True:
            if self._state == "between":
                before, found, rest = self._text.partition("<|channel|>")
                name, complete, body = rest.partition("<|message|>")
                if not found or not complete:
                    return
                self._text, self._header = body, before.rpartition("<|start|>")[2] + found + name
                is_call = "to=functions." in self._header
                self._state = "call" if is_call else "reasoning" if "analysis" in name else "content"
            end = first_mark(self._text, ends)
            if end is None:
                break
            body, self._text = self._text[: end[0]], self._text[end[0] :]
            yield from self._message(body)
            self._state = "between"
        if self._state != "call":
            ready, self._text = split_held(self._text, ends)
            yield from self._message(ready)

    def _message(self, body: str) -> Iterator[Piece]:
        if self._state != "call":
            if body:
                yield Reasoning(body) if self._state == "reasoning" else Content(body)
            return
        try:
            yield from _GPT_OSS.read(f"{self._header}<|message|>{body}", {})
        except NotACallError:
            yield Content(body)
