"""A contender as a server: a process that opens one system and then measures on request (benchmarks/workers.py).

Standard library only, since every contender has its own environment. Requests and replies are lines of JSON.
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
        """Facts for the parent, sent once after opening."""

    def measure(self, **request: Any) -> dict[str, Any]:
        """One measurement."""


def serve(open_contender: Callable[[dict[str, Any]], Contender]) -> None:
    """Open a contender with the first request, reply with its facts, and then measure request by request."""
    # Without it a stopped process would remain after a benchmark is killed, with its memory.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be mixed with the replies

    def reply(result: dict[str, Any]) -> None:
        replies.write(json.dumps(result) + "\n")
        replies.flush()

    contender = open_contender(json.loads(sys.stdin.readline()))
    reply(contender.facts())
    for line in sys.stdin:
        reply(contender.measure(**json.loads(line)))
