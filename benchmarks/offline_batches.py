"""Claim: 32 requests of a file, computed together with a quarter of the experts resident, give at least 3 times the
tokens per second of one request at a time.

The synthetic model in int4 has the tokenizer of examples/mesh-tiny, prompts are token ids, and the functions are those
of ``torch-mesh run``. Times exclude opening the model. Its files are not in the page cache at the beginning of a run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
import torch
from harness import Report, Row

import torch_mesh
from torch_mesh.serving import offline

RESIDENT = 0.25


def with_tokenizer(directory: Path, store: Path) -> Path:
    """Return a folder of links to a store's files and to a tokenizer's."""
    tiny = synthetic.ROOT / "examples" / "mesh-tiny"

    def link(folder: Path) -> None:
        for path in (*store.iterdir(), *tiny.glob("tokenizer*")):
            (folder / path.name).symlink_to(path)

    return synthetic.made(directory / f"{store.name}-with-tokenizer", link)


def request_file(folder: Path, options: Any) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = folder / "requests.jsonl"
    with path.open("w") as file:
        for _ in range(options.requests):
            length = int(torch.randint(options.tokens // 2, options.tokens + 1, (1,), generator=generator))
            prompt = torch.randint(3, 4000, (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt": prompt, "max_tokens": options.new, "temperature": 0}) + "\n")
    return path


def run_requests(folder: Path, requests: Path, concurrent: int) -> dict[str, float]:
    """Tokens per second, and bytes read per token."""
    isolation.evict(sorted(folder.glob("mesh-*.safetensors")))
    out = requests.with_name(f"answers-{concurrent}.jsonl")
    out.unlink(missing_ok=True)
    parsed = offline.read_requests(requests)
    with offline.open_service(str(folder), torch_mesh.MeshConfig(resident=RESIDENT), {}, concurrent) as service:
        offline.check(service, parsed, requests)  # also starts the computing thread
        torch_mesh.reset_stats(service.model)
        begin = time.perf_counter()
        failed = asyncio.run(offline.answer(service, parsed, out, concurrent, lambda done, total: None))
        seconds = time.perf_counter() - begin
        read = torch_mesh.stats(service.model).bytes_read
    if failed:
        raise SystemExit(f"{failed} requests have failed: {out.read_text()[:2000]}")
    bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    return {"speed": tokens / seconds, "read": read / tokens, "tokens": tokens}


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--experts", type=int, default=synthetic.Shape.experts)
    arguments.add_argument("--requests", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=128, help="tokens of the longest prompt")
    arguments.add_argument("--new", type=int, default=32, help="tokens of an answer")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    shape = synthetic.Shape(layers=options.layers, experts=options.experts)
    folder = with_tokenizer(options.dir, synthetic.store(options.dir, shape, "int4"))
    with tempfile.TemporaryDirectory() as scratch:
        requests = request_file(Path(scratch), options)
        batch, single = options.requests, 1
        runs = harness.interleave(
            {
                "together": lambda: run_requests(folder, requests, batch),
                "alone": lambda: run_requests(folder, requests, single),
            },
            options.rounds,
        )
    report = Report(f"{options.requests} requests of a file, {RESIDENT:.0%} of the experts resident")
    speeds = {name: [run["speed"] for run in found] for name, found in runs.items()}
    report.add(
        harness.paired_row(
            f"{batch} at once", speeds["together"], "tokens/s", "one at a time", speeds["alone"], at_least=3.0
        )
    )
    read = {name: statistics.median(run["read"] / 1e6 for run in found) for name, found in runs.items()}
    report.add(Row(f"read per token, {batch} at once", read["together"], "MB", "one at a time", read["alone"]))
    report.details["runs"] = runs
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
