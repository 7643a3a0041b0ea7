"""A local hub that speaks the Hugging Face hub's protocol to huggingface_hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub.utils.sha import git_hash

MODEL = "some/model"
COMMIT = "1" * 40
_CHUNK_BYTES = 1 << 14


class LoopbackHub(http.server.BaseHTTPRequestHandler):
    """Serves ``files`` of ``MODEL``, and counts the bytes of each that it ``sent``.

    ``breaks_after``: bytes of a file after which each connection ends. ``damaged`` files arrive with a changed byte.
    ``on_chunk`` is called with a file's name before each chunk. ``gated``: every file is refused.
    """

    files: dict[str, bytes]
    sent: Counter[str]
    damaged: set[str]
    breaks_after: int | None = None
    gated = False
    url: str

    @staticmethod
    def on_chunk(name: str) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            self._send_json([self._described(name, "path", "oid") | {"type": "file"} for name in self.files])
            return
        if path.startswith(f"/api/models/{MODEL}"):
            siblings = [self._described(name, "rfilename", "blobId") for name in self.files]
            self._send_json({"id": MODEL, "sha": COMMIT, "siblings": siblings})
            return
        name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")[2]
        if MODEL not in path:
            self._refuse(404, "RepoNotFound")
        elif self.gated:
            self._refuse(403, "GatedRepo")
        elif name not in self.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(name, head)

    def _send_file(self, name: str, head: bool) -> None:
        data = self.files[name]
        first, end = 0, len(data)
        wanted = None if head else self.headers.get("Range")
        if wanted:
            begin, _, last = wanted.removeprefix("bytes=").partition("-")
            first, end = int(begin), min(int(last or end) + 1, end) if last else end
            if first >= len(data):
                self._refuse(416, "RangeNotSatisfiable")
                return
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_hash(name, data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(end - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        self.end_headers()
        if head:
            return
        if name in self.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        end = min(end, first + (self.breaks_after or end))
        for begin in range(first, end, _CHUNK_BYTES):
            type(self).on_chunk(name)
            part = data[begin : min(begin + _CHUNK_BYTES, end)]
            self.sent[name] += len(part)  # counted first, since the test reads the count once the client has the data
            with contextlib.suppress(ConnectionError):  # the client may have been killed
                self.wfile.write(part)

    def _described(self, name: str, name_key: str, id_key: str) -> dict[str, Any]:
        data = self.files[name]
        file: dict[str, Any] = {name_key: name, "size": len(data), id_key: git_hash(data)}
        if _is_large(name):
            file["lfs"] = {"size": len(data), "sha256": _hash(name, data), "oid": _hash(name, data), "pointerSize": 134}
        return file

    def _send_json(self, answer: object) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def loopback_hub(cache: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LoopbackHub]]:
    """A hub without files, which this process's client uses, with its cache in the folder ``cache``."""
    state: dict[str, Any] = {"files": {}, "sent": Counter(), "damaged": set()}
    handler = type("Handler", (LoopbackHub,), state)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    handler.url = url = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template[template.index("/{repo_id}") :])
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _hash(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if _is_large(name) else git_hash(data)
