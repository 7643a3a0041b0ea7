"""setup.py's ninja files, where paths have characters that a shell or ninja reads."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

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
    """What setup.py defines, nothing being set up."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    if shutil.which("ninja") is None:
        pytest.importorskip("ninja")
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    return SimpleNamespace(**runpy.run_path(str(REPOSITORY / "setup.py")))


@pytest.mark.parametrize("folder", FOLDERS)
def test_any_path_can_be_built_in(build: SimpleNamespace, tmp_path: Path, folder: str) -> None:
    root = tmp_path / folder
    (root / "include").mkdir(parents=True)
    (root / "include" / "answer.h").write_text(HEADER)
    (root / "main.cpp").write_text(SOURCE)
    build.NinjaFile.compile.__globals__["ROOT"] = root
    define = f'-DNAME="{folder}"'.replace("\\", "\\\\") if '"' not in folder else '-DNAME="quoted"'
    expected = folder if '"' not in folder else "quoted"

    def make() -> subprocess.CompletedProcess[str]:
        ninja = build.NinjaFile(root / "out", [define, f"-I{root / 'include'}"], [f"-L{root}", f"-Wl,-rpath,{root}"])
        ninja.compile([root / "main.cpp"], ["-isystem", str(root / "include")])
        ninja.link(root / "out" / "program")
        return subprocess.run([root / "out" / "program"], capture_output=True, text=True, check=True)

    assert make().stdout == f"42 {expected}"
    # The header's path goes through the compiler's list of dependencies and back.
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
def test_words_come_through_the_shell_as_they_are(build: SimpleNamespace) -> None:
    words = ["plain", "", *FOLDERS, "two\nlines"]
    line = build._words(words).replace("$$", "$")  # as ninja does
    printed = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout
    assert printed.split("\0")[:-1] == words


@pytest.mark.parametrize("inplace", [False, True])
def test_what_tests_need_is_built_in_a_checkout_only(build: SimpleNamespace, inplace: bool) -> None:
    shipped, testing = build.EXTENSIONS
    command = build.BuildExtension(
        setuptools.Distribution({"ext_modules": [setuptools.Extension(shipped, sources=[])]})
    )
    command.inplace = inplace
    command.ensure_finalized()
    assert [extension.name for extension in command.extensions] == ([shipped, testing] if inplace else [shipped])
