"""``torch-mesh routing``: commands on recorded routing. Each is a module of this package with
``add_arguments(parser)``."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "profile": "count what a trace used, for a warm start",
    "fit": "fit matrices on text that predict a model's next experts",
    "simulate": "replay traces against policies and pool sizes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Uses recorded routing: the experts that each token chose. torch_mesh.record_trace writes a trace."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        importlib.import_module(f"{__name__}.{name}").add_arguments(commands.add_parser(name, help=about))
