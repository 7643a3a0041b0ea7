"""``torch-mesh convert``: a checkpoint becomes a store."""

from __future__ import annotations

import argparse
import os

from rich.filesize import decimal as format_bytes

from torch_mesh.cli.options import positive
from torch_mesh.store.convert import convert
from torch_mesh.store.hub import local_folder
from torch_mesh.store.manifest import GROUP_SIZES, OF_CODES, WEIGHTS
from torch_mesh.store.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Converts a Hugging Face checkpoint to a store: a complete checkpoint whose experts are packed, quantised "
        "and checksummed, one contiguous read each. Interrupted at any moment, the same command continues."
    )
    parser.add_argument("source", help="a checkpoint folder, a GGUF file, or a model id on the Hugging Face hub")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument(
        "--weights",
        choices=("auto", *WEIGHTS, *OF_CODES),
        required=True,
        help="format of the experts' weights; auto: the one that holds the checkpoint's as they are, or is nearest to them",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        help="weights that share one scale, for int8, int4 and lut4 (default: %(default)s)",
    )
    parser.add_argument("--revision", help="of the model on the hub: a branch, a tag or a commit (default: main)")
    parser.add_argument(
        "--token", help="for a model on the hub that asks for one (default: $HF_TOKEN, or that of `hf auth login`)"
    )
    parser.add_argument("--threads", type=positive, help="experts packed at a time (default: one per processor)")
    parser.add_argument("--force", action="store_true", help="replace another store at the destination")
    parser.set_defaults(run=run, interrupted="interrupted; the same command continues where it stopped")


def run(arguments: argparse.Namespace) -> int:
    """Converts; returns the exit code."""
    folder = local_folder(arguments.source, revision=arguments.revision, token=arguments.token)
    with progress_bar(f"{arguments.weights} store") as progress:
        written = convert(
            folder,
            arguments.destination,
            arguments.weights,
            arguments.group_size,
            name=None if os.path.exists(arguments.source) else arguments.source,
            force=arguments.force,
            workers=arguments.threads,
            progress=progress,
        )
    shape = written.store.manifest.shape
    size = written.store.manifest.record_bytes * shape.layers * shape.experts
    what = f"{shape.layers} x {shape.experts} experts, {format_bytes(size)} as {written.store.manifest.weights}"
    print(f"{arguments.destination}: {'already holds' if written.existed else 'now holds'} {what}")
    return 0
