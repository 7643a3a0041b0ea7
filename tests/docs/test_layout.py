"""The packages of torch_mesh: they import only packages below them, without cycles, and few modules are at the top.
The sources are parsed, not imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "torch_mesh"

# From the top down: a module imports from its own line and those below. docs/architecture.md has them in the same
# order. The lists of upstream's private names are below all modules that use them.
ORDER = (
    "__main__",
    "cli",
    "serving",
    "patching",
    "planning",
    "calibration",
    "adapters",
    "speculation",
    "hf",
    "lossy",
    "gpu",
    "statistics",
    "modules",
    "pool",
    "routing",
    "prefetch",
    "config",
    "config_fields",
    "store",
    "models",
    "hf.generation_compat",
    "hf.known_types",
    "hf.compat",
    "hf.wrapping",
    "hf.torch_compat",
    "system",
    "validators",
    "formats",
    "errors",
    "version",
)
# The package itself, and two public paths that documentation names: these may import from any line.
EXEMPT = ("__init__", "families", "synthetic")
MAX_TOP_MODULES = 12


def _modules() -> dict[str, Path]:
    """Files by dotted module name without ``torch_mesh``: ``store.header``, and ``store`` for a package."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return names


MODULES = _modules()


def _statements(node: ast.AST, functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports below ``node``, without those for type checkers; with those in functions if ``functions``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(child, functions)


@functools.cache
def _imports(name: str, functions: bool) -> frozenset[str]:
    """The modules of torch_mesh that this one imports."""
    path = MODULES[name]
    package = path.parent.relative_to(REPOSITORY).parts
    found = set()
    for statement in _statements(ast.parse(path.read_text("utf-8")), functions):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            parts = package[: len(package) - statement.level + 1] if statement.level else ()
            base = ".".join([*parts, *filter(None, [statement.module])])
            targets = [f"{base}.{alias.name}" for alias in statement.names]
        for target in targets:
            first, _, rest = target.partition(".")
            if first != "torch_mesh":
                continue
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            if rest and rest != name:
                found.add(rest)
    return frozenset(found)


@pytest.mark.parametrize("functions", [False, True])
def test_imports_have_no_cycle(functions: bool) -> None:
    graph = {name: _imports(name, functions) for name in MODULES}
    while free := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    assert not graph


def test_packages_import_only_packages_below_them() -> None:
    """Imports in functions count too."""
    place = {name: number for number, name in enumerate(ORDER)}
    tops = {name: name if name in place else name.partition(".")[0] for name in MODULES}
    assert set(tops.values()) == {*ORDER, *EXEMPT}
    upward = [
        f"{name} imports {target}"
        for name, top in tops.items()
        if top not in EXEMPT
        for target in _imports(name, functions=True)
        if tops[target] not in EXEMPT and place[tops[target]] < place[top]
    ]
    assert not upward


def test_documentation_lists_the_packages_in_this_order() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    rows = [line.split("`")[1].rstrip("/") for line in text.splitlines() if line.startswith("| `") and "/` |" in line]
    packages = [name for name in ORDER if (PACKAGE / name).is_dir()]
    assert [name for name in rows if name in packages] == packages


def test_at_most_twelve_modules_are_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_TOP_MODULES


# The folders of csrc/, from the bottom up.
ROOMS = ("base", "store", "io", "kernels", "tables", "residency", "engine", "gpu", "bindings", "testing")


def test_folders_of_csrc_include_only_folders_below_them() -> None:
    csrc = REPOSITORY / "csrc"
    upward = [
        f"{path.relative_to(csrc)} includes {target}/"
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cpp")
        for target in re.findall(r'^#include "(\w+)/', path.read_text("utf-8"), re.MULTILINE)
        if ROOMS.index(target) > ROOMS.index(path.relative_to(csrc).parts[0])
    ]
    assert not upward


def test_no_file_of_the_cpu_path_includes_gpu_headers() -> None:
    csrc = REPOSITORY / "csrc"
    users = {
        str(path.relative_to(csrc))
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cpp") and '#include "gpu/' in path.read_text("utf-8")
    }
    assert {path for path in users if not path.startswith(("gpu/", "testing/"))} == {"bindings/device.cpp"}


def test_only_the_device_bindings_include_experimental_gpu_headers() -> None:
    csrc = REPOSITORY / "csrc"
    users = {
        str(path.relative_to(csrc))
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cpp") and '#include "gpu/experimental/' in path.read_text("utf-8")
    }
    assert {path for path in users if not path.startswith("gpu/experimental/")} == {"bindings/device.cpp"}
    for header in (csrc / "gpu" / "experimental").glob("*.h"):
        assert header.read_text("utf-8").startswith("// Experimental:"), header.name
