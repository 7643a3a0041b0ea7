"""A report as one self-contained HTML file: ``page.html`` with its data."""

from __future__ import annotations

import html
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_mesh.errors import MeshError
from torch_mesh.statistics.counters import HEADINGS
from torch_mesh.statistics.report import Report, Run, Stretch, path_text
from torch_mesh.statistics.snapshot import MEMORY

# More stretches than a screen can resolve. A page of an hour of a large model stays below 1.5 MB.
STRETCHES = 240
_TABLES, _DATA = "<!-- tables -->", "<!-- data -->"  # placeholders in page.html
_MAX_PLAN_BYTES = 64 << 20
_PLANNED = ("tokens_per_second", "peak_bytes", "pool_bytes", "slots")


def render_page(reports: Sequence[Report], plan: dict[str, Any] | None = None, live: bool = False) -> str:
    """The page. ``reports`` are cut into ``STRETCHES``; ``plan`` is a result of ``read_plan``. A ``live`` page polls
    its server for ``data.json``.

    All text of a report is escaped.
    """
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # Split instead of replaced: the data may contain either placeholder.
    begin, rest = page.split(_TABLES)
    tables = "".join(_table(name, run) for name, run in _runs(reports))
    middle, end = rest.split(_DATA)
    return begin + _meanings() + tables + middle + render_data(reports, plan, live) + end


def render_data(reports: Sequence[Report], plan: dict[str, Any] | None = None, live: bool = False) -> str:
    """The page's data, as JSON that is safe in a script element."""
    notes = [
        f"{path_text(report.path)}: {len(report.damaged)} lines are cut short and left out"
        for report in reports
        if report.damaged
    ]
    notes += [f"{path_text(report.path)} has no line yet" for report in reports if not report.runs]
    runs = [_run_data(name, run) for name, run in _runs(reports)]
    data = {"runs": runs, "plan": plan, "notes": notes, "live": live}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # occur in JSON strings only
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _runs(reports: Sequence[Report]) -> list[tuple[str, Run]]:
    return [named for report in reports for named in report.named_runs()]


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The page's part of a plan by ``torch-mesh plan --json``. Raises MeshError for other files."""

    def refuse(problem: str) -> MeshError:
        return MeshError(f"{path_text(path)} is not what `torch-mesh plan --json` prints: {problem}.")

    with open(path, "rb") as file:
        content = file.read(_MAX_PLAN_BYTES + 1)
    try:
        table = json.loads(content) if len(content) <= _MAX_PLAN_BYTES else None
    except (ValueError, RecursionError):
        raise refuse("no JSON") from None
    if not isinstance(table, dict) or not isinstance(table.get("status"), str):
        raise refuse("no status")
    rate = table.get("hit_rate")
    shown = {name: table.get(name) for name in _PLANNED}
    shown["hit_rate"] = rate.get("expected") if isinstance(rate, dict) else rate
    for name, value in shown.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63
        ):
            raise refuse(f"{name} is {value!r:.80}")
    return shown


def _run_data(name: str, run: Run) -> dict[str, Any]:
    # A clock that was set back gives no rates.
    stretches = [stretch for stretch in run.stretches if stretch.end > stretch.begin]

    def each(value: Callable[[Stretch], float | None]) -> list[float | None]:
        return [_rounded(value(stretch)) for stretch in stretches]

    def rate(value: Callable[[Stretch], float]) -> list[float | None]:
        return each(lambda stretch: value(stretch) / (stretch.end - stretch.begin))

    snapshots = [stretch.snapshot for stretch in stretches]
    experts = max((snapshot.experts for snapshot in snapshots), default=0)
    remembered = experts and all(snapshot.experts == experts for snapshot in snapshots)
    return {
        "name": name,
        "span": run.span,
        "about": dict(run.about),
        "lossy": run.total.lossy,
        "layers": len(run.total.per_layer),
        "experts": experts if remembered else 0,
        "begin": [round(stretch.begin - run.begin, 3) for stretch in stretches],
        "end": [round(stretch.end - run.begin, 3) for stretch in stretches],
        "hit_rate": {
            "decode": each(lambda one: one.stats.decode.hit_rate),
            "prefill": each(lambda one: one.stats.prefill.hit_rate),
        },
        "steps": rate(lambda stretch: stretch.stats.decode.forwards),
        "waiting": rate(lambda stretch: stretch.stats.stall_seconds),
        "read": rate(lambda stretch: stretch.stats.bytes_read),
        "unused": rate(lambda stretch: stretch.stats.unused_prefetch_bytes),
        "layer_hits": [[_rounded(layer.hit_rate) for layer in stretch.stats.per_layer] for stretch in stretches],
        "resident": [snapshot.resident for snapshot in snapshots] if remembered else None,
        "memory": {part: [snapshot.memory and snapshot.memory[part] for snapshot in snapshots] for part in MEMORY}
        if any(snapshot.memory for snapshot in snapshots)
        else None,
        "summary": {
            "hit_rate": _rounded(run.total.decode.hit_rate),
            "prefill_hit_rate": _rounded(run.total.prefill.hit_rate),
            "tokens_per_second": _rounded(_typical(stretches)),
            "waiting": _rounded(_waiting_fraction(stretches)),
            "bytes_read": run.total.bytes_read,
            "accuracy": _rounded(run.total.prefetch_accuracy),
            "peak_bytes": run.peak_bytes,
            "pool_bytes": run.budget_bytes,
            "slots": run.total.slots,
        },
    }


def _typical(stretches: Iterable[Stretch]) -> float | None:
    """Decode steps per second, the median over stretches without prefill."""
    rates = [
        stretch.stats.decode.forwards / (stretch.end - stretch.begin)
        for stretch in stretches
        if stretch.stats.decode.forwards and not stretch.stats.prefill.forwards
    ]
    return statistics.median(rates) if rates else None


def _waiting_fraction(stretches: Sequence[Stretch]) -> float | None:
    seconds = sum(stretch.end - stretch.begin for stretch in stretches)
    return sum(stretch.stats.stall_seconds for stretch in stretches) / seconds if seconds else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _meanings() -> str:
    entries = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(meaning)}</dd>" for name, meaning in HEADINGS.items())
    return f"<dl>{''.join(entries)}</dl>"


def _table(name: str, run: Run) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        first, *rest = (html.escape(cell) for cell in cells)
        return f'<tr><th scope="row">{first}</th>' + "".join(f"<{kind}>{cell}</{kind}>" for cell in rest) + "</tr>"

    headings, *rows = run.total.table()
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<figure><figcaption>{html.escape(name)}: {html.escape(run.span)}</figcaption><div class="wide" tabindex="0" '
        'role="region" aria-label="counters"><table><thead>'
        f"{row(headings, 'th')}</thead><tbody>{body}</tbody></table></div></figure>"
    )
