"""Runs every benchmark one after the other and keeps their JSON; the exit status says whether all claims hold.

The machine should do nothing else meanwhile. Builds the peers' environment first if it is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import harness
import synthetic

HERE = Path(__file__).resolve().parent
SMALL = ("error.py", "perplexity.py")
LARGE = ("load.py", "cold_decode.py")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--json-dir", type=Path, default=synthetic.ROOT / "build" / "benchmarks")
    options = arguments.parse_args()
    if not synthetic.PEERS_PYTHON.exists():
        subprocess.run([str(HERE / "peers.sh")], check=True)
    missed = []
    for script in (*SMALL, *LARGE):
        command = [sys.executable, str(HERE / script), "--json", str(options.json_dir / f"{Path(script).stem}.json")]
        if script in LARGE:
            command += ["--dir", str(options.dir)]
        if subprocess.run(command, check=False).returncode != 0:
            missed.append(script)
    if missed:
        print(f"not shown: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
