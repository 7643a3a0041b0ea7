"""``weights="auto:8GiB"``: of a checkpoint that is about to be loaded, the format that ``torch-mesh plan`` would name."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal as format_bytes

from ..config import MeshConfig
from ..values import auto_weights
from .formats import MAX_ERROR, why_no_choice
from .measuring import measure_formats, measure_speeds
from .plan import plan
from .sizes import find_sizes


def choose_format(folder: Path, config: MeshConfig) -> tuple[MeshConfig, str]:
    """``config`` with the format, its group size and ``resident``, and why that format was taken.

    Measures the disk and each format's arithmetic, about six seconds. Raises ValueError where there is nothing to compare, where no format is
    within the limit of error, and where one token's experts fit in none.
    """
    asked = f"weights={config.weights!r}"
    memory, limit = auto_weights("weights", config.weights)
    max_error = MAX_ERROR if limit is None else limit
    if config.resident != "auto":
        raise ValueError(f"{asked} says what memory the experts have, and resident={config.resident!r} does: give one.")
    if config.store is not None:
        raise ValueError(f"{asked} may take another format each time, and store= holds one: leave store out.")
    sized = config.replace(weights="auto", resident=f"{memory}B")
    sizes = find_sizes(folder, sized)
    if reason := why_no_choice(folder, sizes, sized, card=config.gpu.experts != 0):
        raise ValueError(f"{asked} has nothing to compare: {reason}. Name a format, or leave weights at 'auto'.")
    speeds = measure_speeds(sizes, sized)
    if speeds is None:
        raise ValueError(f"{asked}: {folder} has too few experts to measure the disk by. Name a format.")
    planned = plan(
        folder, sized, speeds=speeds, format_speeds=measure_formats(sizes, sized), max_error=max_error
    ).format_choices
    if not planned:
        raise ValueError(
            f"{asked}: one token's experts fit in no format, or the machine has less memory left. torch-mesh plan {folder} says what they need."
        )
    choice = next((choice for choice in planned if choice.chosen), None)
    if choice is None:
        least = min(planned, key=lambda each: each.weight_error)
        raise ValueError(
            f"{asked}: no format whose weights are off by at most {max_error:.1%} fits; {least.weights} does, with {least.weight_error:.1%}. "
            "Allow more, as in 'auto:8GiB:15%', or give more memory."
        )
    why = (
        f"fastest of {len(planned)} formats in {format_bytes(memory)}, {choice.tokens_per_second:.2g} tokens/s expected, weights off by "
        f"{choice.weight_error:.1%} (at most {max_error:.1%})"
    )
    if sizes.own_codes is not None and choice.weights == sizes.own_codes[0]:
        return sized, why  # its codes as they are, in their own groups
    return sized.replace(weights=choice.weights, group_size=choice.group_size or config.group_size), why
