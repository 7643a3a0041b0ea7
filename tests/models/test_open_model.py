"""Errors of tokenizers that cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from torch_mesh.errors import MeshError
from torch_mesh.hf.open_model import open_tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_file_of_a_tokenizer_is_named(name: str, content: str, mesh_tiny: Path, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mesh_tiny / file, tmp_path)
    assert open_tokenizer(tmp_path) is not None
    (tmp_path / name).write_text(content)
    with pytest.raises(MeshError, match=f"{name} is no JSON object"):
        open_tokenizer(tmp_path)


def test_a_tokenizer_of_other_contents_is_an_error_of_its_folder(mesh_tiny: Path, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(mesh_tiny / file, tmp_path)
    content = json.loads((mesh_tiny / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"model": 3}))
    with pytest.raises(MeshError, match=f"{tmp_path} has no tokenizer"):
        open_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=f"{tmp_path} has no tokenizer"):
        open_tokenizer(tmp_path)
