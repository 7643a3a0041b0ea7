"""Requests as Claude Code 2.1.332 and Codex 0.171 send them, with shorter texts and fewer tools."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import MeshConfig

TOKENS = 8
_TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "any place": None,
    "system only first": "{{ tools }}{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _TURN,
    "developer only first": "{{ tools }}{% if messages[0].role in ('system', 'developer') %}"
    "<|im_start|>developer\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for message in messages if message.role not in ('system', 'developer') %}" + _TURN,
    "roles alternate": "{{ tools }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for message in messages if message.role != 'system' %}{% if (message.role == 'assistant') != loop.index0 % 2 %}"
    "{{ raise_exception('Conversation roles must alternate.') }}{% endif %}" + _TURN,
}
EVERYTHING = "{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
BRIEF = "In the beginning God created the heaven and the earth. " * 8
SKILLS = "And the earth was without form, and void."


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=1.0), default_tokens=TOKENS)


@pytest.fixture(params=TEMPLATES)
def prompts(
    request: pytest.FixtureRequest, server: Any, seen_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The prompts that the model gets, by each of the templates."""
    if TEMPLATES[request.param] is not None:
        monkeypatch.setattr(server.prompts.processor, "chat_template", TEMPLATES[request.param])
    return seen_prompts


def _events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return _answer(server, path, body)[1]


def _answer(server: Any, path: str, body: dict[str, Any]) -> tuple[set[str], list[dict[str, Any]]]:
    """What is left out, and the events."""
    request = urllib.request.Request(
        server.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
        left_out = set(filter(None, answer.headers.get("x-torch-mesh-left-out", "").split(", ")))
    return left_out, [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _claude(server: Any, cch: str, *later: Any) -> dict[str, Any]:
    """The body of a turn of Claude Code. ``cch`` differs in each request."""
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=cli; cch={cch};"
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {
        "model": server.model,
        "max_tokens": TOKENS,
        "metadata": {"user_id": '{"device_id": "a", "session_id": "b"}'},
        "output_config": {"effort": "high"},
        "stream": True,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are Claude Code.", **cached},
            {"type": "text", "text": BRIEF, **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who is there?"}, {"type": "text", "text": "Look."}]},
            {"role": "system", "content": [{"type": "text", "text": SKILLS, **cached}]},
            *later,
        ],
        "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": schema}],
    }


def test_claude_code_reuses_the_prompt_of_its_last_turn(server: Any, prompts: list[str]) -> None:
    first = _events(server, "/v1/messages?beta=true", _claude(server, "00001"))
    assert first[0]["type"] == "message_start" and first[-1]["type"] == "message_stop"
    assert BRIEF.strip() in prompts[0] and "cch=" not in prompts[0]
    assert prompts[0].index("Look.") < prompts[0].index(SKILLS) < prompts[0].rindex("assistant")
    asked = first[-2]["usage"]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "nobody", "is_error": False}
    called = [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "who"}},
    ]
    turns = ({"role": "assistant", "content": called}, {"role": "user", "content": [result]})
    second = _events(server, "/v1/messages?beta=true", _claude(server, "00002", *turns))
    tokens = asked["input_tokens"] + asked["cache_read_input_tokens"]
    assert second[-2]["usage"]["cache_read_input_tokens"] > 0.9 * tokens > 0


def test_claude_code_needs_no_variables(
    server: Any, seen_prompts: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch_mesh.serving.left_out._logged", set())
    monkeypatch.setattr(
        server.prompts.processor, "chat_template", EVERYTHING + "{# <think></think> #}{{ enable_thinking }}"
    )
    body = _claude(server, "00001") | {
        "thinking": {"type": "enabled", "budget_tokens": TOKENS - 1, "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "xhigh"},
    }
    deferred = {"eager_input_streaming": True, "allowed_callers": ["direct"], "defer_loading": True}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    tools = [body["tools"][0] | deferred, search]
    fields = {"thinking.budget_tokens", "output_config.effort", "tools.defer_loading", "tools (web_search_20250305)"}
    for _ in range(2):
        left_out, events = _answer(server, "/v1/messages?beta=true", body | {"tools": tools})
        assert left_out == fields and events[-1]["type"] == "message_stop"
    assert len(caplog.records) == len(fields), "each is logged once"
    assert (
        '"Bash"' in seen_prompts[-1]
        and "web_search" not in seen_prompts[-1]
        and "defer_loading" not in seen_prompts[-1]
    )
    for thinking in ({"type": "enabled", "budget_tokens": TOKENS}, {"type": "enabled"}):
        body |= {"thinking": thinking, "output_config": {"effort": "high"}}
        assert _answer(server, "/v1/messages", body)[0] == set()
        assert seen_prompts[-1].endswith("True")
    monkeypatch.setattr(server.prompts.processor, "chat_template", EVERYTHING)  # of a model that does not reason
    assert _answer(server, "/v1/messages", body)[0] == {"thinking"}


def test_claude_code_searches_for_deferred_tools(
    server: Any, seen_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.prompts.processor, "chat_template", EVERYTHING)
    schema = {"type": "object", "properties": {"page": {"type": "string"}}, "required": ["page"]}
    look = {"name": "mcp__book__look", "description": "Opens a page.", "input_schema": schema, "defer_loading": True}
    search = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
    unused = search | {"name": "DeferredToolPlaceholder", "defer_loading": True}
    call = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "select:mcp__book__look"}}

    def body(*found: str, tools: Any = (search, unused, look)) -> dict[str, Any]:
        references = [{"type": "tool_reference", "tool_name": name} for name in found]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": references}
        turns = ({"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
        return _claude(server, "00001", *(turns if found else ())) | {"tools": tools}

    asked = _events(server, "/v1/messages", body(tools=[search, unused]))[-2]["usage"]
    left_out, events = _answer(server, "/v1/messages", body("mcp__book__look"))
    assert left_out == set() and "Placeholder" not in seen_prompts[-1]
    _, _, shown = seen_prompts[-1].partition('"role": "tool"')
    assert seen_prompts[-1].count("Opens a page.") == shown.count("Opens a page.") == shown.count('\\"page\\"') / 2 == 1
    tokens = asked["input_tokens"] + asked["cache_read_input_tokens"]
    assert events[-2]["usage"]["cache_read_input_tokens"] > 0.9 * tokens > 0, "the tools before are the same"
    with pytest.raises(urllib.error.HTTPError) as error:
        _events(server, "/v1/messages", body("mcp__book__lok"))
    assert "tool_name is 'mcp__book__lok': give the name of one of tools" in json.load(error.value)["error"]["message"]
    theirs = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    left_out, _ = _answer(server, "/v1/messages", body(tools=[search, look, theirs]))
    assert left_out == {"tools.defer_loading", "tools (tool_search_tool_regex_20251119)"}
    assert "Opens a page." in seen_prompts[-1]


def _codex(server: Any, *later: Any, **more: Any) -> dict[str, Any]:
    def message(role: str, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{role}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }

    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    about = {"description": "Runs a command.", "strict": False, "parameters": schema | {"additionalProperties": False}}
    return {
        "model": server.model,
        "input": [message("developer", BRIEF), message("developer", SKILLS), message("user", "Who is there?"), *later],
        "tools": [{"type": "function", "name": "exec_command", **about}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"session_id": "a", "x-codex-installation-id": "b"},
        "access_programs": {"cyber": "none"},
        **more,
    }


def test_the_model_sees_all_messages_of_codex(server: Any, prompts: list[str]) -> None:
    asked = {"instructions": "Be kind."}
    result = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "Exit code 0"}
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "call_1", "name": "exec_command"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    thought["content"] = [{"type": "reasoning_text", "text": "I look."}]
    turns = (thought, call | {"arguments": '{"cmd": "who"}'}, result)
    for later in ((), turns):
        events = _events(server, "/v1/responses", _codex(server, *later, **asked))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["usage"]["output_tokens"] == TOKENS
        assert all(text.strip() in prompts[-1] for text in ("Be kind.", BRIEF, SKILLS, "Who is there?"))
    assert "Exit code 0" in prompts[-1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("system only first", "System message must be at the beginning"),
        ("developer only first", "input[3] is a developer message"),
    ],
)
def test_a_late_developer_message_that_the_template_does_not_show_is_refused(
    name: str, reason: str, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.prompts.processor, "chat_template", TEMPLATES[name])
    late = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be quick."}]}
    with pytest.raises(urllib.error.HTTPError) as error:
        _events(server, "/v1/responses", _codex(server, late))
    answer = json.load(error.value)["error"]
    assert answer["param"] == "input" and reason in answer["message"]


def test_log_probabilities_beside_encrypted_reasoning(server: Any) -> None:
    encrypted = _codex(server)["include"]
    both = _codex(server, include=[*encrypted, "message.output_text.logprobs"], tools=[], top_logprobs=2)
    for body, has in ((_codex(server, tools=[]), False), (both, True)):
        (item,) = _events(server, "/v1/responses", body)[-1]["response"]["output"]
        assert bool(item["content"][0]["logprobs"]) == has


def test_codex_calls_the_tools_of_mcp_servers(
    server: Any, seen_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(server.prompts.processor, "chat_template", EVERYTHING)
    schema = {"type": "object", "properties": {"page": {"type": "string", "maxLength": 4}}, "required": ["page"]}
    look = {"type": "function", "name": "look", "description": "Opens a page.", "strict": False, "parameters": schema}
    shell = _codex(server)["tools"][0]
    others = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    for name, shown in (("mcp__book", "mcp__book__look"), ("mcp__book__", "mcp__book__look"), ("a", "a__look")):
        book = {"type": "namespace", "name": name, "description": "The handbook.", "tools": [look]}
        tools = [shell, look, book, *others]
        choice = {"type": "function", "name": "look", "namespace": name}
        body = _codex(server, tools=tools, tool_choice=choice, max_output_tokens=200)
        left_out, events = _answer(server, "/v1/responses", body)
        assert left_out == {"tools (web_search)", "tools (custom)"}
        assert events[-1]["response"]["tools"][2]["type"] == "namespace"
        items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
        assert [(item["namespace"], item["name"]) for item in items] == [(name, "look")] * 2
        assert items[-1] == events[-1]["response"]["output"][0]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "nothing"}
        _events(server, "/v1/responses", _codex(server, items[-1], result, tools=tools))
        assert seen_prompts[-1].count(f'"{shown}"') == 2, "as a tool, and in the earlier call"
        assert "The handbook.\\n\\nOpens a page." in seen_prompts[-1] and "apply_patch" not in seen_prompts[-1]
    choice = {"type": "function", "name": "look"}
    events = _events(server, "/v1/responses", _codex(server, tools=tools, tool_choice=choice, max_output_tokens=200))
    assert events[-1]["response"]["output"][0].keys().isdisjoint({"namespace"})
