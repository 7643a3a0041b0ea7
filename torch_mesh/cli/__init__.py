"""The command ``torch-mesh``. Each command is a module of this package with ``add_parser(subparsers)``, which sets ``run``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

import torch_mesh
from torch_mesh.cli import bench, convert, doctor, fit, inspect, plan, profile, report, simulate, verify
from torch_mesh.errors import MeshError

_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except KeyboardInterrupt:
        return _complain(parsed, getattr(parsed, "interrupted", "interrupted"), _INTERRUPTED)
    except ValueError as error:
        return _complain(parsed, str(error), _USAGE)
    except (MeshError, OSError, ImportError, MemoryError) as error:
        return _complain(parsed, str(error), _FAILURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-mesh", description="Mixture-of-Experts models with their experts on NVMe."
    )
    parser.add_argument("--version", action="version", version=f"torch-mesh {torch_mesh.__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (convert, verify, inspect, plan, bench, fit, profile, simulate, report, doctor):
        command.add_parser(subparsers)
    return parser


def _complain(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    print(f"torch-mesh: {' '.join(message.split())}", file=sys.stderr)
    return code
