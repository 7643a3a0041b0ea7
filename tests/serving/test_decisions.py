"""Decisions (/v1/systemone): the served model stays as it is, and a request that does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from posts import post
from safetensors.torch import save_file

from torch_mesh import MeshConfig
from torch_mesh.serving import admission

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DecisionPipeline"), reason="this transformers serves no decisions"
)
ASKED = {"state": "In the beginning", "questions": {"a": {"type": "noul", "instructions": "Is it?"}}}
CHAT = {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 8, "temperature": 0}


def _chat(server: Any) -> str:
    return str(post(server, "/v1/chat/completions", CHAT)[1]["choices"][0]["message"])


@pytest.fixture
def checkpoint(folder: Path, tmp_path: Path) -> Path:
    """The served folder, to which a test adds files."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def server(serving: Callable[..., Any], checkpoint: Path) -> Any:
    (checkpoint / "decision.json").write_text('{"labels": {"noul": ["A", "B"]}}')  # each is one token
    with serving(checkpoint, MeshConfig(resident=0.5)) as server:
        yield server


def test_decisions_leave_the_model_on_its_device(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.pipelines.base.is_torch_cuda_available", lambda: True)
    for _ in range(2):
        status, answer = post(server, "/v1/systemone", ASKED)
        assert status == 200 and 0 < answer["answers"]["a"]["noul"] < 1 and answer["usage"]["input_tokens"] > 3
    assert server.kept.model.device == torch.device("cpu")


def test_a_state_that_does_not_fit_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _chat(server)
    assert server.kept.conversations

    def refused(**more: Any) -> str:
        status, answer = post(server, "/v1/systemone", ASKED | more)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "state")
        return str(answer["error"]["message"])

    assert "max_position_embeddings" in refused(state="begin " * 2500)
    monkeypatch.setattr(admission, "left_bytes", lambda: admission.RESERVE_BYTES)
    assert "bytes of memory" in refused(state="begin " * 400)


def test_decisions_evict_conversations(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = post(server, "/v1/systemone", ASKED)[1]["usage"]["input_tokens"]
    _chat(server)
    kept, needed = server.kept, server.kept.admission.needs.peak(tokens, tokens, tokens)
    assert kept.conversations
    monkeypatch.setattr(
        admission,
        "left_bytes",
        lambda: admission.RESERVE_BYTES + needed - sum(each.nbytes for each in kept.conversations),
    )
    assert post(server, "/v1/systemone", ASKED)[0] == 200
    assert kept.conversations == []


def test_a_decision_config_with_an_adapter_is_refused(serving: Callable[..., Any], checkpoint: Path) -> None:
    adapter = checkpoint / "lora"
    adapter.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    (checkpoint / "decision.json").write_text('{"adapter": "lora", "labels": {"noul": ["A", "B"]}}')
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    sizes = {"A": (2, config.hidden_size), "B": (config.num_attention_heads * config.head_dim, 2)}
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    factors = {
        name.format(layer, which): torch.ones(size)
        for layer in range(config.num_hidden_layers)
        for which, size in sizes.items()
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    with serving(checkpoint, MeshConfig(resident=0.5)) as server:
        before = _chat(server)
        for _ in range(2):
            status, answer = post(server, "/v1/systemone", ASKED)
            assert status == 400 and "'lora'" in answer["error"]["message"], answer
        assert _chat(server) == before
