"""``torch-mesh merge``: a base and an adapter become a store."""

from __future__ import annotations

import argparse

from rich.filesize import decimal as format_bytes

from torch_mesh.cli.options import positive
from torch_mesh.store.manifest import GROUP_SIZES, WEIGHTS
from torch_mesh.store.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a store of a base model with a PEFT adapter merged into it: adapters on experts, on other layers, and modules_to_save. "
        "Takes the memory of a few experts. Interrupted at any moment, the same command continues."
    )
    parser.add_argument(
        "base",
        help="a checkpoint folder, a store, a GGUF file, or a model id on the Hugging Face hub: what was trained on, or better what that was "
        "converted from",
    )
    parser.add_argument("adapter", help="a folder that PEFT's save_pretrained wrote")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument(
        "--weights",
        choices=("auto", *WEIGHTS),
        default="auto",
        help="format of the experts' weights; auto: that of the base (default: %(default)s)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        help="weights that share one scale, for --weights int8, int4 and lut4 (default: %(default)s)",
    )
    parser.add_argument("--revision", help="of a base on the hub: a branch, a tag or a commit (default: main)")
    parser.add_argument(
        "--token", help="for a base on the hub that asks for one (default: $HF_TOKEN, or that of `hf auth login`)"
    )
    parser.add_argument("--threads", type=positive, help="experts packed at a time (default: one per processor)")
    parser.add_argument("--force", action="store_true", help="replace another store at the destination")
    parser.set_defaults(run=run, interrupted="interrupted; the same command continues where it stopped")


def run(arguments: argparse.Namespace) -> int:
    """Merges; returns the exit code."""
    from torch_mesh.adapters.merging import merge  # which needs PEFT

    with progress_bar("merged store") as progress:
        written = merge(
            arguments.base,
            arguments.adapter,
            arguments.destination,
            weights=arguments.weights,
            group_size=arguments.group_size,
            revision=arguments.revision,
            token=arguments.token,
            force=arguments.force,
            workers=arguments.threads,
            progress=progress,
        )
    manifest = written.store.manifest
    shape = manifest.shape
    size = manifest.record_bytes * shape.layers * shape.experts
    what = f"{shape.layers} x {shape.experts} experts with the adapter, {format_bytes(size)} as {manifest.weights}"
    print(f"{arguments.destination}: {'already holds' if written.existed else 'now holds'} {what}")
    return 0
