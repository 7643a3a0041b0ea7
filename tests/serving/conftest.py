"""A small trained model to serve, and servers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_mesh import MeshConfig
from torch_mesh.store.convert import convert

TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}
Write calls as <tool_call>
{"name": "...", "arguments": {...}}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def folder(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in int8, with a chat template."""
    destination = tmp_path_factory.mktemp("served") / "mesh-tiny-int8"
    convert(mesh_tiny, destination, "int8")
    (destination / "chat_template.jinja").write_text(TEMPLATE)
    return destination


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., Any]]:
    """Starts servers on free loopback ports. They and all their threads end with the test module."""
    for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):
        pytest.importorskip(needed)
    from torch_mesh.serving.server import Server

    with ExitStack() as running:

        def serve(model: Path, config: MeshConfig, kept_bytes: int | None = None, **options: Any) -> Server:
            options = {"host": "127.0.0.1", "port": 0} | options
            return running.enter_context(Server(str(model), config, kept_bytes, options))

        yield serve


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=1.0))


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With models as small as some tests', threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seen_prompts(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the module's server gives to its model during the test."""
    seen: list[str] = []
    encode_messages = server.prompts.encode_messages

    def watch(*arguments: Any) -> Any:
        inputs = encode_messages(*arguments)
        seen.append(server.prompts.tokenizer.decode(inputs["input_ids"][0]))
        return inputs

    monkeypatch.setattr(server.prompts, "encode_messages", watch)
    return seen
