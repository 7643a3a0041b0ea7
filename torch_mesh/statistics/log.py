"""Statistics as lines of JSON in a file, every so many forwards, written by a thread."""

from __future__ import annotations

import json
import os
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch_mesh import _C
from torch_mesh.errors import PoolClosedError
from torch_mesh.formats import FORMATS
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.statistics.counters import engine_stats
from torch_mesh.statistics.machine import describe_machine
from torch_mesh.statistics.snapshot import take_snapshot
from torch_mesh.system.atomic_files import FILE_MODE
from torch_mesh.system.background import BackgroundThread

if TYPE_CHECKING:
    from torch_mesh.pool.expert_pool import ExpertPool

# The thread's longest sleep; closing the engine wakes it at once.
_PATIENCE_SECONDS = 3600.0


class StatsLog:
    """Append a line to ``path`` each time that ``layer``, the model's last, has ended ``every`` more forwards.

    A line is ``Stats.to_dict(experts=False)`` with ``time`` (seconds since 1970), ``forward`` (ended forwards), ``run``
    (unique to the engine) and a ``Snapshot``. A thread writes it: lines are skipped if forwards are faster; the first
    failed write is warned of. Ends with the engine.
    """

    def __init__(
        self,
        engines: Sequence[_C.Engine],
        layer: int,
        every: int,
        path: str,
        lossy: str,
        expert_range: ExpertRange | None,
        about: Mapping[str, str],
    ) -> None:
        self._engines = engines
        self._layer = layer
        self._every = every
        self._path = path
        self._lossy = lossy
        self._expert_range = expert_range
        self._about = about
        self._name = secrets.token_hex(8)
        self._warned = False
        self._cut_short = False  # the last line is incomplete
        self.thread = BackgroundThread(self._run, "torch_mesh statistics")

    def _run(self) -> None:
        engine = self._engines[0]
        try:
            ended = engine.forwards(self._layer)
            while True:
                goal = (ended // self._every + 1) * self._every
                reached = engine.wait_for_forwards(self._layer, goal, _PATIENCE_SECONDS)
                ended = engine.forwards(self._layer)
                if reached:
                    stats = engine_stats(
                        [self._engines], experts=False, lossy=self._lossy, expert_range=self._expert_range
                    )
                    counted = stats.to_dict(experts=False)
                    now = take_snapshot(self._engines, len(stats.per_layer), self._about).to_dict()
                    self._write({"time": time.time(), "forward": ended, "run": self._name} | now | counted)
        except PoolClosedError:
            pass

    def _write(self, line: dict[str, object]) -> None:
        text = ("\n" if self._cut_short else "") + json.dumps(line) + "\n"
        data = text.encode()
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                written = os.write(file, data)
            finally:
                os.close(file)
            if written > 0:
                self._cut_short = written < len(data)
            if written < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"Statistics cannot be written to {self._path}: {error}. This is said once.",
                    RuntimeWarning,
                    stacklevel=2,
                )


def start_log(pool: ExpertPool, model: str, layer_indices: Sequence[int], *, file: str, every: int) -> None:
    """Log the statistics of ``pool`` to ``file`` every so many forwards, until it is closed.
    ``layer_indices``: the pool's layers that run.

    Raises MemoryError if no thread can be started.
    """
    group = f", groups of {pool.group_size}" if FORMATS[pool.weights].chosen_groups else ""
    about = {
        "model": model,
        "format": f"{pool.weights}{group}",
        "policy": str(pool.engine.describe()["policy"]),
        "machine": describe_machine(),
    }
    engines = [each.engine for each in pool.with_fallback]  # not the pool, which ends with its last reference
    file = os.path.abspath(file)  # the program may change its folder
    own_file = file if pool.expert_range is None else pool.expert_range.own_file(file)
    log = StatsLog(engines, layer_indices[-1], every, own_file, pool.lossy, pool.expert_range, about)
    pool.end_with(log.thread)
