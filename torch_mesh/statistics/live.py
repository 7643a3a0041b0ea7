"""The page of a report that follows its files while a model writes them, on this machine only."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch_mesh.statistics.page import STRETCHES, render_data, render_page
from torch_mesh.statistics.report import Report, StatsFile

_NAMES = {"127.0.0.1", "localhost"}


class LivePage(ThreadingHTTPServer):
    """Serves the page of these files on loopback, and its current data at ``/data.json``. ``serve_forever`` runs it.

    The files need not exist yet. ``port`` 0 takes a free one; ``address`` is the page's.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], plan: dict[str, Any] | None, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._files = [StatsFile(path) for path in paths]
        self._plan = plan
        self._reading = threading.Lock()
        self._rendered: dict[str, tuple[list[Any], str]] = {}  # by path: the files' state, and the text

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[str, str] | None:
        """Type and text of ``path``; None if it does not exist. Raises the errors of reading the files."""
        render = {"/": render_page, "/data.json": render_data}.get(path)
        if render is None:
            return None
        with self._reading:
            now = [_state(file) for file in self._files]
            before, text = self._rendered.get(path, (None, ""))
            if now != before:
                text = render([self._report(file) for file in self._files], self._plan, live=True)
                self._rendered[path] = now, text
        return ("text/html" if path == "/" else "application/json"), text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def _report(self, file: StatsFile) -> Report:
        try:
            return file.report(STRETCHES, growing=True)
        except FileNotFoundError:
            return Report(file.path, (), ())


def _state(file: StatsFile) -> tuple[int, int, int, int] | None:
    """Changes when the file is written to; None without a file."""
    try:
        status = file.path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    timeout = 30  # seconds without a request

    def do_GET(self) -> None:
        # Another host name could belong to another site's page (DNS rebinding). The port is not checked: a tunnel may
        # change it.
        if self.headers.get("Host", "").partition(":")[0].lower() not in _NAMES:
            self._answer(403, "text/plain", "Ask for 127.0.0.1 or localhost.")
            return
        try:
            found = self.server.content(self.path.partition("?")[0])
        except (
            ValueError,
            RuntimeError,
            OSError,
        ) as error:  # a file that is being written: the next request may succeed
            self._answer(500, "text/plain", str(error))
            return
        self._answer(404, "text/plain", "There is / and /data.json.") if found is None else self._answer(200, *found)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Disabled: requests are frequent."""
