"""``torch-mesh merge``: merge an adapter into a base, as a new store."""

from __future__ import annotations

import argparse

from torch_mesh.cli.stores import add_store_arguments, format_summary, naming_force
from torch_mesh.formats import ROUNDED_FORMATS, in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a store of a base model with a PEFT adapter merged into it: adapters on experts, on other layers, and "
        "modules_to_save. Takes the memory of a few experts. Repeat an interrupted command to continue."
    )
    parser.add_argument(
        "base",
        help="a checkpoint folder, a store, a GGUF file, or a model id on the Hugging Face hub: the base of the "
        "training, or better the checkpoint that it was converted from",
    )
    parser.add_argument("adapter", help="a folder that PEFT's save_pretrained wrote")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument(
        "--weights",
        choices=("auto", *ROUNDED_FORMATS),
        default="auto",
        metavar="FORMAT",
        help=f"format of the experts' weights: {in_words(ROUNDED_FORMATS, 'or')}; or auto: that of the base (default: "
        "%(default)s)",
    )
    add_store_arguments(parser, "a base")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.adapters.merging import merge
    from torch_mesh.store.progress import progress_bar

    with naming_force(), progress_bar("merged store") as progress:
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
    print(format_summary(written, arguments.destination, "experts with the adapter"))
    return 0
