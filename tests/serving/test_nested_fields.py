"""Fields within messages, tools and other objects: each is honoured, or the request is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from posts import post

USER = {"role": "user", "content": "In the beginning"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 1},
    RESPONSES: {"input": [USER], "max_output_tokens": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
THEIRS = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
BOOK = {"type": "namespace", "name": "book", "tools": [FLAT]}
SEARCH = {"type": "web_search"}
CUSTOM = {"type": "custom", "function": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def text(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a", **more}]}


def theirs(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


# The path, the fields, and the name that the error message contains.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER | {"unknown": 1}]}, "unknown"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "audio": {"id": "1"}}]}, "audio"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "function_call"),
    (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, "refusal"),
    (CHAT, {"messages": [USER | {"parsed": {}}]}, "parsed"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
    (CHAT, {"messages": [{"role": "user"}]}, "content"),
    (CHAT, {"messages": [text(unknown=1)]}, "unknown"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL | {"unknown": 1}]}]}, "unknown"),
    (CHAT, {"tools": [TOOL | {"unknown": 1}]}, "unknown"),
    (CHAT, {"tools": [TOOL, TOOL]}, "look"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
    (CHAT, {"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "look", "unknown": 1}}}, "unknown"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}, "unknown": 1}},
        "unknown",
    ),
    (CHAT, {"response_format": {"type": "text", "unknown": 1}}, "unknown"),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "unknown": 1}}}, "unknown"),
    (CHAT, {"chat_template_kwargs": {"unknown": 1}}, "unknown"),
    (CHAT, {"generation_config": '{"unknown": 1, "max_new_tokens": 1}'}, "unknown"),
    (CHAT, {"max_tokens": 8, "generation_config": '{"max_new_tokens": 3}'}, "max_new_tokens"),
    (CHAT, {"max_tokens": 8, "generation_config": '{"max_length": 8}'}, "give max_new_tokens"),
    (CHAT, {"temperature": 0, "generation_config": '{"max_new_tokens": 1, "do_sample": true}'}, "do_sample"),
    (CHAT, {"generation_config": '{"max_new_tokens": 1, "suppress_tokens": [99999]}'}, "suppress_tokens"),
    (CHAT, {"generation_config": '{"max_new_tokens": 1, "cache_implementation": "quantized"}'}, "generation_config"),
    (RESPONSES, {"input": [USER | {"unknown": 1}]}, "unknown"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "a"}]}, "wizard"),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call", "call_id": "1", "unknown": 1, **CALL["function"]}]},
        "unknown",
    ),
    (RESPONSES, {"tools": [FLAT, FLAT]}, "look"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "look", "unknown": 1}}, "unknown"),
    (RESPONSES, {"tools": [SEARCH, {"type": "custom", "name": "a"}]}, "web_search, custom"),
    (RESPONSES, {"tools": [FLAT, SEARCH], "tool_choice": SEARCH}, "web_search"),
    (RESPONSES, {"tools": [FLAT, {"type": 7}]}, "tools[1].type"),
    (RESPONSES, {"tools": [BOOK, FLAT | {"name": "book__look"}]}, "book__look"),
    (RESPONSES, {"tools": [BOOK | {"name": ""}]}, "name"),
    (RESPONSES, {"tools": [BOOK | {"unknown": 1}]}, "unknown"),
    (RESPONSES, {"tools": [BOOK | {"tools": [BOOK]}]}, "tools[0].tools[0].type"),
    (RESPONSES, {"tools": [BOOK], "tool_choice": FUNCTION["name"]}, "tool_choice"),
    (RESPONSES, {"tools": [BOOK], "tool_choice": {"type": "function", "name": "look"}}, "book__look"),
    (RESPONSES, {"tools": [BOOK], "tool_choice": {"type": "function", "name": "look", "namespace": 7}}, "namespace"),
    (RESPONSES, {"input": [USER, {"type": "custom_tool_call", "call_id": "1", "name": "a"}]}, "custom_tool_call"),
    (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "a"}, USER]}, "function_call_output"),
    (RESPONSES, {"text": {"format": {"type": "text", "unknown": 1}}}, "unknown"),
    (MESSAGES, {"messages": [USER | {"unknown": 1}]}, "unknown"),
    (MESSAGES, theirs({"type": "text", "text": "a", "citations": [{"type": "char_location"}]}), "citations"),
    (MESSAGES, theirs({"type": "tool_result", "tool_use_id": "1", "unknown": 1}), "unknown"),
    (MESSAGES, theirs({"type": "tool_result", "tool_use_id": "1", "is_error": "yes"}), "is_error"),
    (MESSAGES, theirs({"type": "tool_use", "name": "look", "input": {}}, role="assistant"), "id"),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "unknown": 1}]}, "unknown"),
    (MESSAGES, {"tools": [THEIRS | {"defer_loading": "x"}]}, "defer_loading"),
    (MESSAGES, {"tools": [THEIRS | {"allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "a"}]}, "web_search_20250305"),
    (MESSAGES, {"tools": [THEIRS, {"type": "a"}], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
    (MESSAGES, {"tools": [THEIRS | {"description": 7}]}, "description"),
    (MESSAGES, {"tools": [THEIRS | {"strict": "x"}]}, "strict"),
    (MESSAGES, {"tools": [THEIRS, THEIRS]}, "look"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice asks for a call, but there are no tools"),
    (MESSAGES, {"tools": [THEIRS], "tool_choice": {"type": "auto", "name": "look"}}, "name"),
    (MESSAGES, {"tools": [THEIRS], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MESSAGES, {"thinking": {"type": "adaptive", "unknown": 1}}, "unknown"),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 1}}, "budget_tokens"),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "all"}}, "display"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    (MESSAGES, {"output_config": {"effort": "most"}}, "effort"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    (MESSAGES, {"metadata": {"unknown": 1}}, "unknown"),
    (MESSAGES, {"metadata": {"user_id": 7}}, "user_id"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER | {"name": "Ann"}, {"role": "assistant", "content": "a", "refusal": None}, USER]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"index": 0}]}, USER]}),
    (CHAT, {"messages": [text(cache_control={"type": "ephemeral"})]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "annotations": [], "reasoning_content": "b"}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "{}", "parsed": {}}, USER]}),
    (CHAT, {"messages": [USER, {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]}),
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"metadata": {"a": "b"}, "verbosity": "medium", "service_tier": "flex"}),
    (CHAT, {"prompt_cache_key": "a", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}}),
    (CHAT, {"reasoning_effort": "none"}),  # this model does not reason
    (RESPONSES, {"reasoning": {"effort": "none", "summary": "concise"}, "text": {"verbosity": "medium"}}),
    (RESPONSES, {"reasoning": {"summary": "detailed"}, "truncation": "auto", "service_tier": "priority"}),
    (CHAT, {"max_tokens": 2, "temperature": 0, "generation_config": '{"max_new_tokens": 2, "do_sample": false}'}),
    (RESPONSES, {"tools": [BOOK, FLAT], "tool_choice": {"type": "function", "name": "look", "namespace": "book"}}),
    (RESPONSES, {"input": [USER, {"type": "message", "id": "1", "status": "completed", **USER}]}),
    (RESPONSES, {"input": [USER, {"type": "reasoning", "id": "1", "summary": []}, USER]}),
    (MESSAGES, theirs({"type": "text", "text": "a", "citations": None, "cache_control": {"type": "ephemeral"}})),
    (MESSAGES, {"tools": [THEIRS | {"cache_control": {"type": "ephemeral"}}]}),
    (MESSAGES, {"metadata": {"user_id": "a"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}}),
]


def _post(server: Any, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
    return post(server, path, NEEDED[path] | fields)


def test_unsupported_nested_fields_are_refused_by_name(server: Any) -> None:
    pytest.importorskip("llguidance")
    for path, fields, name in REFUSED:
        status, answer = _post(server, path, fields)
        assert status == 400 and name in answer["error"]["message"], (path, fields, answer)


def test_fields_that_clients_copy_from_answers_are_accepted(server: Any) -> None:
    for path, fields in TAKEN:
        assert _post(server, path, fields)[0] == 200, (path, fields)


def test_an_answer_names_the_tools_of_the_request(server: Any) -> None:
    flat = FLAT | {"name": "b"}
    tools = _post(server, RESPONSES, {"tools": [TOOL, flat, BOOK, CUSTOM]})[1]["tools"]
    assert tools == [FLAT, flat, BOOK, CUSTOM]


def test_an_answer_names_its_service_tier_and_truncation(server: Any) -> None:
    for path in (CHAT, RESPONSES, "/v1/completions"):
        assert _post(server, path, {"service_tier": "priority"})[1]["service_tier"] == "default"
    assert _post(server, RESPONSES, {"truncation": "auto"})[1]["truncation"] == "auto"
    status, answer = _post(server, RESPONSES, {"truncation": "auto", "max_output_tokens": 10**9})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_reasoning_that_cannot_be_turned_off_is_an_error(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = server.prompts.processor
    whole = processor.chat_template
    off = ((CHAT, {"reasoning_effort": "none"}), (MESSAGES, {"thinking": {"type": "disabled"}}))
    for marks, status in (("<think></think>", 400), ("<|channel|><|message|>", 400), ("</think> enable_thinking", 200)):
        monkeypatch.setattr(processor, "chat_template", f"{whole}{{# {marks} #}}")
        for path, fields in off:
            assert _post(server, path, fields)[0] == status, (marks, path)


def test_a_system_message_that_the_template_omits_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (
        "{{ messages[0].content }}{% for each in messages[1:] if each.role != 'system' %}{{ each.content }}{% endfor %}"
    )
    monkeypatch.setattr(server.prompts.processor, "chat_template", first)
    for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
        assert _post(server, path, {field: [{"role": "system", "content": "Be brief."}, USER]})[0] == 200
        for role in ("system", "developer"):
            status, answer = _post(server, path, {field: [USER, {"role": role, "content": "Be brief."}, USER]})
            assert status == 400 and "put it first" in answer["error"]["message"]


def test_variables_that_the_template_reads_are_accepted(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = server.prompts.processor
    monkeypatch.setattr(processor, "chat_template", processor.chat_template + "{{ mood }}{{ messages[0].tone }}")
    fields = {"messages": [USER | {"tone": "kind"}], "chat_template_kwargs": {"mood": "grave"}}
    assert _post(server, CHAT, fields)[0] == 200
    assert _post(server, CHAT, {"chat_template_kwargs": {"moo": "grave"}})[0] == 400


def test_the_model_is_told_that_a_tool_has_failed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    encode_messages = server.prompts.encode_messages

    def watch(messages: Any, *arguments: Any) -> Any:
        seen.extend(messages)
        return encode_messages(messages, *arguments)

    monkeypatch.setattr(server.prompts, "encode_messages", watch)
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no such file"}
    assert _post(server, MESSAGES, theirs(result | {"is_error": True}, result))[0] == 200
    assert [each["content"] for each in seen[:2]] == ["Error: no such file", "no such file"]
