"""``torch-mesh doctor``: what this machine offers, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_mesh.errors import MeshError

if TYPE_CHECKING:
    from torch_mesh.cli.doctor_checks import Finding

_STATUS_STYLE = {"ok": "green", "limited": "yellow", "missing": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Explains what this machine offers torch_mesh and what to change. "
        "Exits with 1 only where torch_mesh cannot work at all."
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the stores (default: torch_mesh's folder in $XDG_CACHE_HOME)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.cli.doctor_checks import report

    folder = arguments.folder
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        raise MeshError(f"--folder {folder} is a file: name a folder, which need not exist yet")
    findings = report(folder)
    usable = not any(finding.fatal for finding in findings)
    if arguments.json:
        print(json.dumps({"usable": usable, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        _print_table(findings, usable)
    return 0 if usable else 1


def _print_table(findings: list[Finding], usable: bool) -> None:
    table = Table("", "status", "found", title="torch_mesh on this machine", title_justify="left")
    for finding in findings:
        style = _STATUS_STYLE[finding.status]
        table.add_row(finding.name, f"[{style}]{finding.status}[/]", escape(finding.found))
    console = Console()
    console.print(table)
    if advised := [finding for finding in findings if finding.advice]:
        console.print("What to change:")
    for finding in advised:  # outside of the table, whose cells would wrap commands
        console.print(f"  {finding.name}: {finding.advice}", markup=False, highlight=False, soft_wrap=True)
    if not usable:
        console.print("[red]torch_mesh cannot work here until what is missing above is there.[/]")
