"""Grammars of JSON and of a family's tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch_mesh.serving.answer_parser import parser_of
from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.schema_types import json_types, resolved
from torch_mesh.serving.tool_formats import AnswerFormat, ToolFormat

_BLANKS = r"( |\n {0,40})?"  # between the parts of JSON; unbounded, a model may write white space forever
_OBJECT = {"type": "object"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly"}
_OF_PARAMETERS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}


def check_installed(field: str) -> None:
    """Raises RequestError if llguidance is missing, which ``field`` needs."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"{field} needs llguidance, which this server does not have: pip install torch_mesh[serve].", field
        ) from error


def call_rules(
    tokenizer: Any, format: AnswerFormat, tools: Mapping[str, Any], several: bool, strict: Collection[str]
) -> list[str]:
    """The rule ``calls``: one call of ``tools``, or ``several``.

    Args:
        tools: the parameters' JSON schema by name.
        strict: names of tools whose schema has to be checked as a whole. In others, what llguidance does not know is
            free.

    Raises RequestError for a strict tool with a schema that llguidance does not accept.
    """
    written = format.tools
    assert written is not None
    several &= not format.channels  # the end of a call ends the answer
    begin, end = _text(tokenizer, written.begin), _text(tokenizer, written.end)
    closing = "" if written.as_json else written.after.strip()
    rules = [f"call: {begin} tool"]
    if closing:  # a block may have several calls
        rules, end = [f'call: {begin} {"tool+" if several else "tool"} "\\n"? {end}'], ""
    for index, (name, schema) in enumerate(tools.items()):
        rule, head, lenient = f"tool{index}", written.before + name + written.between, name not in strict
        if written.as_json:
            rules.append(f"{rule}: {_text(tokenizer, head)} {rule}json {_text(tokenizer, written.after)} {end}")
            rules.append(f"{rule}json: {_arguments(name, schema or _OBJECT, _OBJECT, lenient)}")
        elif written.parameter is not None and _has_known_keys(schema):
            keys, parameters = _parameter_rules(tokenizer, written.parameter, rule, name, schema, lenient)
            rules.append(f"{rule}: {_tags(tokenizer, head)} {' '.join(keys)} {_tags(tokenizer, written.after)} {end}")
            rules += parameters
        else:
            rules.append(f"{rule}: {_tags(tokenizer, head)} body")
    rules.append(f"tool: {' | '.join(f'tool{index}' for index in range(len(tools)))}")
    if not written.as_json:
        tags = re.findall("<[^<>]+>", "".join(written.parameter or ()))
        rules += _until(tokenizer, "body", closing or written.end, (*written.quotes, *tags))
    calls = "call" if not several else "call+" if written.header else 'call ("\\n" call)*'
    around = (_text(tokenizer, written.header), calls, _text(tokenizer, written.footer))
    return [f"calls: {' '.join(filter(None, around))}", *rules]


def unchecked(written: ToolFormat, schema: Any) -> list[str]:
    """The parameters of a tool of which ``call_rules`` checks less than ``schema`` says. ``"*"``: all of them."""
    if written.as_json:
        return []
    if written.parameter is None or not _has_known_keys(schema) or schema.keys() - _OF_PARAMETERS - _ANNOTATIONS:
        return ["*"]
    properties = {key: resolved(each, schema) for key, each in schema.get("properties", {}).items()}
    return [key for key, each in properties.items() if _choices(each) is None and _is_text(each) and not _is_any(each)]


def _has_known_keys(schema: Any) -> bool:
    """Whether the arguments that ``schema`` allows are its properties."""
    if not isinstance(schema, dict) or not isinstance(properties := schema.get("properties", {}), dict):
        return False
    return bool(properties) or schema.get("additionalProperties") is False


def _parameter_rules(
    tokenizer: Any, written: tuple[str, str, str], tool: str, name: str, schema: Mapping[str, Any], lenient: bool
) -> tuple[list[str], list[str]]:
    """Terms for the parameters of the tool ``name`` in the order of ``schema``, and their rules."""
    before, between, after = written
    required = schema.get("required")
    root = {name: each for name, each in schema.items() if name not in ("$schema", "$id")}
    terms, rules = [], []
    for number, (key, given) in enumerate(schema.get("properties", {}).items()):
        rule, about = f"{tool}p{number}", resolved(given, root)
        terms.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        head, end = _tags(tokenizer, before + key + between), _tags(tokenizer, after)
        if (choices := _choices(about)) is not None:
            texts = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices)
            rules.append(f"{rule}: {head} ({' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)}) {end}")
        elif _is_text(about):
            rules += [f'{rule}: {head} {rule}text "\\n"?', *_until(tokenizer, f"{rule}text", after.strip())]
        else:
            value = _arguments(name, _within(about, root), {}, lenient)
            rules += [f"{rule}: {head} {rule}json {end}", f"{rule}json: {value}"]
    return terms, rules


def _within(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """``schema``, a part of ``root``, as a schema of its own."""
    moved = _moved(schema)
    return {**moved, "$defs": {"root": _moved(root)}} if "#/$defs/root" in json.dumps(moved) else moved


def _moved(schema: Any) -> Any:
    """``schema`` with references to the root as references to ``#/$defs/root``."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    moved = {"$ref": f"#/$defs/root{reference[1:]}"} if isinstance(reference, str) and reference[:1] == "#" else {}
    return {name: _moved(each) for name, each in schema.items()} | moved


def _choices(schema: Any) -> list[Any] | None:
    """All values of ``schema`` if it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema or schema.get("type") == "null":
        return [schema.get("const")]
    if isinstance(listed := schema.get("enum"), list):
        return listed
    found = [_choices(each) for each in _branches(schema)]
    return [value for each in found for value in each or ()] if found and None not in found else None


def _is_text(schema: Any) -> bool:
    """Whether a value of ``schema`` may be text, which is then written without quotes."""
    return not {"string", None}.isdisjoint(json_types(schema))


def _is_any(schema: Any) -> bool:
    """Whether any text is a value of ``schema``, which allows text."""
    if not isinstance(schema, dict):
        return True
    known = schema.keys() <= {"type", "anyOf", "oneOf"} | _ANNOTATIONS
    return known and {"object", "array"}.isdisjoint(json_types(schema)) and all(map(_is_any, _branches(schema)))


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else []


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


def _json(schema: Mapping[str, Any], lenient: bool = False) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _BLANKS, 'lenient': lenient}})}"


def _arguments(tool: str, schema: Mapping[str, Any], otherwise: Mapping[str, Any], lenient: bool) -> str:
    """JSON of ``schema``, for arguments of ``tool``. ``otherwise``: a lenient tool's, if llguidance refuses ``schema``.

    Raises RequestError.
    """
    terms = _json(schema, lenient)
    problem = _problem(terms)
    if not problem:
        return terms
    if lenient:
        return _json(otherwise)
    raise RequestError(
        f"tools has {tool!r}, whose schema cannot be converted to a grammar: {problem}. Change it.", "tools"
    )


@functools.lru_cache(1024)  # a client's tools are those of its last request
def _problem(terms: str) -> str:
    """Why llguidance does not accept ``terms``; empty if it does."""
    import llguidance

    return error_text(llguidance.LLMatcher.validate_grammar(f"start: {terms}"))


def error_text(error: str) -> str:
    """llguidance's error in one line, without the lines of the grammar below it."""
    return " ".join(re.split(r"\n +\d+ \| ", error)[0].split())


def _until(tokenizer: Any, name: str, mark: str, within: Sequence[str] = ()) -> list[str]:
    """A rule: any text up to and with ``mark``. ``within``: marks that it may have."""
    token = _token(tokenizer, mark)
    if token is None:
        return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]
    text = f"{name.upper()}_TEXT"
    tokens = " | ".join(filter(None, (_token(tokenizer, each) for each in within)))
    return [f"{name}: {text} {f'(({tokens}) {text})*' if tokens else ''} {token}", f"{text}: /(?s:.*)/"]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _text(tokenizer: Any, text: str) -> str:
    """``text`` as Lark terms, with marks that are tokens by their ids."""
    added = tokenizer.get_added_vocab()
    marks = "|".join(re.escape(mark) for mark in added if mark == text or (mark.startswith("<") and mark in text))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(_token(tokenizer, part) or json.dumps(part, ensure_ascii=False) for part in parts if part)


def _tags(tokenizer: Any, text: str) -> str:
    """``_text`` of tags. Models of one family differ in the line breaks between them."""
    return " ".join('"\\n"?' if part == "\n" else _text(tokenizer, part) for part in re.split("(\n)", text) if part)


def _token(tokenizer: Any, mark: str) -> str | None:
    found = tokenizer.get_added_vocab().get(mark)
    return None if found is None else f"<[{found}]>"
