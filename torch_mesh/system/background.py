"""Python threads: those that work for an engine until it is closed, and threads that run tasks.

``threading.Event``, ``Condition`` and ``concurrent.futures`` take their locks in Python code. A KeyboardInterrupt that
comes between a lock and its release leaves it locked, and the other thread waits for ever. So the main thread takes no
lock here: it waits for a ``SimpleQueue``, whose methods are written in C.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class BackgroundThread(threading.Thread):
    """Start ``work`` at once. Raises MemoryError if no thread can be started.

    A daemon thread. The code that closes the engine joins it: Python would abort if it ended while the thread runs.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        with _thread_limit():
            self.start()

    def end(self) -> None:
        """Join the thread, after it was told to end or its engine was closed."""
        if threading.current_thread() is not self:  # the garbage collector may call this on the thread itself
            self.join(timeout=5.0)


class Flag:
    """Like ``threading.Event``. A signal handler may set it."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for up to ``timeout`` seconds. Returns whether the flag is set."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=timeout)
                self._wake.put(None)  # for another waiting thread
        return self._is_set


class Task(Generic[_Result]):
    """One call on another thread."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        self._call: Callable[[], _Result] | None = call
        self._error: BaseException | None = None
        self._ended = Flag()

    def run(self, cancelled: bool) -> None:
        """Called once, by the other thread."""
        call, self._call = self._call, None
        assert call is not None
        try:
            if cancelled:
                raise CancelledError
            self._result = call()
        except BaseException as error:  # noqa: BLE001  raised by result
            self._error = error
        del call
        self._ended.set()

    def result(self) -> _Result:
        """Wait for the call. Raises what it raised, and ``CancelledError`` if it was not made."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result


class TaskThreads(contextlib.AbstractContextManager["TaskThreads"]):
    """Up to ``count`` threads that run tasks in the order of ``submit``, started as needed.

    Leaving the context waits for all tasks. After an exception it cancels those that have not begun. A submitted task
    ends even if the main thread is interrupted.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: queue.SimpleQueue[tuple[Task[Any], Callable[[Task[Any]], object]] | None] = queue.SimpleQueue()
        self._threads: list[tuple[Flag, Flag]] = []  # started, ended
        self._cancelled = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(cancel=kind is not None)
        except BaseException:
            self.close(cancel=True)
            raise

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all tasks, or for those that have begun. Calling it again is allowed."""
        self._cancelled = self._cancelled or cancel
        for _ in self._threads:
            self._tasks.put(None)
        for started, ended in self._threads:
            if started.is_set():  # otherwise it never started or is late, and finds its tasks cancelled
                ended.wait()

    def submit(self, call: Callable[..., _Result], /, *arguments: Any) -> Task[_Result]:
        """Raises MemoryError if no thread can be started."""
        return self._submit(functools.partial(call, *arguments), lambda _: None)

    def map(self, call: Callable[..., _Result], /, *columns: Iterable[Any]) -> list[_Result]:
        """Like the built-in function, but runs at once and on all threads."""
        tasks = [self.submit(call, *arguments) for arguments in zip(*columns, strict=True)]
        return [task.result() for task in tasks]

    def run(self, calls: Iterable[Callable[[], _Result]]) -> Iterator[_Result]:
        """Yield results in the order of completion. Takes one more of ``calls`` than there are threads at a time.
        Raises the first error of a call."""
        completed: queue.SimpleQueue[Task[_Result]] = queue.SimpleQueue()
        under_way = 0
        for call in calls:
            self._submit(call, completed.put)
            under_way += 1
            if under_way > self._count:
                yield completed.get().result()
                under_way -= 1
        for _ in range(under_way):
            yield completed.get().result()

    def _submit(self, call: Callable[[], _Result], completed: Callable[[Task[_Result]], object]) -> Task[_Result]:
        if sum(started.is_set() for started, _ in self._threads) < self._count:  # Ctrl-C may have prevented a start
            self._start()
        task = Task(call)
        self._tasks.put((task, completed))
        return task

    def _start(self) -> None:
        started, ended = Flag(), Flag()
        self._threads.append((started, ended))
        try:
            with _thread_limit():
                # Not a threading.Thread, whose start waits for a Condition.
                _thread.start_new_thread(self._work, (started, ended))
        except MemoryError:
            self._threads.pop()
            raise
        started.wait()

    def _work(self, started: Flag, ended: Flag) -> None:
        started.set()
        while (item := self._tasks.get()) is not None:
            task, completed = item
            task.run(self._cancelled)
            completed(task)
            del task, completed, item
        ended.set()


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
