"""``torch-mesh verify``: reads all of a store and names what is damaged."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from torch_mesh.store.manifest import open_store
from torch_mesh.store.progress import progress_bar
from torch_mesh.store.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads all of a store and names every record and file that is not as it was written. "
        "Exits with 1 if there is any."
    )
    parser.add_argument("store", help="a folder that torch-mesh convert wrote")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what is damaged; returns the exit code."""
    store = open_store(arguments.store)
    with progress_bar("verifying", show=not arguments.json) as progress:
        damages = list(verify(store, progress))
    shape = store.manifest.shape
    if arguments.json:
        print(json.dumps({"records": shape.layers * shape.experts, "damages": [asdict(damage) for damage in damages]}))
    else:
        for damage in damages:
            print(damage)
        verdict = f"{len(damages)} damaged" if damages else "all as they were written"
        others = len(store.manifest.other_files)
        print(f"{arguments.store}: {shape.layers * shape.experts} records and {others} other files: {verdict}")
    return 1 if damages else 0
