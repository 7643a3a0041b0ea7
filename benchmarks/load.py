"""Claim: a 5 GB checkpoint converted to int4 opens in 5 s after imports, and in 2 GB of memory, at resident=0.4. The
first opening of the bf16 original, which converts it to int4, reaches 1 GB of experts per second, or the disk's speed
if that is less.

Every load is cold: in a new process, with files evicted from the page cache. Weights may be mapped and not yet read
when ``from_pretrained`` returns. So the time to the end of a first prompt is shown too, and peaks include it.
torch_mesh runs under a memory limit of 2 GB, which bounds memory of every kind. Conversions have no limit; the disk's
speed is that of direct reads of the original, measured between them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import harness
import sessions
import synthetic
from direct_reads import read_files
from harness import Report, Row

RESIDENT = 0.4
MAX_SECONDS, MAX_BYTES = 5.0, 2_000_000_000
CONVERTED = ("int4", "lut4")
CONVERSION_BYTES_PER_SECOND = 1e9


def measure(options: Any) -> Report:
    shape = synthetic.Shape(layers=options.layers)
    source, own_store = synthetic.checkpoint(options.dir, shape), synthetic.store(options.dir, shape, "int4")
    common = {
        "threads": harness.available_cpus(),
        "vocab": shape.vocab,
        "seed": shape.seed,
        "prompt": 16,
        "warm_up": 0,
        "measured": 1,
        "watch_memory": False,
    }

    def load(script: str, model: Path, limit: int, **request: Any) -> dict[str, Any]:
        return sessions.run(Path(sys.executable), script, model, limit, {**common, **request})

    def first_opening(weights: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            conversion_options = {"weights": weights, "store": str(Path(folder) / "store")}
            return load(
                "mesh.py", source, sessions.NO_LIMIT, resident=RESIDENT, dense="none", eager=True, **conversion_options
            )

    systems = {
        "torch_mesh": partial(load, "mesh.py", own_store, MAX_BYTES, resident=RESIDENT, dense="none"),
        "transformers": partial(load, "in_memory.py", source, sessions.NO_LIMIT),
    }
    systems |= {conversion(weights): partial(first_opening, weights) for weights in CONVERTED}
    systems["disk"] = partial(disk, source)
    results = harness.interleave(systems, options.rounds)
    report = Report(f"from_pretrained of {shape.expert_bytes_bf16 / 1e9:.1f} GB of experts, cold, after imports")
    add_rows(report, results)
    for weights in CONVERTED:
        add_conversion(report, weights, results, shape.expert_bytes_bf16)
    report.notes += [
        f"torch_mesh: converted int4 checkpoint, resident={RESIDENT}; transformers: the bf16 original, all in memory",
        f"medians of {options.rounds} interleaved rounds",
        "peaks are those of the process (VmHWM), imports and a prompt included",
        f"torch_mesh ran in a control group limited to {MAX_BYTES / 1e9:g} GB",
    ]
    report.details["runs"] = sessions.without_logits(results)
    return report


def add_rows(report: Report, results: dict[str, list[dict[str, Any]]]) -> None:
    def figure(system: str, key: str, divisor: float = 1.0) -> float:
        return statistics.median(run[key] for run in results[system]) / divisor

    seconds, peak = figure("torch_mesh", "load_seconds"), figure("torch_mesh", "peak", 1e9)
    report.add(Row("load, torch_mesh", seconds, "s", "limit", MAX_SECONDS, at_most=1.0))
    report.add(Row("load, torch_mesh", seconds, "s", "transformers", figure("transformers", "load_seconds")))
    first = seconds + figure("torch_mesh", "prompt_seconds")
    first_transformers = figure("transformers", "load_seconds") + figure("transformers", "prompt_seconds")
    report.add(Row("load and a prompt of 16 tokens, torch_mesh", first, "s", "transformers", first_transformers))
    report.add(Row("peak, torch_mesh", peak, "GB", "limit", MAX_BYTES / 1e9, at_most=1.0))
    report.add(Row("peak, torch_mesh", peak, "GB", "transformers", figure("transformers", "peak", 1e9)))


def conversion(weights: str) -> str:
    return f"first opening, {weights}"


def disk(source: Path) -> dict[str, Any]:
    files = sorted(source.glob("*.safetensors"))
    return {"bytes_per_second": sum(file.stat().st_size for file in files) / read_files(files)}


def add_conversion(report: Report, weights: str, results: dict[str, list[dict[str, Any]]], source_bytes: int) -> None:
    runs = results[conversion(weights)]
    speeds = [source_bytes / run["load_seconds"] / 1e9 for run in runs]
    reads = [run["bytes_per_second"] / 1e9 for run in results["disk"]]
    row = partial(harness.paired_row, conversion(weights), speeds, "GB/s")
    report.add(row("disk", reads))
    if weights == "int4":
        min_speeds = [min(read, CONVERSION_BYTES_PER_SECOND / 1e9) for read in reads]
        report.add(row("1 GB/s, at most the disk", min_speeds, at_least=1.0))
    packing = statistics.median(run["load_processor_seconds"] for run in runs) / harness.available_cpus()
    reading = source_bytes / 1e9 / statistics.median(reads)
    report.notes.append(
        f"{conversion(weights)}: bound by {'packing' if packing > reading else 'the disk'}: all processors together "
        "were busy for "
        f"{packing:.2f} s, plain reads of the experts take {reading:.2f} s"
    )


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
