"""A one-line description of the machine."""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

import psutil
import torch

from torch_mesh.system.background import usable_processors
from torch_mesh.version import __version__


@functools.cache
def describe_machine() -> str:
    """Processors, memory, torch and torch_mesh; without what a sandbox hides."""
    parts = [f"{usable_processors()} processors of {_processor() or platform.machine()}"]
    with contextlib.suppress(OSError):
        parts.append(f"{psutil.virtual_memory().total / 1e9:.1f} GB of memory")
    return ", ".join([*parts, f"torch {torch.__version__}", f"torch_mesh {__version__}"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
