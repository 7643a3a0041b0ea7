"""``torch-mesh report``: show the statistics that a model has written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from torch_mesh.cli.options import below, positive
from torch_mesh.system.atomic_files import check_results, new_file

if TYPE_CHECKING:
    from torch_mesh.statistics.report import Report, Run

_WIDTH = 160
_STRETCHES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Summarizes files of MeshConfig.stats.file: hits, reads and waits by layer, by phase and over time. "
        "Each run of a process has its own summary."
    )
    parser.add_argument("files", nargs="+", metavar="STATS", help="a file of JSON lines")
    parser.add_argument(
        "--stretches", type=positive, help=f"rows of the printed table over time (default: {_STRETCHES})"
    )
    parser.add_argument(
        "--html", metavar="OUT", help="write a page that opens without a network: curves, residency by expert, memory"
    )
    parser.add_argument("--plan", metavar="PLAN", help="show beside it this output of `torch-mesh plan --json`")
    parser.add_argument(
        "--live",
        metavar="PORT",
        type=below(1 << 16),
        help="serve that page on this machine's loopback while the files grow; 0: a free port",
    )
    parser.add_argument("--png", metavar="OUT", help="draw the last run over time; needs matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.statistics.page import STRETCHES, read_plan, render_page
    from torch_mesh.statistics.report import StatsFile

    if arguments.plan and not arguments.html and arguments.live is None:
        raise ValueError("--plan is shown on the page: give --html OUT or --live PORT too")
    if arguments.live is not None and (arguments.html or arguments.png):
        raise ValueError("--live shows files that still grow: give --html and --png when they are complete")
    if arguments.live is not None and arguments.stretches is not None:
        raise ValueError("--stretches is for the printed table, which --live does not print: leave one of them out")
    check_results((arguments.html, "<!doctype html>"), (arguments.png, ""))
    plan = read_plan(arguments.plan) if arguments.plan else None
    if arguments.live is not None:
        return _serve(arguments.files, plan, arguments.live)
    files = [StatsFile(path) for path in arguments.files]
    reports = [file.report(arguments.stretches or _STRETCHES) for file in files]
    _print(reports, Console(width=_WIDTH))
    if arguments.html:
        page = render_page([file.report(STRETCHES) for file in files], plan)
        with new_file(arguments.html) as file:
            file.write(page.encode())
    if arguments.png:
        _draw(reports[-1], arguments.png)
    return 0


def _serve(files: list[str], plan: dict[str, Any] | None, port: int) -> int:
    from torch_mesh.statistics.live import LivePage

    try:
        page = LivePage(files, plan, port)
    except OSError as error:
        problem = f"--live {port}: {error.strerror or error}"
        if isinstance(error, PermissionError) and port < 1024:
            problem += "; ports below 1024 are root's"
        raise OSError(f"{problem}: give another port, or 0 for a free one") from error
    with page:
        print(f"{page.address} follows {', '.join(files)}; Ctrl-C ends it", flush=True)
        page.serve_forever()
    return 0


def _print(reports: list[Report], console: Console) -> None:
    for report in reports:
        for name, run in report.named_runs():
            slots = f"{run.total.slots} slots at the end"
            console.print(f"{name}: {run.span}, {slots}", markup=False, highlight=False)
            for key, value in run.about.items():
                console.print(f"{key}: {value}", markup=False, highlight=False)
            headings, *rows = run.total.table()
            table = Table(*headings)
            for row in rows:
                table.add_row(*row, end_section=row is rows[len(run.total.per_layer) - 1])
            console.print(table, markup=False)
            if run.total.lossy:
                console.print(f"lossy: {run.total.lossy}", markup=False, highlight=False)
            if run.stretches:
                console.print(_over_time(run), markup=False)
        if report.damaged:
            lines = ", ".join(map(str, report.damaged[:10])) + (", ..." if len(report.damaged) > 10 else "")
            console.print(f"{len(report.damaged)} lines are cut short and left out: {lines}", markup=False)


def _over_time(run: Run) -> Table:
    from torch_mesh.statistics.counters import PHASES
    from torch_mesh.statistics.watch import RATES, layer_bars, rate_cells

    table = Table("from", "phase", *RATES, "hit rate by layer", title="over time", title_justify="left")
    for stretch in run.stretches:
        seconds = stretch.end - stretch.begin
        start, bars = _clock(stretch.begin - run.begin), layer_bars(stretch.stats)
        for name in PHASES:
            counters = getattr(stretch.stats, name)
            if counters.accesses:
                table.add_row(start, name, *rate_cells(counters.forwards, counters, seconds), bars)
                start = bars = ""
    return table


def _clock(seconds: float) -> str:
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _draw(report: Report, path: str) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--png needs matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    run = report.runs[-1]
    stretches = [stretch for stretch in run.stretches if stretch.end > stretch.begin]
    if not stretches:
        raise ValueError(f"{report.path} has no two lines of its last run between which time passed: nothing to draw")
    minutes = [(stretch.begin + stretch.end) / 2 / 60 - run.begin / 60 for stretch in stretches]
    figure, (rates, reads, layers) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    for name in ("prefill", "decode"):
        hits = [getattr(stretch.stats, name).hit_rate for stretch in stretches]
        if any(hit is not None for hit in hits):
            rates.plot(minutes, [float("nan") if hit is None else hit for hit in hits], "o-", label=name)
    rates.set(ylabel="hit rate", ylim=(0, 1))
    rates.legend()
    lengths = [stretch.end - stretch.begin for stretch in stretches]
    speeds = [stretch.stats.bytes_read / length / 1e6 for stretch, length in zip(stretches, lengths, strict=True)]
    waits = [100 * stretch.stats.stall_seconds / length for stretch, length in zip(stretches, lengths, strict=True)]
    reads.plot(minutes, speeds, "o-", color="tab:green", label="read")
    reads.set(ylabel="MB/s read", ylim=(0, None))
    waiting = reads.twinx()
    waiting.plot(minutes, waits, "o-", color="tab:red")
    waiting.set(ylabel="% of the time waiting (red)", ylim=(0, None))
    by_layer = [[layer.hit_rate for layer in stretch.stats.per_layer] for stretch in stretches]
    grid = [[float("nan") if hit is None else hit for hit in column] for column in zip(*by_layer, strict=True)]
    image = layers.pcolormesh(
        [stretch.begin / 60 - run.begin / 60 for stretch in stretches] + [(stretches[-1].end - run.begin) / 60],
        range(len(grid) + 1),
        grid,
        vmin=0,
        vmax=1,
    )
    layers.set(ylabel="MoE layer", xlabel="minutes")
    figure.colorbar(image, ax=layers, label="hit rate")
    figure.suptitle(str(report.path))
    with new_file(path) as file:
        figure.savefig(file, format="png")  # whatever the name's ending
    pyplot.close(figure)
