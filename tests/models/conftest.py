"""For all models: a cache folder of the test's own, and inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's stores go: not in its tmp_path, which is its own. May not exist yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "torch_mesh"


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9))
