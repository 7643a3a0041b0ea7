"""Options and output of the commands that write a store."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal as format_bytes

from torch_mesh.cli.options import positive
from torch_mesh.errors import StoreError
from torch_mesh.formats import CALIBRATED_FORMATS, DEFAULT_GROUP_SIZE, GROUP_SIZES, in_words, short_name

if TYPE_CHECKING:
    from torch_mesh.store.writer import Written


def add_store_arguments(parser: argparse.ArgumentParser, model: str, calibrates: bool = False) -> None:
    """``model``: the input's name in the help; ``calibrates``: the command has --calibrate."""
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        help=f"weights that share one scale, for {in_words(CALIBRATED_FORMATS)} (default: {DEFAULT_GROUP_SIZE}, or "
        f"that of {model} in the same format)",
    )
    parser.add_argument(
        "--revision", help=f"revision of {model} on the hub: a branch, a tag or a commit (default: main)"
    )
    parser.add_argument(
        "--token", help=f"access token for {model} on the hub (default: $HF_TOKEN, or that of `hf auth login`)"
    )
    calibrating = "; with --calibrate one, on all threads" if calibrates else ""
    parser.add_argument(
        "--threads", type=positive, help=f"experts packed at a time (default: one per processor{calibrating})"
    )
    parser.add_argument("--force", action="store_true", help="replace another store at the destination")
    parser.set_defaults(interrupted="interrupted; the same command continues where it stopped")


@contextlib.contextmanager
def naming_force() -> Iterator[None]:
    """Within, an error about another store at the destination mentions --force."""
    from torch_mesh.store.folders import OtherStoreError

    try:
        yield
    except OtherStoreError as error:
        raise StoreError(f"{error}, or give --force to replace it") from error


def format_summary(written: Written, destination: str, what: str) -> str:
    """For example "out: now holds 2 x 4 experts, 1.2 MB as int4"; ``what`` names the experts."""
    manifest = written.store.manifest
    shape = manifest.shape
    size = manifest.record_bytes * shape.layers * shape.experts
    verb = "already holds" if written.existed else "now holds"
    held = f"{shape.layers} x {shape.experts} {what}, {format_bytes(size)} as {short_name(manifest.weights)}"
    return f"{destination}: {verb} {held}"
