"""Run benchmarks one after the other, write their JSON, and print a table of all claims. The exit status is 1 if a
claim does not hold.

Without an option: the benchmarks that need only torch_mesh, in a few minutes. With ``--peers``: those with other
systems and large files; this installs the systems first. With ``--gpu``: those that need a CUDA device; without one the
exit status is 2. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import card
import harness
import synthetic
from harness import Report, Row

HERE = Path(__file__).resolve().parent
OWN = (
    "error.py",
    "perplexity.py",
    "calibration.py",
    "op_overhead.py",
    "attention_op.py",
    "decode_op.py",
    "verify_rows.py",
    "prefill_op.py",
    "row_thresholds.py",
    "stats_cost.py",
)
ON_LARGE_FILES = (
    "whole_model.py",
    "busy_machine.py",
    "fill.py",
    "load.py",
    "cold_decode.py",
    "gguf_models.py",
    "prefill_cold.py",
    "cold_read.py",
    "cold_bound.py",
    "table_rows.py",
    "speculation_replay.py",
)
ON_A_CARD = ("gpu_layer.py", "gpu_streaming.py", "gpu_decode.py")
PEERS = (
    "lossy.py",
    "speculation.py",
    "resident_drafts.py",
    "loss_curves.py",
    "weight_error.py",
    "layer_peers.py",
    *ON_LARGE_FILES,
)


def run(script: str, directory: Path, report: Path) -> int:
    """Run a benchmark, and return its exit status. A claim that does not hold is in the report, if there is one."""
    report.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / script), "--json", str(report)]
    if script in (*ON_LARGE_FILES, "gpu_decode.py"):
        command += ["--dir", str(directory)]
    return subprocess.run(command, check=False).returncode


def claims(report: Path) -> list[Row]:
    names = [field.name for field in fields(Row)]
    rows = [Row(**{name: row[name] for name in names}) for row in json.loads(report.read_text())["rows"]]
    return [row for row in rows if row.holds is not None]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    harness.add_dir(arguments)
    selection = arguments.add_mutually_exclusive_group()
    selection.add_argument("--peers", action="store_true", help="benchmarks with other systems and large files")
    selection.add_argument("--gpu", action="store_true", help="benchmarks on a CUDA device")
    arguments.add_argument("--json-dir", type=Path, default=synthetic.ROOT / "build" / "benchmarks")
    options = arguments.parse_args()
    if options.peers:
        subprocess.run([str(HERE / "peers.sh")], check=True)
    summary, failed = Report("All claims"), {}
    for script in PEERS if options.peers else ON_A_CARD if options.gpu else OWN:
        report = options.json_dir / f"{Path(script).stem}.json"
        status = run(script, options.dir, report)
        if report.exists():
            summary.rows += claims(report)
        else:
            failed[script] = status
    if options.gpu and set(failed.values()) == {card.NO_CARD}:
        return card.NO_CARD
    status = summary.finish(None)
    if failed:
        print(f"no result: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or status)


if __name__ == "__main__":
    sys.exit(main())
