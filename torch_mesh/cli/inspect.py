"""``torch-mesh inspect``: describe a store or a checkpoint, and verify a store."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.filesize import decimal as format_bytes
from rich.table import Table
from rich.text import Text

from torch_mesh.cli.options import add_model_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows what a store or a checkpoint holds, from its headers alone, also of a model on the hub. With --verify "
        "it reads all of a store, and exits with 1 if any record or file is damaged. A store on the hub is downloaded "
        "for that."
    )
    add_model_argument(parser, "folder")
    parser.add_argument(
        "--verify", action="store_true", help="read all of a store, and name every damaged record and file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.verify:
        return _verify(arguments)
    from torch_mesh.store.hub import outline_folder
    from torch_mesh.store.inspect import describe

    with outline_folder(arguments.folder) as (folder, present):
        description = describe(folder)
    if not present:
        description["folder"] = arguments.folder
    if arguments.json:
        print(json.dumps(description))
    else:
        _print_table(description)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from torch_mesh.store.hub import local_folder, outline_folder
    from torch_mesh.store.manifest import open_store
    from torch_mesh.store.progress import progress_bar
    from torch_mesh.store.verify import verify

    with outline_folder(arguments.folder) as (folder, present):
        store = open_store(folder)  # before anything that is not a store is downloaded
    if not present:
        store = open_store(local_folder(arguments.folder))
    with progress_bar("verifying", show=not arguments.json) as progress:
        damages = list(verify(store, progress))
    records = store.manifest.shape.layers * store.manifest.shape.experts
    if arguments.json:
        print(json.dumps({"records": records, "damages": [asdict(damage) for damage in damages]}))
    else:
        for damage in damages:
            print(damage)
        verdict = f"{len(damages)} damaged" if damages else "all as they were written"
        print(f"{arguments.folder}: {records} records and {len(store.manifest.other_files)} other files: {verdict}")
    return 1 if damages else 0


def _print_table(held: dict[str, Any]) -> None:
    table = Table("", "", title=Text(held["folder"], "table.title"), title_justify="left", show_header=False)
    group = f", groups of {held['group_size']}" if held["group_size"] else ""
    parts = [name for name in ("gated", "bias") if held[name]]
    table.add_row("kind", held["kind"] + (f", format {held['format_version']}" if held["kind"] == "store" else ""))
    table.add_row("source", held["source"])
    table.add_row("weights", held["weights"] + group)
    if calibration := held["calibration"]:
        table.add_row("calibrated", f"on {calibration['tokens']} tokens, {calibration['text'][:8]}")
    table.add_row("layers", f"{held['layers']}: {_span(held['modules'])}")
    table.add_row("experts per layer", f"{held['experts']}, {held['top_k']} of them per token")
    table.add_row(
        "an expert",
        f"hidden {held['hidden']}, intermediate {held['intermediate']}{''.join(', ' + part for part in parts)}, "
        f"activation {_activation(held['activation'])}",
    )
    table.add_row("bytes of an expert", f"{format_bytes(held['expert_bytes'])}, reads: {held['reads_per_expert']}")
    table.add_row("bytes of all experts", f"{format_bytes(held['all_experts_bytes'])}, files: {len(held['files'])}")
    table.add_row("bytes of the rest", format_bytes(held["other_bytes"]))
    if codes := held["dense_codes"]:
        held_in = f"{format_bytes(sum(codes.values()))} in {', '.join(codes)}"
        table.add_row("of that, codes of linear layers", f"{held_in}: read with dense='codes'")
    rounded = f" in {held['table_weights']}" if held["table_weights"] else ""
    for path, size in held["tables"].items():
        table.add_row("of that, a table that stays in files", f"{format_bytes(size)}{rounded}: {path}")
    Console().print(table, markup=False)


def _activation(given: str | list[str] | None) -> str:
    if given is None or isinstance(given, str):
        return given or "of its module"
    return " or ".join(dict.fromkeys(given))  # one per layer


def _span(modules: list[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}"
