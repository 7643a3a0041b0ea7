"""Shared code of all benchmarks: rows with a peer or limit, interleaved rounds, a table, JSON.

Absolute figures drift by tens of per cent, so claims are ratios to a reference of the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One measured figure. ``ratio`` is value / reference; with ``at_most`` or ``at_least`` the row is a claim.

    ``low`` and ``high`` are the 10th and 90th percentile of the pairs' ratios, whose median is ``ratio``.
    """

    name: str
    value: float
    unit: str
    reference_name: str = ""
    reference: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.reference is None and (self.at_most is not None or self.at_least is not None):
            raise ValueError(f"row {self.name!r} bounds a ratio but has no reference to form it with")

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference if self.reference else None

    @property
    def holds(self) -> bool | None:
        """Whether the claim is met; None for a row that claims nothing."""
        if self.at_most is None and self.at_least is None:
            return None
        ratio = self.ratio
        if ratio is None:
            return False
        return (self.at_most is None or ratio <= self.at_most) and (self.at_least is None or ratio >= self.at_least)


@dataclass
class Report:
    """The result of one benchmark: the machine, its rows, and details that only the JSON has."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def finish(self, json_path: Path | None) -> int:
        """Prints the table, writes the JSON if a path is given; returns the exit status, 1 if a claim does not hold."""
        print_table(self)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(as_json(self), indent=1) + "\n")
        return int(any(row.holds is False for row in self.rows))


def as_json(report: Report) -> dict[str, Any]:
    rows = [{**asdict(row), "ratio": row.ratio, "holds": row.holds} for row in report.rows]
    return {
        "title": report.title,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": rows,
        "notes": report.notes,
        "details": report.details,
    }


def print_table(report: Report) -> None:
    console = Console(width=None if os.isatty(1) else 150)
    table = Table(title=report.title, caption=describe(machine()), caption_justify="left")
    table.add_column("what")
    for column in ("value", "reference", "ratio", "p10–p90", "wanted"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in report.rows:
        table.add_row(*cells(row))
    console.print(table)
    for note in report.notes:
        console.print(f"- {note}", highlight=False)


def cells(row: Row) -> tuple[str, ...]:
    reference = "" if row.reference is None else f"{amount(row.reference, row.unit)} ({row.reference_name})"
    bounds = [f"≤ {number(row.at_most)}" if row.at_most is not None else ""]
    bounds.append(f"≥ {number(row.at_least)}" if row.at_least is not None else "")
    verdict = {None: "", True: "[green]holds[/green]", False: "[red]missed[/red]"}[row.holds]
    ratio = "" if row.ratio is None else number(row.ratio)
    spread = "" if row.low is None or row.high is None else f"{row.low:.3g}–{row.high:.3g}"
    return row.name, amount(row.value, row.unit), reference, ratio, spread, " ".join(filter(None, bounds)), verdict


def amount(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def number(value: float) -> str:
    return f"{value:.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def machine() -> dict[str, Any]:
    """The facts of this machine that a figure depends on."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpus": available_cpus(),
        "isa": [
            flag for flag in ("avx2", "avx_vnni", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags
        ],
        "memory_gib": round(int(meminfo["MemTotal"].split()[0]) / 2**20, 1),
        "kernel": platform.release(),
    }


def describe(facts: Mapping[str, Any]) -> str:
    isa = " ".join(facts["isa"])
    return f"{facts['cpu']}, {facts['cpus']} CPUs ({isa}), {facts['memory_gib']} GiB, Linux {facts['kernel']}"


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every contender once per round. Each round starts with another contender, so drift affects all of them
    alike."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 is needed")
    names = list(contenders)
    results: dict[str, list[T]] = {name: [] for name in names}
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(contenders[name]())
    return results


def paired_row(
    name: str,
    values: Sequence[float],
    unit: str,
    reference_name: str,
    references: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Return a row of interleaved pairs. Its ratio is the median of the pairs' ratios, since both runs of a pair happen
    in the same conditions. The row's reference is the one that gives this ratio, not the median of the references.
    """
    ratios = sorted(value / reference for value, reference in zip(values, references, strict=True))
    value = statistics.median(values)
    return Row(
        name,
        value,
        unit,
        reference_name,
        value / statistics.median(ratios),
        at_most,
        at_least,
        low=percentile(ratios, 10),
        high=percentile(ratios, 90),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of values in ascending order."""
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    return dot / math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))


def available_cpus() -> int:
    return len(os.sched_getaffinity(0))


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument("--json", type=Path, default=None, help="also write the rows, notes and details to this file")
    return result


def add_rounds(arguments: argparse.ArgumentParser, rounds: int) -> None:
    arguments.add_argument("--rounds", type=int, default=rounds)
    arguments.add_argument("--threads", type=int, default=available_cpus())
    arguments.add_argument("--seed", type=int, default=0)


def add_dir(arguments: argparse.ArgumentParser) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    arguments.add_argument(
        "--dir", type=Path, default=cache / "mesh-bench", help="folder for the large files; not the repository"
    )
