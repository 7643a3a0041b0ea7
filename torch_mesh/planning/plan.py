"""Predict what a model will need and reach on a machine, before it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch_mesh.config import MeshConfig
from torch_mesh.gpu.choosing import check_gpu_weights
from torch_mesh.gpu.planning import GpuPlan
from torch_mesh.lossy.fallback import check_fallback_format
from torch_mesh.planning.fitting import (
    fitting_slots,
    margin_bytes,
    on_card,
    or_fewer_bits,
    peak_bytes,
    planned_gpu_pool_bytes,
    tokens_per_chunk,
    vocabulary_stays_in_files,
)
from torch_mesh.planning.formats import (
    MAX_ERROR,
    DenseChoice,
    FormatChoice,
    comparison_unsupported_reason,
    dense_choices,
    format_choices,
    with_chosen,
)
from torch_mesh.planning.hit_rates import HitRate, known_or_expected
from torch_mesh.planning.ranks import RankPlan, check_ranks, divided
from torch_mesh.planning.sizes import Sizes, fallback_record_bytes, locate
from torch_mesh.planning.token_time import Speeds, token_seconds
from torch_mesh.routing.synthetic import check_overlap
from torch_mesh.store.manifest import is_store
from torch_mesh.system.memory import anonymous_bytes, available_bytes

Status = Literal["ok", "below recommended", "too small", "nothing to do", "unknown"]


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``: bytes, seconds and fractions; None if unknown."""

    folder: str
    status: Status
    advice: str
    sizes: Sizes
    ranks: RankPlan | None  # None: one process has the whole model
    gpu: GpuPlan | None  # experts on a GPU
    memory_bytes: int  # all that the process may take
    process_bytes: int  # part of it: the interpreter with torch and transformers, without mapped files
    margin_bytes: int | None  # part of it that ``resident="auto"`` leaves free; None for any other ``resident``
    slots: int | None
    fallback_slots: int  # slots of lossy.fallback, beside ``slots``
    pool_bytes: int | None  # bytes of both kinds of slots
    resident_fraction: float | None  # fraction of all experts, without fallbacks
    recommended_slots: int  # twice the experts that a token uses in each layer (arXiv 2505.16056)
    recommended_bytes: int
    workspace_bytes: int
    tokens_per_chunk: int | None  # longer prompts are computed in chunks; None for unfused experts
    chunk_bytes: int | None  # read by a chunk, at most
    peak_bytes: int | None  # peak memory without KV cache, a prompt's activations and page cache
    hit_rate: HitRate | None
    speeds: Speeds | None
    tokens_per_second: float | None  # decoding one sequence, without compilation
    tokens_per_second_range: tuple[float, float] | None  # with the low and the high hit rate
    chunk_seconds: float | None  # seconds of reading for one chunk of a prompt
    dense_choices: tuple[DenseChoice, ...]  # alternatives to ``dense``; empty with a GPU or ranks
    format_choices: tuple[FormatChoice, ...]  # empty without ``format_speeds``, or if there is no choice

    def to_dict(self) -> dict[str, Any]:
        """In types of JSON."""
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
    """Predict what the model in ``folder`` needs and reaches with ``config``.

    ``memory``: bytes that the whole process may take; None: what it has and can still take here. ``hit_rate``: a known
    hit rate without prefetch, as from ``torch_mesh.stats`` with ``prefetch="off"`` or a replayed trace. ``overlap``:
    the fraction of a token's experts that the next token uses too, for ``simulated_hit_rate``. Without ``speeds`` the
    plan has no times.

    ``card``: the free and total bytes of a GPU, which takes the rest of the model and the experts of ``gpu.experts``.

    ``ranks``: the number of processes that divide the experts. Each has the rest of the model; ``memory``, speeds and
    results are those of one.

    ``format_speeds``: bytes per second of packed experts in each format, computed for one token. With them and
    ``speeds`` the plan compares these formats, and chooses the fastest whose error of weights is at most
    ``config.max_error``, or else 10 %. For settings without a choice see ``comparison_unsupported_reason``.

    With ``lossy.fallback`` or a GPU it predicts memory only, not hits and times.

    Raises StoreError, UnsupportedModelError and ValueError as loading would, but for the files of ``prefetch`` and
    ``profile``, which it does not open; ValueError for an impossible overlap, for settings that exclude ranks, and for
    a GPU if the size of the rest of the model is unknown.
    """
    located = locate(folder)
    sizes = located.sizes(config)
    process = anonymous_bytes()
    whole = memory if memory is not None else process + available_bytes()
    vocabularies = ranks == 1 and card is None and vocabulary_stays_in_files(sizes, config, whole - process)
    if vocabularies:
        sizes = located.sizes(config, vocabularies=True)
    of_ranks = None
    if ranks > 1:
        check_ranks(sizes, config, ranks, overlap, card)
        sizes, of_ranks = divided(sizes, ranks)
    shape = sizes.shape
    if overlap is not None:
        check_overlap(overlap, shape.experts, shape.top_k)
    check_gpu_weights(config.gpu, sizes.weights if is_store(folder) else None)
    gpu = None if card is None else on_card(folder, sizes, config, *card)
    sizes_in_memory = sizes if gpu is None else dataclasses.replace(sizes, dense_bytes=0, dense_bytes_loading=0)
    available = None if sizes.dense_bytes is None else whole - process - (sizes_in_memory.dense_bytes or 0)
    check_fallback_format(sizes.weights, fallback=config.lossy.fallback, deferred_experts=config.lossy.deferred_experts)
    on_gpu = 0 if gpu is None else gpu.placed
    gpu_pool = planned_gpu_pool_bytes(sizes, config) if on_gpu else 0
    slots, fallback_slots, problem = fitting_slots(sizes, config, available, on_gpu, gpu_pool)
    if gpu is not None and not gpu.loads:
        slots, fallback_slots, problem = None, 0, gpu.advice
    fallback_bytes = fallback_slots * fallback_record_bytes(sizes, config)
    every = shape.layers * shape.experts
    recommended = shape.layers * min(shape.experts, -(-2 * shape.top_k // ranks))
    fraction = None if slots is None else slots / every
    rate = None if fraction is None or fallback_slots or gpu else known_or_expected(shape, fraction, hit_rate, overlap)
    chunk = tokens_per_chunk(sizes, config)
    chunk_bytes = None if slots is None else (every - on_gpu if slots < every - on_gpu else 0) * sizes.expert_bytes
    seconds = _token_seconds(sizes, config, speeds, rate, shape.top_k if of_ranks is None else of_ranks.busiest)
    choices: tuple[FormatChoice, ...] = ()
    if not comparison_unsupported_reason(folder, sizes, config, hit_rate=hit_rate, card=gpu is not None, ranks=ranks):
        choices = tuple(format_choices(sizes, config, available, speeds, format_speeds or {}, overlap))
    dense: tuple[DenseChoice, ...] = ()
    if gpu is None and of_ranks is None:
        dense = tuple(dense_choices(located, config, rate, speeds, vocabularies=vocabularies))
    status, advice = _verdict(sizes, None if slots is None else slots + on_gpu, fallback_slots, recommended, problem)
    peak = peak_bytes(sizes_in_memory, config, process, slots, fallback_bytes + gpu_pool)
    if peak is not None and peak > whole:
        if peak == process + (sizes_in_memory.dense_bytes_loading or 0):
            when, remedy = "While the rest of the model is loaded", "give more memory"
        else:
            when = "With prompts that fill the workspace"
            remedy = "give more memory, or a smaller resident or workspace"
        advice += f" {when}, the peak is {peak - whole:,} bytes above the memory: {remedy}."
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
        resident_fraction=fraction,
        recommended_slots=recommended,
        recommended_bytes=recommended * sizes.expert_bytes,
        workspace_bytes=config.workspace_bytes,
        tokens_per_chunk=chunk,
        chunk_bytes=chunk_bytes,
        peak_bytes=peak,
        hit_rate=rate,
        speeds=speeds,
        tokens_per_second=None if seconds is None else 1 / seconds[0],
        tokens_per_second_range=None if seconds is None else (1 / seconds[1], 1 / seconds[2]),
        chunk_seconds=None if speeds is None or chunk_bytes is None else chunk_bytes / speeds.disk,
        dense_choices=dense,
        format_choices=with_chosen(choices, MAX_ERROR if config.max_error is None else config.max_error),
    )


def _token_seconds(
    sizes: Sizes, config: MeshConfig, speeds: Speeds | None, rate: HitRate | None, used: float
) -> list[float] | None:
    """Seconds per token with the expected, the low and the high hit rate. ``used``: experts of a token in each
    layer."""
    if speeds is None or rate is None or sizes.dense_bytes_per_token is None:
        return None
    prefetch = config.prefetch != "off"
    return [token_seconds(sizes, speeds, hits, prefetch, used) for hits in (rate.expected, rate.low, rate.high)]


def _verdict(sizes: Sizes, held: int | None, fallback_slots: int, recommended: int, problem: str) -> tuple[Status, str]:
    """``held``: experts that are resident or on a GPU."""
    every = sizes.shape.layers * sizes.shape.experts
    if held is None and not problem and sizes.dense_bytes is not None:
        return "unknown", "The owner of the shared pool sets how many experts are resident."
    if held is None and not problem:
        return "unknown", (
            "The folder has records but no config.json, so that the size of the rest of the model is unknown: give "
            "--resident, or a converted checkpoint."
        )
    if held is None:
        return "too small", problem
    if held >= every:
        return "nothing to do", "All experts fit: nothing is read after the first forwards."
    if held + fallback_slots >= recommended:
        return "ok", "Enough experts are resident. More memory makes it faster."
    return "below recommended", (
        f"{held + fallback_slots} of {every} experts fit, {recommended} are recommended: give "
        f"{recommended * sizes.expert_bytes:,} bytes for experts{or_fewer_bits(sizes)}. It works, but waits for the "
        "disk more often."
    )
