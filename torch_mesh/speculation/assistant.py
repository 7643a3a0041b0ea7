"""Drafts of a smaller model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_mesh import _C
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.speculation.drafter import Drafter
from torch_mesh.speculation.linear_attention import is_linear
from torch_mesh.speculation.rewinding import Rewinding
from torch_mesh.speculation.suitability import new_cache, standalone_unsupported_reason

_STEP = _C.MAX_DECODE_ROWS  # tokens per forward of the large model: those drafted, and the next one


def check_assistant(model: Any) -> None:
    """Raises ValueError for a model that cannot draft."""
    if reason := _unsupported_reason(model):
        raise ValueError(
            f"assistant={type(model).__name__} cannot draft: {reason}. Give a smaller causal language model with the "
            "same tokenizer."
        )


def _unsupported_reason(model: Any) -> str:
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        return "it is no model of transformers that generates"
    base = _without_adapters(model)
    if reason := standalone_unsupported_reason(base):
        return reason
    if any(map(is_linear, new_cache(base).layers)):
        return "it has linear attention, whose state rewinds by one forward only"
    return ""


def _without_adapters(model: Any) -> Any:
    """The model inside, since PEFT's forward hides the signature."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Assistant(Drafter):
    def __init__(self, model: Any, tokens: Iterable[int] = ()) -> None:
        self._model = model
        self._text = list(tokens)
        self._read: list[int] = []  # cached tokens
        self._agreed = 0  # how many of the cached tokens are known to equal the text's
        self._cache: Any = new_cache(model)
        self._rewinding: Rewinding | None = None  # after the first forward
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        # Learned positions end at this length, and rotary ones degrade beyond it.
        self._longest: int = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", sys.maxsize)
        takes = inspect.signature(_without_adapters(model).forward).parameters
        self._last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    @property
    def is_behind(self) -> bool:  # type: ignore[override]
        return len(self._text) - self._common() > _STEP

    def extend(self, tokens: Iterable[int]) -> None:
        self._text += tokens

    def draft(self, length: int) -> Sequence[int]:
        if not length or len(self._text) + length > self._longest:
            return ()
        common = self._common()
        new = self._text[common:]
        if any(token >= self._vocabulary for token in new):  # unknown to this tokenizer
            return ()
        self._rewind(len(self._read) - common)
        drafted: list[int] = []
        while len(drafted) < length:
            new = [self._next(new)]
            drafted += new
        return drafted

    def _common(self) -> int:
        """How many tokens of the text are cached. At least one is left to compute."""
        limit = min(len(self._read), len(self._text) - 1)
        while self._agreed < limit and self._read[self._agreed] == self._text[self._agreed]:
            self._agreed += 1
        return self._agreed

    def _rewind(self, tokens: int) -> None:
        if self._rewinding is not None:
            self._rewinding.rewind(tokens)
            del self._read[len(self._read) - tokens :]

    def _next(self, tokens: list[int]) -> int:
        ids = torch.tensor([tokens], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=True, **{CACHE_NAME: self._cache}, **self._last).logits
        if self._rewinding is None:
            self._rewinding = Rewinding(self._model, self._cache)
        self._read += tokens
        return int(logits[0, -1].argmax())
