"""Malformed requests: each gets a status that names the client's mistake, in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from posts import post

from torch_mesh.serving import requests
from torch_mesh.serving.admission import shorten
from torch_mesh.serving.errors import BodyTooLargeError, RequestError, RequestTooLongError
from torch_mesh.serving.requests import check_values

openai = pytest.importorskip("openai")

DEEP: Any = "end"
for _ in range(300):
    DEEP = [DEEP]
LONE_SURROGATE = "\ud800"
NOT_TEXT = (7, True, [], ["a"], {"a": 1})
NOT_NUMBERS = ("x", "1", True, [1], {"a": 1}, float("nan"), float("inf"), 10**400)
NOT_WHOLE = (*NOT_NUMBERS, 1.5)
NOT_OBJECTS = ("x", 1, True, [1])
NOT_BOOLS = ("yes", 1, 0.0, [], {})
USER = {"role": "user", "content": "In the beginning"}

# By path: the required fields, and for each parameter its invalid values.
SAMPLING: dict[str, Any] = {
    "temperature": (*NOT_NUMBERS, -1),
    "top_p": (*NOT_NUMBERS, -0.5, 1.5),
    "seed": (*NOT_WHOLE, 2**70, -(2**70)),
    "stream": NOT_BOOLS,
    "generation_config": (*NOT_TEXT, "x", "[1]", "7", '"x"', "null", '{"max_new_tokens": 2'),
    "user": NOT_TEXT,
    "model": NOT_TEXT,
}
ENDED: dict[str, Any] = {
    "max_tokens": (*NOT_WHOLE, 0, -1),
    "frequency_penalty": (*NOT_NUMBERS, -3, 3),
    "presence_penalty": (*NOT_NUMBERS, -3, 3),
    "stop": (7, True, {"a": 1}, [7], [None]),
    "logit_bias": (
        *NOT_OBJECTS,
        *({key: 1} for key in ("x", "-1", "1.5", "4096", "9" * 5000)),
        *({"5": bias} for bias in ("x", None, 101)),
    ),
    "n": (*NOT_WHOLE, 0),
    "stream_options": NOT_OBJECTS,
}
MESSAGES: tuple[Any, ...] = (
    *("x", 1, True, {}, {"a": 1}, []),
    *([each] for each in ("x", 1, None, [], {}, {"content": "a"}, {"role": None, "content": "a"}, {"role": 1})),
    *([{"role": "user", "content": content}] for content in (1, True, {"a": 1}, ["x"], [1], [[]], [None], [{}])),
    *([{"role": "user", "content": [part]}] for part in ({"text": "a"}, {"type": "text"}, {"type": 1, "text": "a"})),
    *([{"role": "user", "content": [{"type": "text", "text": text}]}] for text in (1, None, ["a"])),
    *([{"role": "assistant", "tool_calls": calls}] for calls in ("x", 1, {"a": 1}, ["x"], [None], [{}])),
    *(
        [{"role": "assistant", "tool_calls": [{"function": function}]}]
        for function in ("x", {"name": 1, "arguments": "{}"}, {"arguments": "{}"})
    ),
    *(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
        for arguments in (1, "{", "[1]", DEEP)
    ),
    [{"role": "user", "content": LONE_SURROGATE}],
    [{"role": "tool", "tool_call_id": ["a"], "content": "a"}],
    [{"role": "assistant", "content": "a", "reasoning_content": 1}],
    [{"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f", "arguments": "{}"}}]}],
)
NOT_JSON = ({"a": float("nan")}, {"a": [float("-inf")]}, {"a": LONE_SURROGATE})
TOOLS = (
    *(*NOT_OBJECTS, {"a": 1}, [None], [{"type": "function", "function": "x"}], [{"function": {"name": 1}}]),
    *([{"type": "function", "function": {"name": "f", "parameters": each}}] for each in NOT_JSON),
)
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "/v1/completions": (
        {"prompt": "a", "max_tokens": 1},
        {
            **SAMPLING,
            **ENDED,
            "prompt": (None, "", [""], ["a", 1], [4096], *({}, 7, True, []), LONE_SURROGATE, DEEP),
            "suffix": NOT_TEXT,
            "echo": NOT_BOOLS,
            "best_of": (*NOT_WHOLE, 0),
            "logprobs": (*NOT_WHOLE, -1),
        },
    ),
    "/v1/chat/completions": (
        {"messages": [USER], "max_tokens": 1},
        {
            **SAMPLING,
            **ENDED,
            "messages": (None, *MESSAGES),
            "max_completion_tokens": (*NOT_WHOLE, 0),
            "tools": TOOLS,
            "tool_choice": (1, True, [1]),
            "response_format": NOT_OBJECTS,
            "logprobs": NOT_BOOLS,
            "top_logprobs": (*NOT_WHOLE, -1),
            "parallel_tool_calls": NOT_BOOLS,
            "chat_template_kwargs": (*NOT_OBJECTS, {"tokenize": False}, {"tools": []}, {"conversation": []}),
            "metadata": NOT_OBJECTS,
        },
    ),
    "/v1/responses": (
        {"input": "a", "max_output_tokens": 1},
        {
            **SAMPLING,
            "input": (
                *(None, 1, True, {}, [], ["x"], [1], [None], [[]], [{}], [{"type": "input_text"}]),
                *([{"type": "message", "role": role, "content": "a"}] for role in (None, 1)),
                *([{"role": "user", "content": content}] for content in (1, {"a": 1}, ["x"], [{"type": "input_text"}])),
                *([USER, {"type": kind}] for kind in ("function_call", "function_call_output", "unknown", 1, None)),
                [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}],
                [USER, {"type": "reasoning", "content": [{"type": "reasoning_text"}]}],
                [USER, {"type": "reasoning", "content": "x"}],
                [USER, "x"],
                LONE_SURROGATE,
            ),
            "instructions": NOT_TEXT,
            "max_output_tokens": (*NOT_WHOLE, 0),
            "tools": TOOLS,
            "parallel_tool_calls": NOT_BOOLS,
            "text": NOT_OBJECTS,
            "reasoning": NOT_OBJECTS,
            "metadata": (*NOT_OBJECTS, *NOT_JSON),
            "previous_response_id": NOT_TEXT,
        },
    ),
}


def _error(answer: tuple[int, Any], status: int = 400) -> dict[str, Any]:
    """Return the error of an answer with this status, after checking that it has OpenAI's form."""
    assert answer[0] == status, answer
    assert set(answer[1]) == {"error"} and set(answer[1]["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = answer[1]["error"]
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


@pytest.mark.parametrize("path", CASES)
def test_an_invalid_value_is_an_error_that_names_its_field(path: str, server: Any) -> None:
    needed, fields = CASES[path]
    assert post(server, path, needed)[0] == 200
    for name, values in fields.items():
        for value in values:
            assert _error(post(server, path, needed | {name: value}))["param"] == name, (name, value)
            if name != "stream":
                answer = post(server, path, needed | {name: value, "stream": True})
                assert _error(answer)["param"] == name, (name, value)


@pytest.mark.parametrize("path", CASES)
def test_null_fields_count_as_absent(path: str, server: Any) -> None:
    needed, fields = CASES[path]
    optional = set(fields) - set(needed)
    assert post(server, path, dict.fromkeys(optional) | needed)[0] == 200


@pytest.mark.parametrize("path", [*CASES, "/load_model"])
def test_a_body_has_to_be_a_json_object(path: str, server: Any) -> None:
    for body in (b"", b"{", b"[1]", b'"x"', b"7", b"null", b"\xff", b"[" * 2000, b'{"prompt": "a"', b"{'prompt': 'a'}"):
        _error(post(server, path, body))
    _error(post(server, path, {}))
    _error(post(server, path, {"model": 7}))
    assert "utf-8" in json.dumps(post(server, path, b"\xff"))  # says why it cannot be read
    _error(post(server, path, {"model": LONE_SURROGATE}), 400)


@pytest.mark.parametrize("path", CASES)
def test_bodies_are_checked_beside_the_event_loop(path: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def check(body: Any) -> None:
        threads.append(threading.current_thread().name)
        raise RequestError("checked", "model")

    monkeypatch.setattr(requests, "check_values", check)
    assert post(server, path, CASES[path][0])[0] == 400
    assert threads and "torch-mesh-http" not in threads


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", CASES)
def test_a_large_body_is_refused(path: str, chunked: bool, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyTooLargeError, "MAX_BYTES", 1 << 20)
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.address).netloc, timeout=60)
    parts = [json.dumps(CASES[path][0]).encode(), *[b" " * (1 << 19)] * 3]
    connection.request("POST", path, iter(parts) if chunked else b"".join(parts), encode_chunked=chunked,
                       headers={"Content-Type": "application/json"})  # fmt: skip
    answer = connection.getresponse()
    error = json.load(answer)["error"]
    assert answer.status == 413 and "more than 1 MiB" in error["message"]
    assert "request_too_large" in (error.get("code"), error["type"])
    connection.close()
    assert post(server, path, CASES[path][0])[0] == 200


def test_a_body_is_not_read_for_a_client_without_the_key(server: Any) -> None:
    from torch_mesh.serving.app import build_app
    from torch_mesh.serving.metrics import Metrics

    app = build_app(server._service, Metrics(server._counters, server.engine.progress), False, "secret", None)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"9")]}
    asyncio.run(app(scope | {"query_string": b"", "http_version": "1.1"}, receive, send))
    assert sent[0]["status"] == 401


def test_a_cache_that_needs_a_gpu_is_refused(server: Any) -> None:
    for name in ("offloaded", "offloaded_static", "offloaded_hybrid"):
        options = json.dumps({"max_new_tokens": 2, "cache_implementation": name})
        error = _error(post(server, "/v1/completions", {"prompt": "In the", "generation_config": options}))
        assert error["param"] == "cache_implementation" and "on the CPU" in error["message"]


def test_each_answer_has_a_limit_of_its_own(server: Any) -> None:
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    fields = {"prompt_field": "prompt", "limit_field": "max_tokens"}
    first, second = server._service.answers(inputs, {}, **fields, count=2)
    limit = second.job.config.max_new_tokens
    assert shorten(first.job.config, RequestTooLongError("", 3)) and first.job.config.max_new_tokens == 3
    assert second.job.config.max_new_tokens == limit > 3


def test_variables_that_the_server_sets_are_refused(server: Any) -> None:
    for name in ("messages", "conversation", "chat_template", "continue_final_message", "max_length"):
        body = {"messages": [USER], "chat_template_kwargs": {name: []}}
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 400 and f"has {name!r}, which the server sets" in answer["error"]["message"]


def test_the_number_of_prompts_is_limited(server: Any) -> None:
    status, body = post(server, "/v1/completions", {"prompt": ["a"] * 129, "max_tokens": 1})
    assert status == 400 and "up to 128" in body["error"]["message"]


@pytest.mark.parametrize("path", CASES)
def test_fields_that_are_not_of_the_api_are_refused(path: str, server: Any) -> None:
    for name in ("nothing", LONE_SURROGATE, 'a "quote"'):
        _error(post(server, path, CASES[path][0] | {name: 1}))


def test_unknown_paths_and_methods(server: Any) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/audio/transcriptions", 404), ("/v1/models", 405)):
        assert path in _error(post(server, path, {}), status)["message"]


def test_an_error_of_the_template_names_the_messages_field(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = server.prompts.processor
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with the user') }}{% endif %}a"
    monkeypatch.setattr(processor, "chat_template", strict)
    system = {"role": "system", "content": "a"}
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        for stream in (False, True):
            error = _error(post(server, path, {field: [system], "stream": stream}))
            assert error["param"] == field and "Begin with the user" in error["message"]
    monkeypatch.setattr(processor, "chat_template", "{{ messages[0].name.upper() + 1 }}")
    assert _error(post(server, "/v1/chat/completions", {"messages": [USER]}))["param"] == "messages"
    monkeypatch.setattr(processor, "chat_template", "{# nothing #}")
    assert "no tokens" in _error(post(server, "/v1/chat/completions", {"messages": [USER]}))["message"]


def test_text_is_checked_as_a_whole() -> None:
    class Text(str):
        def __iter__(self) -> Iterator[str]:
            pytest.fail("each character is read in Python")

    check_values({"messages": [{"role": Text("user"), "content": Text("\U0001f600 and \ue000")}]})
    with pytest.raises(RequestError, match="surrogate"):
        check_values({"messages": [{"role": "user", "content": Text("a\udfff")}]})


def test_openais_client_raises_bad_request_errors(client: Any, server: Any) -> None:
    for ask in (
        lambda: client.completions.create(model=server.model, prompt=""),
        lambda: client.completions.create(model=server.model, prompt=[1, 4096]),
        lambda: client.chat.completions.create(model=server.model, messages=[]),
        lambda: client.chat.completions.create(model=server.model, messages=[USER], temperature="x"),
        lambda: client.responses.create(model=server.model, input=[]),
    ):
        with pytest.raises(openai.BadRequestError, match=r"(prompt|messages|temperature|input) (is|has)") as error:
            ask()
        assert error.value.param in ("prompt", "messages", "temperature", "input")


def test_valid_biases_and_stops_are_accepted(client: Any, server: Any) -> None:
    request = {"model": server.model, "messages": [USER], "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**request).choices[0].message.content
    for nothing in ({"logit_bias": {}}, {"stop": []}, {"stop": ""}, {"stop": [""]}, {"tools": []}):
        assert client.chat.completions.create(**request, **nothing).choices[0].message.content == plain
    processor = server.prompts.processor
    for bias in (100, 99.5):
        wanted = client.chat.completions.create(**request, logit_bias={"65": bias}).choices[0].message.content
        assert wanted == processor.decode([65] * 4)
