"""The figures of a patched model that transformers' Trainer logs while it trains."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from torch_mesh.adapters.report import describe_training
from torch_mesh.statistics.counters import Stats, counted_since
from torch_mesh.statistics.stats import stats


class MeshTrainerCallback(TrainerCallback):
    """``Trainer(..., callbacks=[torch_mesh.MeshTrainerCallback()])``: what trains, and the cost of reading experts in
    each log.

    Prints ``describe_training(model)`` when training begins. Each log gets, for the forwards and backwards since the
    last log, ``mesh_hit_rate`` (fraction of accesses that found a resident expert), ``mesh_read_gb`` and
    ``mesh_wait_seconds`` (time in which a forward had nothing to compute). Evaluation counts to the next log. Trainer's
    printed log and ``state.log_history`` have them; reporters such as W&B do not. Raises MeshError for a model that is
    not patched.
    """

    def __init__(self) -> None:
        self._before = Stats()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        assert model is not None
        self._before = stats(model)
        if state.is_world_process_zero:
            print(describe_training(model))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if model is None or logs is None:
            return
        now = stats(model)
        counted, self._before = counted_since(self._before, now), now
        found = {"mesh_read_gb": counted.bytes_read / 1e9, "mesh_wait_seconds": counted.stall_seconds}
        if counted.hit_rate is not None:
            found["mesh_hit_rate"] = counted.hit_rate
        found = {name: round(value, 4) for name, value in found.items()}
        logs.update(found)  # for the callbacks that follow
        if state.log_history:
            state.log_history[-1].update(found)
