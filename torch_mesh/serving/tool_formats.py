"""Read tool calls in the format of each family.

A family is recognized by its chat template, which shows the model how to write a call. A new format is an entry of
``FORMATS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_mesh.serving.schema_types import json_type, json_types, resolved


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object


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


def _in_tags(
    *,
    hints: tuple[str, ...],
    begin: str,
    end: str,
    before: str,
    between: str,
    after: str,
    parameter: tuple[str, str, str],
) -> ToolFormat:
    """A format with parameters between tags. Its reader accepts calls without the line breaks of these texts."""
    first, middle, last = parameter
    label = rf"[^<\n{re.escape(middle[0])}]+"  # up to the mark that follows it
    middle = re.escape(middle.rstrip("\n")).replace("\\\n", r"\s*") + (r"\n?" if middle.endswith("\n") else "")

    def opening(pattern: str) -> str:
        return re.escape(first) + pattern + middle

    call_end, opens = after.strip() or end, opening(label)
    next_call = rf"{re.escape(end)}.*{re.escape(begin)}"
    next_part = rf"{re.escape(call_end)}\s*{re.escape(before.strip())}|\n\s*{re.escape(first)}" if after else opens
    read = _tag_reader(
        re.compile(re.escape(before.strip()) + f"(?P<name>{label})" + re.escape(between.strip())),
        call_end,
        re.compile(opening(f"(?P<key>{label})")),
        last,
        re.compile(f"{next_call}|{next_part}", re.DOTALL),
    )
    return ToolFormat(
        hints=hints,
        begin=begin,
        end=end,
        read=read,
        before=before,
        between=between,
        after=after,
        as_json=False,
        values=_values(opens, re.escape(last.strip())),
        parameter=parameter,
    )


def _tag_reader(
    begins: re.Pattern[str], call_end: str, parameters: re.Pattern[str], last: str, missing_end: re.Pattern[str]
) -> Callable[[str, Mapping[str, Any]], list[Call]]:
    """Read calls whose parameters are between tags, with the types of the tool's schema.

    Args:
        begins: matches a call's beginning and its ``name``.
        call_end: ends a call. A value may contain it.
        parameters: matches a parameter's beginning and its ``key``.
        last: ends a value, together with line breaks around it.
        missing_end: matches what a value contains if its own end is missing, so that it goes on to the end of the next.
    """
    value_end = last.strip()
    line_break = "\n" if last.startswith("\n") else ""

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
                    stop = found if (found := text.find(call_end, position)) >= 0 else len(text)
                opened = parameters.search(text, position, stop)
                between = text[position : opened.start() if opened else stop]
                if value_end in between and between.replace(value_end, "").strip():
                    raise NotACallError("the mark after a value is in the value")
                if opened is None:
                    break
                closed = text.find(value_end, opened.end())
                value = text[opened.end() : closed].removesuffix(line_break)
                if closed < 0 or missing_end.search(value):
                    raise NotACallError("a parameter without an end")
                key, position = opened["key"].strip(), closed + len(value_end)
                given[key] = _typed(value, resolved(known.get(key), schema))
            position = stop + len(call_end)
            calls.append(Call(name, json.dumps(given, ensure_ascii=False)))
        if not calls:
            raise NotACallError("no name")
        return calls

    return read


_PYTHON = {"True": True, "False": False, "None": None}  # templates of Qwen show these for earlier calls


def _typed(text: str, schema: Any) -> Any:
    """``text`` as JSON; as it is where it is no JSON, or where the schema allows strings and not what it is as JSON."""
    types = json_types(schema)
    try:
        found = _loads(text)
    except (ValueError, RecursionError):
        return text if {"string", None} & types else _PYTHON.get(text.strip(), text)
    if "string" not in types or None in types:
        return found
    made = json_type(found)
    allowed = {"integer", "number"} if made == "integer" else {made}
    return found if made != "string" and allowed & types else text


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
GPT_OSS = ToolFormat(  # whose channels _ChannelParser reads
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
    _in_tags(  # GLM 4.5 and later
        hints=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        end="</tool_call>",
        before="",
        between="\n",
        after="",
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    _in_tags(  # Qwen3-Coder, Qwen3.5, Nemotron-H
        hints=("<tool_call>", "<function="),
        begin="<tool_call>",
        end="</tool_call>",
        before="\n<function=",
        between=">\n",
        after="</function>\n",
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    _in_tags(  # MiniMax M2
        hints=("<minimax:tool_call>", "<invoke name="),
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        before='\n<invoke name="',
        between='">\n',
        after="</invoke>\n",
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
    GPT_OSS,
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
