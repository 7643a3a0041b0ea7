"""Interrupts of the main thread while background threads work for it."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torch_mesh.system.background import Flag, TaskThreads

_HANGS = 60  # seconds


class _InterruptAt:
    """A trace function that raises KeyboardInterrupt, as a signal handler may, at one step of the main thread."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if event in ("line", "return") and frame.f_code.co_filename != __file__:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


class _Calls:
    """A callable that takes a moment, and the calls that are running."""

    def __init__(self) -> None:
        self.running: list[int] = []

    def __call__(self, value: int) -> int:
        self.running.append(value)
        time.sleep(0.0005)
        self.running.remove(value)
        return value


def _completed(call: _Calls) -> None:
    with TaskThreads(2) as threads:
        assert sorted(threads.run([partial(call, value) for value in range(4)])) == [0, 1, 2, 3]


def _mapped(call: _Calls) -> None:
    with TaskThreads(2) as threads:
        assert threads.map(call, range(3)) == [0, 1, 2]


def _flags(call: _Calls) -> None:
    requested, answered = Flag(), Flag()

    def answer() -> None:
        requested.wait()
        call(0)
        answered.set()

    with TaskThreads(1) as threads:
        try:
            threads.submit(answer)
            requested.set()
            answered.wait()
        finally:
            requested.set()


@pytest.mark.parametrize("work", [_completed, _mapped, _flags])
def test_an_interrupt_at_any_step_leaves_no_thread_hanging(work: Callable[[_Calls], None], tmp_path: Path) -> None:
    """Runs in a forked child, which exits if it hangs."""
    report = tmp_path / "report"
    child = os.fork()
    if child == 0:
        with report.open("w", buffering=1) as stream:
            faulthandler.dump_traceback_later(_HANGS, exit=True, file=stream)
            for step in itertools.count():
                stream.write(f"step {step}\n")
                interrupt, calls = _InterruptAt(step), _Calls()
                sys.settrace(interrupt)
                try:  # noqa: SIM105  the trace would count contextlib's lines as steps
                    work(calls)
                except KeyboardInterrupt:
                    pass
                sys.settrace(None)
                if calls.running:
                    stream.write("a call still runs\n")
                    os._exit(1)
                if interrupt.left >= 0:
                    os._exit(0)
    _, status = os.waitpid(child, 0)
    lines = report.read_text().splitlines()
    assert status == 0, "\n".join(lines[-40:])
    assert len(lines) > 50


def test_a_thread_whose_start_was_interrupted_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    start, interrupted = _thread.start_new_thread, []

    def start_second(*arguments: Any) -> Any:
        if interrupted:
            return start(*arguments)
        interrupted.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", start_second)
    with TaskThreads(1) as threads:
        with pytest.raises(KeyboardInterrupt):
            threads.submit(int)
        task = threads.submit(int, "7")
        assert task._ended.wait(_HANGS)
        assert task.result() == 7


def test_errors_cancel_tasks_that_have_not_begun() -> None:
    def fail() -> None:
        raise OSError("full")

    made: list[int] = []
    with pytest.raises(OSError, match="full"), TaskThreads(1) as threads:
        failing = threads.submit(fail)
        with contextlib.suppress(OSError):
            failing.result()
        begun, going_on = Flag(), Flag()
        running = threads.submit(lambda: (begun.set(), going_on.wait(0.2)))
        cancelled = threads.submit(made.append, 1)
        begun.wait()
        failing.result()
    assert running.result() == (None, False)
    with pytest.raises(CancelledError):
        cancelled.result()
    assert made == []
