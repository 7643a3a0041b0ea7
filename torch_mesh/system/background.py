"""Python threads: those that work for an engine until it is closed, and pools of task threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundThread(threading.Thread):
    """Start ``work`` at once. Raises MemoryError if no thread can be started.

    A daemon thread; the code that closes the engine joins it, since Python would abort if it ended under it.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        with _thread_limit():
            self.start()

    def end(self) -> None:
        """Join the thread, after it was told to end or its engine was closed."""
        if threading.current_thread() is not self:  # the garbage collector may call this on the thread itself
            self.join(timeout=5.0)


class TaskThreads(ThreadPoolExecutor):
    """An executor whose ``submit`` and ``map`` raise MemoryError if no thread can be started."""

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        with _thread_limit():
            return super().submit(task, *arguments, **named)


def usable_processors() -> int:
    """The number of CPUs this process may use; all of them if a sandbox hides the affinity."""
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
            f"no thread can be started ({error}): raise the process limit (ulimit -u, pids.max)"
        ) from error
