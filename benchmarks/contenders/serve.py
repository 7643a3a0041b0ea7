"""A contender that stays: a process that opens one system and then measures whenever it is asked
(benchmarks/workers.py).

Standard library only, since every contender brings its own environment. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1


class Contender(Protocol):
    def facts(self) -> dict[str, Any]:
        """What the parent wants to know once, after opening."""

    def measure(self, **request: Any) -> dict[str, Any]:
        """One measurement."""


def serve(open_contender: Callable[[dict[str, Any]], Contender]) -> None:
    """Opens a contender with the first request, answers with its facts, then measures request by request."""
    # A stopped process would outlive a benchmark that was killed, and keep its memory.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the replies

    def reply(result: dict[str, Any]) -> None:
        replies.write(json.dumps(result) + "\n")
        replies.flush()

    contender = open_contender(json.loads(sys.stdin.readline()))
    reply(contender.facts())
    for line in sys.stdin:
        reply(contender.measure(**json.loads(line)))
