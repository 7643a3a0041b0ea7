"""A model's decode steps with static buffers, run eagerly or captured in a CUDA graph and replayed."""

from __future__ import annotations

from typing import Any

import card
import torch
from torch import Tensor
from transformers import StaticCache

import torch_mesh


class DecodeSteps:
    """Decodes one sequence of at most ``max_tokens`` tokens, one a step.

    transformers' StaticCache counts its tokens on the device, so that a captured step continues after the last one.
    Steps return float logits [vocabulary]. Those of ``replay`` are in a buffer that the next step overwrites.
    """

    def __init__(self, model: Any, max_tokens: int) -> None:
        self.model = model
        self.device = model.device
        self.ids = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self._replay: Any = None
        self._replayed: Tensor | None = None  # the buffer that a replay writes

    def reset(self) -> None:
        """Forgets the sequence."""
        self.cache.reset()

    @torch.no_grad()
    def eager(self, token: Tensor) -> Tensor:
        self.ids.copy_(token)
        return self._run()

    @torch.no_grad()
    def capture(self) -> None:
        """Capture the graph that ``replay`` launches, for a model with experts on the device, and forget the
        sequence."""
        torch_mesh.set_capture_batch_sizes(self.model, [1])
        self._replay = card.captured(self.device, self._run_for_replays)
        self.reset()

    @torch.no_grad()
    def replay(self, token: Tensor) -> Tensor:
        self.ids.copy_(token)
        self._replay()
        assert self._replayed is not None
        return self._replayed

    def _run_for_replays(self) -> None:
        self._replayed = self._run()

    def _run(self) -> Tensor:
        output = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float()
