"""Draws the figure of the README from cold_decode.py's JSON: tokens per second of each system, in one run.

usage: figure.py cold_decode.json docs/cold_decode.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS, OTHERS = "#c2410c", "#94a3b8"


def speeds(report: dict[str, Any]) -> dict[str, float]:
    """Tokens per second by system, fastest first; a system compared with several others has several rows of one value."""
    found = {row["name"].removeprefix("decode, "): row["value"] for row in report["rows"] if row["unit"] == "tok/s"}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def draw(report: dict[str, Any], target: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "torch_mesh"  # the same input draws the same file
    plt.rcParams["font.family"] = "sans-serif"
    bars = speeds(report)
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(bars) + 1.2), layout="constrained")
    colours = [OURS if name.startswith("torch_mesh") else OTHERS for name in bars]
    drawn = axes.barh(list(bars), list(bars.values()), color=colours, height=0.62)
    axes.bar_label(drawn, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    axes.set_xlabel("tokens per second, batch 1")
    figure.suptitle(report["title"], x=0.01, ha="left", fontsize=11)
    facts = report["machine"]
    figure.supxlabel(f"{facts['cpu']}, {facts['cpus']} CPUs, {report['date'][:10]}", fontsize=8, color="#64748b")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("report", type=Path)
    arguments.add_argument("target", type=Path)
    options = arguments.parse_args()
    draw(json.loads(options.report.read_text()), options.target)


if __name__ == "__main__":
    main()
