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
from urllib.parse import unquote

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


def _values(begin: str, end: str) -> re.Pattern[str]:
    """See ``ToolFormat.values``."""
    return re.compile(rf"{begin}.*?{end}|(?P<open>{begin})", re.DOTALL)


_JSON_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<open>")', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
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
        values: matches a value, or as its group ``open`` the beginning of one. Marks within are not those of calls.
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
    values: re.Pattern[str] = _JSON_STRINGS
    parameter: tuple[str, str, str] | None = None
    quotes: tuple[str, ...] = ()
    shows_ids: bool = False

    def follow(self, text: str, position: int, stop: int) -> tuple[bool, int]:
        """Whether a value is open at ``stop``, if none is at ``position``, and where the last complete one ends."""
        for value in self.values.finditer(text, position, stop):
            if value["open"] is not None:
                return True, value.start()
            position = value.end()
        return False, position

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
    if given is None:
        given = {}
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


def _tag_reader(
    begin: str, end: str, parameter: str, after: str, broken: str
) -> Callable[[str, Mapping[str, Any]], list[Call]]:
    """Read calls whose parameters are between tags, with the types of the tool's schema.

    ``begin`` matches a call's beginning and its ``name``, ``parameter`` that of a parameter and its ``key``. ``end``
    and ``after`` end them; a value may contain ``end``. ``broken`` matches what a value contains if its own end is
    missing, so that it goes on to the end of the next one.
    """
    begins, parameters, takes_in_others = re.compile(begin), re.compile(parameter), re.compile(broken, re.DOTALL)
    on_lines = parameter.endswith(r"\n?")

    def read(text: str, schemas: Mapping[str, Any]) -> list[Call]:
        calls, position = [], 0
        while head := begins.search(text, position):
            name, position = head["name"].strip(), head.end()
            schema = schemas.get(name) or {}
            properties = schema.get("properties") if isinstance(schema, dict) else None
            known = properties if isinstance(properties, dict) else {}
            given: dict[str, Any] = {}
            stop = -1
            while True:
                if stop < position:
                    stop = found if (found := text.find(end, position)) >= 0 else len(text)
                opened = parameters.search(text, position, stop)
                between = text[position : opened.start() if opened else stop]
                if after in between and between.replace(after, "").strip():
                    raise NotACallError("the mark after a value is in the value")
                if opened is None:
                    break
                closed = text.find(after, opened.end())
                value = text[opened.end() : closed].removesuffix("\n" if on_lines else "")
                if closed < 0 or takes_in_others.search(value):
                    raise NotACallError("a parameter without an end")
                key, position = opened["key"].strip(), closed + len(after)
                given[key] = _typed(value, resolved(known.get(key), schema))
            position = stop + len(end)
            calls.append(Call(name, json.dumps(given, ensure_ascii=False)))
        if not calls:
            raise NotACallError("no name")
        return calls

    return read


_PYTHON = {"True": True, "False": False, "None": None}  # templates of Qwen show these for earlier calls
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}


def _typed(text: str, schema: Any) -> Any:
    """``text`` as JSON; as it is where it is no JSON, or where the schema allows strings and not what it is as JSON."""
    types = json_types(schema)
    try:
        found = _loads(text)
    except (ValueError, RecursionError):
        return text if {"string", None} & types else _PYTHON.get(text.strip(), text)
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
    if every := [types for types in map(json_types, listed.get("allOf", ())) if None not in types]:
        return set.intersection(*every)
    values = [schema["const"]] if "const" in schema else listed.get("enum", [])
    return {_TYPES.get(type(value), "number") for value in values} or {None}


def resolved(schema: Any, root: Any) -> Any:
    """``schema`` with what it and its branches refer to in the definitions of ``root``."""
    schema = _followed(schema, root)
    if not isinstance(schema, dict):
        return schema
    branches = {name: schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)}
    return {**schema, **{name: [_followed(each, root) for each in found] for name, found in branches.items()}}


def _followed(schema: Any, root: Any) -> Any:
    """``schema`` with what it refers to in place of the reference, also through other references."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        found = root
        for name in reference.split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


_MAX_REFERENCES = 16  # a definition may refer to itself
_BARE_KEY = re.compile(r'(?<=[{,])\s*(?P<key>[^\s"{}\[\],:](?:[^"{}\[\],:]*[^\s"{}\[\],:])?)\s*:')
_BARE_PYTHON = re.compile(r"(?<=[:,\[])\s*(?P<value>True|False|None)\s*(?=[,}\]])")
_QUOTE = '<|"|>'


def _read_gemma(text: str, _: Mapping[str, Any]) -> list[Call]:
    """``call:NAME{key:<|"|>text<|"|>,other:3}``."""
    found = re.fullmatch(r"\s*call:(?P<name>[^{]+)(?P<arguments>\{.*\})\s*", text, re.DOTALL)
    if found is None:
        raise NotACallError("no name, or no arguments")
    parts = found["arguments"].split(_QUOTE)  # every second one is a string
    parts[::2] = [_BARE_KEY.sub(lambda found: json.dumps(found["key"]) + ":", part) for part in parts[::2]]
    parts[::2] = [_BARE_PYTHON.sub(lambda found: json.dumps(_PYTHON[found["value"]]), part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [Call(found["name"].strip(), _arguments("".join(parts)))]


_ARGUMENTS = '", "arguments": '
_QWEN = ToolFormat(
    hints=("<tool_call>",),
    begin="<tool_call>",
    end="</tool_call>",
    read=_read_json,
    before='\n{"name": "',
    between=_ARGUMENTS,
    after="}\n",
)
_GPT_OSS = ToolFormat(  # whose channels _ChannelParser reads
    hints=("<|channel|>", "commentary"),
    begin="<|channel|>",
    end="<|call|>",
    read=_reader(r".*?to=functions\.(?P<name>[^\s<]+).*?<\|message\|>(?P<arguments>.*)"),
    before="commentary to=functions.",
    between=" <|constrain|>json<|message|>",
    after="",
)
# The first whose hints are in the chat template.
FORMATS = (
    ToolFormat(  # Kimi K2
        hints=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        read=_reader(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)"),
        before="functions.",
        between=":0<|tool_call_argument_begin|>",
        after="",
        header="<|tool_calls_section_begin|>",
        footer="<|tool_calls_section_end|>",
        shows_ids=True,
    ),
    ToolFormat(  # DeepSeek V3 and R1
        hints=("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"),
        begin="<\uff5ctool\u2581call\u2581begin\uff5c>",
        end="<\uff5ctool\u2581call\u2581end\uff5c>",
        read=_reader(r"function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n?```"),
        before="function<\uff5ctool\u2581sep\uff5c>",
        between="\n```json\n",
        after="\n```",
        header="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        footer="<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    ToolFormat(  # DeepSeek V3.1
        hints=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        begin="<\uff5ctool\u2581call\u2581begin\uff5c>",
        end="<\uff5ctool\u2581call\u2581end\uff5c>",
        read=_reader(r"(?P<name>.+?)<\uff5ctool\u2581sep\uff5c>(?P<arguments>.*)"),
        before="",
        between="<\uff5ctool\u2581sep\uff5c>",
        after="",
        header="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        footer="<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    ToolFormat(  # GLM 4.5 and later
        hints=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        end="</tool_call>",
        read=_tag_reader(
            r"(?P<name>[^<\n]+)",
            "</tool_call>",
            r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
            "</arg_value>",
            r"</tool_call>.*<tool_call>|<arg_key>[^<]*</arg_key>\s*<arg_value>",
        ),
        values=_values("<arg_value>", "</arg_value>"),
        before="",
        between="\n",
        after="",
        as_json=False,
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat(  # Qwen3-Coder, Qwen3.5, Nemotron-H
        hints=("<tool_call>", "<function="),
        begin="<tool_call>",
        end="</tool_call>",
        read=_tag_reader(
            r"<function=(?P<name>[^<>\n]+)>",
            "</function>",
            r"<parameter=(?P<key>[^<>\n]+)>\n?",
            "</parameter>",
            r"</tool_call>.*<tool_call>|</function>\s*<function=|\n\s*<parameter=",
        ),
        values=_values("<parameter=[^<>\\n]+>", "</parameter>"),
        before="\n<function=",
        between=">\n",
        after="</function>\n",
        as_json=False,
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    ToolFormat(  # MiniMax M2
        hints=("<minimax:tool_call>", "<invoke name="),
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        read=_tag_reader(
            r'<invoke name="(?P<name>[^<>"\n]+)">',
            "</invoke>",
            r'<parameter name="(?P<key>[^<>"\n]+)">',
            "</parameter>",
            r'</minimax:tool_call>.*<minimax:tool_call>|</invoke>\s*<invoke |\n\s*<parameter name="',
        ),
        values=_values('<parameter name="[^<>"\\n]+">', "</parameter>"),
        before='\n<invoke name="',
        between='">\n',
        after="</invoke>\n",
        as_json=False,
        parameter=('<parameter name="', '">', "</parameter>\n"),
    ),
    ToolFormat(  # Gemma 4
        hints=("<|tool_call>", "call:"),
        begin="<|tool_call>",
        end="<tool_call|>",
        read=_read_gemma,
        before="call:",
        between="",
        after="",
        as_json=False,
        values=_values(re.escape(_QUOTE), re.escape(_QUOTE)),
        quotes=(_QUOTE,),
    ),
    _QWEN,
    ToolFormat(
        hints=("<tool_calls>",),
        begin="<tool_calls>",
        end="</tool_calls>",
        read=_read_json,
        before='[{"name": "',
        between=_ARGUMENTS,
        after="}]",
    ),
    ToolFormat(
        hints=("<TOOLCALL>",),
        begin="<TOOLCALL>",
        end="</TOOLCALL>",
        read=_read_json,
        before='[{"name": "',
        between=_ARGUMENTS,
        after="}]",
    ),
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


class _Reader:
    """Text that comes in parts, and the state of what it is."""

    _state: str
    _text: str  # that is not divided yet

    @property
    def is_content(self) -> bool:
        return self._state == "content"

    @property
    def holds_text(self) -> bool:
        """Whether the end of the text so far may be the beginning of a mark."""
        return bool(self._text)

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        raise NotImplementedError


@dataclass
class Parser(_Reader):
    """Finds calls and reasoning by the marks around them; see ``parser_of``."""

    format: AnswerFormat
    schemas: Mapping[str, Any] | None
    prompt_end: str
    _state: str = field(default="content", init=False)
    _text: str = field(default="", init=False)
    _blank: str = field(default="", init=False)  # held back: white space before a mark is not content
    _begun: bool = field(default=False, init=False)  # there was text since the last mark
    # In the text of a call: where to search for its end, and where its last complete value ends.
    _searched: int = field(default=0, init=False)
    _values_end: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        thinking = self.format.thinking
        if thinking and self.prompt_end.rstrip().endswith(thinking[0].rstrip()):
            self._state = "reasoning"
        self._begun = self._state == "content"

    def end(self) -> list[Piece]:
        """The remaining pieces. An incomplete call is content."""
        pieces: list[Piece] = []
        while self._state == "call" and (found := first_mark(self._text, self._marks())):  # in a value without an end
            before, self._text = self._text[: found[0]], self._text[found[0] + len(found[1]) :]
            pieces += [*self._call(before), *self._pieces()]
        text, self._text = self._text, ""
        if self._state == "call" and self.format.tools is not None:
            return [*pieces, Content(self._blank + self.format.tools.begin + text)]
        kind = Reasoning if self.is_reasoning else Content
        text = self._blank + text if self._begun else text
        return [*pieces, kind(text)] if text and (self._state == "content" or text.strip()) else pieces

    def _next_mark(self) -> tuple[int, str] | None:
        """Position and text of the mark that ends the current state. Marks within values of a call are none."""
        tools = self.format.tools
        if self._state != "call" or tools is None:
            return first_mark(self._text, self._marks())
        while (found := self._text.find(tools.end, self._searched)) >= 0:
            self._searched = found + 1
            is_open, self._values_end = tools.follow(self._text, self._values_end, found)
            if not is_open:
                return found, tools.end
        self._searched = max(self._searched, len(self._text) - len(tools.end) + 1)
        return None

    def _pieces(self) -> Iterator[Piece]:
        while found := self._next_mark():
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
        self._state, self._searched, self._values_end = "content", 0, 0
        try:
            yield from tools.read(text, self.schemas or {})
        except NotACallError:
            broken, end, rest = text.partition(tools.end)
            if end:  # it was taken for a part of a value
                self._text = rest + tools.end + self._text
            self._begun = True
            yield Content(tools.begin + broken + tools.end)


class _ChannelParser(_Reader):
    """gpt-oss's messages: ``<|start|>ROLE<|channel|>NAME<|message|>TEXT``, and then ``<|end|>``, ``<|call|>`` or
    ``<|return|>``. A call's recipient is after the role or after the channel's name."""

    def __init__(self, continues: bool) -> None:
        self._state = "content" if continues else "between"  # where a prompt ends
        self._text = self._header = ""

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
