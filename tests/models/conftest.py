"""For all models: a cache folder of the test's own, and inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's stores go. May not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torch_mesh"


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9))
