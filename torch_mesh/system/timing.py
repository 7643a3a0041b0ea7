"""Measure how long calls take, and the peak memory bandwidth; needs torch alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

SECONDS = 0.4  # seconds of each measurement
LARGE_BYTES = 256 << 20  # large enough to exceed all caches


def seconds_per_call(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """The median duration, which is robust against a busy moment."""
    return statistics.median(_times(call, seconds))


def memory_speed(threads: int | None = None) -> float:
    """Peak read bandwidth in bytes per second: a vector times itself, on ``threads`` threads, or torch's number.

    An upper bound for decoding, which has to read the weights.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        vector = torch.zeros(LARGE_BYTES // 4, device="cpu")
        return vector.nbytes / min(_times(lambda: torch.dot(vector, vector), SECONDS))
    finally:
        torch.set_num_threads(before)


def _times(call: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    with torch.no_grad():
        call()
        end = time.monotonic() + seconds
        while len(times) < 3 or time.monotonic() < end:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return times
