"""Grammars of JSON and of a family's tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torch_mesh.serving.tool_calls import AnswerFormat

_SPECIAL = re.compile("(<[|\uff5c][^<>]*[|\uff5c]>)")
_BLANKS = r"( |\n {0,40})?"  # between the parts of JSON; unbounded, a model may write white space forever


def json_rules(schema: Mapping[str, Any]) -> list[str]:
    """The rule ``json``: a value of ``schema``."""
    return [f"json: {_json(schema)}"]


def call_rules(tokenizer: Any, format: AnswerFormat, tools: Mapping[str, Any], several: bool) -> list[str]:
    """The rule ``calls``: one call of ``tools``, or ``several``. ``tools``: the parameters' JSON schema by name."""
    written = format.tools
    assert written is not None
    rules = []
    for index, (name, schema) in enumerate(tools.items()):
        head = _text(tokenizer, written.before + name + written.between)
        if written.as_json:
            rules.append(f"tool{index}: {head} arguments{index} {_text(tokenizer, written.after)}")
            rules.append(f"arguments{index}: {_json(schema or {'type': 'object'})}")
        else:
            rules.append(f"tool{index}: {head}")
    rules.append(f"tool: {' | '.join(f'tool{index}' for index in range(len(tools)))}")
    begin, end = _text(tokenizer, written.begin), _text(tokenizer, written.end)
    if written.as_json:
        rules.append(f"call: {begin} tool {end}")
    else:
        rules += [f"call: {begin} tool body", *_until(tokenizer, "body", written.end)]
    several &= not format.channels  # the end of a call ends the answer
    calls = "call" if not several else "call+" if written.header else 'call ("\\n" call)*'
    around = (_text(tokenizer, written.header), calls, _text(tokenizer, written.footer))
    return [f"calls: {' '.join(filter(None, around))}", *rules]


def text_rules(tokenizer: Any, format: AnswerFormat) -> list[str]:
    """The rule ``text``: any text without the beginning of a call."""
    written = format.tools
    assert written is not None
    begin = written.header or written.begin
    if _token(tokenizer, begin) is not None:
        return ["text: TEXT", "TEXT: /(?s:.*)/"]
    return ["text: TEXT", f"TEXT: /(?s:.*)/ & ~/(?s:.*{_escaped(begin)}.*)/"]


def grammar(tokenizer: Any, format: AnswerFormat, reasons: bool, answer: str, rules: list[str]) -> str:
    """A grammar of ``answer`` (the right side of a rule) after reasoning that the prompt has begun."""
    if not reasons or format.thinking is None:
        return "\n".join([f"start: {answer}", *rules])
    return "\n".join([f"start: thoughts ({answer})", *_until(tokenizer, "thoughts", format.thinking[1]), *rules])


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _BLANKS}})}"


def _until(tokenizer: Any, name: str, mark: str) -> list[str]:
    """A rule: any text up to and with ``mark``."""
    token = _token(tokenizer, mark)
    if token is not None:
        return [f"{name}: {name.upper()}_TEXT {token}", f"{name.upper()}_TEXT: /(?s:.*)/"]
    return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _text(tokenizer: Any, text: str) -> str:
    """``text`` as Lark terms, with marks of one token as its id."""
    if (token := _token(tokenizer, text)) is not None:
        return token
    parts = [part for part in _SPECIAL.split(text) if part]
    return " ".join(_token(tokenizer, part) or json.dumps(part, ensure_ascii=False) for part in parts)


def _token(tokenizer: Any, mark: str) -> str | None:
    found = tokenizer.get_added_vocab().get(mark)
    return None if found is None else f"<[{found}]>"
