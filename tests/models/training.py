"""A few steps of training: of transformers' Trainer on a text that is quickly learned, and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

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


def train(model: nn.Module, ids: torch.Tensor, steps: int = 8) -> list[float]:
    """The losses of training steps on one text."""
    # Without weight decay, which would change parameters without gradients, too.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_gradients(first: PreTrainedModel, second: PreTrainedModel) -> None:
    embeddings = torch.randn(1, 4, first.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    losses = (model(inputs_embeds=embeddings).logits.float().logsumexp(-1).sum() for model in (first, second))
    assert torch.equal(*(torch.autograd.grad(loss, embeddings)[0] for loss in losses))
