"""For all models: a cache folder of the test's own, and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's stores go: not in its tmp_path, which is its own. May not exist yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "torch_mesh"


@pytest.fixture(scope="module")
def original(mesh_tiny: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer(mesh_tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(mesh_tiny)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9))
