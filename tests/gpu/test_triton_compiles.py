"""The Triton kernels compile for three generations of cards. No card is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Shared memory that a block may use on an Ampere consumer card, an A100 and an H100, by compute capability.
SHARED_BYTES = {86: 99 << 10, 80: 163 << 10, 90: 227 << 10}


def _compile(*arguments: str, cache: Path) -> list[str]:
    """The lines that compile_kernels.py prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_the_compiler_frontend_accepts_every_kernel(tmp_path: Path) -> None:
    assert len(_compile("--frontend", "80", cache=tmp_path)) == 82


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_within_the_cards_shared_memory(capability: int, tmp_path: Path) -> None:
    lines = _compile(str(capability), cache=tmp_path)
    assert len(lines) == 82
    assert all(int(line.split()[-3]) <= SHARED_BYTES[capability] for line in lines)
