"""Requests that tests send to a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any


def post(server: Any, path: str, body: Any) -> tuple[int, Any]:
    """Status and parsed JSON of the answer. ``body``: bytes as they are, anything else as JSON."""
    return answer_of(server, path, body)[:2]


def answer_of(server: Any, path: str, body: Any) -> tuple[int, Any, Message]:
    """As ``post``, and the answer's headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers
