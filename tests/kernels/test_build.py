"""setup.py: its ninja files for paths with special characters, its versions, and errors of a wrong extension."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

import torch_mesh

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("it's", 'a "quoted" one', "for $HOME or $$", "a b", "c:d", "`true`", "back\\slash", "#1 & ; (x) *")

HEADER = "#pragma once\nconstexpr int kAnswer = 42;\n"
SOURCE = """
#include "answer.h"
#include <cstdio>
int main() { std::printf("%d %s", kAnswer, NAME); }
"""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The names that setup.py defines. It is run without building anything."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    if shutil.which("ninja") is None:
        pytest.importorskip("ninja")
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    return SimpleNamespace(**runpy.run_path(str(REPOSITORY / "setup.py")))


@pytest.mark.parametrize(
    "folder", [" ".join(FOLDERS), *(pytest.param(folder, marks=pytest.mark.thorough) for folder in FOLDERS)]
)
def test_a_build_works_in_a_folder_of_any_name(build: SimpleNamespace, tmp_path: Path, folder: str) -> None:
    root = tmp_path / folder
    (root / "include").mkdir(parents=True)
    (root / "include" / "answer.h").write_text(HEADER)
    (root / "main.cpp").write_text(SOURCE)
    build.NinjaFile.compile.__globals__["ROOT"] = root
    define = f'-DNAME="{folder}"'.replace("\\", "\\\\") if '"' not in folder else '-DNAME="quoted"'
    expected = folder if '"' not in folder else "quoted"

    def make() -> subprocess.CompletedProcess[str]:
        ninja = build.NinjaFile(root / "out", [define, f"-I{root / 'include'}"], [f"-L{root}", f"-Wl,-rpath,{root}"])
        flags = ["-isystem", str(root / "include")]
        ninja.compile([root / "main.cpp"], flags, ninja.precompile("headers", ["answer.h"], flags))
        ninja.link(root / "out" / "program")
        return subprocess.run([root / "out" / "program"], capture_output=True, text=True, check=True)

    assert make().stdout == f"42 {expected}"
    # Ninja reads the header's path from the compiler's list of dependencies.
    (root / "include" / "answer.h").write_text(HEADER.replace("42", "43"))
    assert make().stdout == f"43 {expected}"


def test_the_compiler_may_have_arguments_and_a_path_with_spaces(
    build: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "it's a compiler"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/log"\nshift\nexec {shutil.which("c++")} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f'"{wrapper}" "first $argument"')
    assert build.compiles("int main() {}")
    build.NinjaFile.compile.__globals__["ROOT"] = tmp_path
    (tmp_path / "main.cpp").write_text("int main() {}\n")
    ninja = build.NinjaFile(tmp_path / "out", [], [])
    ninja.compile([tmp_path / "main.cpp"])
    ninja.link(tmp_path / "out" / "program")
    assert (tmp_path / "log").read_text().splitlines() == ["first $argument"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="as everything here")
def test_words_pass_through_the_shell_unchanged(build: SimpleNamespace) -> None:
    words = ["plain", "", *FOLDERS, "two\nlines"]
    line = build._words(words).replace("$$", "$")  # as ninja does
    printed = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout
    assert printed.split("\0")[:-1] == words


@pytest.mark.parametrize("inplace", [False, True])
def test_the_testing_extension_is_built_in_a_checkout_only(build: SimpleNamespace, inplace: bool) -> None:
    shipped, testing = build.EXTENSIONS
    command = build.BuildExtension(
        setuptools.Distribution({"ext_modules": [setuptools.Extension(shipped, sources=[])]})
    )
    command.inplace = inplace
    command.ensure_finalized()
    assert [extension.name for extension in command.extensions] == ([shipped, testing] if inplace else [shipped])


def test_a_wheel_requires_one_torch_and_an_sdist_any(build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    stated = [line for line in (REPOSITORY / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    for command in ("bdist_wheel", "editable_wheel", "dist_info"):
        monkeypatch.setattr(sys, "argv", ["setup.py", command])
        assert build.version() == f"{torch_mesh.__version__}+torch{minor}"
        assert build.requirements() == [f"torch=={minor}.*", *stated[1:]]
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    assert build.version() == torch_mesh.__version__ and build.requirements() == stated
    assert stated[0].startswith("torch>=")


def test_a_static_library_is_preferred_and_one_that_does_not_link_is_ignored(
    build: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, program = (
        'extern "C" int answer() { return 42; }',
        'extern "C" int answer();\nint main() { return answer(); }',
    )
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    assert build.library("answers", program) == []
    compile_it = ["c++", "-x", "c++", "-", "-fPIC"]
    subprocess.run([*compile_it, "-shared", "-o", tmp_path / "libanswers.so"], input=source.encode(), check=True)
    assert build.library("answers", program) == ["-lanswers"]
    subprocess.run([*compile_it, "-c", "-o", tmp_path / "answers.o"], input=source.encode(), check=True)
    subprocess.run(["ar", "rc", tmp_path / "libanswers.a", tmp_path / "answers.o"], check=True)
    assert build.library("answers", program) == ["-l:libanswers.a"]
    assert build.library("answers", program.replace("answer(", "another(")) == []


@pytest.mark.parametrize(
    ("built", "loads"), [("2.13.0", True), ("2.13.9+cu130", True), ("2.12.1", False), ("3.13.0", False)]
)
def test_an_extension_for_another_torch_is_refused_with_advice(
    built: str, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.4+cpu")
    monkeypatch.setattr(torch_mesh, "_C", SimpleNamespace(torch_version=built))
    monkeypatch.setattr(torch_mesh, "_unusable", None)
    monkeypatch.delitem(vars(torch_mesh), "patch", raising=False)
    torch_mesh._load_extension()
    if loads:
        assert torch_mesh._unusable is None
        return
    with pytest.raises(ImportError, match=f"built against torch {re.escape(built)}.*torch 2.13.4.*pip install"):
        torch_mesh.patch  # noqa: B018


def test_an_extension_that_does_not_link_names_the_torch_it_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.1.0+torch2.13")
    monkeypatch.setattr(torch_mesh, "_unusable", None)
    monkeypatch.delattr(torch_mesh, "_C")
    monkeypatch.delitem(sys.modules, "torch_mesh._C")

    def find_spec(name: str, *_: object) -> None:
        if name == "torch_mesh._C":
            raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    monkeypatch.delitem(vars(torch_mesh), "patch", raising=False)
    torch_mesh._load_extension()
    with pytest.raises(ImportError, match=r"^torch_mesh was built against torch 2\.13, and torch 2\.15\.0 is loaded"):
        torch_mesh.patch  # noqa: B018
    assert torch_mesh._unusable is not None and torch_mesh._unusable.__cause__ is not None


@pytest.mark.slow
def test_an_sdist_builds_a_complete_wheel_that_runs(mesh_tiny: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(REPOSITORY, checkout, ignore=ignored)
    make = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    options = ["--no-build-isolation", "--no-deps", "--no-cache-dir"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path, sdist], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    shipped = ("py.typed", "_C.pyi", "ops/experts.py", "cli/serve.py", "statistics/page.html")
    assert {f"torch_mesh/{name}" for name in shipped} <= names
    assert not [name for name in names if "_testing" in name or name.startswith(("csrc", "tests"))]
    (extension,) = installed.glob("torch_mesh/_C*.so")
    needed = subprocess.run(["readelf", "-d", extension], check=True, capture_output=True, text=True).stdout
    assert "$ORIGIN/../torch/lib" in needed and "libgomp.so.1" in needed
    code = """
import sys, torch_mesh
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=torch_mesh.MeshConfig(resident=0.3))
assert torch_mesh.__file__.startswith(sys.argv[2]) and model.generate(max_new_tokens=4).shape[1] > 1
"""
    command = [sys.executable, "-c", code, str(mesh_tiny), str(installed)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, check=True)
