"""What the grammars of answers allow, by llguidance itself with the marks of each family as tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from torch_mesh.serving.prompts import Prompts
from torch_mesh.serving.service import Service

llguidance = pytest.importorskip("llguidance")

CHANNELS = "<|start|>{{ tools }}<|channel|>commentary<|message|>"
QWEN = "{{ tools }}<tool_call></think>"
MARKS = {
    CHANNELS: ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    QWEN: ("<think>", "</think>", "<tool_call>", "</tool_call>"),
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
    """Whether a request's grammar allows an answer: ``all`` of it, as what it ``begins`` with, or ``not``."""

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
        lark = service._grammar(service.prompts.format, prompt_end, continues, tools, schema)
        assert lark is not None
        matcher = llguidance.LLMatcher(known, lark[0], log_level=0)
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
