"""Draws figures from the benchmarks' JSON.

usage: figure.py cold-decode cold_decode.json docs/cold_decode.svg
       figure.py roofline layer_peers.json docs/roofline.svg
       figure.py formats calibration.json docs/formats.svg
       figure.py gpu-timeline gpu_decode.json gpu_decode.svg
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from cold_decode import DEFAULTS, PEERS, with_equal_memory
from cold_decode import MESH as TUNED
from layer_peers import KT, MESH, ONNX, TORCH, TRANSFORMERS, bits_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from op_layer import EXPERTS, TOP_K, WEIGHTS_PER_EXPERT

OURS, OTHERS = "#c2410c", "#94a3b8"
SYSTEM_COLOURS = {MESH: OURS, TRANSFORMERS: "#2563eb", ONNX: "#7c3aed", KT: "#0f766e", TORCH: "#64748b"}
SMALL = {"fontsize": 8, "color": "#334155"}
DTYPES = ("float32", "bfloat16")
LANE_COLOURS = (OURS, "#64748b", "#2563eb", OTHERS)
FORMAT_MARKERS = {"bf16": "o", "int8": "s", "int4": "^"}


def speeds(report: dict[str, Any]) -> dict[str, float]:
    """Return tokens per second by system under torch_mesh's limit, fastest first. A system that is compared with
    several others has several rows with the same value."""
    found = {row["name"].removeprefix("decode, "): row["value"] for row in report["rows"] if row["unit"] == "tok/s"}
    equal = {name: found[name] for name in (TUNED, DEFAULTS)} | {name: found[with_equal_memory(name)] for name in PEERS}
    return dict(sorted(equal.items(), key=lambda item: -item[1]))


def draw_cold_decode(report: dict[str, Any], target: Path) -> None:
    bars = speeds(report)
    limit = report["details"]["runs"][TUNED][0]["limit"] / 1e9
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(bars) + 1.2), layout="constrained")
    colours = [OURS if name.startswith("torch_mesh") else OTHERS for name in bars]
    containers = axes.barh(list(bars), list(bars.values()), color=colours, height=0.62)
    axes.bar_label(containers, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    axes.set_xlabel("tokens per second, batch 1")
    finish(figure, report, f"Decode within {limit:.2f} GB of memory in all", target)


def finish(figure: Figure, report: dict[str, Any], title: str, target: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    facts = report["machine"]
    figure.supxlabel(f"{facts['cpu']}, {facts['cpus']} CPUs, {report['date'][:10]}", fontsize=8, color="#64748b")
    figure.savefig(target, metadata={"Date": None})


@dataclass(frozen=True)
class Point:
    """One variant at one number of rows."""

    name: str
    rows: int
    intensity: float  # operations per byte of weights
    rate: float  # GFLOP/s


def points(report: dict[str, Any]) -> list[Point]:
    """Return the points of layer_peers.py's report."""
    found = []
    for rows in (1, 512):
        for name, speeds in report["details"][f"rows/s, {rows}"].items():
            operations = 2 * rows * TOP_K * WEIGHTS_PER_EXPERT
            used = TOP_K / EXPERTS if rows == 1 else 1.0
            read = used * report["details"]["weight_bytes"][name]
            rate = statistics.median(speeds) / rows * operations / 1e9
            found.append(Point(name, rows, operations / read, rate))
    return found


def draw_roofline(report: dict[str, Any], target: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    draw_roofs(axes, report)
    for point in points(report):
        system = next(name for name in SYSTEM_COLOURS if point.name.startswith(name))
        marker = FORMAT_MARKERS[bits_of(point.name.removeprefix(system).strip())]
        axes.plot(point.intensity, point.rate, marker, color=SYSTEM_COLOURS[system], markersize=8, alpha=0.85)
    legend(axes)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights", ylabel="GFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    finish(figure, report, f"{report['title']}: one row (left), 512 rows (right)", target)


def draw_formats(report: dict[str, Any], target: Path) -> None:
    """Draw the divergence of each format by bits, plain and calibrated."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    points = {tuple(name.split(" g")): point for name, point in report["details"]["points"].items()}
    for family in ("int4", "lut4", "tcq"):  # one line each, over all bits and group sizes
        members = sorted((point["bits"], point) for (name, _), point in points.items() if name.startswith(family))
        bits, family_points = [bits for bits, _ in members], [point for _, point in members]
        for kind, colour in (("plain", OTHERS), ("calibrated", OURS)):
            style = "s--" if family == "int4" else "o-"
            axes.plot(bits, [point[kind] for point in family_points], style, color=colour, linewidth=1, label=kind)
            if family != "tcq":
                offset = (6, 0 if kind == "plain" else -7)
                axes.annotate(family, (bits[-1], family_points[-1][kind]), offset, textcoords="offset points", **SMALL)
    for (name, group_size), point in points.items():
        if name.startswith("tcq"):
            label = f"{name}, groups of {group_size}"
            axes.annotate(label, (point["bits"], point["plain"]), (6, 4), textcoords="offset points", **SMALL)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, frameon=False)
    axes.set(yscale="log", xlabel="bits a weight, scales included", ylabel="divergence, 0.001 nat a token")
    axes.yaxis.set_major_locator(FixedLocator([5, 10, 20, 40, 80]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08)
    finish(figure, report, report["title"], target)


def draw_roofs(axes: Axes, report: dict[str, Any]) -> None:
    """Draw the limits of the same rounds: a plain read of the weights, and torch's square products."""
    read, *products = (statistics.median(report["details"][f"limit, {name}"]) for name in ("read", *DTYPES))
    top, first, last = max(products), 0.7, 700
    axes.plot([first, top / read], [first * read, top], color="#334155", linewidth=1)
    label = f"plain read, {read:.0f} GB/s"
    along_line = {"rotation": math.degrees(math.atan(read)), "rotation_mode": "anchor", "transform_rotates_text": True}
    axes.annotate(label, (2 * first, 2 * first * read * 1.15), **along_line, **SMALL)
    for dtype, rate in zip(DTYPES, products, strict=True):
        axes.plot([rate / read, last], [rate, rate], color="#334155", linewidth=1)
        axes.annotate(f"torch's {dtype} product, {rate:.0f} GFLOP/s", (last, 1.04 * rate), ha="right", **SMALL)


def legend(axes: Axes) -> None:
    """Add a legend: colours are systems, markers are formats."""
    for system, colour in SYSTEM_COLOURS.items():
        axes.plot([], [], "o", color=colour, label=system)
    for form, marker in FORMAT_MARKERS.items():
        axes.plot([], [], marker, color="#334155", fillstyle="none", label=form)
    axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=2)


def draw_gpu_timeline(report: dict[str, Any], target: Path) -> None:
    """Draw the timelines of gpu_decode.py's report, one panel for each profiled configuration."""
    timelines = report["details"]["timeline"]
    figure, panels = plt.subplots(
        len(timelines), figsize=(10, 2.2 * len(timelines) + 0.6), layout="constrained", squeeze=False
    )
    for axes, (name, lanes) in zip(panels[:, 0], timelines.items(), strict=True):
        for row, intervals in enumerate(lanes.values()):
            bars = [(begin / 1e3, (end - begin) / 1e3) for begin, end in intervals]
            axes.broken_barh(bars, (row - 0.35, 0.7), color=LANE_COLOURS[row])
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(name, loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("milliseconds, under the profiler")
    finish(figure, report, report["title"], target)


FIGURES = {
    "cold-decode": draw_cold_decode,
    "roofline": draw_roofline,
    "formats": draw_formats,
    "gpu-timeline": draw_gpu_timeline,
}


def draw(name: str, report: dict[str, Any], target: Path) -> None:
    """Draw the figure ``name`` of a benchmark's report (``harness.as_json``)."""
    plt.rcParams["svg.hashsalt"] = "torch_mesh"  # the same input gives the same file
    plt.rcParams["font.family"] = "sans-serif"
    FIGURES[name](report, target)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("figure", choices=sorted(FIGURES))
    arguments.add_argument("report", type=Path)
    arguments.add_argument("target", type=Path)
    options = arguments.parse_args()
    draw(options.figure, json.loads(options.report.read_text()), options.target)


if __name__ == "__main__":
    main()
