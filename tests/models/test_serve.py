"""``transformers serve`` of converted folders, in this process on a loopback port: answers are the model's tokens."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert

for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

from transformers.cli.serve import Serve

TEXTS = ["And it came to pass in those days, that", "def main():\n    parser =", "In the beginning", "import os\n"]
TOKENS = 12


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("serve") / "mesh-tiny-int8"
    convert(request.config.rootpath / "examples" / "mesh-tiny", destination, "int8")
    return destination


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=1.0))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        texts.append(tokenizer.decode(tokens[0, inputs["input_ids"].size(1) :], skip_special_tokens=True))
    assert len(set(texts)) == len(TEXTS)
    return texts


@contextmanager
def _served(folder: Path, **options: Any) -> Iterator[tuple[Serve, str]]:
    """A server on a free port of loopback, which is stopped at the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = Serve(str(folder), device="cpu", host="127.0.0.1", port=port, non_blocking=True, **options)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(address)
        yield serve, address
    finally:
        serve.kill_server()
        serve._thread.join(timeout=30)
        assert not serve._thread.is_alive()


def _wait_until_healthy(address: str) -> None:
    waiting = threading.Event()
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            waiting.wait(0.1)
    raise AssertionError(f"{address} does not answer")


def _complete(address: str, folder: Path, text: str, stream: bool = False) -> str:
    body = {"model": str(folder), "prompt": text, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        if not stream:
            return json.load(answer)["choices"][0]["text"]
        lines = [line.decode().removeprefix("data: ") for line in answer if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MESH_RESIDENT", "0.2")


def _model(serve: Serve) -> Any:
    (timed,) = serve._model_manager.loaded_models.values()
    return timed.model


@pytest.mark.parametrize("stream", first_quick(True, False))
def test_answers_are_those_of_generate(small_pool: None, folder: Path, expected: list[str], stream: bool) -> None:
    with _served(folder) as (serve, address):
        assert next(patched_modules(_model(serve)), None) is not None
        assert [_complete(address, folder, text, stream) for text in TEXTS] == expected
        stats = torch_mesh.stats(_model(serve))
        assert stats.evicted > 0 and stats.decode.forwards > 0


@pytest.mark.parametrize("continuous_batching", first_quick(True, False))
def test_concurrent_requests_get_their_own_answers(
    small_pool: None, folder: Path, expected: list[str], continuous_batching: bool
) -> None:
    options = {"cb_num_blocks": 24, "cb_max_batch_tokens": 32} if continuous_batching else {}
    with (
        _served(folder, continuous_batching=continuous_batching, **options) as (_, address),
        ThreadPoolExecutor() as pool,
    ):
        answers = list(pool.map(lambda text: _complete(address, folder, text), TEXTS * 2))
    if not continuous_batching:
        assert answers == expected * 2
        return
    # In a batch rounding may decide a near tie differently. A wrong answer would have nothing in common with the
    # expected one.
    equal = sum(a == b for a, b in zip(answers, expected * 2, strict=True))
    assert equal >= len(answers) // 2
    assert all(answer[:4] == other[:4] for answer, other in zip(answers, expected * 2, strict=True))


def test_a_saved_model_is_served(folder: Path, expected: list[str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    with _served(tmp_path / "saved") as (_, address):
        assert _complete(address, tmp_path / "saved", TEXTS[0]) == expected[0]
