"""Clients and logs show the progress of reading a long prompt."""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import MeshConfig
from torch_mesh.serving import progress

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

CHAT = [{"role": "user", "content": "In the beginning"}]


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=0.5), kept_bytes=0)


def test_comments_keep_a_silent_stream_alive(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_mesh.serving import app

    monkeypatch.setattr(app, "QUIET", 0.01)
    go_on, generate = threading.Event(), server.kept._generate

    def slow(**arguments: Any) -> Any:
        assert go_on.wait(60)
        return generate(**arguments)

    monkeypatch.setattr(server.kept, "_generate", slow)
    body = {"messages": CHAT, "max_tokens": 3, "temperature": 0, "stream": True}
    for path in ("/v1/chat/completions", "/v1/messages"):
        go_on.clear()
        request = urllib.request.Request(
            server.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            comments = []
            while len(comments) < 3:
                line = answer.readline().decode()
                if line.startswith(":"):
                    comments.append(line)
            go_on.set()
            rest = answer.read().decode()
        assert "reading a prompt of " in comments[-1] and "%" in comments[-1]
        assert rest.rstrip().endswith(("data: [DONE]", '"message_stop"}'))
    go_on.set()
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(client.chat.completions.create(model=server.model, **body))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_layers_are_counted_until_the_prompt_is_read(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = server.engine.progress
    ends, end = [], found.end

    def ending() -> None:
        ends.append((found.tokens, found.fraction))
        end()

    monkeypatch.setattr(found, "end", ending)
    monkeypatch.setattr(progress, "_EVERY", -1.0)
    with caplog.at_level(logging.INFO, "torch_mesh.serving.progress"):
        _complete(server, "In the beginning")
    read = [each for each in ends if each[0]]
    assert len(read) == 1 and read[0][1] == 1.0  # each layer once, without the decode steps
    lines = [record.getMessage() for record in caplog.records if "reading a prompt" in record.getMessage()]
    assert len(lines) == 6 and lines[2].endswith("50% done")
    assert found.tokens == 0 and "torch_mesh_reading_tokens 0.0" in _text(f"{server.address}/metrics")
    assert not any(module._forward_hooks for module in found._modules)


def _complete(server: Any, text: str) -> None:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        client.completions.create(model=server.model, prompt=text, max_tokens=3, temperature=0)


def _text(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()
