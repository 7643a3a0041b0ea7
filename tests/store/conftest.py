"""Shared by the tests of files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A GGUF file of an architecture with experts of a type. Written once: tests copy it instead of changing it."""
    import gguf_files  # needs the gguf package

    @functools.cache
    def write(architecture: str, kind: str = "F32") -> Any:
        path = tmp_path_factory.mktemp(architecture) / "model.gguf"
        return gguf_files.write(path, architecture, {"_exps.weight": kind})

    return write
