"""Claim: workers that share a pool, and its owner, take at most 1.1 x one pool in addition to their memory without
experts (PSS, from smaps).

Without a claim it shows the tokens per second of all workers together, with one pool (`torch-mesh share`) and with the
same memory divided among one pool per worker. Each worker has one thread and its own text. The synthetic model's
routing is nearly uniform, the worst case for any cache; `--store` names another converted model.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row

from torch_mesh.store.manifest import open_store

POOL = "memfd:torch_mesh_pool"


def worker(folder: str, config: str, index: str) -> None:
    """Open the model. For each number on standard input decode that many tokens, and print the figures as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    import torch_mesh

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=torch_mesh.MeshConfig(**json.loads(config))
    )
    generator = torch.Generator().manual_seed(int(index))
    prompt = torch.randint(0, model.config.vocab_size, (1, 16), generator=generator)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        torch_mesh.reset_stats(model)
        begin = time.perf_counter()
        tokens = int(line)
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0)
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "hits": torch_mesh.stats(model).hit_rate}), flush=True)


class Worker:
    def __init__(self, folder: Path, config: dict[str, Any], index: int) -> None:
        command = [sys.executable, __file__, "worker", str(folder), json.dumps(config), str(index)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}; see its output above")
        return json.loads(line)


def pss(pid: int) -> int:
    """Proportional set size of a process, in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE).group(1)) * 1024


def pool_pss(pid: int) -> int:
    """The part of a process's PSS that belongs to a shared pool, in bytes."""
    total, in_pool = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_pool = POOL in line
        elif in_pool and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def run(
    folder: Path, configs: list[dict[str, Any]], tokens: int, rounds: int, owner: int | None = None
) -> dict[str, Any]:
    """Run workers with ``configs`` at the same time. Return their total tokens per second (the best round), hit rate,
    and PSS with that of the process ``owner``; ``owner_rest``: the owner's PSS without the pool."""
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(folder, config, index))) for index, config in enumerate(configs)]
        for each in workers:
            each.answer()
        speeds, hits = [], 0.0
        for _ in range(1 + rounds):  # the first round fills the pools
            for each in workers:
                each.begin(tokens)
            answers = [each.answer() for each in workers]
            speeds.append(len(workers) * tokens / max(answer["seconds"] for answer in answers))
            hits = sum(answer["hits"] for answer in answers) / len(answers)
        processes = [each.process.pid for each in workers] + ([] if owner is None else [owner])
        result = {"speed": max(speeds[1:]), "hits": hits, "pss": sum(map(pss, processes))}
        return result if owner is None else {**result, "owner_rest": pss(owner) - pool_pss(owner)}


def run_shared(folder: Path, resident: float, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Run ``count`` workers on one pool with the fraction ``resident`` of the experts."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = f"{temporary}/socket"
        command = [sys.executable, "-m", "torch_mesh", "share", str(folder), "--socket", socket]
        command += ["--resident", str(resident), "--workers", str(count)]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert owner.stdout is not None
            if not owner.stdout.readline():
                raise SystemExit("torch-mesh share ended; see its output above")
            return run(folder, [{"shared": socket}] * count, tokens, rounds, owner.pid)
        finally:
            owner.terminate()
            owner.communicate()


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--store", type=Path, help="a converted model in place of the synthetic one")
    arguments.add_argument("--layers", type=int, default=4, help="layers of the synthetic model")
    arguments.add_argument("--resident", type=float, default=0.5, help="fraction of the experts that fits into memory")
    arguments.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=2)
    given = arguments.parse_args()
    folder = given.store or synthetic.store(given.dir, synthetic.Shape(layers=given.layers), "int4")
    manifest = open_store(folder).manifest
    pool = int(given.resident * manifest.shape.layers * manifest.shape.experts) * manifest.record_bytes
    report = Report(f"{folder.name}: workers over {pool / 1e9:.2f} GB of experts, {given.resident:.0%} of all")
    for count in given.workers:
        own = run(folder, [{"resident": given.resident / count}] * count, given.tokens, given.rounds)
        shared = run_shared(folder, given.resident, count, given.tokens, given.rounds)
        workers = "1 worker" if count == 1 else f"{count} workers"
        name = f"{workers}, one pool (hits {shared['hits']:.0%})"
        reference = f"pools of their own ({own['hits']:.0%})"
        report.add(Row(name, shared["speed"], "tokens/s", reference, own["speed"]))
        other_bytes = own["pss"] - pool + shared["owner_rest"]
        report.add(
            Row(f"{workers}, memory for experts", shared["pss"] - other_bytes, "B", "one pool", pool, at_most=1.1)
        )
        report.details[workers] = {"shared": shared, "own": own}
    return report.finish(given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
