"""Options that several commands have."""

from __future__ import annotations

import argparse

from torch_mesh.config import FIELDS, MeshConfig, parse_size


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each field of MeshConfig, ``--group-size`` for ``group_size``."""
    group = parser.add_argument_group("how the model is opened", "fields of MeshConfig, with its defaults")
    for name in FIELDS:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE")


def given_config(arguments: argparse.Namespace) -> MeshConfig:
    """The fields that were given; ValueError for a value that is not allowed."""
    given = {name: getattr(arguments, name) for name in FIELDS}
    return MeshConfig(**{name: value for name, value in given.items() if value is not None})


def positive(text: str) -> int:
    """The ``type`` of an option that counts something."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def size(text: str) -> int:
    """The ``type`` of an option such as ``--memory 8GiB``."""
    try:
        return parse_size(int(text) if text.isdigit() else text, "the size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
