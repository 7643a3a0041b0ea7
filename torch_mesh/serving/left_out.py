"""What a request asks for and does not get: named in a header of the response, and logged once for each reason."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from itertools import accumulate

_LOG = logging.getLogger(__name__)
HEADER = "x-torch-mesh-left-out"
# Characters of one note, and of the header: clients take 8,190 of a header (aiohttp), or 16 KiB of all of them (Node).
_NOTE, _ALL = 100, 2000
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
    """The header with ``notes``, whose text may be a client's; none without notes. Long notes are cut, and of many
    notes the last are counted."""
    texts = [note.encode("unicode_escape").decode() for note in notes]
    texts = [text if len(text) <= _NOTE else f"{text[: _NOTE - 3]}..." for text in texts]
    lengths = accumulate(len(text) + len(", ") for text in texts)
    fitting = sum(length <= _ALL for length in lengths)
    if fitting < len(texts):
        texts[fitting:] = [f"and {len(texts) - fitting} more"]
    return {HEADER: ", ".join(texts)} if texts else {}
