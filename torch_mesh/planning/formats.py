"""Compare the formats of weights for the same memory, and choose one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_mesh.config import MeshConfig
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.formats import BF16_ERROR, DENSE_FORMATS, FORMATS, ROUNDED_FORMATS
from torch_mesh.modules.dense import CODES
from torch_mesh.planning.fitting import fitting_slots
from torch_mesh.planning.hit_rates import HitRate, known_or_expected
from torch_mesh.planning.sizes import LocatedModel, Sizes
from torch_mesh.planning.token_time import Speeds, token_seconds
from torch_mesh.store.convert import checked_group_size
from torch_mesh.store.dense_codes import stored_codes
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.manifest import Shape, is_store

# The default of max_error: admits four bits in any groups, but not three.
MAX_ERROR = 0.10

# Formats at this fraction of the fastest's speed count as equally fast: measurements vary by as much.
_AS_FAST = 0.95


@dataclass(frozen=True)
class DenseChoice:
    """The rest of the model in a format of fewer bits."""

    dense: str
    weight_error: float  # relative, of Gaussian weights
    bytes: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class FormatChoice:
    """The experts in another format, in the same memory."""

    weights: str
    group_size: int | None
    expert_bytes: int
    all_experts_bytes: int
    slots: int
    resident_fraction: float
    hit_rate: HitRate
    bytes_per_token: float  # read, without unused prefetches
    tokens_per_second: float
    weight_error: float  # relative, of Gaussian weights; 0 for bf16 and bf12
    chosen: bool  # the smallest error of those within ``max_error`` and 5 % of the fastest of these


def dense_choices(
    located: LocatedModel,
    config: MeshConfig,
    rate: HitRate | None,
    speeds: Speeds | None,
    *,
    vocabularies: bool = False,
) -> Iterator[DenseChoice]:
    """``dense`` in fewer bits, read at the same speed, with the same experts resident. ``vocabularies``: as for
    ``LocatedModel.sizes``."""
    if config.dense == CODES or (config.dense in DENSE_FORMATS and not FORMATS[config.dense].holds_bf16):
        return
    folder = located.folder
    has_codes = bool(stored_codes(folder)) if is_store(folder) else is_gguf(folder)
    for dense in (*((CODES,) if has_codes else ()), "int8", "int4"):
        try:
            sizes = located.sizes(config.replace(dense=dense), vocabularies=vocabularies)
        except UnsupportedModelError:  # no linear layer of the rest is large enough, or in such codes
            continue
        if sizes.dense_bytes is None:
            return
        seconds = None
        if rate is not None and speeds is not None:
            seconds = token_seconds(sizes, speeds, rate.expected, config.prefetch != "off")
        error = 0.0 if dense == CODES else FORMATS[dense].errors[config.group_size]
        yield DenseChoice(dense, error, sizes.dense_bytes, None if seconds is None else 1 / seconds)


def format_choices(
    sizes: Sizes,
    config: MeshConfig,
    available: int | None,
    speeds: Speeds | None,
    format_speeds: Mapping[str, float],
    overlap: float | None,
) -> Iterator[FormatChoice]:
    """The compared formats in which the experts of one token fit in ``available`` bytes."""
    shape = sizes.shape
    if speeds is None or sizes.dense_bytes_per_token is None:
        return
    for weights, (group, error) in compared_formats(sizes, config).items():
        if weights not in format_speeds:
            continue
        record = shape.record_bytes(weights, group)
        of_format = dataclasses.replace(
            sizes,
            weights=weights,
            group_size=group or None,
            expert_bytes=record,
            all_experts_bytes=record * shape.layers * shape.experts,
            staging_bytes=sizes.raw_staging_bytes if (weights, group) == sizes.own_records else 0,
        )
        slots, _, _ = fitting_slots(of_format, config, available, on_gpu=0, gpu_pool=0)
        if slots is None:
            continue
        fraction = slots / (shape.layers * shape.experts)
        rate = known_or_expected(shape, fraction, None, overlap)
        seconds = token_seconds(
            of_format,
            dataclasses.replace(speeds, experts=format_speeds[weights]),
            rate.expected,
            config.prefetch != "off",
        )
        yield FormatChoice(
            weights=weights,
            group_size=of_format.group_size,
            expert_bytes=record,
            all_experts_bytes=of_format.all_experts_bytes,
            slots=slots,
            resident_fraction=fraction,
            hit_rate=rate,
            bytes_per_token=(1 - rate.expected) * shape.layers * shape.top_k * record,
            tokens_per_second=1 / seconds,
            weight_error=error,
            chosen=False,
        )


def comparison_unsupported_reason(
    folder: Path,
    sizes: Sizes,
    config: MeshConfig,
    *,
    hit_rate: float | None = None,
    card: bool = False,
    ranks: int = 1,
) -> str:
    """Why formats are not compared; empty if they are."""
    if is_store(folder):
        return f"the experts of {folder} are {sizes.weights} already: give the checkpoint that it was converted from"
    if isinstance(config.resident, float):
        return "resident is a fraction of the experts, whose bytes differ by format: give it as a size"
    if hit_rate is not None:
        return "a known hit rate holds for one format"
    if card or ranks > 1:
        return "experts on a GPU or divided among ranks are not compared"
    if config.lossy.fallback != "none":
        return "lossy.fallback has two formats"
    return ""


def compared_formats(sizes: Sizes, config: MeshConfig) -> dict[str, tuple[int, float]]:
    """Group size and error of weights of each compared format. The format that holds a quantized checkpoint's codes
    comes first. Errors are relative to the checkpoint's values."""
    own = sizes.own_codes
    formats = {} if own is None else {own[0]: (own[1], sizes.own_error)}
    for weights in ROUNDED_FORMATS:
        group = compared_group(weights, sizes.shape, config)
        rounded = FORMATS[weights].holds_bf16 and not sizes.exact_in_bf16
        formats.setdefault(weights, (group, BF16_ERROR if rounded else FORMATS[weights].errors[group]))
    return formats


def compared_group(weights: str, shape: Shape, config: MeshConfig) -> int:
    """The group size in which a format is compared: the config's, 0 for bf16 and bf12. For trellises, which gain
    little from smaller groups, 128, or 64 if that pads the shape less."""
    if FORMATS[weights].trellis:
        return min((128, 64), key=lambda group: shape.record_bytes(weights, group))
    return checked_group_size(weights, config.group_size)


def with_chosen(choices: tuple[FormatChoice, ...], max_error: float) -> tuple[FormatChoice, ...]:
    """Mark one choice with an error of at most ``max_error`` as ``chosen``, if there is any."""
    allowed = [choice for choice in choices if choice.weight_error <= max_error]
    fastest = max((choice.tokens_per_second for choice in allowed), default=0.0)
    as_fast = [choice for choice in allowed if choice.tokens_per_second >= _AS_FAST * fastest]
    best = min(as_fast, key=lambda choice: (choice.weight_error, -choice.tokens_per_second), default=None)
    return tuple(dataclasses.replace(choice, chosen=choice is best) for choice in choices)
