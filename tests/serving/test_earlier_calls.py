"""Calls in the messages of a request, as the chat templates of several families read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.prompts import Prompts

ARGUMENTS = {"path": "a b", "lines": [1, 2]}
JOINING = (  # as DeepSeek's
    "{% for message in messages %}{% for tool in message.tool_calls or [] %}"
    "{{ '```json\n' + tool['function']['arguments'] + '\n```' }}{% endfor %}{% endfor %}"
)
# As gpt-oss's, which joins a call's arguments by tojson.
ONE_TEXT = (
    "{% for message in messages %}{% if message.tool_calls %}{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}"
    "{{ '<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}"
    "{{ message.tool_calls[0].function.arguments | tojson }}"
    "{% else %}[{{ message.content }}]{% endif %}{% endfor %}"
)

Render = Callable[[str, list[dict[str, Any]]], str]


@pytest.fixture(scope="module")
def render(mesh_tiny: Path) -> Render:
    """The prompt for messages, by a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    model = SimpleNamespace(config=SimpleNamespace(model_type="none"), device="cpu")

    def rendered(template: str, messages: list[dict[str, Any]]) -> str:
        tokenizer.chat_template = template
        prompts = Prompts("tiny", tokenizer, model, {})
        inputs = prompts.encode_messages(messages, None, {}, "messages")
        text: str = tokenizer.decode(inputs["input_ids"][0])
        return text

    return rendered


def _call(name: str, number: str, arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_arguments_are_text_for_a_template_that_joins_text(arguments: Any, render: Render) -> None:
    messages = [_turn(_call("read", "1", arguments), _call("read", "2", arguments))]
    assert render(JOINING, messages) == f"```json\n{json.dumps(ARGUMENTS)}\n```" * 2
    flat = {"role": "assistant", "tool_calls": [{"name": "read", "arguments": arguments}]}
    assert json.loads(render("{{ '' + messages[0].tool_calls[0].arguments }}", [flat])) == ARGUMENTS


def test_a_template_that_takes_no_form_of_the_arguments_is_an_error(render: Render) -> None:
    with pytest.raises(RequestError, match="does not accept this request"):
        render("{{ messages[0].tool_calls[0].function.arguments + 1 }}", [_turn(_call("read", "1"))])


def test_content_joins_the_reasoning_where_a_template_refuses_both(render: Render) -> None:
    call = _call("read", "1")
    begin, end = "<|channel|>analysis<|message|>", f"<|end|>{json.dumps(ARGUMENTS)}"
    both = _turn(call, content="I read it.", reasoning_content="A file?")
    assert render(ONE_TEXT, [both]) == f"{begin}A file?\n\nI read it.{end}"
    with pytest.raises(RequestError, match="both content and thinking"):  # the client's own name, which is not replaced
        render(ONE_TEXT, [both | {"thinking": "Another?"}])
    assert render(ONE_TEXT, [_turn(call, content="I read it.")]) == f"{begin}I read it.{end}"
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "A file?"}
    assert render(ONE_TEXT, [answer]) == "[Yes]"
