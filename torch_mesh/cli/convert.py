"""``torch-mesh convert``: convert a checkpoint to a store."""

from __future__ import annotations

import argparse

from torch_mesh.calibration import CALIBRATE_TOKENS
from torch_mesh.cli.options import positive
from torch_mesh.cli.stores import add_store_arguments, format_summary, naming_force
from torch_mesh.formats import CALIBRATED_FORMATS, PASSTHROUGH_FORMATS, ROUNDED_FORMATS, TABLE_FORMATS, in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Converts a Hugging Face checkpoint to a store: a complete checkpoint whose experts are packed, "
        "quantized and checksummed, one contiguous read each. Repeat an interrupted command to continue."
    )
    parser.add_argument("source", help="a checkpoint folder, a GGUF file, or a model id on the Hugging Face hub")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument(
        "--weights",
        choices=("auto", *ROUNDED_FORMATS, *PASSTHROUGH_FORMATS),
        required=True,
        metavar="FORMAT",
        help=f"format of the experts' weights: {in_words(ROUNDED_FORMATS, 'or')}; the one that holds the codes of this "
        "quantized checkpoint (docs/formats.md); or auto: that one, else the nearest, and for bf16 weights bf12, or "
        "bf16 where bf12 has no room for them",
    )
    parser.add_argument(
        "--calibrate",
        metavar="TEXT",
        help=f"calibrate {in_words(CALIBRATED_FORMATS, 'or')} on this text, of the kind that the model will read: "
        'plain text, or .jsonl with a "text" in each line. The model is run on it first',
    )
    parser.add_argument(
        "--calibrate-tokens",
        type=positive,
        metavar="N",
        help=f"maximum number of its tokens to run (default: {CALIBRATE_TOKENS})",
    )
    parser.add_argument(
        "--keep-original",
        action="store_true",
        help="leave the weight files of a model of the hub in its cache (default: each is removed when it is used up)",
    )
    parser.add_argument(
        "--tables",
        choices=("exact", *TABLE_FORMATS),
        default="exact",
        help=f"format of the rows of embedding tables that stay in files: as they are, or rounded to "
        f"{in_words(TABLE_FORMATS, 'or')} (default: %(default)s)",
    )
    add_store_arguments(parser, "a model", calibrates=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.store.convert import convert
    from torch_mesh.store.progress import progress_bar

    if arguments.calibrate is None and arguments.calibrate_tokens is not None:
        raise ValueError("--calibrate-tokens needs a text: give --calibrate TEXT with it")
    calibrate = None
    if arguments.calibrate is not None:
        from torch_mesh.calibration.packing import on_text

        calibrate = on_text(arguments.calibrate, arguments.calibrate_tokens or CALIBRATE_TOKENS)
    with naming_force(), progress_bar(f"{arguments.weights} store") as progress:
        written = convert(
            arguments.source,
            arguments.destination,
            arguments.weights,
            arguments.group_size,
            revision=arguments.revision,
            token=arguments.token,
            keep_original=arguments.keep_original,
            calibrate=calibrate,
            tables=arguments.tables,
            force=arguments.force,
            workers=arguments.threads,
            progress=progress,
        )
    print(format_summary(written, arguments.destination, "experts"))
    return 0
