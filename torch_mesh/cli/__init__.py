"""The command ``torch-mesh``. Each subcommand is a module of this package with ``add_arguments(parser)``, which sets
``run``. Only ``run`` imports torch and transformers, which takes seconds: help and the parser's errors need neither."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch_mesh
from torch_mesh.errors import MeshError
from torch_mesh.version import __version__

# Descriptions are here instead of in the modules, so that --help and --version import none of them.
COMMANDS = {
    "convert": "convert a checkpoint to a store, whose experts are read fastest",
    "merge": "make a store of a model with an adapter merged into it",
    "inspect": "show what a store or a checkpoint holds, and check every byte of a store",
    "plan": "predict what a model will need and reach here, and say what to change",
    "cache": "list, remove and prune the cached conversions",
    "serve": "serve a model through OpenAI's and Anthropic's APIs",
    "chat": "talk with a model in the terminal, as transformers chat does",
    "run": "answer a file of requests, many at once",
    "share": "keep a store's experts in memory for several processes",
    "bench": "measure what a model reaches here, beside the machine's limits and the plan",
    "routing": "warm starts, predictors and simulations from recorded routing",
    "report": "summarize the statistics that a model has written",
    "doctor": "explain what this machine offers and what to change",
}

_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130
# Commands that work without the extension, or import it themselves.
_UNCHECKED = ("cache", "doctor", "inspect")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    parsed = argparse.Namespace(debug="--debug" in given)
    try:
        parser = _parser(given)
        parser.parse_args(given, parsed)
        _check_empty(parsed, given)
        if parsed.command not in _UNCHECKED:
            _check_extension()
        return parsed.run(parsed)
    except KeyboardInterrupt:
        return _print_error(parsed, getattr(parsed, "interrupted", "interrupted"), _INTERRUPTED)
    except ValueError as error:
        return _print_error(parsed, str(error), _USAGE)
    except (MeshError, ImportError, MemoryError) as error:
        return _print_error(parsed, str(error), _FAILURE)
    except OSError as error:
        return _print_error(parsed, _os_error_message(error), _FAILURE)


class _Command(argparse.ArgumentParser):
    """Shows the subcommand's own usage for an unknown option, where argparse would show that of all commands.

    Options cannot be abbreviated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            options = [name for name in self._option_string_actions if option.lstrip("-") in name]
            close = options or difflib.get_close_matches(option, self._option_string_actions, 1, 0.8)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            if not option.startswith("-") and any(each.nargs == "*" for each in self._get_positional_actions()):
                hint = " (give it before the options)"
            if option == "--debug":
                hint = " (give it before the command)"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(_FAILURE, "torch-mesh: completion needs shtab: pip install torch_mesh[completion]\n")
        print(shtab.complete(_parser(COMMANDS), values))
        parser.exit()


def _parser(given: Collection[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with options of the given one only, or of all for ``COMMANDS``."""
    parser = argparse.ArgumentParser(
        prog="torch-mesh",
        description="Mixture-of-Experts models with their experts on NVMe.",
        epilog="Status: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C. Some commands also use 1 "
        "for a result, as their help says.",
    )
    parser.add_argument("--version", action="version", version=f"torch-mesh {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_PrintCompletion,
        help="print a completion script for this shell, and exit",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=_Command
    )
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = subparsers.add_parser(name, help=about)
        if name == chosen or given is COMMANDS:
            importlib.import_module(f"{__name__}.{name}").add_arguments(command)
    return parser


def _check_empty(parsed: argparse.Namespace, given: Sequence[str]) -> None:
    """Raise ValueError for an argument without text. As a path it would be the current folder."""
    for name, value in vars(parsed).items():
        if "" in given and (value in ("", Path()) or (isinstance(value, list) and "" in value)):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option if option in given else name} is empty: give a value, or leave it out")


def _check_extension() -> None:
    """Raise ImportError, with advice, if the extension does not load."""
    import torch  # noqa: F401  which loads it, or finds why it cannot be

    if torch_mesh._unusable is not None:
        raise ImportError(str(torch_mesh._unusable)) from torch_mesh._unusable


def _os_error_message(error: OSError) -> str:
    """The message of an OSError, its file first, as in torch_mesh's own errors."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    names = (os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{', '.join(names)}: {error.strerror[0].lower()}{error.strerror[1:]}"


def _print_error(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    print(f"torch-mesh: {' '.join(message.split())}", file=sys.stderr)
    return code
