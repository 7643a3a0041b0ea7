"""A few steps of transformers' Trainer on a text with a pattern that is quickly learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

STEPS = 4
ROWS = [(torch.arange(12) + start) % 5 + 3 for start in range(8)]
TEXT: Any = [{"input_ids": row, "labels": row} for row in ROWS]


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            control.should_training_stop = True


def trainer_for(model: Any, folder: Path, callbacks: list[TrainerCallback] | None = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    arguments = TrainingArguments(str(folder), **(settings | options))
    return Trainer(model=model, args=arguments, train_dataset=TEXT, eval_dataset=TEXT, callbacks=callbacks)
