"""Grammars of JSON and of a family's tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torch_mesh.serving.tool_calls import AnswerFormat, parser_of

_BLANKS = r"( |\n {0,40})?"  # between the parts of JSON; unbounded, a model may write white space forever


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


def grammar(
    tokenizer: Any,
    format: AnswerFormat,
    prompt_end: str,
    continues: bool,
    schema: Mapping[str, Any] | None,
    calls: list[str],
    required: bool,
) -> str:
    """A grammar of answers, which may begin with reasoning.

    Args:
        prompt_end: text of the prompt's last tokens, which may have begun or ended the reasoning.
        continues: the prompt has begun the content.
        schema: of the content. None: any text.
        calls: the rules of ``call_rules``; none if the model may not call.
        required: it must call.
    """
    if format.channels:
        head, message = _text(tokenizer, "<|channel|>"), _text(tokenizer, "<|message|>")
        rules = [
            f'thought: {head} ("analysis" | "commentary") {message} TEXT',
            f"next: {_text(tokenizer, '<|end|><|start|>assistant')}",
        ]
        before, final = "(thought next)*", f'{head} "final" {message}'
        text, begin = f"{final} TEXT | calls", "<|channel|>"
    else:
        before, rules = _reasoning(tokenizer, format, prompt_end, continues)
        final, text = "", "TEXT (calls TEXT)*"
        begin = (format.tools.header or format.tools.begin) if format.tools else ""
    if required:
        answer = "calls"
    elif schema is not None:
        answer = f"{final} json" + (" | calls" if calls else "")
        rules.append(f"json: {_json(schema)}")
    else:
        answer = text
    start = f"{before} ({answer})"
    if format.channels and continues:
        start = f"TEXT (next {start})?" if answer is text else f"TEXT next {start}"
    if begin:  # which is read as the beginning of a call if it is written out, too
        rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*{_escaped(begin)}.*)/")
    return "\n".join([f"start: {start}", *rules, *calls])


def _reasoning(tokenizer: Any, format: AnswerFormat, prompt_end: str, continues: bool) -> tuple[str, list[str]]:
    """Terms for the rest of the reasoning, or for reasoning that the model may begin, and their rules."""
    if format.thinking is None:
        return "", []
    begin, end = format.thinking
    rules = _until(tokenizer, "thoughts", end)
    if parser_of(format, None, prompt_end).is_reasoning:
        return "thoughts", rules
    if continues or prompt_end.rstrip().endswith(end):
        return "", []
    return f'("\\n"? {_text(tokenizer, begin)} thoughts)?', rules


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
    """``text`` as Lark terms, with marks that are tokens by their ids."""
    added = tokenizer.get_added_vocab()
    marks = "|".join(re.escape(mark) for mark in added if mark == text or (mark.startswith("<") and mark in text))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(_token(tokenizer, part) or json.dumps(part, ensure_ascii=False) for part in parts if part)


def _token(tokenizer: Any, mark: str) -> str | None:
    found = tokenizer.get_added_vocab().get(mark)
    return None if found is None else f"<[{found}]>"
