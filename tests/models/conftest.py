"""Shared by the tests of models: a cache folder for each test, the small trained model, its tokenizer and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_models import FAMILIES
from tiny_models import TINY_MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test's conversion cache, outside its tmp_path. It may not exist yet."""
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


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A class of experts of ``TINY_MODELS`` whose models have tables."""
    TINY_MODELS[request.param]  # skips a family that the installed transformers lacks
    name: str = request.param
    return name
