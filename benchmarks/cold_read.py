"""Claim: promoting experts of which none is resident goes at 0.9 of the speed of plain direct reads of the same size and number
under way, and takes at most 10 ms of processor time per GB, 60 ms where each expert's checksum is verified.

The records are those of the synthetic model's store, a layer promoted after another into a pool that holds one. The reference
is a loop of threads, and fio where it is installed; both read the same files from end to end.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import synthetic
import torch
from harness import Report, Row
from op_layer import store_engine
from prefill_cold import CHUNK, DEPTH, plain_reads

from torch_mesh.store.manifest import open_store

CPU_MS_PER_GB = {"never": 10.0, "first": 60.0}


def promote_all(folder: Path, verify: str) -> dict[str, Any]:
    """Every record once, from a pool that has never read one."""
    shape = open_store(folder).manifest.shape
    # Room for one layer, and nothing in it.
    engine = store_engine(folder, slots=shape.experts, policy="lru", verify=verify, io="auto", workspace=1 << 20)
    try:
        every = torch.arange(shape.experts)
        handles = [torch.tensor([engine.id, layer, engine.generation]) for layer in range(shape.layers)]
        processor, begin = processor_seconds(), time.perf_counter()
        for handle in handles:
            torch.ops.torch_mesh.promote(handle, every)
        seconds = time.perf_counter() - begin
        processor = processor_seconds() - processor
        read = int(engine.stats()["bytes_read"].sum())
        return {"speed": read / seconds, "processor": 1e3 * processor / (read / 1e9), "about": engine.describe()}
    finally:
        engine.close()


def processor_seconds() -> float:
    """Of all threads of this process, in it and in the kernel on its behalf."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def plain(folder: Path) -> dict[str, Any]:
    processor = processor_seconds()
    seconds = plain_reads(folder)
    read = synthetic.store_expert_bytes(folder)
    return {"speed": read / seconds, "processor": 1e3 * (processor_seconds() - processor) / (read / 1e9)}


def fio(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("mesh-*.safetensors"))
    command = ["fio", "--name=read", "--readonly", "--direct=1", "--rw=read", "--ioengine=io_uring"]
    command += [f"--bs={CHUNK}", f"--iodepth={DEPTH}", f"--filename={':'.join(map(str, files))}"]
    done = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True, text=True)
    return {"speed": json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]}


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, default=synthetic.Shape.layers)
    arguments.add_argument("--weights", default="int4", choices=("bf16", "int8", "int4", "lut4"))
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    folder = synthetic.store(options.dir, synthetic.Shape(layers=options.layers), options.weights)
    contenders: dict[str, Any] = {"plain loop": lambda: plain(folder)}
    if shutil.which("fio"):
        contenders["fio"] = lambda: fio(folder)
    contenders |= {verify: lambda verify=verify: promote_all(folder, verify) for verify in CPU_MS_PER_GB}
    runs = harness.interleave(contenders, options.rounds)

    report = Report(f"Cold experts, {options.weights}, in chunks of {CHUNK >> 20} MiB, {DEPTH} under way")
    for verify, bound in CPU_MS_PER_GB.items():
        speeds = [run["speed"] / 1e9 for run in runs[verify]]
        for reference in [name for name in runs if name not in CPU_MS_PER_GB]:
            others = [run["speed"] / 1e9 for run in runs[reference]]
            name = f"promotion, verify={verify!r}"
            report.add(harness.paired_row(name, speeds, "GB/s", reference, others, at_least=0.9))
        processor = harness.percentile(sorted(run["processor"] for run in runs[verify]), 50)
        report.add(Row(f"processor, verify={verify!r}", processor, "ms/GB", "allowed", bound, at_most=1.0))
    loop = harness.percentile(sorted(run["processor"] for run in runs["plain loop"]), 50)
    report.add(Row("processor, plain loop", loop, "ms/GB"))
    about = runs["never"][0]["about"]
    report.notes.append(f"read with {about['io']}; {'; '.join(about['notes']) or 'nothing to note'}")
    report.details["runs"] = {
        name: [{k: v for k, v in run.items() if k != "about"} for run in each] for name, each in runs.items()
    }
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
