"""Small disks, and processes with fewer privileges than the tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_IPC_LOCK = 1, 2, 14


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def without_privileges(
    command: list[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to which file permissions and the limit of locked memory apply, even if the tests run as root."""

    def drop() -> None:
        if os.geteuid() == 0:
            for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_IPC_LOCK):
                if ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                    raise OSError(ctypes.get_errno(), "prctl")

    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, preexec_fn=drop)
