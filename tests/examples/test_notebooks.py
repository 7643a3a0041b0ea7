"""The notebooks are stored with the outputs of a complete run, and they run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from run_notebooks import EXAMPLES, execute

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def _code(notebook: nbformat.NotebookNode) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kinds(cell: Any) -> set[str]:
    """The MIME types of a cell's outputs: text, tables, figures."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.output_type: None})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_one_complete_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in _code(notebook)] == list(range(1, len(_code(notebook)) + 1))
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"/(site-packages|home|root|Users)/", text), "a path of the machine that it ran on"


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_new_run_has_outputs_of_the_stored_types(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored, now = _code(nbformat.read(path, as_version=4)), _code(execute(path))
    assert [_kinds(cell) for cell in now] == [_kinds(cell) for cell in stored]
