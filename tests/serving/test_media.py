"""Pictures, videos and sound of requests: no file of the server is opened, and no address fetched unless allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from posts import answer_of, post

from torch_mesh import MeshConfig

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PICTURE = "data:image/png;base64,iVBORw0KGgo="


class Processor:
    """A stub of one for all media. Records their addresses, which transformers would open."""

    image_processor = video_processor = feature_extractor = object()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.opened: list[str] = []
        self.messages: list[Any] = []

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        self.messages = messages
        contents = [message["content"] for message in messages]
        self.opened += [part["url"] for content in contents for part in content if part["type"] != "text"]
        return self.tokenizer("In the beginning", return_tensors="pt")


@pytest.fixture(scope="module", params=[False, True], ids=["closed", "fetching"])
def server(request: pytest.FixtureRequest, serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=1.0), fetch_media=request.param)


@pytest.fixture
def fetches(server: Any) -> bool:
    found: bool = server.prompts._fetches
    return found


@pytest.fixture
def processor(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processor]:
    made = Processor(server.prompts.tokenizer)
    monkeypatch.setattr(server.prompts, "processor", made)
    return made


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Addresses of an existing file."""
    path = tmp_path / "a.png"
    path.write_bytes(bytes(8))
    return [str(path), path.as_uri(), f"FILE://{path}"]


def _requests(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A picture at ``address``, in all the forms of each API."""
    for part in (
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": address},
    ):
        yield CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    part = {"type": "input_image", "image_url": address}
    yield RESPONSES, {"input": [part], "max_output_tokens": 1}
    yield RESPONSES, {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}
    output = {"type": "function_call_output", "call_id": "1", "output": [part]}
    yield RESPONSES, {"input": [{"role": "user", "content": "a"}, output], "max_output_tokens": 1}
    part = {"type": "image", "source": {"type": "url", "url": address}}
    yield MESSAGES, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    part = {"type": "tool_result", "tool_use_id": "1", "content": [part]}
    yield MESSAGES, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}


def _media(kind: str, address: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": address}}]}], "max_tokens": 1}


def test_files_of_the_server_are_refused(server: Any, processor: Processor, files: list[str]) -> None:
    others = ["a.png", "", "HTTP://localhost/a.png", "ftp://localhost/a.png"]
    bodies = [each for address in (*files, *others) for each in _requests(address)]
    bodies += [(CHAT, _media(kind, address)) for address in files for kind in ("video_url", "audio_url")]
    for path, body in bodies:
        status, answer = post(server, path, body)
        assert status == 400 and answer["error"]["param"] == ("input" if path == RESPONSES else "messages"), body
    assert processor.opened == []


def test_addresses_are_fetched_only_if_the_server_allows_it(server: Any, processor: Processor, fetches: bool) -> None:
    addresses = ("http://169.254.169.254/latest", "https://localhost/a.png")
    bodies = [each for address in addresses for each in _requests(address)]
    bodies += [(CHAT, _media(kind, address)) for address in addresses for kind in ("video_url", "audio_url")]
    for path, body in bodies:
        status, answer = post(server, path, body)
        assert status == (200 if fetches else 400), answer
        assert fetches or "--fetch-media" in answer["error"]["message"]
    assert len(processor.opened) == (len(bodies) if fetches else 0)


def test_data_of_a_request_is_accepted(server: Any, processor: Processor) -> None:
    bodies = [*_requests(PICTURE), (CHAT, _media("audio_url", PICTURE))]
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    content = [{"type": "image", "source": source}]
    bodies.append((MESSAGES, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}))
    for path, body in bodies:
        assert post(server, path, body)[0] == 200, body
    assert processor.opened == [PICTURE] * len(bodies)
    status, answer = post(server, CHAT, _media("video_url", PICTURE))
    assert status == 400 and "http(s)" in answer["error"]["message"]


@pytest.mark.parametrize("detail", ["auto", "high", "original", "low", "none"])
def test_pictures_are_processed_in_one_size(detail: str, server: Any, processor: Processor) -> None:
    expected = (400, None) if detail == "none" else (200, "detail" if detail == "low" else None)
    parts = [
        (CHAT, {"type": "image_url", "image_url": {"url": PICTURE, "detail": detail}}),
        (RESPONSES, {"type": "input_image", "image_url": PICTURE, "detail": detail}),
    ]
    for path, part in parts:
        field, limit = ("messages", "max_tokens") if path == CHAT else ("input", "max_output_tokens")
        status, _, headers = answer_of(server, path, {field: [{"role": "user", "content": [part]}], limit: 1})
        assert (status, headers["x-torch-mesh-left-out"]) == expected


def _results() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two results of tools, a text with a picture and a picture alone, before a text: by Anthropic's API and by
    OpenAI's."""
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    picture = {"type": "image", "source": source}
    content = [
        {
            "type": "tool_result",
            "tool_use_id": "1",
            "is_error": True,
            "content": [{"type": "text", "text": "A"}, picture],
        },
        {"type": "tool_result", "tool_use_id": "2", "content": [picture]},
        {"type": "text", "text": "B"},
    ]
    drawn = {"type": "input_image", "image_url": PICTURE}
    items = [
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "Error: A"}, drawn]},
        {"type": "function_call_output", "call_id": "2", "output": [drawn]},
        {"role": "user", "content": [{"type": "input_text", "text": "B"}]},
    ]
    later = {"role": "assistant", "content": "C"}
    user = {"role": "user", "content": "D"}
    return (
        {"messages": [{"role": "user", "content": content}, later, user], "max_tokens": 1},
        {"input": [user, *items, later, user], "max_output_tokens": 1},
    )


def test_pictures_of_tools_follow_their_results(server: Any, processor: Processor) -> None:
    for path, body in zip((MESSAGES, RESPONSES), _results(), strict=True):
        status, _, headers = answer_of(server, path, body)
        assert status == 200 and headers["x-torch-mesh-left-out"] is None
        first, second, user, said, _ = processor.messages[-5:]
        assert [each["role"] for each in (first, second, user, said)] == ["tool", "tool", "user", "assistant"]
        assert first["content"] == [{"type": "text", "text": "Error: A"}]
        assert all(part["type"] == "text" for part in second["content"])
        picture = {"type": "image", "url": PICTURE}
        assert user["content"] == [picture, picture, {"type": "text", "text": "B"}]
    picture = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": _results()[0]["messages"][0]["content"][1]["content"],
    }
    body = {"messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
    for messages in (body["messages"], [*body["messages"], {"role": "assistant", "content": "C"}]):
        assert post(server, MESSAGES, body | {"messages": messages})[0] == 200
        assert [each["role"] for each in processor.messages[:2]] == ["tool", "user"]


def test_a_model_of_text_is_told_that_a_tool_had_a_picture(
    server: Any, seen_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    monkeypatch.setattr(server.prompts.processor, "chat_template", template)
    note = "[picture left out: this model reads text]"
    for path, body in zip((MESSAGES, RESPONSES), _results(), strict=True):
        status, _, headers = answer_of(server, path, body)
        assert status == 200 and headers["x-torch-mesh-left-out"] == "pictures in results of tools"
        assert f"tool: Error: A\n{note}\ntool: {note}\nuser: B\n" in seen_prompts[-1].replace(
            f"tool: \n{note}", f"tool: {note}"
        )


@pytest.mark.parametrize("reads", [True, False])
def test_a_picture_that_cannot_be_read_is_not_blamed_on_the_template(
    reads: bool, server: Any, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(*_: Any, tokenize: bool, **__: Any) -> str:
        if tokenize or not reads:
            raise OSError("image file is truncated")
        return ""

    monkeypatch.setattr(processor, "apply_chat_template", apply)
    for path, body in _requests(PICTURE):
        status, answer = post(server, path, body)
        message = answer["error"]["message"]
        assert status == 400 and "image file is truncated" in message
        assert ("cannot be read" in message) == reads != ("chat template" in message)


def test_sound_in_base64_is_never_a_path(server: Any, processor: Processor, files: list[str]) -> None:
    for given in (files[0], {"data": files[0]}, {"data": files[0], "format": "mp3"}):
        content = [{"type": "input_audio", "input_audio": given}]
        assert post(server, CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})[0] == 200
    assert processor.opened == [f"data:audio/{kind};base64,{files[0]}" for kind in ("wav", "wav", "mp3")]


def test_variables_of_the_template_are_no_media(server: Any, processor: Processor, files: list[str]) -> None:
    for name in ("images", "videos", "audio", "processor_kwargs"):
        processor.chat_template = f"{{{{ {name} }}}}"
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: files[:1]}}
        status, answer = post(server, CHAT, body)
        assert status == 400 and answer["error"]["param"] == "chat_template_kwargs" and name in str(answer)
    assert processor.opened == []
