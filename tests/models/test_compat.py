"""Each private name of transformers, PEFT, accelerate and torch that torch_mesh uses exists, and only the three files
that list them use any."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import torch_mesh
from torch_mesh.hf import compat, generation_compat, torch_compat

PACKAGE = Path(torch_mesh.__file__).parent
LISTS = (compat, generation_compat, torch_compat)
UPSTREAM = ("torch", "transformers", "peft", "accelerate")


@pytest.mark.parametrize(
    "name", [*compat.NAMES, *generation_compat.NAMES], ids=lambda name: f"{name.owner}.{name.name}"
)
def test_a_listed_private_name_exists(name: compat.Name) -> None:
    if name.owner.startswith("peft"):
        pytest.importorskip("peft")
    _check(name)


@pytest.mark.parametrize("path", [path for path, _ in torch_compat.NAMES])
def test_a_listed_private_name_of_torch_exists(path: str) -> None:
    pkgutil.resolve_name(path)


def _check(name: compat.Name) -> None:
    package = Requirement(name.versions)
    installed = version(package.name)
    if not package.specifier.contains(installed, prereleases=True):
        pytest.skip(f"{package.name} {installed}; {name.name} is there in {name.versions}")
    owner = pkgutil.resolve_name(name.owner)
    there = name.name in inspect.getsource(owner) if name.in_source else hasattr(owner, name.name)
    assert there, f"{name.owner} has no {name.name} ({name.versions})"


def test_no_other_file_imports_a_private_name() -> None:
    """Nor does it use a listed attribute of an upstream object. ``self`` may be of a subclass that defines it."""
    listed = {name.name for each in (compat.NAMES, generation_compat.NAMES) for name in each}
    listed = {name for name in listed if name.startswith("_")}
    own = {Path(inspect.getfile(module)) for module in LISTS}
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path in own or path.is_relative_to(PACKAGE / "ops"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        modules = {}  # local names of upstream modules and their members
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in UPSTREAM:
                modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] in UPSTREAM]
                modules |= {name.partition(".")[0]: name.partition(".")[0] for name in names}
        used = {
            *modules.values(),
            *(_dotted(node, modules) for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        }
        private = {name for name in used if any(part[0] == "_" != part[1:2] for part in name.split(".") if part)}
        touched = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in listed and ast.unparse(node.value) != "self"
        }
        found += [f"{path.relative_to(PACKAGE)}: {name}" for name in private | touched]
    assert not found


# Private names of Python's own objects, of C++ and of torch.ops.
NOT_UPSTREAM = {
    "_C",
    "_DetailedStats",
    "_asdict",
    "_current_frames",
    "_exit",
    "_get_positional_actions",
    "_getframe",
    "_option_string_actions",
    "_replace",
    "_run_exitfuncs",
    "_to_copy",
}


def test_no_other_file_uses_a_private_attribute_of_upstream() -> None:
    """A private attribute that torch_mesh does not define is upstream's, and so is a string that names a listed one."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    lists = {Path(inspect.getfile(module)) for module in LISTS}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    defined = {name for path, node in nodes if path not in lists for name in _defined(node)} | NOT_UPSTREAM
    reached = {
        (path.relative_to(PACKAGE).as_posix(), node.attr)
        for path, node in nodes
        if path not in lists and isinstance(node, ast.Attribute) and _is_private(node.attr)
    }
    assert {each for each in reached if each[1] not in defined} == set()
    private = {name for name in map(str, _strings_of_lists(trees, lists)) if _is_private(name)} - defined
    named = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path, node in nodes
        if path not in lists and isinstance(node, ast.Constant) and node.value in private
    }
    assert named == set()


def _is_private(name: str) -> bool:
    return name.isidentifier() and name[0] == "_" and not name.startswith(("__", "_mesh"))


def _defined(node: ast.AST) -> list[str]:
    """The names that a node defines: functions, classes, variables, and attributes of ``self``."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    return [node.attr] if own else []


def _strings_of_lists(trees: dict[Path, ast.Module], lists: set[Path]) -> list[str]:
    return [
        node.value
        for path in lists
        for node in ast.walk(trees[path])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _dotted(node: ast.expr, modules: dict[str, str]) -> str:
    """The dotted name of a node, such as ``torch.cpu._name``; "" if it does not begin with an upstream module."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, modules)
        return base and f"{base}.{node.attr}"
    return ""
