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
from torch_mesh.serving.prompts import Prompts, response_messages
from torch_mesh.serving.requests import checked_request

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
BY_IDS = (  # as Kimi K2's
    "{% for message in messages %}{% for call in message.tool_calls or [] %}<|tool_call_begin|>{{ call['id'] }}"
    "<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{{ message.content }}{% endif %}"
    "{% endfor %}"
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


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_a_call_may_have_no_arguments(arguments: dict[str, Any], render: Render) -> None:
    function = {"name": "look", **arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    checked_request("chat", {"messages": [message]}, "tiny", 9)
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == "{}"
    item = {"type": "function_call", "call_id": "1", **function}
    checked_request("responses", {"input": [item]}, "tiny", 9)
    messages = response_messages([item], None)
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == "{}"


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


def test_ids_of_calls_are_names_and_numbers_where_a_template_shows_ids_alone(render: Render) -> None:
    messages = [
        _turn(_call("read", "call_ab"), _call("find", "call_cd")),
        *({"role": "tool", "tool_call_id": number, "content": "-"} for number in ("call_cd", "call_ab", "unknown")),
        _turn(_call("read", "call_ab")),  # some clients count from the start in each turn
        {"role": "tool", "tool_call_id": "call_ab", "content": "-"},
    ]
    rest = f"<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|>"
    assert render(BY_IDS, messages) == (
        f"<|tool_call_begin|>functions.read:0{rest}<|tool_call_begin|>functions.find:1{rest}"
        "## Return of functions.find:1\n-## Return of functions.read:0\n-## Return of unknown\n-"
        f"<|tool_call_begin|>functions.read:2{rest}## Return of functions.read:2\n-"
    )
    assert messages[0]["tool_calls"][0]["id"] == "call_ab"
    assert render("{{ messages[0].tool_calls[0].id }}", messages) == "call_ab"
