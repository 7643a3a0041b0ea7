"""One session of one system in its own process: open the model, read a prompt, warm up, decode, report.

Standard library only, since every contender has its own environment. Tokens are a seeded stream, not the model's
choice. So all systems have the same inputs whatever the effect of quantization, and no random model repeats a few
tokens whose experts any cache would hold. The routing is the model's own.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Logits(Protocol):
    """A vector of torch or NumPy."""

    def tolist(self) -> list[float]: ...


class Decoder(Protocol):
    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append ``tokens`` to the sequence, and return the logits of the last one."""

    def begin(self) -> None:
        """Called once between warm-up and measurement."""

    def facts(self) -> dict[str, Any]:
        """Return figures of this system alone: hit rates, its count of bytes, anonymous memory of weights."""


class AnonymousPeak(threading.Thread):
    """The highest anonymous memory of this process, sampled every few milliseconds between ``start`` and ``stop``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.005):
            self.bytes = max(self.bytes, status_bytes("RssAnon"))

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return self.bytes


def status_bytes(name: str) -> int:
    """Return a memory figure of this process, such as VmHWM or RssAnon, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {name}")


def bytes_read() -> int:
    """Return the bytes read from the storage device for this process, page faults and read-ahead included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise KeyError("/proc/self/io has no read_bytes")


def tokens(request: dict[str, Any]) -> list[int]:
    count = request["prompt"] + request["warm_up"] + request["measured"]
    generator = random.Random(request["seed"])
    return [generator.randrange(request["vocab"]) for _ in range(count)]


def decode(decoder: Decoder, request: dict[str, Any]) -> dict[str, Any]:
    stream = tokens(request)
    prompt, rest = stream[: request["prompt"]], stream[request["prompt"] :]
    start = time.perf_counter()
    prompt_logits = decoder.forward(prompt).tolist()
    prompt_seconds = time.perf_counter() - start
    for token in rest[: request["warm_up"]]:
        decoder.forward([token])
    decoder.begin()
    read_before, start = bytes_read(), time.perf_counter()
    for token in rest[request["warm_up"] :]:
        decoder.forward([token])
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": request["measured"] / seconds,
        "read_per_token": (bytes_read() - read_before) / request["measured"],
        "prompt_seconds": prompt_seconds,
        "prompt_logits": prompt_logits,
    }


def run(open_decoder: Callable[[dict[str, Any]], Decoder]) -> None:
    """usage: <contender>.py REQUEST.json RESULT.json; imports are done by the time this is called and are not timed."""
    request = json.loads(Path(sys.argv[1]).read_text())
    watch = AnonymousPeak() if request["watch_memory"] else None  # not while the speed is measured
    if watch:
        watch.start()
    start, processor = time.perf_counter(), time.process_time()
    decoder = open_decoder(request)
    load = {
        "load_seconds": time.perf_counter() - start,
        "load_processor_seconds": time.process_time() - processor,
        "load_peak": status_bytes("VmHWM"),
    }
    result = decode(decoder, request)
    result.update(decoder.facts(), **load, peak=status_bytes("VmHWM"))
    if watch:
        result["anonymous_peak"] = watch.stop()
    Path(sys.argv[2]).write_text(json.dumps(result))
