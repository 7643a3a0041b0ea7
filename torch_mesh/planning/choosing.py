"""``max_error``: of a checkpoint that is about to be loaded, the format that ``torch-mesh plan`` would name."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal as format_bytes

from ..config import MeshConfig
from ..validators import parse_size
from .formats import why_no_choice
from .machine import measure_formats, measure_speeds
from .plan import plan
from .sizes import find_sizes


def choose_format(folder: Path, config: MeshConfig) -> tuple[MeshConfig, str]:
    """``config`` with the format and its group size, and why that format was taken.

    Measures the disk and each format's arithmetic, about six seconds. Raises ValueError where there is nothing to
    compare, where no format is within the limit of error, and where one token's experts fit in none.
    """
    asked = f"max_error={config.max_error}"
    if config.weights != "auto":
        raise ValueError(
            f"{asked} chooses the format, and weights={config.weights!r} names one: leave one of them out."
        )
    if config.resident == "auto":
        raise ValueError(
            f"{asked} chooses the format for an amount of memory: give resident= as a size, such as '8GiB'."
        )
    if config.store is not None:
        raise ValueError(f"{asked} may take another format each time, and store= holds one: leave store out.")
    sizes = find_sizes(folder, config)
    if reason := why_no_choice(folder, sizes, config, card=config.gpu.experts != 0):
        raise ValueError(f"{asked} has nothing to compare: {reason}. Leave max_error out.")
    speeds = measure_speeds(sizes, config)
    if speeds is None:
        raise ValueError(f"{asked}: {folder} has too few experts to measure the disk by. Name a format.")
    planned = plan(folder, config, speeds=speeds, format_speeds=measure_formats(sizes, config)).format_choices
    if not planned:
        raise ValueError(
            f"{asked}: one token's experts fit in no format, or the machine has less memory left. torch-mesh plan "
            f"{folder} says what they need."
        )
    choice = next((choice for choice in planned if choice.chosen), None)
    if choice is None:
        least = min(planned, key=lambda each: each.weight_error)
        raise ValueError(
            f"{asked}: no format whose weights are off by at most {config.max_error:.1%} fits; {least.weights} does, "
            f"with {least.weight_error:.1%}. Allow more, or give more memory."
        )
    why = (
        f"fastest of {len(planned)} formats in {format_bytes(parse_size(str(config.resident), 'resident'))}, "
        f"{choice.tokens_per_second:.2g} tokens/s expected, weights off by {choice.weight_error:.1%} "
        f"(at most {config.max_error:.1%})"
    )
    chosen = config.replace(max_error=None)
    if sizes.own_codes is not None and choice.weights == sizes.own_codes[0]:
        return chosen, why  # its codes as they are, in their own groups
    return chosen.replace(weights=choice.weights, group_size=choice.group_size or config.group_size), why
