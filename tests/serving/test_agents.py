"""Two agents that call tools in a loop, by the openai client. Calls are valid, and the next turn has their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import MeshConfig

pytest.importorskip("llguidance")

TURNS = 3
SCHEMAS: dict[str, dict[str, Any]] = {
    "read": {"path": {"type": "string", "maxLength": 12}, "lines": {"type": "integer", "minimum": 1, "maximum": 99}},
    "search": {"word": {"type": "string", "maxLength": 12}},
}


def _parameters(name: str) -> dict[str, Any]:
    fields = SCHEMAS[name]
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _is_valid(name: str, arguments: dict[str, Any]) -> bool:
    kinds = {"string": str, "integer": int}
    fields = SCHEMAS[name]
    return arguments.keys() == fields.keys() and all(
        isinstance(arguments[field], kinds[about["type"]]) for field, about in fields.items()
    )


def _by_completions(client: Any, model: str, task: str) -> list[int]:
    """Run over streamed chat completions. Return the cached prompt tokens of each turn."""
    about = [{"name": name, "description": f"{name} the scriptures. " * 8} for name in SCHEMAS]
    tools = [{"type": "function", "function": each | {"parameters": _parameters(each["name"])}} for each in about]
    messages: list[Any] = [{"role": "user", "content": task}]
    known = []
    for turn in range(TURNS + 1):
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice="required" if turn < TURNS else "none",
            parallel_tool_calls=False,
            max_tokens=200 if turn < TURNS else 8,
            stream=True,
            stream_options={"include_usage": True},
            seed=turn,
        )
        name, arguments, finish = "", "", ""
        for chunk in stream:
            if chunk.usage is not None:
                known.append(chunk.usage.prompt_tokens_details.cached_tokens)
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or ():
                    number, name = call.id, call.function.name
                    arguments += call.function.arguments
        if turn == TURNS:
            assert finish in ("length", "stop")
            return known
        assert finish == "tool_calls" and _is_valid(name, json.loads(arguments))
        function = {"name": name, "arguments": arguments}
        messages.append({"role": "assistant", "tool_calls": [{"id": number, "type": "function", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": number, "content": f"The {name} has found nothing."})
    return known


def _by_responses(client: Any, model: str, task: str) -> list[int]:
    """Run over the Responses API. Return the cached prompt tokens of each turn."""
    about = [{"name": name, "description": f"{name} the scriptures. " * 8} for name in SCHEMAS]
    tools = [{"type": "function", **each, "parameters": _parameters(each["name"])} for each in about]
    turns: list[Any] = [{"role": "user", "content": task}]
    known = []
    for turn in range(TURNS + 1):
        last = turn == TURNS
        choice = "none" if last else "required"
        limit = 16 if last else 200
        options = {"tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": limit}
        answer = client.responses.create(model=model, input=turns, tools=tools, **options)
        known.append(answer.usage.input_tokens_details.cached_tokens)
        if last:
            assert answer.output[-1].type == "message"
            break
        (call,) = answer.output
        assert call.type == "function_call" and _is_valid(call.name, json.loads(call.arguments))
        turns.append(call.to_dict())
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "nothing"})
    return known


def test_two_agents_call_tools_until_they_answer(
    folder: Path, serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for start in range(2):  # the second server starts with the first one's prefix cache
        server = serving(folder, MeshConfig(resident=0.5), log_level="error", prefix_cache="1GiB")
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for agent in (_by_completions, _by_responses):
                known = agent(client, server.model, "Find the verse about the sower.")
                assert len(known) == TURNS + 1 and known[1] > 50 < known[2]
                assert not start or known[0] > 50
        server.kept.prefixes.flush()
        server.stop()
