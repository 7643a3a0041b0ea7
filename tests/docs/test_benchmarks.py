"""Each benchmark uses only names that torch_mesh and the other scripts define. Running them takes too long."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_taken_from_torch_mesh_are_defined(script: str) -> None:
    for node in ast.walk(SCRIPTS[script]):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] == "torch_mesh":
                for alias in aliases:
                    try:
                        getattr(importlib.import_module(module), alias.name)
                    except AttributeError:
                        importlib.import_module(f"{module}.{alias.name}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_taken_from_other_benchmarks_are_defined(script: str) -> None:
    modules = {}
    for node in ast.walk(SCRIPTS[script]):
        match node:
            case ast.Import(names=aliases):
                modules |= {alias.asname or alias.name: alias.name for alias in aliases if alias.name in SCRIPTS}
            case ast.ImportFrom(module=str(module), names=aliases) if module in SCRIPTS:
                missing = {alias.name for alias in aliases} - defined(SCRIPTS[module])
                assert not missing, f"{script}.py imports {missing} from {module}.py"
    for node in ast.walk(SCRIPTS[script]):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                assert attribute in defined(SCRIPTS[modules[name]]), f"{script}.py uses {name}.{attribute}"
