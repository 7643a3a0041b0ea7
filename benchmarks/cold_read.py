"""Claim: promoting cold experts reaches 0.95 of the speed of plain direct reads with the same size and number in
flight; 0.9 with eight experts per call or with checksums. It takes no more processor time than those reads, and 60 ms
per GB with checksums.

The records are those of the synthetic model's store, promoted layer by layer into a pool that holds one layer. The
reference is a loop of threads that reads the same records into huge pages, and fio if it is installed, which reads the
same files sequentially.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
import torch
from direct_reads import CHUNK, DEPTH, read_records
from harness import Report, Row
from op_layer import store_engine

from torch_mesh.store.manifest import open_store

Runs = list[dict[str, Any]]


@dataclass(frozen=True)
class Promotion:
    """``at_least``: minimum fraction of a plain loop's speed. ``processor``: maximum processor time in ms per GB; None:
    the loop's."""

    verify: str
    experts_per_call: int
    at_least: float
    processor: float | None


PROMOTIONS = {
    "verify='never'": Promotion("never", synthetic.Shape.experts, 0.95, None),
    "verify='first'": Promotion("first", synthetic.Shape.experts, 0.9, 60.0),
    "eight a call": Promotion("never", 8, 0.9, None),
}


def promote_all(folder: Path, promotion: Promotion) -> dict[str, Any]:
    """Read every record once, into a new pool."""
    shape = open_store(folder).manifest.shape
    # An empty pool for one layer.
    engine = store_engine(
        folder, slots=shape.experts, policy="lru", verify=promotion.verify, io="auto", workspace=1 << 20
    )
    try:
        calls = torch.arange(shape.experts).split(promotion.experts_per_call)
        handles = [torch.tensor([engine.id, layer]) for layer in range(shape.layers)]
        processor, begin = processor_seconds(), time.perf_counter()
        for handle in handles:
            for experts in calls:
                torch.ops.torch_mesh.promote(handle, experts)
        seconds = time.perf_counter() - begin
        processor = processor_seconds() - processor
        read = engine.totals()["bytes_read"]
        return {"speed": read / seconds, "processor": 1e3 * processor / (read / 1e9), "about": engine.describe()}
    finally:
        engine.close()


def processor_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def plain(folder: Path) -> dict[str, Any]:
    processor = processor_seconds()
    seconds = read_records(folder)
    read = synthetic.store_expert_bytes(folder)
    return {"speed": read / seconds, "processor": 1e3 * (processor_seconds() - processor) / (read / 1e9)}


def fio(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("mesh-*.safetensors"))
    command = ["fio", "--name=read", "--readonly", "--direct=1", "--rw=read", "--ioengine=io_uring"]
    command += [f"--bs={CHUNK}", f"--iodepth={DEPTH}", f"--filename={':'.join(map(str, files))}"]
    done = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True, text=True)
    return {"speed": json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]}


def add_processor(report: Report, name: str, runs: Runs, loop: Runs, bound: float | None) -> None:
    time_taken, loop_time = (statistics.median(run["processor"] for run in each) for each in (runs, loop))
    reference = ("plain loop", loop_time) if bound is None else ("allowed", bound)
    report.add(Row(f"processor, {name}", time_taken, "ms/GB", *reference, at_most=1.0))


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--weights", default="int4", choices=("bf16", "int8", "int4", "lut4"))
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    folder = synthetic.store(options.dir, synthetic.Shape(layers=options.layers), options.weights)
    contenders: dict[str, Any] = {"plain loop": lambda: plain(folder)}
    if shutil.which("fio"):
        contenders["fio"] = lambda: fio(folder)
    references = list(contenders)
    contenders |= {name: partial(promote_all, folder, promotion) for name, promotion in PROMOTIONS.items()}
    runs = harness.interleave(contenders, options.rounds)

    report = Report(f"Cold experts, {options.weights}, in chunks of {CHUNK >> 20} MiB, {DEPTH} under way")
    for name, promotion in PROMOTIONS.items():
        speeds = [run["speed"] / 1e9 for run in runs[name]]
        for reference in references:
            others = [run["speed"] / 1e9 for run in runs[reference]]
            min_ratio = promotion.at_least
            report.add(harness.paired_row(f"promotion, {name}", speeds, "GB/s", reference, others, at_least=min_ratio))
        add_processor(report, name, runs[name], runs["plain loop"], promotion.processor)
    about = runs["verify='never'"][0]["about"]
    report.notes.append(f"read with {about['io']}; {'; '.join(about['notes']) or 'nothing to note'}")
    report.details["runs"] = {
        name: [{k: v for k, v in run.items() if k != "about"} for run in each] for name, each in runs.items()
    }
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
