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
