"""Anthropic's API, used by Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from torch_mesh import MeshConfig
from torch_mesh.serving.anthropic_api import _joined

anthropic = pytest.importorskip("anthropic")

TEXT = "In the beginning"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "the weather", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=1.0), kept_bytes=0)


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def _drawn(temperature: float) -> dict[str, Any]:
    """A field for which the newest clients have no parameter."""
    return {"extra_body": {"temperature": temperature}}


@pytest.fixture
def asked(server: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8} | _drawn(0)


def test_a_message(client: Any, asked: dict[str, Any]) -> None:
    answer = client.messages.create(**asked)
    assert answer.type == "message" and answer.role == "assistant" and answer.stop_reason == "max_tokens"
    (block,) = answer.content
    assert block.type == "text" and block.text and answer.usage.output_tokens == 8
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.content[0].text == block.text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    events = [event.type for event in client.messages.create(**asked, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_model_has_a_name(client: Any, server: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (server.model, "model", server.model)
    assert model.created_at.tzinfo is not None and model == client.models.retrieve(server.model)


def test_a_system_prompt_and_blocks_are_read(client: Any, asked: dict[str, Any]) -> None:
    blocks = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]
    same = asked | {"messages": [{"role": "user", "content": blocks}]}
    assert client.messages.create(**same).content == client.messages.create(**asked).content
    counted = {name: asked[name] for name in ("model", "messages")}
    alone = client.messages.count_tokens(**counted).input_tokens
    assert alone == client.messages.create(**asked).usage.input_tokens
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert client.messages.count_tokens(**counted, system=system).input_tokens > alone
    assert client.messages.count_tokens(**counted, tools=TOOLS).input_tokens > alone


def test_messages_of_one_role_are_joined(client: Any, asked: dict[str, Any], seen_prompts: list[str]) -> None:
    a, b = ({"type": "text", "text": text} for text in "ab")
    for roles in (["user"], ["user", "assistant"]):
        apart = [{"role": role, "content": content} for role in roles for content in ("a", [b])]
        joined = [{"role": role, "content": [a, b]} for role in roles]
        for messages in (apart, joined):
            client.messages.create(**asked | {"messages": messages})
        assert seen_prompts[-2] == seen_prompts[-1]


def test_reasoning_is_joined_to_the_text_after_it() -> None:
    reasoning = {"role": "assistant", "content": "", "reasoning_content": "r"}
    texts = [{"role": "assistant", "content": text} for text in "ab"]
    (message,) = _joined([reasoning, *texts])
    assert message == reasoning | {"content": [{"type": "text", "text": "a\nb"}]}  # a processor's parts are glued
    (message,) = _joined([reasoning, texts[0] | {"reasoning_content": "s"}])
    assert message == texts[0] | {"reasoning_content": "rs"}


def test_stop_sequences(client: Any, asked: dict[str, Any]) -> None:
    whole = client.messages.create(**asked).content[0].text
    answer = client.messages.create(**asked, stop_sequences=["never said", whole[3:5]])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == whole[3:5]
    assert answer.content[0].text == whole[: whole.find(whole[3:5])]


def test_an_answer_continues_the_last_assistant_message(client: Any, asked: dict[str, Any]) -> None:
    messages = [*asked["messages"], {"role": "assistant", "content": "And it came"}]
    begun = client.messages.count_tokens(model=asked["model"], messages=messages).input_tokens
    plain = client.messages.count_tokens(model=asked["model"], messages=asked["messages"]).input_tokens
    answered = [*messages, {"role": "user", "content": "a"}]
    turned = client.messages.count_tokens(model=asked["model"], messages=answered).input_tokens
    assert plain < begun < turned
    assert client.messages.create(**asked | {"messages": messages}).content


def test_an_answer_in_channels_continues_the_last_assistant_message(
    client: Any, server: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = (
        "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>"
        "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    monkeypatch.setattr(server.prompts.processor, "chat_template", channels)
    messages = [*asked["messages"], {"role": "assistant", "content": "And it came"}]
    (block,) = client.messages.create(**asked | {"messages": messages}).content
    assert block.type == "text" and block.text
    assert client.messages.create(**asked).content == []  # this model writes no message's header


def test_tools_are_called(client: Any, asked: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    drawn = asked | {"max_tokens": 300, "tools": TOOLS} | _drawn(1.0)
    one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (one, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(**drawn, tool_choice=choice)
        (call,) = answer.content
        assert answer.stop_reason == "tool_use" and call.name == "weather" and set(call.input) == {"city", "days"}
        with client.messages.stream(**drawn, tool_choice=choice) as stream:
            (streamed,) = stream.get_final_message().content
        assert streamed.type == "tool_use" and set(streamed.input) == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]},
    ]
    answer = client.messages.create(**asked | {"messages": turns, "tools": TOOLS}, tool_choice={"type": "none"})
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_loop_calls_tools(stream: bool, client: Any, server: Any, asked: dict[str, Any]) -> None:
    """It first asks for a thread, unless the client is older."""
    pytest.importorskip("llguidance")
    seen: list[str] = []

    @anthropic.beta_tool
    def look(book: Literal["Mark", "Luke"]) -> str:
        """Looks into a book."""
        seen.append(book)
        return "nothing"

    runner = client.beta.messages.tool_runner(
        **asked | {"max_tokens": 300},
        tools=[look],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        stream=stream,
    )
    answers = [each.get_final_message() if stream else each for each in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"] and len(seen) == 2
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**asked | {"extra_body": {"thread": {"type": "create"}}})
    assert error.value.body["error"]["param"] == "thread"


def test_answers_that_are_json(client: Any, asked: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(**asked | {"max_tokens": 300, "output_config": form} | _drawn(1.0))
    assert set(json.loads(answer.content[0].text)) == {"city", "days"}


def test_unsupported_fields_are_refused_by_name(client: Any, asked: dict[str, Any]) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    picture = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    refused: list[tuple[str, Any]] = [
        ("thinking", {"type": "interleaved"}),
        ("mcp_servers", [{"type": "url", "url": "http://localhost", "name": "a"}]),
        ("container", "a"),
        ("service_tier", "batch"),
        ("output_config", {"task_budget": {"type": "tokens", "total": 1024}}),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("tool_choice", {"type": "any"}),  # without tools
        ("messages", [{"role": "user", "content": [document]}]),
        ("messages", [{"role": "user", "content": [picture]}]),
        ("messages", [{"role": "developer", "content": "a"}]),
        ("messages", [{"role": "system", "content": [picture]}]),
        ("top_k", -1),
        ("max_tokens", 0),
        ("nothing", 1),
    ]
    body = {name: asked[name] for name in ("model", "messages", "max_tokens")}
    for name, value in refused:
        with pytest.raises(anthropic.BadRequestError) as error:
            client.post("/v1/messages", body=body | {name: value}, cast_to=object)
        found = error.value.body
        assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
        assert found["error"]["param"] == name, (name, found)
    with pytest.raises(anthropic.BadRequestError) as error:
        client.post("/v1/messages", body={"messages": asked["messages"]}, cast_to=object)
    assert error.value.body["error"]["param"] == "max_tokens"
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**asked | {"model": "another"})
    assert error.value.body["error"]["type"] == "not_found_error"


def test_an_error_in_a_stream(client: Any, server: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**_: Any) -> Any:
        raise RuntimeError('a "quote"')

    monkeypatch.setattr(server.kept, "_generate", failing)
    # A logged error has frames, through which pytest would keep the model alive.
    monkeypatch.setattr("torch_mesh.serving.engine._LOG.disabled", True)
    with pytest.raises(anthropic.APIStatusError, match='a "quote"'):
        list(client.messages.create(**asked, stream=True))
