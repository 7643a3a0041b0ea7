"""What a model will need and reach on a machine, before it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import MeshConfig
from ..gpu.choosing import check_gpu_weights
from ..gpu.planning import GpuPlan
from ..lossy.fallback import check_fallback_format
from ..store.manifest import is_store
from ..system.memory import anonymous_bytes, available_bytes
from .fitting import fitting_slots, gpu_pool_bytes, margin_bytes, on_card, or_fewer_bits, peak_bytes, tokens_per_chunk
from .formats import MAX_ERROR, DenseChoice, FormatChoice, dense_choices, format_choices, why_no_choice, with_chosen
from .hit_rates import HitRate, known_or_expected
from .ranks import RankPlan, check_ranks, divided
from .sizes import Sizes, fallback_record_bytes, find_sizes
from .token_time import Speeds, token_seconds

Status = Literal["ok", "below recommended", "too small", "nothing to do", "unknown"]


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
    process_bytes: int  # of those: the interpreter with torch and transformers, without mapped files
    margin_bytes: int | None  # of those: what ``resident="auto"`` leaves free; None where a size or share is named
    slots: int | None
    fallback_slots: int  # stand-ins besides
    pool_bytes: int | None  # of both
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
) -> Plan:
    """What the model in ``folder`` needs with ``config`` and what it will reach.

    ``memory``: bytes that the whole process may take; None: what it has and what it can still take here. ``hit_rate``:
    a known one without prefetch, as ``torch_mesh.stats`` has it with ``prefetch="off"`` or a replayed trace, in place
    of the expected. ``overlap``: a known share of a token's experts that the next token uses too, for
    ``simulated_hit_rate``. Without ``speeds`` nothing is said of time.

    ``card``: the free and all bytes of a GPU, which then takes the rest of the model and what ``gpu.experts`` says.

    ``ranks``: so many processes divide the experts, and each has the rest of the model whole; ``memory``, the speeds
    and the answer are of one of them.

    ``format_speeds``: bytes per second of packed weights of experts in each format, computed for one token. With them
    and ``speeds`` the plan compares these formats, and chooses the fastest whose error of weights is at most
    ``config.max_error``, or else 10 %. There is nothing to choose, and the comparison is empty, for a store or a
    checkpoint that is quantised, with a hit rate that is known (it is of one format), ranks, a card or stand-ins, and
    where ``resident`` is a share of the experts and not an amount of memory.

    With ``lossy.fallback`` or a card it says what takes memory, but nothing of hits and time.

    Raises StoreError, UnsupportedModelError and ValueError as loading would, ValueError for an overlap that no routing
    has, for what does not go with ranks, and for a card where it is not known what the rest of the model takes.
    """
    sizes = find_sizes(folder, config)
    of_ranks = None
    if ranks > 1:
        check_ranks(sizes, config, ranks, overlap, card)
        sizes, of_ranks = divided(sizes, ranks)
    shape = sizes.shape
    process = process_bytes()
    whole = memory if memory is not None else process + available_bytes()
    check_gpu_weights(config.gpu, sizes.weights if is_store(folder) else None)
    gpu = None if card is None else on_card(folder, sizes, config, *card)
    sizes_in_memory = sizes if gpu is None else dataclasses.replace(sizes, dense_bytes=0, dense_bytes_loading=0)
    available = None if sizes.dense_bytes is None else whole - process - (sizes_in_memory.dense_bytes or 0)
    check_fallback_format(sizes.weights, fallback=config.lossy.fallback, deferred_experts=config.lossy.deferred_experts)
    on_gpu = 0 if gpu is None else gpu.placed
    gpu_pool = gpu_pool_bytes(sizes, config) if on_gpu else 0
    slots, fallback_slots, problem = fitting_slots(sizes, config, available, on_gpu, gpu_pool)
    if gpu is not None and not gpu.loads:
        slots, fallback_slots, problem = None, 0, gpu.advice
    fallback_bytes = fallback_slots * fallback_record_bytes(sizes, config)
    every = shape.layers * shape.experts
    recommended = shape.layers * min(shape.experts, -(-2 * shape.top_k // ranks))
    share = None if slots is None else slots / every
    rate = None if share is None or fallback_slots or gpu else known_or_expected(shape, share, hit_rate, overlap)
    chunk = tokens_per_chunk(sizes, config)
    chunk_bytes = None if slots is None else (every - on_gpu if slots < every - on_gpu else 0) * sizes.expert_bytes
    seconds = None
    if speeds is not None and rate is not None and sizes.dense_bytes_per_token is not None:
        prefetch = config.prefetch != "off"
        used = shape.top_k if of_ranks is None else of_ranks.busiest
        seconds = [token_seconds(sizes, speeds, hits, prefetch, used) for hits in (rate.expected, rate.low, rate.high)]
    choices: tuple[FormatChoice, ...] = ()
    if not why_no_choice(folder, sizes, config, hit_rate=hit_rate, card=gpu is not None, ranks=ranks):
        choices = tuple(format_choices(sizes, config, available, speeds, format_speeds or {}, overlap))
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
        margin_bytes=margin_bytes(sizes, config, available, gpu_pool),
        slots=slots,
        fallback_slots=fallback_slots,
        pool_bytes=None if slots is None else slots * sizes.expert_bytes + fallback_bytes,
        resident_share=share,
        recommended_slots=recommended,
        recommended_bytes=recommended * sizes.expert_bytes,
        workspace_bytes=config.workspace_bytes,
        tokens_per_chunk=chunk,
        chunk_bytes=chunk_bytes,
        peak_bytes=peak_bytes(sizes_in_memory, config, process, slots, fallback_bytes + gpu_pool),
        hit_rate=rate,
        speeds=speeds,
        tokens_per_second=None if seconds is None else 1 / seconds[0],
        tokens_per_second_range=None if seconds is None else (1 / seconds[1], 1 / seconds[2]),
        chunk_seconds=None if speeds is None or chunk_bytes is None else chunk_bytes / speeds.disk,
        dense_choices=() if gpu or of_ranks else tuple(dense_choices(folder, config, rate, speeds)),
        format_choices=with_chosen(choices, MAX_ERROR if config.max_error is None else config.max_error),
    )


def process_bytes() -> int:
    """What Python, torch and transformers take, as any process that runs a model has them."""
    return anonymous_bytes()


def _verdict(sizes: Sizes, held: int | None, fallback_slots: int, recommended: int, problem: str) -> tuple[Status, str]:
    """``held``: experts that are resident or lie on a card."""
    every = sizes.shape.layers * sizes.shape.experts
    if held is None and not problem:
        return "unknown", (
            "The folder has records and no config.json, so what the rest of the model takes is not known: give "
            "--resident, or a "
            "converted checkpoint."
        )
    if held is None:
        return "too small", problem
    if held >= every:
        return "nothing to do", "All experts fit: nothing will be read after the first forwards."
    if held + fallback_slots >= recommended:
        return "ok", "Enough experts are resident: more memory makes it faster, and nothing needs to change."
    return "below recommended", (
        f"{held + fallback_slots} of {every} experts fit, {recommended} are recommended: give "
        f"{recommended * sizes.expert_bytes:,} bytes for "
        f"experts{or_fewer_bits(sizes)}. It works, and waits for the disk more often."
    )
