"""``torch-mesh cache``: list and prune the conversion cache."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.filesize import decimal as format_bytes
from rich.table import Column, Table
from rich.text import Text

from torch_mesh.cli.options import positive
from torch_mesh.errors import MeshError
from torch_mesh.store.cached_stores import CachedStore, cached_stores, remove
from torch_mesh.store.disk_cache import cache_folder

_OTHER_COLUMNS = 48  # minimum width of a table's other columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists and removes cached stores and prefix caches. A model that is opened in another format than its "
        "checkpoint's is converted once, into $XDG_CACHE_HOME/torch_mesh or ~/.cache/torch_mesh: one store per model, "
        "format and group size. A removed store is made again when it is needed. A prefix cache has the KV cache "
        "of prompts (serve --prefix-cache) for one model as it was opened; a server may go on while it is removed."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = _add(commands, "ls", "list the stores, the one that was used last first")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(run=_list)
    removing = _add(commands, "rm", "remove stores")
    removing.add_argument("names", nargs="+", metavar="NAME", help="name of a store, as ls prints it")
    removing.set_defaults(run=_remove)
    pruning = _add(
        commands, "prune", "remove stores that are damaged or were not used for long, and unfinished conversions"
    )
    pruning.add_argument("--days", type=positive, default=30, help="days without use (default: %(default)s)")
    pruning.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    pruning.set_defaults(run=_prune)


def _add(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    stores = cached_stores()
    if arguments.json:
        rows = [{"name": each.name, "bytes": each.bytes, "used": each.used, "about": each.about} for each in stores]
        print(json.dumps({"folder": str(cache_folder()), "stores": rows}))
        return 0
    name = Column("name", no_wrap=True)  # an argument of `cache rm`
    table = Table(
        name, "bytes", "days since used", "holds", title=Text(str(cache_folder()), "table.title"), title_justify="left"
    )
    for each in stores:
        table.add_row(each.name, format_bytes(each.bytes), f"{each.days:.0f}", each.about)
    console = Console()
    min_width = max((len(each.name) for each in stores), default=0) + _OTHER_COLUMNS
    console.print(table, markup=False, width=max(console.width, min_width), crop=False)
    print(f"{len(stores)} stores, {format_bytes(sum(each.bytes for each in stores))}")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    """Remove all of the named stores, or none."""
    stores = {each.name: each for each in cached_stores()}
    if unknown := [name for name in arguments.names if name not in stores]:
        close = difflib.get_close_matches(unknown[0], stores)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ValueError(
            f"{', '.join(unknown)}: there is no such store in {cache_folder()}{hint}; torch-mesh cache ls lists them"
        )
    return _remove_all([stores[name] for name in dict.fromkeys(arguments.names)])


def _prune(arguments: argparse.Namespace) -> int:
    old = [each for each in cached_stores() if each.leftover or each.days > arguments.days]
    return _remove_all(old, arguments.dry_run)


def _remove_all(stores: Iterable[CachedStore], dry_run: bool = False) -> int:
    freed, stayed = 0, 0
    for each in stores:
        try:
            if not dry_run:
                remove(each)
        except (MeshError, OSError) as error:  # such as one that is being written: go on with the others
            print(f"torch-mesh: {error}", file=sys.stderr)
            stayed += 1
            continue
        freed += each.bytes
        print(f"{'would remove' if dry_run else 'removed'} {each.name}: {format_bytes(each.bytes)}")
    print(f"{format_bytes(freed)} {'would be free' if dry_run else 'are free'}")
    return 1 if stayed else 0
