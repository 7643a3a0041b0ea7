"""The CUDA device of a benchmark: its name, timing by events, and capture of runs in a graph.

Every function takes the device. Tests pass the CPU: then runs are timed by the clock and not captured.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

NO_CARD = 2  # exit status


def find_card(script: str) -> torch.device | None:
    """The current CUDA device. Without one says so, in the name of ``script``, and returns None."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    print(f"benchmarks/{script} needs a CUDA device, and torch sees none: nothing was measured", file=sys.stderr)
    return None


def facts(device: torch.device) -> dict[str, Any]:
    """The conditions of a figure besides the machine: the card, versions, the commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU in its place"
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "commit": _commit(),
    }


def describe(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def _commit() -> str:
    """The commit of the working tree, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds from an idle device to the end of all work that ``run`` put into the current stream."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def captured(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """``run`` as a CUDA graph, after one call that compiles kernels and lets libraries choose theirs."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in memory that ``device`` can read directly."""
    return tensor.pin_memory() if device.type == "cuda" else tensor.clone()
