"""Measure what a model reaches on this machine, beside the machine's limits and the prediction of ``plan``."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.choosing import choose_format
from torch_mesh.planning.machine import measure_speeds
from torch_mesh.planning.plan import Plan, plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.statistics.counters import Stats
from torch_mesh.statistics.stats import reset_stats, stats
from torch_mesh.system.background import BackgroundThread, Flag
from torch_mesh.system.memory import anonymous_bytes
from torch_mesh.system.timing import memory_speed

_AVERAGED_TOKENS = 16  # if a forward gives several tokens
_MAX_MISSES = 1 << 16
_LOOK_SECONDS = 0.02  # between samples of the memory


@dataclass(frozen=True)
class Limits:
    """Upper limits of tokens per second on this machine, for any software, given the reads that there were."""

    disk: float | None  # None: nothing was read, or the disk's speed is unknown
    memory: float | None  # each weight that a token needs is read once; None: their size is unknown


class Miss(NamedTuple):
    """Times of a cold expert of a decode step, in seconds since the first claim; None: unknown.

    ``claimed``: the forward claimed it. ``begun`` and ``landed``: its read began and ended; ``begun`` is earlier if the
    read began ahead of the claim. ``handed``: it was handed over, packed and checked, after the experts before it were
    computed. ``computed``: its computation ended."""

    layer: int
    expert: int
    claimed: float | None
    begun: float | None
    landed: float | None
    handed: float | None
    computed: float | None


@dataclass(frozen=True)
class Measured:
    """Seconds, bytes and tokens per second."""

    folder: str
    prompt_tokens: int
    decoded_tokens: int
    open_seconds: float
    prefill_seconds: float
    prefill_tokens_per_second: float
    step_seconds: tuple[float, ...]  # each decoded token but the first, which belongs to the prefill
    tokens_per_second: float  # at the median step
    tokens_per_second_p10: float  # a tenth of the steps are slower
    tokens_per_second_p90: float  # a tenth of the steps are faster
    hit_rate: float | None  # decoding
    stall_fraction: float  # fraction of decoding spent waiting for the disk
    prefill_stall_fraction: float
    bytes_per_token: float  # read while decoding
    peak_bytes: int  # memory of the process without mapped files and the page cache
    limits: Limits
    plan: Plan
    stats: Stats
    misses: tuple[Miss, ...]  # the first _MAX_MISSES while decoding

    @property
    def ratio_to_plan(self) -> float | None:
        """Tokens per second over the planned ones."""
        planned = self.plan.tokens_per_second
        return None if planned is None else self.tokens_per_second / planned

    def to_dict(self) -> dict[str, Any]:
        """In types of JSON."""
        rest = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "misses"}
        return rest | {
            "limits": dataclasses.asdict(self.limits),
            "plan": self.plan.to_dict(),
            "stats": self.stats.to_dict(experts=False),
            "ratio_to_plan": self.ratio_to_plan,
        }


def default_text() -> str:
    """About 200,000 characters of English and Python that come with torch. Random tokens would route unlike any
    text."""
    return inspect.getsource(torch.nn.functional)


def measure(
    folder: Path,
    config: MeshConfig,
    open_model: Callable[[Path, MeshConfig], Any],
    prompt: Sequence[int],
    tokens: int,
    *,
    memory: int | None = None,
) -> Measured:
    """Measure the machine, open the model, and generate ``tokens`` tokens from ``prompt``, greedily.

    ``memory``: bytes that the process may take, from which ``resident="auto"`` is planned; None: what it can take. With
    ``max_error`` the format is chosen first. Raises MeshError if the model does not fit, and whatever loading raises.
    """
    if config.max_error is not None:
        config, _ = choose_format(folder, config)
    sizes = find_sizes(folder, config)
    speeds = measure_speeds(sizes, config)
    planned = plan(folder, config, memory=memory, speeds=speeds)
    if planned.status == "too small":
        raise MeshError(planned.advice)
    if memory is not None and config.resident == "auto" and planned.pool_bytes is not None:
        config = config.replace(resident=planned.pool_bytes)
    peak = _PeakMemory()
    try:
        begin = time.perf_counter()
        model = open_model(folder, config)
        opened = time.perf_counter() - begin
        clock, counted, misses = _generate(model, prompt, tokens)
    finally:
        peak.stop()
    steps = clock.steps()
    paces = steps if counted.speculation is None else _means(steps, _AVERAGED_TOKENS)
    fast, slow = _tenths(paces)
    decode = counted.decode
    read = decode.bytes_read / len(steps)
    used = sizes.shape.layers * sizes.shape.top_k * sizes.expert_bytes
    through = None
    if sizes.dense_bytes_per_token is not None:
        through = memory_speed() / (used + sizes.dense_bytes_per_token)
    return Measured(
        folder=str(folder),
        prompt_tokens=len(prompt),
        decoded_tokens=tokens,
        open_seconds=opened,
        prefill_seconds=clock.prefill(),
        prefill_tokens_per_second=len(prompt) / clock.prefill(),
        step_seconds=tuple(steps),
        tokens_per_second=1 / statistics.median(paces),
        tokens_per_second_p10=1 / slow,
        tokens_per_second_p90=1 / fast,
        hit_rate=decode.hit_rate,
        stall_fraction=decode.stall_seconds / sum(steps),
        prefill_stall_fraction=counted.prefill.stall_seconds / clock.prefill(),
        bytes_per_token=read,
        peak_bytes=peak.bytes,
        limits=Limits(disk=speeds.disk / read if speeds is not None and read else None, memory=through),
        plan=planned,
        stats=counted,
        misses=misses,
    )


def _means(steps: Sequence[float], count: int) -> list[float]:
    """The mean of each ``count`` steps, since a forward that verifies drafts gives several tokens."""
    runs = [steps[first : first + count] for first in range(0, len(steps), count)]
    return [statistics.fmean(run) for run in runs]


def _generate(model: Any, prompt: Sequence[int], tokens: int) -> tuple[_Clock, Stats, tuple[Miss, ...]]:
    ids = torch.tensor([list(prompt)], device=model.device)
    engine = next(patched_modules(model))._mesh_pool.engine
    clock = _Clock(lambda: engine.record_misses(_MAX_MISSES))
    reset_stats(model)
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
    )
    return clock, stats(model), _misses(engine.misses())


def _misses(rows: np.ndarray) -> tuple[Miss, ...]:
    """Convert the rows of ``_C.Engine.misses()``."""
    first = rows[:, 2].min(initial=np.iinfo(np.int64).max)
    times = [[(each - first) / 1e9 if each else None for each in row] for row in rows[:, 2:].tolist()]
    return tuple(Miss(layer, expert, *own) for (layer, expert), own in zip(rows[:, :2].tolist(), times, strict=True))


class _Clock:
    """A streamer that records the time of the prompt and of each token, and calls ``after_prompt``."""

    def __init__(self, after_prompt: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._after_prompt = after_prompt

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 2:  # the prompt, its first token
            self._after_prompt()

    def end(self) -> None:
        pass

    def prefill(self) -> float:
        return self.times[1] - self.times[0]

    def steps(self) -> list[float]:
        return [end - begin for begin, end in zip(self.times[1:], self.times[2:], strict=False)]


def _tenths(values: Sequence[float]) -> tuple[float, float]:
    """The first and the last decile."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


class _PeakMemory:
    """The peak of this process's anonymous memory, seen by a thread."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._ended = Flag()
        self._thread = BackgroundThread(self._look, "torch_mesh memory")

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())

    def stop(self) -> None:
        self._ended.set()
        self._thread.end()
