"""`make wheel`, outside the repository: the sdist builds, its wheel needs no system package, and the quickstart runs
with it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from test_pages import MODELS, REPOSITORY, blocks, commands

pytestmark = pytest.mark.slow
TOOL = REPOSITORY / "tools" / "wheel.py"
# The system's libraries that manylinux lets a wheel depend on. Torch's own libraries come on top.
OF_SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The wheel, and the report of auditwheel about it."""
    pytest.importorskip("auditwheel")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, str(TOOL), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sdist, wheel = (Path(line) for line in done.stdout.splitlines()[-2:])
    assert sorted(folder.iterdir()) == sorted((sdist, wheel))
    return wheel, " ".join(done.stdout.split())


def test_the_wheel_needs_no_system_package(made: tuple[Path, str], tmp_path: Path) -> None:
    wheel, report = made
    assert "+torch" in wheel.name
    tag = wheel.stem.rpartition("-")[2].split(".")[0]
    assert tag.startswith("manylinux_") and f'"{tag}"' in report, report
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (extension,) = (name for name in names if name.startswith("torch_mesh/_C") and name.endswith(".so"))
        archive.extract(extension, tmp_path)
    assert {"torch_mesh/py.typed", "torch_mesh/_C.pyi", "torch_mesh/ops/experts_triton.py"} <= set(names)
    assert not [name for name in names if "_testing" in name or name.startswith(("tests/", "csrc/"))]
    dynamic = subprocess.run(["readelf", "-d", tmp_path / extension], capture_output=True, text=True, check=True).stdout
    needed = {line.partition("[")[2].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    brought = {name.rpartition("/")[2] for name in names}
    assert needed <= OF_SYSTEM | set(runpy.run_path(str(TOOL))["OF_TORCH"]) | brought, needed


def test_the_quickstart_runs_where_the_wheel_is_installed(
    made: tuple[Path, str], mesh_tiny: Path, tmp_path: Path
) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Torch is large and comes from this environment. Folders in a .pth file are searched last. Their own .pth files,
    # such as that of an editable torch_mesh, are not read.
    (packages / "others.pth").write_text(
        "".join(f"{place}\n" for place in sys.path if place.endswith(("site-packages", "dist-packages")))
    )
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(made[0])], check=True)

    lines = ["import subprocess, torch_mesh", f"assert torch_mesh.__file__.startswith({str(packages)!r})"]
    ran = 0
    for language, _, code in blocks(REPOSITORY / "docs" / "quickstart.md"):
        for place, replacement in (dict.fromkeys(MODELS, str(mesh_tiny)) | {"/nvme": str(empty)}).items():
            code = code.replace(place, replacement)
        if language == "python":
            lines.append(code)
            ran += 1
        for words in commands(code) if language == "sh" else ():
            lines.append(f"subprocess.run({[str(python.parent / 'torch-mesh'), *words]!r}, check=True)")
            ran += 1
    assert ran >= 6
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ours |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(python), "-c", "\n".join(lines)], cwd=empty, env=ours, check=True)
