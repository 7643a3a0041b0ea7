"""Claim: the memory of torch-mesh serve for the keys of conversations stays within --keep-keys.

Four clients hold conversations of all lengths with examples/mesh-tiny, over loopback. The server's anonymous memory
without counted keys, after half of the time, is its memory for everything else. What exceeds that at the end is
compared with the limit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import harness
from harness import Report, Row

from torch_mesh.validators import parse_size

MODEL = Path(__file__).resolve().parents[1] / "examples" / "mesh-tiny"
CLIENTS = 4
LENGTH = 3000  # characters after which a conversation ends, within the model's positions


def complete(address: str, prompt: str, tokens: int) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def converse(address: str, seed: int, seconds: float) -> int:
    """Send requests of one client for ``seconds``, and return their number."""
    rng = random.Random(seed)
    words = (MODEL / "README.md").read_text().split()
    end, text, requests = time.monotonic() + seconds, "", 0
    while time.monotonic() < end:
        text += " ".join(rng.choices(words, k=rng.randint(5, 120)))
        text += complete(address, text, rng.randint(2, 40))
        requests += 1
        if len(text) > LENGTH or rng.random() < 0.2:
            text = ""
    return requests


def sample_memory(server: int, address: str) -> dict[str, int]:
    """Return the process's anonymous memory and its counter of kept keys, in bytes."""
    with urllib.request.urlopen(address.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    kept = next(line.split()[1] for line in lines if line.startswith("torch_mesh_kept_keys_bytes "))
    status = Path(f"/proc/{server}/status").read_text().splitlines()
    memory = next(line.split()[1] for line in status if line.startswith("RssAnon:"))
    return {"memory": int(memory) << 10, "kept": round(float(kept))}


@contextmanager
def serving(model: Path, *options: str, log: IO[str] | int = subprocess.DEVNULL) -> Iterator[tuple[int, str]]:
    """The process id of a server of ``model`` and the address of its API. ``log``: where its errors go."""
    command = [sys.executable, "-m", "torch_mesh", "serve", str(model), "--resident", "0.5"]
    command += ["--host", "127.0.0.1", "--port", "0", "--log-level", "error", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a model this small does not use more threads
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            yield server.pid, server.stdout.readline().split()[3].removesuffix(",")
        finally:
            server.terminate()


def measure(limit: str, seconds: float) -> list[dict[str, int]]:
    """Sample a server with ``limit`` for kept keys after each quarter of the time, with the number of requests so
    far."""
    samples = []
    with serving(MODEL, "--keep-keys", limit) as (server, address):
        requests = 0
        for quarter in range(4):
            with ThreadPoolExecutor(CLIENTS) as clients:
                seeds = range(quarter * CLIENTS, (quarter + 1) * CLIENTS)
                requests += sum(clients.map(lambda seed: converse(address, seed, seconds / 4), seeds))
            samples.append(sample_memory(server, address) | {"requests": requests})
    return samples


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--keep-keys", default="20MiB")
    arguments.add_argument("--seconds", type=float, default=50, help="duration of the clients' requests")
    options = arguments.parse_args()
    limit = parse_size(options.keep_keys, "--keep-keys")
    samples = measure(options.keep_keys, options.seconds)
    other_memory = samples[1]["memory"] - samples[1]["kept"]
    report = Report("Memory of kept keys")
    for moment, sample in zip(("a quarter", "half", "three quarters", "the end"), samples, strict=True):
        at_most = 1.2 if moment == "the end" else None
        taken = (sample["memory"] - other_memory) / 1e6
        report.add(Row(f"taken at {moment}", taken, "MB", "--keep-keys", limit / 1e6, at_most=at_most))
        report.notes.append(f"counted at {moment}: {sample['kept'] / 1e6:.1f} MB, after {sample['requests']} requests")
    report.details["looks"] = samples
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
