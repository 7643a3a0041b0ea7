"""Runs benchmarks one after the other, keeps their JSON, and ends with a table of all claims; the exit status says whether
they hold.

Without an option: what needs nothing but torch_mesh, in a few minutes. With ``--peers``: what is measured beside other
systems and on large files; installs those systems first. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import harness
import synthetic
from harness import Report, Row

HERE = Path(__file__).resolve().parent
OWN = (
    "error.py",
    "perplexity.py",
    "op_overhead.py",
    "attention_op.py",
    "decode_op.py",
    "prefill_op.py",
    "row_thresholds.py",
    "stats_cost.py",
)
ON_LARGE_FILES = ("whole_model.py", "load.py", "cold_decode.py", "prefill_cold.py", "cold_read.py", "cold_bound.py")
PEERS = ("lossy.py", "weight_error.py", "layer_peers.py", *ON_LARGE_FILES)


def run(script: str, directory: Path, report: Path) -> bool:
    """Whether a benchmark wrote its report; a claim that does not hold is in the report."""
    report.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / script), "--json", str(report)]
    if script in ON_LARGE_FILES:
        command += ["--dir", str(directory)]
    subprocess.run(command, check=False)
    return report.exists()


def claims(report: Path) -> list[Row]:
    names = [field.name for field in fields(Row)]
    rows = [Row(**{name: row[name] for name in names}) for row in json.loads(report.read_text())["rows"]]
    return [row for row in rows if row.holds is not None]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--peers", action="store_true", help="what is measured beside other systems")
    arguments.add_argument("--json-dir", type=Path, default=synthetic.ROOT / "build" / "benchmarks")
    options = arguments.parse_args()
    if options.peers:
        subprocess.run([str(HERE / "peers.sh")], check=True)
    summary, failed = Report("All claims"), []
    for script in PEERS if options.peers else OWN:
        report = options.json_dir / f"{Path(script).stem}.json"
        if run(script, options.dir, report):
            summary.rows += claims(report)
        else:
            failed.append(script)
    status = summary.finish(None)
    if failed:
        print(f"no result: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or status)


if __name__ == "__main__":
    sys.exit(main())
