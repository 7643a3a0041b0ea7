"""Keep pools within the memory that the machine and its cgroups leave to this process, while forwards run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch_mesh import _C
from torch_mesh.errors import PoolClosedError, ReadTimeoutError
from torch_mesh.system.background import BackgroundThread, Flag
from torch_mesh.system.memory import auto_margin, left_bytes

_LOG = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.25
# The kernel returns pages with a delay: looking sooner would take the same memory twice.
_SETTLING_SECONDS = 1.0
# Memory that is free for a shorter time is left to other processes.
_CALM_SECONDS = 3.0
# Growth per step: clearing memory takes a moment, in which others may need it.
_GROWTH_BYTES = 2**30


def wanted_slots(left: int, pools: Sequence[dict[str, int]], sharing: int = 1) -> list[int]:
    """Slots that each of a process's ``pools`` should have with ``left`` bytes free (negative: above a limit).

    Together they get what ``resident="auto"`` would choose now, each the same fraction of its initial size where
    possible, in whole segments. The present number is kept while between a half and five quarters of auto's margin are
    left. ``sharing``: the number of processes with such pools on the same memory.
    """
    present = [pool["slots"] for pool in pools]
    total = left + sharing * sum(pool["slot_bytes"] for pool in pools)
    margin = auto_margin(total)
    if margin // 2 <= left <= margin + margin // 4:
        return present
    wanted = [
        _in_segments(pool, size) for pool, size in zip(pools, _divided((total - margin) // sharing, pools), strict=True)
    ]
    change = min if left < margin else max
    return [change(slots, now) for slots, now in zip(wanted, present, strict=True)]


def _divided(budget: int, pools: Sequence[dict[str, int]]) -> list[int]:
    """Bytes of each pool: the same fraction of its maximum, but at least its minimum."""
    max_bytes = [pool["max_slots"] * pool["record_bytes"] for pool in pools]
    min_bytes = [pool["min_slots"] * pool["record_bytes"] for pool in pools]
    sharing = set(range(len(pools)))
    while sharing:
        rest = budget - sum(min_bytes[index] for index in range(len(pools)) if index not in sharing)
        whole = sum(max_bytes[index] for index in sharing)
        too_small = {index for index in sharing if rest * max_bytes[index] < min_bytes[index] * whole}
        if not too_small:
            return [
                rest * max_bytes[index] // whole if index in sharing else min_bytes[index]
                for index in range(len(pools))
            ]
        sharing -= too_small
    return min_bytes


def _in_segments(pool: dict[str, int], size: int) -> int:
    segments = size // (pool["segment_slots"] * pool["record_bytes"])
    return min(pool["max_slots"], max(pool["min_slots"], segments * pool["segment_slots"]))


class MemoryGuard:
    """A thread that shrinks a process's pools at once when memory runs low, and grows them when memory has been free
    for a while.

    Looks four times a second while engines are registered. One guard has all engines of the process, so that no two
    react to one shortage. If the system's files are unreadable it logs that once, and the pools keep their size.
    """

    def __init__(self, proc: Path = Path("/proc"), calm: float = _CALM_SECONDS) -> None:
        self._proc = proc
        self._calm = calm
        self._engines: list[_C.Engine] = []
        self._thread: BackgroundThread | None = None
        self._stop = Flag()
        # Reentrant: the garbage collector may remove an engine at any moment.
        self._lock = threading.RLock()
        self._free_since: float | None = None
        self._warned = False
        self._sharing = 1

    @staticmethod
    def of_this_process() -> MemoryGuard:
        """The guard of this process; a forked child has its own."""
        return _guards.setdefault(os.getpid(), MemoryGuard())

    def add(self, engine: _C.Engine, sharing: int = 1) -> None:
        """``sharing``: the number of processes on this machine, this one included, that have such an engine."""
        with self._lock:
            self._sharing = max(self._sharing, sharing)
            if not self._engines:
                self._stop = Flag()
                # Before the engine counts as guarded: starting a thread may fail.
                self._thread = BackgroundThread(partial(self._run, self._stop), "torch_mesh memory guard")
            self._engines.append(engine)

    def remove(self, engine: _C.Engine) -> BackgroundThread | None:
        """Call before ``engine`` is closed. After the last engine the thread is told to end, and returned for
        joining."""
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
                if not self._engines:
                    self._sharing = 1
                    self._stop.set()
            return None if self._engines else self._thread

    def _run(self, stop: Flag) -> None:
        pause = _INTERVAL_SECONDS
        while not stop.wait(pause):
            try:
                pause = _SETTLING_SECONDS if self._look() else _INTERVAL_SECONDS
            except (OSError, ValueError, IndexError) as error:
                if not self._warned:
                    self._warned = True
                    _LOG.warning("Free memory cannot be read, so the pool of experts keeps its size: %s", error)
            except MemoryError:  # what the guard is for: look again
                continue

    def _look(self) -> bool:
        """True if some pool was resized."""
        described = []
        for engine in list(self._engines):
            try:
                described.append((engine, engine.describe_size()))
            except PoolClosedError:  # the engine was closed directly
                self.remove(engine)
        left = left_bytes(self._proc)
        wanted = wanted_slots(left, [about for _, about in described], self._sharing)
        changes = [
            (engine, about, slots)
            for (engine, about), slots in zip(described, wanted, strict=True)
            if slots != about["slots"]
        ]
        growth = any(slots > about["slots"] for _, about, slots in changes)
        if not growth:
            self._free_since = None
        else:
            now = time.monotonic()
            self._free_since = self._free_since or now
            if now - self._free_since < self._calm:
                return False
        for engine, about, slots in changes:
            try:
                self._resize(engine, about, slots, left, _GROWTH_BYTES // len(changes))
            except ReadTimeoutError as error:  # continued when the disk answers
                _LOG.warning("%s", error)
            except MemoryError as error:  # the other pools may succeed
                self._free_since = None
                _LOG.info("The pool of experts stays as it is: %s", error)
        return bool(changes)

    def _resize(self, engine: _C.Engine, about: dict[str, int], wanted: int, left: int, max_growth: int) -> None:
        slots = about["slots"]
        wanted = min(wanted, slots + max(about["segment_slots"], max_growth // about["record_bytes"]))
        try:
            engine.resize(wanted)
        except PoolClosedError:
            return
        if wanted < slots:
            _LOG.warning("%d MiB of memory are left: %d experts stay resident of %d.", left >> 20, wanted, slots)
        else:
            _LOG.info("%d MiB of memory are left: %d experts may be resident, not %d.", left >> 20, wanted, slots)


_guards: dict[int, MemoryGuard] = {}  # by process id
