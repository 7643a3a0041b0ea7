"""What a request asks for and does not get: named in a header of the response, and logged once for each reason."""

from __future__ import annotations

import logging
from contextvars import ContextVar

_LOG = logging.getLogger(__name__)
HEADER = "x-torch-mesh-left-out"
_logged: set[str] = set()
_notes: ContextVar[list[str] | None] = ContextVar("left_out", default=None)


def collect() -> list[str]:
    """A list that gets what is left out of the request that this task and those it starts answer."""
    notes: list[str] = []
    _notes.set(notes)
    return notes


def leave_out(what: str, reason: str) -> None:
    """Note that ``what``, a part of the request, has no effect. ``reason``: a constant sentence."""
    notes = _notes.get()
    if notes is not None and what not in notes:
        notes.append(what)
    if reason not in _logged:
        _logged.add(reason)
        _LOG.warning("%s Answers to such requests name it in %s; this is logged once.", reason, HEADER)


def headers(notes: list[str]) -> dict[str, str]:
    """The header with ``notes``, whose text may be a client's; none without notes."""
    return {HEADER: ", ".join(notes).encode("unicode_escape").decode()} if notes else {}
