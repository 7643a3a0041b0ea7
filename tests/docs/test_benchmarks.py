"""What benchmarks take from one another is there: they run for too long to be run here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}


def defined(tree: ast.Module) -> set[str]:
    """The names of a module, of its own and imported."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_imports_what_the_others_define(script: str) -> None:
    for node in ast.walk(SCRIPTS[script]):
        if isinstance(node, ast.ImportFrom) and node.module in SCRIPTS:
            missing = {alias.name for alias in node.names} - defined(SCRIPTS[node.module])
            assert not missing, f"{script}.py takes {missing} from {node.module}.py"
