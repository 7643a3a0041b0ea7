"""``max_error``: choose the format of a checkpoint that is about to be loaded, as ``torch-mesh plan`` would."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal as format_bytes

from torch_mesh.config import MeshConfig
from torch_mesh.planning.formats import comparison_unsupported_reason
from torch_mesh.planning.machine import measure_formats, measure_speeds
from torch_mesh.planning.plan import plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.validators import parse_size


def choose_format(folder: Path, config: MeshConfig) -> tuple[MeshConfig, str]:
    """Return ``config`` with the chosen format and group size, and the reason.

    Measures the disk and each format's arithmetic, for about six seconds. Raises ValueError if there is no choice, if
    no format is within ``max_error``, and if one token's experts fit in no format.
    """
    setting = f"max_error={config.max_error}"
    if config.weights != "auto":
        raise ValueError(
            f"{setting} chooses the format, but weights={config.weights!r} names one: leave one of them out."
        )
    if config.resident == "auto":
        raise ValueError(
            f"{setting} chooses the format for an amount of memory: give resident= as a size, such as '8GiB'."
        )
    if config.store is not None:
        raise ValueError(f"{setting} may choose another format each time, but store= holds one: leave store out.")
    sizes = find_sizes(folder, config)
    if reason := comparison_unsupported_reason(folder, sizes, config, card=config.gpu.experts != 0):
        raise ValueError(f"{setting} has no choice: {reason}. Leave max_error out.")
    # Mirrors may have copies of a conversion in the cache, whose files are not known before the choice.
    speeds = measure_speeds(sizes, config.replace(mirrors=()))
    if speeds is None:
        raise ValueError(f"{setting}: {folder} has too few experts to measure the disk by. Name a format.")
    planned = plan(folder, config, speeds=speeds, format_speeds=measure_formats(sizes, config)).format_choices
    if not planned:
        raise ValueError(
            f"{setting}: the experts of one token fit in no format, or the machine has less memory left. Give more "
            f"memory: torch-mesh plan {folder} says how much."
        )
    choice = next((choice for choice in planned if choice.chosen), None)
    if choice is None:
        best = min(planned, key=lambda each: each.weight_error)
        raise ValueError(
            f"{setting}: no format with an error of at most {config.max_error:.1%} fits. {best.weights} fits, with an "
            f"error of {best.weight_error:.1%}: allow that, or give more memory."
        )
    why = (
        f"fastest of {len(planned)} formats in {format_bytes(parse_size(str(config.resident), 'resident'))}, "
        f"{choice.tokens_per_second:.2g} tokens/s expected, error of weights {choice.weight_error:.1%} "
        f"(at most {config.max_error:.1%})"
    )
    chosen = config.replace(max_error=None)
    if sizes.own_codes is not None and choice.weights == sizes.own_codes[0]:
        return chosen, why  # the checkpoint's own codes and groups
    return chosen.replace(weights=choice.weights, group_size=choice.group_size or config.group_size), why
