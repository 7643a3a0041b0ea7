"""Options of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch_mesh.config_fields import FIELDS, without_links
from torch_mesh.validators import parse_size, shown

if TYPE_CHECKING:
    from torch_mesh.config import MeshConfig

MODEL = "a store or checkpoint folder, a GGUF file, or a model id on the Hugging Face hub"


# The fields for commands that open a model on the CPU.
CPU_FIELDS = tuple(name for name, field in FIELDS.items() if field.group != "gpu")


def add_model_argument(parser: argparse.ArgumentParser, name: str = "model") -> None:
    parser.add_argument(name, help=MODEL)


def add_config_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = FIELDS) -> None:
    """Add an option for each field of MeshConfig, or for those in ``names``: ``--group-size``, ``--gpu-experts``."""
    group = parser.add_argument_group("how the model is opened", "fields of MeshConfig; see docs/config.md")
    for name in names:
        field = FIELDS[name]
        about = without_links(field.sentence).split(". ")[0].rstrip(".")
        text = f"{about} ({field.values.words}; default: {shown(field.default)})".replace("`", "")
        group.add_argument(_option(name), metavar="VALUE", help=text.replace("%", "%%"))


def given_config(arguments: argparse.Namespace) -> MeshConfig:
    """The given fields. Raises ValueError for an invalid value."""
    from torch_mesh.config import MeshConfig

    given = {name: value for name in FIELDS if (value := getattr(arguments, name, None)) is not None}
    return MeshConfig.from_dict({name: FIELDS[name].values.check(_option(name), given[name]) for name in given})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def below(limit: int) -> Callable[[str], int]:
    """The ``type`` of an option for whole numbers from 0 on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) < limit):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {limit - 1}")
        return int(text)

    return parse


def size(text: str) -> int:
    try:
        return parse_size(text, "the size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_or_zero(text: str) -> int:
    """The ``type`` of an option such as ``--keep-keys``, where 0 means none."""
    return 0 if text.strip() == "0" else size(text)
