"""Keeps a pool within the memory that the machine and its cgroups leave to this process, while forwards run."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from . import _C
from .errors import PoolClosedError, ReadTimeoutError
from .memory import auto_margin, left_bytes

_LOG = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.25
# The kernel gives pages back some time after it was asked: sooner, the next look would take the same memory twice.
_SETTLING_SECONDS = 1.0
# Memory that is free for a shorter time is left to whoever frees and takes it.
_CALM_SECONDS = 3.0


# What is taken at once: clearing it takes a moment, in which others may want memory too.
_GROWTH_BYTES = 2**30


def wanted_slots(left: int, slot_bytes: int, about: dict[str, int]) -> int:
    """How many slots a pool should have whose slots take ``slot_bytes`` where ``left`` bytes are free; less than 0: above a limit.

    That is what ``resident="auto"`` would choose now, in whole segments, which is how memory comes and goes. To change
    little for little, it is the present number while between a half and five quarters of auto's margin are left.
    ``about`` is what ``Engine.describe`` says.
    """
    total = left + slot_bytes
    margin = auto_margin(total)
    if margin // 2 <= left <= margin + margin // 4:
        return about["slots"]
    segments = max(0, total - margin) // (about["segment_slots"] * about["record_bytes"])
    wanted = min(about["most_slots"], max(about["least_slots"], segments * about["segment_slots"]))
    return min(wanted, about["slots"]) if left < margin else max(wanted, about["slots"])


class MemoryGuard:
    """A thread that shrinks ``engine``'s pool at once when memory runs low, and lets it grow back when memory has been free for a while.

    It looks four times a second. Nothing that goes wrong with it disturbs a forward: where the system's files cannot be
    read it says so once, and the pool stays as it is. Ends with the engine.
    """

    def __init__(self, engine: _C.Engine, proc: Path = Path("/proc"), calm: float = _CALM_SECONDS) -> None:
        self._engine = engine
        self._proc = proc
        self._calm = calm
        self._free_since: float | None = None
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch_mesh memory guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before the engine is closed."""
        self._stop.set()

    def join(self) -> None:
        """Waits for the thread, whose engine has been closed. A process that ended under it would abort."""
        if threading.current_thread() is not self._thread:  # the garbage collector runs wherever it likes
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause = _INTERVAL_SECONDS
        while not self._stop.wait(pause):
            try:
                pause = _SETTLING_SECONDS if self._look() else _INTERVAL_SECONDS
            except PoolClosedError:
                return
            except ReadTimeoutError as error:  # what is in use goes when its forwards end
                _LOG.warning("%s", error)
            except MemoryError as error:
                self._free_since = None
                _LOG.info("The pool of experts stays as it is: %s", error)
            except (OSError, ValueError, IndexError) as error:
                if not self._warned:
                    self._warned = True
                    _LOG.warning("Free memory cannot be read, so the pool of experts keeps its size: %s", error)

    def _look(self) -> bool:
        """True if the pool has another size now."""
        about = self._engine.describe_size()
        left = left_bytes(self._proc)
        slots, wanted = about["slots"], wanted_slots(left, about["slot_bytes"], about)
        if wanted <= slots:
            self._free_since = None
        if wanted == slots:
            return False
        if wanted > slots:
            now = time.monotonic()
            self._free_since = self._free_since or now
            if now - self._free_since < self._calm:
                return False
            wanted = min(wanted, slots + max(about["segment_slots"], _GROWTH_BYTES // about["record_bytes"]))
        self._engine.resize(wanted)
        if wanted < slots:
            _LOG.warning("%d MiB of memory are left: %d experts stay resident of %d.", left >> 20, wanted, slots)
        else:
            _LOG.info("%d MiB of memory are left: %d experts may be resident, not %d.", left >> 20, wanted, slots)
        return True
