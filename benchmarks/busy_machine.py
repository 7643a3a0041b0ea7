"""Claim: while other processes compute, two threads decode at 0.85 or more of the speed of the better of one and two
threads, and at 0.55 or more of their speed on an idle machine beside one such process. A token takes at most 1.5 x the
processor time of a run on an idle machine. The same holds for prompts of 512 tokens.

The 4-layer model with every expert in memory in int4, dense layers in int4, eager. A busy process is a loop that never
sleeps, and runs for one round of all contenders. If benchmarks/peers.sh has built llama.cpp, it is measured with two
threads too.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
from harness import Report, Row
from workers import Worker

SEED = 20261125
WHAT = {"decode": 64, "prefill": 512}  # tokens of a run
# Ends when its parent ends (prctl's PR_SET_PDEATHSIG, SIGKILL).
BUSY = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"
ONE, TWO, LLAMA = "1 thread", "2 threads", "llama.cpp Q4_0, 2 threads"

Runs = dict[str, list[dict[str, float]]]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Start ``count`` processes that never sleep, and wait until they run."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def open_workers(options: Any) -> dict[str, Worker]:
    shape = synthetic.Shape()
    setup = {"vocab": shape.vocab, "seed": SEED, "decode": WHAT["decode"]}
    store = synthetic.store(options.dir, shape, "int4")
    workers = {
        name: Worker(
            Path(sys.executable),
            "warm_mesh.py",
            model=str(store),
            threads=threads,
            fields={"dense": "int4"},
            modes=["eager"],
            **setup,
        )
        for name, threads in ((ONE, 1), (TWO, 2))
    }
    if synthetic.PEERS_PYTHON.exists():
        model = synthetic.gguf(options.dir, shape, "Q4_0")
        workers[LLAMA] = Worker(
            synthetic.PEERS_PYTHON, "warm_llama.py", model=str(model), threads=2, fields={}, **setup
        )
    return workers


def measure_under_load(workers: dict[str, Worker], what: str, busy: int, rounds: int) -> Runs:
    def run(name: str) -> dict[str, float]:
        mode = "" if name == LLAMA else "eager"
        return workers[name].measure(mode=mode, what=what, tokens=WHAT[what])

    runs: Runs = {name: [] for name in workers}
    for _ in range(rounds):
        with busy_processes(busy):
            for name, results in harness.interleave({name: partial(run, name) for name in workers}, 1).items():
                runs[name] += results
    return runs


def median(runs: list[dict[str, float]], figure: str) -> float:
    return statistics.median(run[figure] for run in runs)


def add_rows(report: Report, what: str, busy: int, runs: Runs, quiet: Runs) -> None:
    speed = {name: median(results, "tokens_per_second") for name, results in runs.items()}
    label = f"{what} beside {busy} busy {'process' if busy == 1 else 'processes'}"
    faster = max(ONE, TWO, key=lambda name: speed[name])
    report.add(Row(f"{label}, {TWO}", speed[TWO], "tok/s", f"better: {faster}", speed[faster], at_least=0.85))
    if LLAMA in speed:
        report.add(Row(f"{label}, {TWO}", speed[TWO], "tok/s", LLAMA, speed[LLAMA]))
    if busy == 0:
        return
    quiet_speed = median(quiet[TWO], "tokens_per_second")
    report.add(Row(f"{label}, {TWO}", speed[TWO], "tok/s", "quiet", quiet_speed, at_least=0.55 if busy == 1 else None))
    milliseconds, quiet_milliseconds = (
        1e3 * median(results[TWO], "processor_seconds_per_token") for results in (runs, quiet)
    )
    report.add(Row(f"processor time a token, {label}", milliseconds, "ms", "quiet", quiet_milliseconds, at_most=1.5))


def measure(options: Any) -> Report:
    report = Report("4-layer Qwen3-MoE in memory, int4, beside processes that compute")
    workers = open_workers(options)
    for what in WHAT:
        measure_under_load(workers, what, 0, 1)  # reads cold experts
        all_runs = {busy: measure_under_load(workers, what, busy, options.rounds) for busy in options.busy}
        for busy, runs in all_runs.items():
            add_rows(report, what, busy, runs, all_runs[0])
        report.details[what] = all_runs
    for worker in workers.values():
        worker.close()
    report.notes.append(f"medians of {options.rounds} rounds of {WHAT['decode']} decode steps or one prompt")
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes; must include 0"
    )
    options = arguments.parse_args()
    if 0 not in options.busy:
        arguments.error(f"--busy is {options.busy}; include 0: its speed is the reference")
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
