"""The command ``torch-mesh``. Each command is a module of this package with ``add_arguments(parser)``, which sets ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Iterable, Sequence

from torch_mesh.errors import MeshError
from torch_mesh.version import __version__

# What each does stands here and not in its module: whoever asks for help, or for the version, waits for no import.
COMMANDS = {
    "convert": "convert a checkpoint to a store that experts are read from fastest",
    "verify": "read all of a store and name every bad record",
    "inspect": "show what a store or a checkpoint holds",
    "plan": "say what a model will need and reach here, and what to change",
    "serve": "answer requests as OpenAI's API does, through transformers serve",
    "chat": "talk with a model in the terminal, through transformers chat",
    "bench": "measure what a model reaches here, beside the machine's limits and the plan",
    "fit": "learn from text which experts a model will want next",
    "profile": "make a profile for a warm start of recorded routing",
    "simulate": "replay recorded routing against policies and pool sizes",
    "report": "summarise the statistics that a model has written",
    "doctor": "explain what this machine offers and what to change",
}

_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    parsed = _parser(given).parse_args(given)
    try:
        return parsed.run(parsed)
    except KeyboardInterrupt:
        return _complain(parsed, getattr(parsed, "interrupted", "interrupted"), _INTERRUPTED)
    except ValueError as error:
        return _complain(parsed, str(error), _USAGE)
    except (MeshError, OSError, ImportError, MemoryError) as error:
        return _complain(parsed, str(error), _FAILURE)


def _parser(given: Iterable[str]) -> argparse.ArgumentParser:
    """Of all commands, with the options of the one that is given."""
    parser = argparse.ArgumentParser(
        prog="torch-mesh", description="Mixture-of-Experts models with their experts on NVMe."
    )
    parser.add_argument("--version", action="version", version=f"torch-mesh {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = subparsers.add_parser(name, help=about)
        if name == chosen:
            importlib.import_module(f"torch_mesh.cli.{name}").add_arguments(command)
    return parser


def _complain(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    print(f"torch-mesh: {' '.join(message.split())}", file=sys.stderr)
    return code
