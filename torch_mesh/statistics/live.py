"""The page of a report that follows its files while a model writes them, for this machine alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .page import STRETCHES, render_data, render_page
from .report import Report, StatsFile


class LivePage(ThreadingHTTPServer):
    """Serves the page of these files on loopback, and at ``/data.json`` what it has to show by now. ``serve_forever`` runs it.

    Files may not be there yet. ``port`` 0 takes a free one; ``address`` is where it is.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], plan: dict[str, Any] | None, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._files = [StatsFile(path) for path in paths]
        self._plan = plan
        self._reading = threading.Lock()
        here = self.server_address[1]
        # Another name for this address would be a page of somebody else's, which had its name point here.
        self.names = {f"{host}:{here}" for host in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[str, str] | None:
        """Type and text of what is at ``path``; None: nothing is. Raises what reading the files does."""
        render = {"/": render_page, "/data.json": render_data}.get(path)
        if render is None:
            return None
        with self._reading:
            text = render([self._report(file) for file in self._files], self._plan)
        return ("text/html" if path == "/" else "application/json"), text

    def _report(self, file: StatsFile) -> Report:
        try:
            return file.report(STRETCHES, growing=True)
        except FileNotFoundError:
            return Report(file.path, (), ())


class _Handler(BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.names:
            self._answer(403, "text/plain", "Ask for 127.0.0.1 or localhost.")
            return
        try:
            found = self.server.content(self.path)
        except (
            ValueError,
            RuntimeError,
            OSError,
        ) as error:  # of a file that somebody writes: the next time may be better
            self._answer(500, "text/plain", str(error))
            return
        self._answer(404, "text/plain", "There is / and /data.json.") if found is None else self._answer(200, *found)

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: a line each time that the page asks would hide all else."""
