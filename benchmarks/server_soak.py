"""Claim: torch-mesh serve answers many clients for minutes without an error, and its memory stays within --keep-keys.

Clients of all APIs hold conversations with examples/mesh-tiny, streamed or not, with tools, stop sequences and several
answers. They close the connection of every fifth request before it is answered. An error is a status other than 200, a
stream without its last event, or a line in the server's log. Memory is compared as kept_keys.py does.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
import kept_keys
from harness import Report, Row

from torch_mesh.validators import parse_size

ABORTED = 0.2  # of the requests
TEMPLATE = """{% if tools %}{{ tools | tojson }}
Write calls as <tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"]}
FUNCTION = {"name": "search", "description": "Search the scriptures."}
# The beginning of a stream's last event, by address.
LAST_EVENTS = {
    "/v1/completions": ("data: [DONE]",),
    "/v1/chat/completions": ("data: [DONE]",),
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": ("event: message_stop",),
}


@dataclass
class Counts:
    """Counts of the clients. ``errors`` has one text for each error."""

    requests: int = 0
    aborted: int = 0
    errors: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, aborted: bool, error: str | None) -> None:
        with self._lock:
            self.requests += 1
            self.aborted += aborted
            if error is not None:
                self.errors.append(error)


def model_folder(folder: Path) -> Path:
    """examples/mesh-tiny in ``folder``, with a chat template."""
    for file in kept_keys.MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def draw_request(rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
    """The address and the body of a request that continues ``text``."""
    tokens = rng.randint(2, 40)
    path = rng.choice(list(LAST_EVENTS))
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"stream": rng.random() < 0.5, "temperature": rng.choice([0, 0.8])}
    with_tools = rng.random() < 0.3
    if path == "/v1/completions":
        body |= {"prompt": text, "max_tokens": tokens, "n": rng.choice([1, 1, 2]), "stop": rng.choice([[], ["and"]])}
    elif path == "/v1/chat/completions":
        body |= {"messages": messages, "max_tokens": tokens}
        if with_tools:
            tool = {"type": "function", "function": FUNCTION | {"parameters": SCHEMA}}
            body |= {"tools": [tool], "tool_choice": "required"}
    elif path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": tokens}
    else:
        body |= {"messages": messages, "max_tokens": tokens}
        if with_tools:
            body |= {"tools": [FUNCTION | {"input_schema": SCHEMA}]}
    return path, body


def send(address: str, path: str, body: dict[str, Any], patience: float | None, lines: int) -> str | None:
    """Return the error of a request, or None.

    With ``patience``, wait that many seconds or for so many ``lines`` of a stream, and close the connection.
    """
    where = f"{path} {'stream' if body['stream'] else 'body'}"
    host = urlsplit(address)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=patience or 300)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return f"{where}: status {answer.status}: {answer.read().decode()[:300]}"
        if patience is not None:
            for _ in range(lines):
                answer.readline()
            return None
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        aborted = patience is not None and isinstance(error, TimeoutError)
        return None if aborted else f"{where}: {type(error).__name__}: {error}"
    finally:
        connection.close()
    if not body["stream"]:
        return f"{where}: {text[:300]}" if "error" in json.loads(text) and json.loads(text)["error"] else None
    events = [part for part in text.split("\n\n") if part]
    return None if events and events[-1].startswith(LAST_EVENTS[path]) else f"{where}: ends with {events[-1:]}"


def converse(address: str, seed: int, seconds: float, counts: Counts) -> None:
    """Send the requests of one client for ``seconds``."""
    rng = random.Random(seed)
    words = (kept_keys.MODEL / "README.md").read_text().split()
    end, text = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        text += " ".join(rng.choices(words, k=rng.randint(5, 120)))
        path, body = draw_request(rng, text)
        aborted = rng.random() < ABORTED
        patience = rng.uniform(0.001, 0.5) if aborted else None
        counts.add(aborted, send(address, path, body, patience, rng.randint(0, 8)))
        if len(text) > kept_keys.LENGTH or rng.random() < 0.2:
            text = ""


def quarters(address: str, clients: int, seconds: float, counts: Counts) -> Iterator[None]:
    """Run the clients for a quarter of the time, four times."""
    for quarter in range(4):
        with ThreadPoolExecutor(clients) as pool:
            running = [
                pool.submit(converse, address, quarter * clients + client, seconds / 4, counts)
                for client in range(clients)
            ]
        for each in running:
            each.result()
        kept_keys.complete(f"{address}/v1", "In the beginning", 1)  # after which no aborted request still runs
        yield


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--minutes", type=float, default=10, help="duration of the clients' requests")
    arguments.add_argument("--keep-keys", default="20MiB")
    options = arguments.parse_args()
    limit = parse_size(options.keep_keys, "--keep-keys")
    counts, samples = Counts(), []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        model = model_folder(Path(folder))
        with kept_keys.serving(model, "--keep-keys", options.keep_keys, log=log) as (server, address):
            address = address.removesuffix("/v1")
            opened = os.fstat(log.fileno()).st_size  # after the progress of loading
            for _ in quarters(address, options.clients, options.minutes * 60, counts):
                sample = kept_keys.sample_memory(server, f"{address}/v1") | {"requests": counts.requests}
                samples.append(sample)
                print(
                    f"{sample['requests']} requests, {counts.aborted} of them aborted, {len(counts.errors)} errors; "
                    f"RssAnon {sample['memory'] / 1e6:.1f} MB, {sample['kept'] / 1e6:.1f} MB of it kept keys",
                    flush=True,
                )
        log.seek(opened)
        counts.errors += [f"log: {line.rstrip()}" for line in log]
    report = Report("Clients for minutes")
    report.add(Row("requests without an error", counts.requests - len(counts.errors), "", "all", counts.requests, 1, 1))
    other_memory = samples[1]["memory"] - samples[1]["kept"]
    taken = (samples[-1]["memory"] - other_memory) / 1e6
    report.add(Row("taken at the end", taken, "MB", "--keep-keys", limit / 1e6, at_most=1.2))
    report.notes += [f"{counts.aborted} of {counts.requests} requests were aborted", *counts.errors[:20]]
    report.details |= {"looks": samples, "errors": counts.errors}
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
