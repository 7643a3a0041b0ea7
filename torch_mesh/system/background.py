"""Threads of Python's: those that work for an engine until it is closed, and those that share out tasks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundThread(threading.Thread):
    """Runs ``work`` at once. Raises MemoryError where no thread can be started.

    No process waits for it to end, so what closes the engine joins it: else Python could end under it and abort.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        with _thread_limit():
            self.start()

    def end(self) -> None:
        """Waits for the thread, which has been told to end, or whose engine has been closed."""
        if threading.current_thread() is not self:  # the garbage collector runs wherever it likes
            self.join(timeout=5.0)


class TaskThreads(ThreadPoolExecutor):
    """Its ``submit`` and ``map`` raise MemoryError where no thread can be started."""

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        with _thread_limit():
            return super().submit(task, *arguments, **named)


def usable_processors() -> int:
    """How many this process may use; all of them where a sandbox forbids to ask."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


@contextlib.contextmanager
def _thread_limit() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise MemoryError(
            f"no thread can be started ({error}); raise the limit of processes (ulimit -u, pids.max)"
        ) from error
