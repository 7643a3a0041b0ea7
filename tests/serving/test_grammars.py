"""What the grammars of answers allow, by llguidance itself with the marks of each family as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from torch_mesh.serving import left_out
from torch_mesh.serving.answer_parser import parser_of
from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.processors import Grammar
from torch_mesh.serving.prompts import Prompts
from torch_mesh.serving.service import Service
from torch_mesh.serving.tool_formats import Call, answer_format

llguidance = pytest.importorskip("llguidance")

CHANNELS = "<|start|>{{ tools }}<|channel|>commentary<|message|>"
QWEN = "{{ tools }}<tool_call></think>"
CODER = "{{ tools }}<tool_call><function="
GLM = "{{ tools }}<tool_call><arg_key></think>"
MINIMAX = "{{ tools }}<minimax:tool_call><invoke name=</think>"
GEMMA = "{{ tools }}<|tool_call>call:<channel|>"
MARKS = {
    CHANNELS: ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    QWEN: ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    CODER: ("<tool_call>", "</tool_call>"),
    GLM: ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    MINIMAX: ("<minimax:tool_call>", "</minimax:tool_call>"),
    GEMMA: ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMA = ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "response_format")

Allows = Callable[..., str]


@pytest.fixture(scope="module")
def allows(mesh_tiny: Path) -> Allows:
    """Whether a request's grammar allows an answer: ``all``, as what it ``begins`` with, or ``not``. ``free``: none."""

    def vocabulary(template: str) -> tuple[Any, Service]:
        import llguidance.hf

        tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
        tokenizer.add_tokens([AddedToken(mark, special=mark[1] == "|", normalized=False) for mark in MARKS[template]])
        tokenizer.chat_template = template
        model = SimpleNamespace(config=SimpleNamespace(model_type="none"), device="cpu", generation_config=None)
        service = Service("tiny", model, Prompts("tiny", tokenizer, model, {}), None)
        return llguidance.hf.from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id]), service

    made = {template: vocabulary(template) for template in MARKS}

    def allowed(
        template: str, answer: str, prompt_end: str = "", continues: bool = False, schema: Any = None, **given: Any
    ) -> str:
        known, service = made[template]
        tools = service.tools(given) if given else None
        constraint = service._constraint(service.prompts.format, prompt_end, continues, tools, schema)
        if constraint is None:
            return "free"
        matcher = llguidance.LLMatcher(known, constraint.lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = service.prompts.tokenizer(answer)["input_ids"]
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "not"
        return "all" if matcher.is_accepting() else "begins"

    return allowed


def _tools(strict: bool = False, parameters: Any = PARAMETERS) -> list[dict[str, Any]]:
    function = {"name": "weather", "parameters": parameters, "strict": strict}
    return [{"type": "function", "function": function}]


STRICT: dict[str, Any] = {"tools": _tools(strict=True)}
REQUIRED: dict[str, Any] = {"tools": _tools(), "tool_choice": "required"}
RIGHT, WRONG = '{"city": "Rome", "days": 2}', '{"city": "Rome", "days": 0}'
ANALYSIS = "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


@pytest.mark.parametrize("before", ["", ANALYSIS, ANALYSIS + PREAMBLE])
def test_a_model_with_channels_reasons_before_what_a_grammar_forces(before: str, allows: Allows) -> None:
    def channels(answer: str, **given: Any) -> str:
        return allows(CHANNELS, before + answer, **given)

    assert channels(f"{FINAL}Rain", **STRICT) == "all"
    assert channels(f"{CALL}{RIGHT}<|call|>", **STRICT) == "all"
    assert channels(f"{CALL}{RIGHT}<|call|>", **REQUIRED) == "all"
    assert channels(f'{FINAL}{{"a": 1}}', schema=SCHEMA) == "all"
    assert channels("", **STRICT) == channels("", **REQUIRED) == channels("", schema=SCHEMA) == "begins"
    assert channels(f"{CALL}{WRONG}", **STRICT) == channels(f"{CALL}{WRONG}", **REQUIRED) == "not"
    assert channels(f"{FINAL}Rain", **REQUIRED) == channels(f"{FINAL}Rain", schema=SCHEMA) == "not"
    assert channels("Rain", **STRICT) == channels(f"{CALL}{RIGHT}", schema=SCHEMA) == "not"
    assert channels(f"{CALL}{RIGHT}<|call|>", **STRICT, schema=SCHEMA) == "all"


THOUGHTS = "<think>\nRome?\n</think>"
HYBRID = {  # by the end of the prompt: the reasoning that the answer may have, and what it may not have
    "<|im_start|>assistant\n": (("", THOUGHTS, f"\n{THOUGHTS}"), ("Rome?</think>", THOUGHTS * 2)),
    "<|im_start|>assistant\n<think>\n": (("Rome?</think>",), ("", THOUGHTS)),
    "<|im_start|>assistant\n<think>\n\n</think>\n\n": (("",), (THOUGHTS, "Rome?</think>")),
}


@pytest.mark.parametrize("end", HYBRID)
def test_a_model_that_may_reason_does_so_before_what_a_grammar_forces(end: str, allows: Allows) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {RIGHT}}}\n</tool_call>'
    right, wrong = HYBRID[end]
    for answer, given in ((call, STRICT), (call, REQUIRED), ('{"a": 1}', {"schema": SCHEMA})):
        assert {allows(QWEN, thoughts + answer, end, **given) for thoughts in right} == {"all"}
        assert "all" not in {allows(QWEN, thoughts + answer, end, **given) for thoughts in wrong}


def test_content_that_the_prompt_has_begun_goes_on_without_reasoning(allows: Allows) -> None:
    def goes_on(template: str, answer: str, **given: Any) -> str:
        return allows(template, answer, "And it came", continues=True, **given)

    assert goes_on(QWEN, " to pass", **STRICT) == goes_on(CHANNELS, " to pass", **STRICT) == "all"
    assert goes_on(QWEN, THOUGHTS, **STRICT) == goes_on(CHANNELS, ANALYSIS, **STRICT) == "not"
    call = f" to pass<|end|><|start|>assistant{ANALYSIS}{CALL}{RIGHT}<|call|>"
    assert goes_on(CHANNELS, call, **STRICT) == goes_on(CHANNELS, call, **REQUIRED) == "all"
    assert goes_on(CHANNELS, " to pass", **REQUIRED) == "begins"


def test_marks_that_are_not_one_token(allows: Allows) -> None:
    call = '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
    for thoughts in ("", "<|channel>thought\nRome?<channel|>"):
        assert allows(GEMMA, thoughts + call, **REQUIRED) == "all"
    assert allows(GEMMA, call, "<|channel>thought\n<channel|>", **REQUIRED) == "all"
    assert allows(GEMMA, "<|channel>thought\n", "<|channel>thought\n<channel|>", **REQUIRED) == "not"


DEFINITIONS = {"Book": {"enum": ["Mark", "Luke"]}, "Verse": {"type": "object", "properties": {"n": {"type": "number"}}}}
KINDS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {  # schema, values that it allows, and others
    "text": ({"type": "string"}, ("", "Rome", "a\n<b>\n\nc", "7", '"'), ()),
    "optional text": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("Rome", "null"), ()),
    "any": ({"description": "a"}, ("Rome", "[1]"), ()),
    "whole": ({"type": "integer", "maximum": 9}, ("7", "-1"), ("10", "1.5", "Rome", '"7"', "")),
    "whole or null": ({"type": ["integer", "null"]}, ("7", "null"), ("Rome", "true")),
    "choice": (
        {"type": "string", "enum": ["Mark", "Marks", "7"]},
        ("Mark", "Marks", "7"),
        ("Luke", '"Mark"', "Mar", ""),
    ),
    "constant": ({"const": "Mark"}, ("Mark",), ("Luke",)),
    "choice or null": ({"anyOf": [{"enum": ["Mark", True]}, {"type": "null"}]}, ("Mark", "true", "null"), ("Luke",)),
    "list": ({"type": "array", "items": {"type": "string"}}, ("[]", '["a", "b"]'), ("[1]", "a")),
    "referred choice": ({"$ref": "#/$defs/Book", "description": "a"}, ("Mark", "Luke"), ("Rome",)),
    "referred object": (
        {"anyOf": [{"$ref": "#/$defs/Verse"}, {"type": "null"}]},
        ('{"n": 1.5}', "null"),
        ('{"n": "a"}',),
    ),
    "list of referred": ({"type": "array", "items": {"$ref": "#/$defs/Book"}}, ('["Luke"]',), ('["Rome"]',)),
}
TAGS = {  # around a call, around its name, and around a parameter's name and value
    CODER: (
        "<tool_call>\n",
        "<function=weather>\n",
        "<parameter=",
        ">\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    GLM: ("<tool_call>", "weather\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    MINIMAX: (
        "<minimax:tool_call>\n",
        '<invoke name="weather">\n',
        '<parameter name="',
        '">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
}


def _call(template: str, parameters: dict[str, str], breaks: bool = True) -> str:
    begin, name, before, between, after, end = TAGS[template]
    text = begin + name + "".join(before + key + between + value + after for key, value in parameters.items()) + end
    return text if breaks else text.replace("\n", "")


def _closed(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [key for key in properties if key not in optional]
    known = {"type": "object", "properties": properties, "required": required}
    return known | {"additionalProperties": False, "$defs": DEFINITIONS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TAGS)
def test_arguments_between_tags_follow_a_strict_schema(template: str, kind: str, allows: Allows) -> None:
    schema, right, wrong = KINDS[kind]
    parameters = _closed({"a": schema})
    for given in ({"tools": _tools(True, parameters)}, {"tools": _tools(False, parameters), "tool_choice": "required"}):
        for value in right:
            call = _call(template, {"a": value})
            assert allows(template, call, **given) == "all", value
            parser = parser_of(answer_format(template, ""), {"weather": parameters}, "")
            is_text = kind in ("text", "choice") or value in ("", "Rome", "Mark", "Marks", "Luke")
            read = value if is_text else json.loads(value)
            expected = [Call("weather", json.dumps({"a": read}, ensure_ascii=False))]
            assert [*parser.push(call), *parser.end()] == expected
        for value in wrong:
            assert allows(template, _call(template, {"a": value}), **given) == "not", value


BLOCK = f"{TAGS[MINIMAX][0]}%s</minimax:tool_call>"
INVOKES = [
    f'<invoke name="weather">\n<parameter name="a">{value}</parameter>\n</invoke>\n'
    for value in ("Mark", "Rome", "Luke")
]


@pytest.mark.parametrize("checked", [True, False])
def test_a_block_may_have_several_calls(checked: bool, allows: Allows) -> None:
    """MiniMax writes parallel calls into one block. ``checked``: the schema has parameters."""
    parameters = _closed({"a": {"enum": ["Mark", "Luke"]}}) if checked else {"type": "object"}
    first, other, second = INVOKES
    forced = {"tools": _tools(False, parameters), "tool_choice": "required"}
    several, wrong = BLOCK % (first + second), BLOCK % (first + other)
    assert allows(MINIMAX, several, **forced) == allows(MINIMAX, several + "\n" + several, **forced) == "all"
    assert allows(MINIMAX, wrong, **forced) == ("not" if checked else "all")
    assert allows(MINIMAX, several, **forced, parallel_tool_calls=False) == "not"
    assert allows(MINIMAX, BLOCK % "", **forced) == "not"
    parser = parser_of(answer_format(MINIMAX, ""), {"weather": parameters}, "")
    read = [*parser.push(several), *parser.end()]
    assert read == [Call("weather", '{"a": "Mark"}'), Call("weather", '{"a": "Luke"}')]
    coder = _call(CODER, {"a": "Mark"})
    assert allows(CODER, coder.replace("</tool_call>", coder.partition("\n")[2]), **forced) == "all"
    glm = _call(GLM, {"a": "Mark"})
    twice = glm.replace("</tool_call>", glm.removeprefix("<tool_call>"))
    assert allows(GLM, twice, **forced) == ("not" if checked else "all"), "one call, as it is read"


NODE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.com/node",
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "more": {"type": "array", "items": {"$ref": "#/properties/n"}},
        "self": {"$ref": "#"},
        "verse": {"$ref": "#/$defs/Verse"},
    },
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"Verse": {"type": "object", "properties": {"n": {"$ref": "#/properties/n"}}}},
}


@pytest.mark.parametrize("template", TAGS)
def test_references_are_to_the_whole_schema(template: str, allows: Allows) -> None:
    for given in ({"tools": _tools(True, NODE)}, {"tools": _tools(False, NODE), "tool_choice": "required"}):
        right = {
            "n": "1",
            "kids": '[{"n": 2, "kids": [{"n": 3}]}]',
            "more": "[4]",
            "self": '{"n": 5}',
            "verse": '{"n": 6}',
        }
        assert allows(template, _call(template, right), **given) == "all"
        for wrong in ({"kids": "[[]]"}, {"more": '["a"]'}, {"self": "{}"}, {"verse": '{"n": "a"}'}):
            assert allows(template, _call(template, {"n": "1"} | wrong), **given) == "not", wrong


UNIQUE = _closed({"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}})


@pytest.mark.parametrize("template", [*TAGS, QWEN])
def test_keywords_that_no_grammar_has_are_refused_in_strict_tools_only(template: str, allows: Allows) -> None:
    def call(value: str) -> str:
        by_json = f'<tool_call>\n{{"name": "weather", "arguments": {{"a": {value}}}}}\n</tool_call>'
        return by_json if template == QWEN else _call(template, {"a": value})

    forced = {"tools": _tools(False, UNIQUE), "tool_choice": "required"}
    assert allows(template, call("[1, 1]"), **forced) == "all"
    assert allows(template, call('["a"]'), **forced) == "not"
    beside = _tools(True, _closed({}))
    beside[0]["function"]["name"] = "other"
    assert allows(template, call("[1, 1]"), tools=[*beside, *forced["tools"]]) == "all"
    with pytest.raises(RequestError, match="'weather'.*uniqueItems"):
        allows(template, call("[1]"), tools=_tools(True, UNIQUE))


@pytest.mark.parametrize(
    ("a", "reason"),
    [
        ({"pattern": "^(?!-).+$"}, "look-ahead"),
        ({"pattern": r"(a)\1"}, "backreferences"),
        ({"type": "any"}, "Invalid type: any"),
        ({"properties": None}, "properties must be an object"),
        ({"required": None}, "Expected array"),
        ({"$ref": "#/$defs/nothing"}, "does not exist"),
        ({"$ref": "https://example.com/a"}, "not present"),
    ],
)
@pytest.mark.parametrize("template", [QWEN, CODER])
def test_a_schema_that_is_not_accepted_is_refused_in_strict_tools_only(
    template: str, a: dict[str, Any], reason: str, allows: Allows
) -> None:
    schema = _closed({"a": {"type": "array", "items": a}})
    by_json = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
    call = by_json if template == QWEN else _call(template, {"a": "1"})
    free, strict = _tools(False, schema), _tools(True, schema)
    beside = _tools(True, _closed({}))
    beside[0]["function"]["name"] = "other"
    assert allows(template, call, tools=free, tool_choice="required") == "all"
    assert allows(template, call, tools=[*beside, *free]) == allows(template, call, tools=free, schema=SCHEMA) == "all"
    with pytest.raises(RequestError, match=f"'weather'.*{reason}"):
        allows(template, call, tools=strict)


@pytest.mark.parametrize("template", TAGS)
def test_parameters_between_tags_are_those_of_the_schema(template: str, allows: Allows) -> None:
    strict = {"tools": _tools(True, _closed({"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}, "b"))}
    for parameters in ({"a": "x", "b": "1", "c": "y"}, {"a": "x", "c": "y"}):
        assert allows(template, f"I look.\n{_call(template, parameters)}", **strict) == "all"
    for parameters in ({"a": "x"}, {"c": "y"}, {"c": "y", "a": "x"}, {"a": "x", "c": "y", "d": "z"}, {}):
        assert allows(template, _call(template, parameters), **strict) == "not"
    assert allows(template, _call(template, {"a": "x", "b": "1", "c": "y"}, breaks=False), **strict) == "all"
    assert allows(template, "I look.", **strict) == "all"
    assert allows(template, _call(template, {}), tools=_tools(True, _closed({}))) == "all"
    free = {"tools": _tools(True, {"type": "object"})}
    assert allows(template, _call(template, {"any": "x"}), **free) == "all"


def test_what_no_grammar_checks_is_noted(allows: Allows) -> None:
    kinds = {kind: schema for kind, (schema, _, _) in KINDS.items()}
    kinds |= {
        "code": {"type": "string", "pattern": "[a-z]"},
        "few": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    }
    notes = left_out.collect()
    allows(CODER, "", tools=_tools(False, _closed(kinds)), tool_choice="required")
    assert notes == []
    allows(CODER, "", tools=_tools(True, _closed(kinds)))
    assert notes == ["tools.strict (weather.code)", "tools.strict (weather.few)"]
    assert allows(GEMMA, "", **STRICT) == "free"
    assert notes[2:] == ["tools.strict (weather.*)"]


@pytest.mark.parametrize(
    "constraint",
    [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"minProperties": 1}, {"dependentRequired": {"a": ["b"]}}],
)
def test_constraints_beside_the_parameters_are_noted(constraint: dict[str, Any], allows: Allows) -> None:
    schema = _closed({"a": {"type": "integer"}, "b": {"type": "integer"}}, "a", "b") | {"title": "T"}
    notes = left_out.collect()
    allows(CODER, "", tools=_tools(True, schema))
    assert notes == []
    allows(CODER, "", tools=_tools(True, schema | constraint))
    assert notes == ["tools.strict (weather.*)"]


def test_a_grammar_keeps_its_place_when_drafts_are_rejected(mesh_tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    end = tokenizer.eos_token_id

    def allowed(grammar: Grammar, answer: str) -> str:
        ids = [7, *(tokenizer(letter)["input_ids"][0] for letter in answer)]
        scores = grammar(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))[0]
        return tokenizer.decode(scores.isfinite().nonzero().flatten().tolist())

    def new() -> Grammar:
        return Grammar(tokenizer, 'start: "(" /[a-c]/ "." | "(" /[d-f]/ "!"', [end], 1, "response_format")

    kept = new()
    for draft, answer in (("(a.", "(d"), ("(d", "(d"), ("(d.", "(d!"), ("(x!", "(a"), ("(a!x", "(a."), ("(f!", "(")):
        for length in range(len(draft) + 1):
            assert allowed(kept, draft[:length])
        assert allowed(kept, answer) == allowed(new(), answer)


def test_the_header_for_what_is_left_out_is_bounded() -> None:
    (short,) = left_out.headers(["thinking", "tools (\u00e9\n)"]).values()
    assert short == r"thinking, tools (\xe9\n)"
    (long,) = left_out.headers(["tools (" + "\U0001f600" * 10_000 + ")", "thinking"]).values()
    assert len(long) < 200 and long.startswith(r"tools (\U0001f600") and long.endswith("..., thinking")
    notes = [f"tools.strict (f.{number})" for number in range(1_000)]
    (many,) = left_out.headers(notes).values()
    *named, rest = many.split(", ")
    assert len(many) < 2_100 and named == notes[: len(named)] and rest == f"and {1_000 - len(named)} more"
