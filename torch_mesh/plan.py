"""What a model will need and reach on a machine, before it is loaded.

Sizes come from headers, config and manifest, through the code that loading itself uses. Speeds are measured for a moment or
given. What a model's own routing will do cannot be known beforehand: see ``expected_hit_rate`` and ``simulated_hit_rate``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from . import _C
from .config import MeshConfig
from .dense import DENSE_ERROR, dense_saving, kept_in_fp32, packs
from .fallback import check_fallback_config, split_slots
from .families import ExpertsLayer, common_activation, describe_left_alone, find_experts, layers_left_alone
from .gpu.choosing import check_gpu_weights, format_on_gpu
from .gpu.placement import check_beside_gpu
from .gpu.placing import GPU_POOL_SLOTS
from .gpu.planning import BY_PROJECTION, SEVERAL_ACTIVATIONS, GpuPlan, plan_config, plan_on_cpu
from .memory import auto_budget, available_bytes, resident_slots
from .other_format import formats_of_fewer_bits
from .store.checkpoint import (
    TORCH_DTYPES,
    CheckpointExperts,
    checkpoint_files,
    find_checkpoint_experts,
    meta_model,
    read_config,
    shape_of,
)
from .store.convert import checked_group_size, describe_nearest, weights_of_checkpoint
from .store.gguf import is_gguf
from .store.manifest import TRELLISES, Shape, has_chosen_groups, is_store, open_store
from .synthetic import synthetic_trace

Status = Literal["ok", "below recommended", "too small", "nothing to do", "unknown"]

# Hits per access with a share of all experts resident, policy "auto", no prefetch: docs/decisions/0013. The expectation is that
# of DeepSeek-V2-Lite on natural text, the less local of the two models; mesh-tiny is the more local one.
_SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
_EXPECTED_HITS = (0.0, 0.312, 0.535, 0.761, 1.0)
_LOCAL_HITS = (0.0, 0.359, 0.684, 0.911, 1.0)

# What simulated_hit_rate replays: prompts long enough for what a prompt repeats to show. Layers are alike, so a few stand for all.
_SIMULATED_LAYERS = 6
_SIMULATED_PROMPTS = 4
_SIMULATED_TOKENS = 256

# Of the time that reading takes, what is waited for with lookahead; and what is read, over no prefetch: docs/decisions/0018.
_PREFETCH_WAITING = 0.6
_PREFETCH_READS = 1.1

# Relative root mean square of what a format leaves of Gaussian weights, by group size: benchmarks/weight_error.py, as docs/formats.md
# has it. bf16 is that of a bf16 checkpoint; see ``_ROUNDED_TO_BF16`` for others.
WEIGHT_ERROR: dict[str, dict[int, float]] = {
    "bf16": {0: 0.0},
    "int8": {32: 0.0050, 64: 0.0057, 128: 0.0063},
    "int4": {32: 0.081, 64: 0.090, 128: 0.097},
    "lut4": {32: 0.069, 64: 0.078, 128: 0.085},
    "tcq3": {32: 0.138, 64: 0.141, 128: 0.142},
    "tcq2": {32: 0.267, 64: 0.269, 128: 0.271},
    "tcq2+tcq3": {32: 0.232, 64: 0.234, 128: 0.236},  # of a gated expert
}

# What bf16 leaves of Gaussian weights in fp16 or fp32.
_ROUNDED_TO_BF16 = 0.0017

# What a choice of formats may leave where nobody says: four bits in any groups, and not three.
MAX_ERROR = 0.10

# What a user who is short of memory is told of: of each number of bits one.
_ADVISED = ("int8", "int4", "tcq3", "tcq2")

# Of the fastest's speed: measuring a format's arithmetic varies by as much, and error is not worth so little.
_AS_FAST = 0.95


@dataclass(frozen=True)
class HitRate:
    """Hits per expert asked for. ``low`` and ``high`` are no bounds but what random and very local routing would give."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Speeds:
    """Bytes per second, and seconds. ``measured`` names those that were measured on this machine and not given."""

    disk: float  # reads of one record's size, several at a time
    experts: float  # packed weights of experts, computed for one token
    dense: float  # all other weights, likewise
    layer_seconds: float  # what each layer takes besides, eagerly: attention, norms, router, Python
    measured: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint or store takes. Bytes."""

    shape: Shape
    weights: str
    group_size: int | None
    expert_bytes: int  # one record in the pool
    all_experts_bytes: int
    dense_bytes: (
        int | None
    )  # all other weights in memory, after ``dense=`` has packed them; None: no config.json says what
    dense_bytes_loading: int | None  # the same before
    dense_bytes_per_token: int | None  # those that a token reads: without the embedding and experts that are left alone
    left_alone_bytes: int | None  # of the rest: experts of other shapes, which no pool takes
    left_alone: str  # which those are
    staging_bytes: int  # buffers of raw records
    files: tuple[Path, ...]  # that experts are read from
    conversion: str  # what becomes of a checkpoint that another tool has quantised; else empty
    # Format and group size of the records that a checkpoint's own files can be read as, whatever ``weights`` is; None: none.
    own_records: tuple[str, int] | None = None
    raw_staging_bytes: int = 0  # those buffers where they are read so
    exact_in_bf16: bool = True  # False: fp16, fp32 and codes, which bf16 rounds

    @property
    def own_codes(self) -> tuple[str, int] | None:
        """``own_records`` of a quantised checkpoint, which hold its codes as they are."""
        return self.own_records if self.conversion else None


@dataclass(frozen=True)
class DenseChoice:
    """What the rest of the model would be in a format of fewer bits."""

    dense: str
    weight_error: float  # relative, of Gaussian weights
    bytes: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class FormatChoice:
    """What the experts would be in a format, in the same memory."""

    weights: str
    group_size: int | None
    expert_bytes: int
    all_experts_bytes: int
    slots: int
    resident_share: float
    hit_rate: HitRate
    bytes_per_token: float  # read, without what prefetches read in vain
    tokens_per_second: float
    weight_error: float  # relative, of Gaussian weights; none for bf16
    chosen: bool  # fastest of those within ``max_error``; of those within 5 % of its speed the one with the least error


@dataclass(frozen=True)
class RankPlan:
    """What is different where ranks divide the experts. All else in a plan is then of one rank."""

    ranks: int
    experts: int  # of each layer, on each rank
    busiest: (
        float  # of a token's experts, those on the rank that has most of them: the others wait for it in each layer
    )
    sum_bytes: (
        int  # of a token's outputs in bf16, which the ranks add up in each layer; the network's time is not known
    )


@dataclass(frozen=True)
class Plan:
    """``plan``'s answer. Bytes, seconds and shares; None where it cannot be known."""

    folder: str
    status: Status
    advice: str
    sizes: Sizes
    ranks: RankPlan | None  # None: the model is whole in its process
    gpu: GpuPlan | None  # what lies on a card
    memory_bytes: int  # what the process can have in all
    process_bytes: int  # of those: the interpreter with torch and transformers
    slots: int | None
    fallback_slots: int  # stand-ins besides
    pool_bytes: int | None  # of both; with io="mmap" of the page cache, and not in the peak
    resident_share: float | None  # of all experts, as they are
    recommended_slots: int  # twice the experts that a token takes in each layer (arXiv 2505.16056)
    recommended_bytes: int
    workspace_bytes: int
    tokens_per_chunk: int | None  # a longer prompt goes in chunks; None for experts that run by projection
    chunk_bytes: int | None  # that each chunk reads at most
    peak_bytes: int | None  # of memory, without KV cache and the page cache
    hit_rate: HitRate | None
    speeds: Speeds | None
    tokens_per_second: float | None  # decoding one sequence, eagerly
    tokens_per_second_range: tuple[float, float] | None  # with the low and the high hit rate
    chunk_seconds: float | None  # that reading for one chunk of a prompt takes
    dense_choices: tuple[DenseChoice, ...]  # beside ``dense`` as it is; on a card there are none
    format_choices: tuple[FormatChoice, ...]  # where ``format_speeds`` are given and there is a choice

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        table = dataclasses.asdict(self)
        table["sizes"]["files"] = [str(file) for file in self.sizes.files]
        return table


def plan(
    folder: Path,
    config: MeshConfig,
    *,
    memory: int | None = None,
    speeds: Speeds | None = None,
    hit_rate: float | None = None,
    overlap: float | None = None,
    card: tuple[int, int] | None = None,
    ranks: int = 1,
    format_speeds: Mapping[str, float] | None = None,
    max_error: float = MAX_ERROR,
) -> Plan:
    """What the model in ``folder`` needs with ``config`` and what it will reach.

    ``memory``: bytes that the whole process may take; None: what it has and what it can still take here. ``hit_rate``: a known
    one without prefetch, as ``torch_mesh.stats`` has it with ``prefetch="off"`` or a replayed trace, in place of the expected. ``overlap``: a known
    share of a token's experts that the next token uses too, for ``simulated_hit_rate``. Without ``speeds`` nothing is said of time.

    ``card``: the free and all bytes of a GPU, which then takes the rest of the model and what ``gpu.experts`` says.

    ``ranks``: so many processes divide the experts, and each has the rest of the model whole; ``memory``, the speeds and the answer are of one of them.

    ``format_speeds``: bytes per second of packed weights of experts in each format, computed for one token. With them and ``speeds`` the plan
    compares these formats, and chooses the fastest whose error of weights is at most ``max_error`` (0.15 is 15 %). There is nothing to choose, and the
    comparison is empty, for a store or a checkpoint that is quantised, with a hit rate that is known (it is of one format), ranks, a card or stand-ins,
    and where ``resident`` is a share of the experts and not an amount of memory.

    With ``lossy.fallback`` or a card it says what takes memory, but nothing of hits and time.

    Raises StoreError, UnsupportedModelError and ValueError as loading would, ValueError for an overlap that no routing has, for what does not go
    with ranks, for a ``max_error`` outside of [0, 1], and for a card where it is not known what the rest of the model takes.
    """
    if not 0 <= max_error <= 1:
        raise ValueError(f"max_error={max_error} is a share of the weights between 0 and 1: give 0.15 for 15 %")
    sizes = find_sizes(folder, config)
    of_ranks = None
    if ranks > 1:
        _check_ranks(sizes, config, ranks, overlap, card)
        sizes, of_ranks = _divided(sizes, ranks)
    shape = sizes.shape
    process = _process_bytes()
    whole = memory if memory is not None else process + available_bytes()
    check_gpu_weights(config, sizes.weights if is_store(folder) else None)
    gpu = None if card is None else _on_card(folder, sizes, config, *card)
    sizes_in_memory = sizes if gpu is None else dataclasses.replace(sizes, dense_bytes=0, dense_bytes_loading=0)
    available = None if sizes.dense_bytes is None else whole - process - (sizes_in_memory.dense_bytes or 0)
    check_fallback_config(config, sizes.weights)
    on_gpu = 0 if gpu is None else gpu.placed
    gpu_pool = _gpu_pool_bytes(sizes, config) if on_gpu else 0
    slots, fallback_slots, problem = _slots(sizes, config, available, on_gpu, gpu_pool)
    if gpu is not None and not gpu.loads:
        slots, fallback_slots, problem = None, 0, gpu.advice
    fallback_bytes = fallback_slots * _stand_in_bytes(sizes, config)
    every = shape.layers * shape.experts
    recommended = shape.layers * min(shape.experts, -(-2 * shape.top_k // ranks))
    share = None if slots is None else slots / every
    rate = None if share is None or fallback_slots or gpu else _hit_rate(shape, share, hit_rate, overlap)
    chunk = _tokens_per_chunk(sizes, config)
    chunk_bytes = None if slots is None else (every - on_gpu if slots < every - on_gpu else 0) * sizes.expert_bytes
    seconds = None
    if speeds is not None and rate is not None and sizes.dense_bytes_per_token is not None:
        prefetch = config.prefetch != "off"
        used = shape.top_k if of_ranks is None else of_ranks.busiest
        seconds = [token_seconds(sizes, speeds, hits, prefetch, used) for hits in (rate.expected, rate.low, rate.high)]
    choices: tuple[FormatChoice, ...] = ()
    if not why_no_choice(folder, sizes, config, hit_rate=hit_rate, card=gpu is not None, ranks=ranks):
        choices = tuple(_format_choices(sizes, config, available, speeds, format_speeds or {}, overlap))
    status, advice = _verdict(sizes, None if slots is None else slots + on_gpu, fallback_slots, recommended, problem)
    return Plan(
        folder=str(folder),
        status=status,
        advice=advice,
        sizes=sizes,
        ranks=of_ranks,
        gpu=gpu,
        memory_bytes=whole,
        process_bytes=process,
        slots=slots,
        fallback_slots=fallback_slots,
        pool_bytes=None if slots is None else slots * sizes.expert_bytes + fallback_bytes,
        resident_share=share,
        recommended_slots=recommended,
        recommended_bytes=recommended * sizes.expert_bytes,
        workspace_bytes=config.workspace_bytes,
        tokens_per_chunk=chunk,
        chunk_bytes=chunk_bytes,
        peak_bytes=_peak(sizes_in_memory, config, process, slots, fallback_bytes + gpu_pool),
        hit_rate=rate,
        speeds=speeds,
        tokens_per_second=None if seconds is None else 1 / seconds[0],
        tokens_per_second_range=None if seconds is None else (1 / seconds[1], 1 / seconds[2]),
        chunk_seconds=None if speeds is None or chunk_bytes is None else chunk_bytes / speeds.disk,
        dense_choices=() if gpu or of_ranks else tuple(_dense_choices(folder, config, rate, speeds)),
        format_choices=_choose(choices, max_error),
    )


def _check_ranks(
    sizes: Sizes, config: MeshConfig, ranks: int, overlap: float | None, card: tuple[int, int] | None
) -> None:
    experts = sizes.shape.experts
    if experts % ranks:
        raise ValueError(f"ranks={ranks}: the {experts} experts of a layer cannot be divided evenly among them")
    if config.lossy.modes or card is not None or overlap is not None:
        raise ValueError(
            "ranks: lossy modes and experts on a card do not go with them, and overlap is of a whole model's routing. Leave those out."
        )
    if sizes.left_alone:
        raise ValueError(f"ranks: the model has experts of several shapes ({sizes.left_alone}), which are not divided")


def _divided(sizes: Sizes, ranks: int) -> tuple[Sizes, RankPlan]:
    """Those of one rank."""
    shape = sizes.shape
    own = dataclasses.replace(shape, experts=shape.experts // ranks)
    of_rank = dataclasses.replace(sizes, shape=own, all_experts_bytes=sizes.all_experts_bytes // ranks)
    busiest = _busiest(shape.experts, shape.top_k, ranks)
    return of_rank, RankPlan(ranks, own.experts, busiest, sum_bytes=2 * shape.hidden)


def _busiest(experts: int, top_k: int, ranks: int) -> float:
    """Of a token that draws its experts at random, how many are on the rank with most of them, on average: of some thousand draws, always
    the same."""
    draws = np.random.default_rng(0).random((4096, experts)).argpartition(top_k - 1)[:, :top_k]
    owners = draws // (experts // ranks)
    return float(np.stack([(owners == rank).sum(1) for rank in range(ranks)]).max(0).mean())


def _dense_choices(
    folder: Path, config: MeshConfig, rate: HitRate | None, speeds: Speeds | None
) -> Iterator[DenseChoice]:
    """``dense`` in fewer bits, read at the same speed; the same experts stay resident."""
    if config.dense not in ("auto", "none", "bf16"):
        return
    for dense in ("int8", "int4"):
        sizes = find_sizes(folder, config.replace(dense=dense))
        if sizes.dense_bytes is None:
            return
        seconds = None
        if rate is not None and speeds is not None:
            seconds = token_seconds(sizes, speeds, rate.expected, config.prefetch != "off")
        yield DenseChoice(dense, DENSE_ERROR[dense], sizes.dense_bytes, None if seconds is None else 1 / seconds)


def _format_choices(
    sizes: Sizes,
    config: MeshConfig,
    available: int | None,
    speeds: Speeds | None,
    format_speeds: Mapping[str, float],
    overlap: float | None,
) -> Iterator[FormatChoice]:
    """Those of which enough fits."""
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
        slots, _, _ = _slots(of_format, config, available, on_gpu=0, gpu_pool=0)
        if slots is None:
            continue
        share = slots / (shape.layers * shape.experts)
        rate = _hit_rate(shape, share, None, overlap)
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
            resident_share=share,
            hit_rate=rate,
            bytes_per_token=(1 - rate.expected) * shape.layers * shape.top_k * record,
            tokens_per_second=1 / seconds,
            weight_error=error,
            chosen=False,
        )


def why_no_choice(
    folder: Path,
    sizes: Sizes,
    config: MeshConfig,
    *,
    hit_rate: float | None = None,
    card: bool = False,
    ranks: int = 1,
) -> str:
    """Why formats are not compared there; empty where they are."""
    if is_store(folder):
        return f"the experts of {folder} are {sizes.weights} already: give the checkpoint that it was converted from"
    if isinstance(config.resident, float):
        return "resident is a share of the experts, which is another amount of memory in each format: give it as a size"
    if hit_rate is not None:
        return "a known hit rate is of one format"
    if card or ranks > 1:
        return "experts on a card, or divided among ranks, are not compared"
    if config.lossy.fallback != "none":
        return "lossy.fallback has two formats"
    return ""


def compared_formats(sizes: Sizes, config: MeshConfig) -> dict[str, tuple[int, float]]:
    """Group size and error of weights of the formats that are compared. Of a quantised checkpoint its own, which holds codes as they are, comes first, and
    the others' errors are of what the codes stand for."""
    own = sizes.own_codes
    formats = {} if own is None else {own[0]: (own[1], 0.0)}
    for weights, errors in WEIGHT_ERROR.items():
        group = compared_group(weights, sizes.shape, config)
        rounded = weights == "bf16" and not sizes.exact_in_bf16
        formats.setdefault(weights, (group, _ROUNDED_TO_BF16 if rounded else errors[group]))
    return formats


def compared_group(weights: str, shape: Shape, config: MeshConfig) -> int:
    """The group size that a format is compared in: the config's, 0 for bf16. For trellises, where smaller groups buy little, 128, or 64 if that
    pads the shape less and so takes fewer bytes."""
    if weights in TRELLISES:
        return min((128, 64), key=lambda group: shape.record_bytes(weights, group))
    return checked_group_size(weights, config.group_size)


def _choose(choices: tuple[FormatChoice, ...], max_error: float) -> tuple[FormatChoice, ...]:
    allowed = [choice for choice in choices if choice.weight_error <= max_error]
    fastest = max((choice.tokens_per_second for choice in allowed), default=0.0)
    as_fast = [choice for choice in allowed if choice.tokens_per_second >= _AS_FAST * fastest]
    best = min(as_fast, key=lambda choice: (choice.weight_error, -choice.tokens_per_second), default=None)
    return tuple(dataclasses.replace(choice, chosen=choice is best) for choice in choices)


def find_sizes(folder: Path, config: MeshConfig) -> Sizes:
    """What the model in ``folder`` takes with ``config``, from headers, config and manifest alone."""
    if not folder.is_dir() and not is_gguf(folder):
        raise FileNotFoundError(f"{folder} is not a folder: give one with a checkpoint or a store, or a GGUF file")
    if config.weights.startswith("auto:"):
        raise ValueError(
            f"weights={config.weights!r}: a plan compares the formats itself; leave weights out, and give --memory and --max-error."
        )
    return _store_sizes(folder, config) if is_store(folder) else _checkpoint_sizes(folder, config)


def expected_hit_rate(share: float) -> HitRate:
    """What to expect with that share of all experts resident, with policy "auto" and before any prefetch.

    Interpolated between what was measured on DeepSeek-V2-Lite. Models differ: mesh-tiny's own text hits far more often
    (``high``), experts drawn at random would hit as often as they are resident (``low``).
    """
    expected, high = (float(np.interp(share, _SHARES, hits)) for hits in (_EXPECTED_HITS, _LOCAL_HITS))
    return HitRate(expected=expected, low=share, high=high)


def simulated_hit_rate(shape: Shape, share: float, overlap: float) -> HitRate:
    """What to expect where ``overlap`` of a token's experts serve the next token, too: policy "auto" on a made-up trace.

    The trace has topics and drift (see ``synthetic_trace``), its first prompt only fills the pool. About a second. Raises ValueError for an overlap
    that is less than chance gives or more than 0.95.
    """
    layers = min(shape.layers, _SIMULATED_LAYERS)
    trace = synthetic_trace(
        layers=layers,
        experts=shape.experts,
        top_k=shape.top_k,
        prompts=_SIMULATED_PROMPTS,
        prompt_tokens=_SIMULATED_TOKENS,
        overlap=overlap,
    )
    slots = max(shape.top_k, round(share * layers * shape.experts))
    result = _C.replay(trace.ids, experts=shape.experts, policy="auto", slots=slots, sequences=trace.offsets[:-1])
    hits = result["hits"][trace.offsets[1] :]
    expected = float(hits.mean()) / (layers * shape.top_k)
    return HitRate(expected=expected, low=min(share, expected), high=max(expected, expected_hit_rate(share).high))


def token_seconds(
    sizes: Sizes, speeds: Speeds, hits: float, prefetch: bool, experts_of_token: float | None = None
) -> float:
    """Seconds that one token of one sequence takes; with ranks it has ``experts_of_token`` on the busiest, and the network takes more.

    What is cold is waited for: a layer reads too little at a time, and has too little else to compute, for much of it to overlap. With ``prefetch``
    a part is there in time.
    """
    shape = sizes.shape
    assert sizes.dense_bytes_per_token is not None
    used = shape.layers * (shape.top_k if experts_of_token is None else experts_of_token) * sizes.expert_bytes
    reading = (1 - hits) * used / speeds.disk
    computing = used / speeds.experts
    dense = sizes.dense_bytes_per_token / speeds.dense + shape.layers * speeds.layer_seconds
    if not prefetch:
        return dense + computing + reading
    return max(_PREFETCH_READS * reading, dense + computing + _PREFETCH_WAITING * reading)


def _process_bytes() -> int:
    """What Python, torch and transformers take, as any process that runs a model has them."""
    return psutil.Process().memory_info().rss


def _hit_rate(shape: Shape, share: float, given: float | None, overlap: float | None) -> HitRate:
    if given is not None and not 0 <= given <= 1:
        raise ValueError(f"hit_rate={given} must be in [0, 1]")
    if share == 1 or (given is None and overlap is None):
        return expected_hit_rate(share)
    return HitRate(given, given, given) if given is not None else simulated_hit_rate(shape, share, overlap or 0.0)


def _store_sizes(folder: Path, config: MeshConfig) -> Sizes:
    manifest = open_store(folder).manifest
    if config.weights not in ("auto", manifest.weights):
        raise ValueError(
            f"weights={config.weights!r}, but the experts in {folder} are {manifest.weights}: leave weights at 'auto', or give the "
            "original checkpoint."
        )
    dense: tuple[int | None, int | None, int | None] = (None, None, None)
    others: list[ExpertsLayer] | None = None
    shape = manifest.shape
    if (folder / "config.json").is_file():
        described = read_config(folder)
        dtype = getattr(described.get_text_config(), "dtype", None)
        model = meta_model(described)
        layers = find_experts(model)
        dense = _dense_bytes(model, layers, config, dtype or torch.bfloat16)
        others = layers_left_alone(model)
        # What this build fuses; the one that wrote the store may have fused less.
        shape = dataclasses.replace(shape, activation=common_activation(layers))
    return _sizes(
        shape,
        manifest.weights,
        manifest.group_size,
        dense,
        others,
        staging_bytes=0,
        files=tuple(folder / file.name for file in manifest.record_files),
    )


def _checkpoint_sizes(folder: Path, config: MeshConfig) -> Sizes:
    checkpoint_files(folder)  # says that there are no weights before the config is looked at
    model = meta_model(read_config(folder))
    layers = find_experts(model)
    experts = find_checkpoint_experts(folder, model)
    weights, group_size = weights_of_checkpoint(experts, config.weights, config.group_size)
    unconverted = config.store is None
    own = experts.own_records if unconverted else None
    raw = own == (weights, group_size)
    staging = 0 if own is None else _C.Source(**experts.source_arguments()).staging_bytes
    if raw and config.io == "mmap":
        raise ValueError(
            "io='mmap' uses records as they lie in a store, and this checkpoint's weights are packed when they are read: name a "
            "store=, or use io='auto'."
        )
    return _sizes(
        shape_of(layers),
        weights,
        group_size,
        _dense_bytes(model, layers, config, _dense_dtype(model, experts)),
        layers_left_alone(model),
        staging_bytes=staging if raw else 0,
        files=experts.expert_files,
        conversion=_conversion(experts, config, weights, group_size),
        own_records=experts.own_records,
        raw_staging_bytes=staging,
        exact_in_bf16=not experts.weights and experts.nearest().exact,
    )


def _conversion(experts: CheckpointExperts, config: MeshConfig, weights: str, group_size: int) -> str:
    if not experts.weights:
        return ""
    if experts.own_records == (weights, group_size):
        if config.store is not None:
            return (
                f"{experts.format} experts are converted to {weights}, which holds their codes and scales as they are"
            )
        return (
            f"{experts.format} experts are read as they are, in {experts.reads_per_expert} reads each, and packed to {weights} when they "
            "come; torch-mesh convert makes that one read"
        )
    if config.weights == "auto":
        return describe_nearest(experts)
    return f"{experts.format} experts are converted to {config.weights}"


def _dense_dtype(model: Any, experts: CheckpointExperts) -> torch.dtype:
    if not experts.weights:
        return TORCH_DTYPES[experts.dtype]
    return getattr(model.config.get_text_config(), "dtype", None) or torch.bfloat16


def _sizes(
    shape: Shape,
    weights: str,
    group_size: int,
    dense: tuple[int | None, int | None, int | None],
    others: list[ExpertsLayer] | None,
    staging_bytes: int,
    files: tuple[Path, ...],
    conversion: str = "",
    own_records: tuple[str, int] | None = None,
    raw_staging_bytes: int = 0,
    exact_in_bf16: bool = True,
) -> Sizes:
    record = shape.record_bytes(weights, group_size)
    return Sizes(
        shape=shape,
        weights=weights,
        group_size=group_size or None,
        expert_bytes=record,
        all_experts_bytes=record * shape.layers * shape.experts,
        dense_bytes=dense[0],
        dense_bytes_loading=dense[1],
        dense_bytes_per_token=dense[2],
        left_alone_bytes=None if others is None else sum(layer.nbytes for layer in others),
        left_alone=describe_left_alone(others or ()),
        staging_bytes=staging_bytes,
        files=files,
        conversion=conversion,
        own_records=own_records,
        raw_staging_bytes=raw_staging_bytes,
        exact_in_bf16=exact_in_bf16,
    )


def _dense_bytes(
    model: Any, layers: list[ExpertsLayer], config: MeshConfig, dtype: torch.dtype
) -> tuple[int, int, int]:
    """What is not experts of a model on the meta device: packed, as it is loaded, and what a token reads of it."""
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if kept_in_fp32(model, name, dtype):
            parameter.data = parameter.data.float()
    experts = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    loading = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in experts)
    packed = loading - dense_saving(model, layers, config, loaded=False)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding and not packs(config)
    left_alone = sum(layer.nbytes for layer in layers_left_alone(model))
    return packed, loading, packed - left_alone - (0 if tied else embedding.nbytes)


def _stand_in_bytes(sizes: Sizes, config: MeshConfig) -> int:
    return 0 if config.lossy.fallback == "none" else _bytes_in(sizes, config, config.lossy.fallback)


def _bytes_in(sizes: Sizes, config: MeshConfig, weights: str) -> int:
    """Of a record in that format."""
    if weights == sizes.weights:
        return sizes.expert_bytes
    groups = sizes.group_size if has_chosen_groups(sizes.weights) else None
    return sizes.shape.record_bytes(weights, checked_group_size(weights, groups or config.group_size))


def _gpu_record_bytes(sizes: Sizes, config: MeshConfig) -> int:
    return _bytes_in(sizes, config, format_on_gpu(config, sizes.weights))


def _gpu_pool_bytes(sizes: Sizes, config: MeshConfig) -> int:
    """Of the pool through which records in another format go to a card."""
    other = format_on_gpu(config, sizes.weights) != sizes.weights
    return GPU_POOL_SLOTS * _gpu_record_bytes(sizes, config) if other else 0


def _on_card(folder: Path, sizes: Sizes, config: MeshConfig, free: int, total: int) -> GpuPlan:
    """What a card of ``total`` bytes takes beside the rest of the model, which lies there as it is loaded."""
    shape = sizes.shape
    if sizes.dense_bytes_loading is None:
        raise ValueError(
            f"{folder} has no config.json, so what the rest of the model takes on the card is not known: give a converted checkpoint."
        )
    if packs(config):
        raise ValueError(
            f"dense={config.dense!r} is CPU only, and on a card the rest of the model stays as it is: leave it out."
        )
    if shape.activation is None:
        return plan_on_cpu(config, shape.layers, BY_PROJECTION)
    if isinstance(shape.activation, tuple):
        return plan_on_cpu(config, shape.layers, SEVERAL_ACTIVATIONS)
    there = _gpu_record_bytes(sizes, config)
    left = free - sizes.dense_bytes_loading
    planned = plan_config(config, left, total, shape.layers, shape.experts, shape.top_k, there, sizes.expert_bytes)
    if planned.placed > 0:
        check_beside_gpu(config)
    return planned


def _slots(
    sizes: Sizes, config: MeshConfig, available: int | None, on_gpu: int, gpu_pool: int
) -> tuple[int | None, int, str]:
    """How many experts will be resident, or None and why that cannot be; between the two, how many stand-ins."""
    shape = sizes.shape
    reserved = config.workspace_bytes + sizes.staging_bytes + gpu_pool
    top_k = min(shape.top_k, shape.experts)
    least = top_k * sizes.expert_bytes
    if config.resident == "auto":
        if available is None:
            return None, 0, ""
        if (budget := auto_budget(available, reserved)) < least:
            left = f"{max(0, budget):,} bytes are left for experts, and one token of one layer needs {least:,}"
            return None, 0, f"{left}: give more memory{_smaller(sizes)}."
    try:
        slots = resident_slots(
            config.resident,
            layers=shape.layers,
            experts=shape.experts,
            top_k=top_k,
            record_bytes=sizes.expert_bytes,
            reserved=reserved,
            # Without a config.json it cannot be said what else there will be; what is asked for is taken at its word.
            available=available if available is not None else shape.layers * shape.experts * sizes.expert_bytes,
            mapped=config.io == "mmap",
        )
        slots = min(slots, max(top_k, shape.layers * shape.experts - on_gpu))
        experts = {"experts": shape.layers * shape.experts, "top_k": top_k}
        record_bytes = {"record_bytes": sizes.expert_bytes, "stand_in_bytes": _stand_in_bytes(sizes, config)}
        return *split_slots(config, slots, **experts, **record_bytes), ""
    except (ValueError, MemoryError) as error:
        return None, 0, str(error)


def _tokens_per_chunk(sizes: Sizes, config: MeshConfig) -> int | None:
    shape = sizes.shape
    if shape.activation is None:
        return None
    layout = (sizes.weights, sizes.group_size or 0, shape.hidden, shape.intermediate, shape.gated, shape.bias)
    return _C.tokens_per_chunk(*layout, shape.top_k, config.workspace_bytes)


def _peak(sizes: Sizes, config: MeshConfig, process: int, slots: int | None, fallback_bytes: int) -> int | None:
    if slots is None or sizes.dense_bytes is None or sizes.dense_bytes_loading is None:
        return None
    pool = 0 if config.io == "mmap" else slots * sizes.expert_bytes + fallback_bytes
    running = sizes.dense_bytes + pool + sizes.staging_bytes + config.workspace_bytes
    return process + max(running, sizes.dense_bytes_loading)


def _verdict(sizes: Sizes, held: int | None, fallback_slots: int, recommended: int, problem: str) -> tuple[Status, str]:
    """``held``: experts that are resident or lie on a card."""
    every = sizes.shape.layers * sizes.shape.experts
    if held is None and not problem:
        return "unknown", (
            "The folder has records and no config.json, so what the rest of the model takes is not known: give --resident, or a "
            "converted checkpoint."
        )
    if held is None:
        return "too small", problem
    if held >= every:
        return "nothing to do", "All experts fit: nothing will be read after the first forwards."
    if held + fallback_slots >= recommended:
        return "ok", "Enough experts are resident: more memory makes it faster, and nothing needs to change."
    return "below recommended", (
        f"{held + fallback_slots} of {every} experts fit, {recommended} are recommended: give {recommended * sizes.expert_bytes:,} bytes for "
        f"experts{_smaller(sizes)}. It works, and waits for the disk more often."
    )


def _smaller(sizes: Sizes) -> str:
    fewer = [name for name in formats_of_fewer_bits(sizes.weights) if name in _ADVISED]
    return f", or take weights in {' or '.join(fewer[:2])}" if fewer else ""
