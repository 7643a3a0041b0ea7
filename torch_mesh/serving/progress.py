"""The progress of a long prompt: the fraction of MoE layers that are computed."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

from torch_mesh.modules.experts import patched_modules

_LOG = logging.getLogger(__name__)
_EVERY = 10.0  # seconds between two lines of the log


class Progress:
    """The progress of a model's current prompt. Its attributes can be read from any thread.

    Args:
        model: patched.
        counts: count layers by hooks. They are removed with the first token, before steps are compiled.
    """

    def __init__(self, model: Any, counts: bool) -> None:
        # Weak: FastAPI keeps metrics, and so this object, until the process ends.
        self._modules = weakref.WeakSet(patched_modules(model) if counts else ())
        self._handles: list[Any] = []
        self._done = 0
        self._logged_at = 0.0
        self.tokens = 0  # of the current prompt; 0: there is none

    @property
    def fraction(self) -> float:
        """The computed fraction of the current prompt, from 0 to 1."""
        return min(1.0, self._done / len(self._modules)) if self._modules else 0.0

    @contextlib.contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Count from here to ``end``, or to the end of the block."""
        self._done, self._logged_at, self.tokens = 0, time.monotonic(), tokens
        self._handles = [module.register_forward_hook(self._count) for module in self._modules]
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        self.tokens = 0
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def describe(self) -> str:
        if not self.tokens:
            return "waiting"
        read = f", {self.fraction:.0%} done" if self._modules else ""
        return f"reading a prompt of {self.tokens:,} tokens{read}"

    def _count(self, *_: Any) -> None:
        self._done += 1
        if time.monotonic() - self._logged_at > _EVERY:
            self._logged_at = time.monotonic()
            _LOG.info("%s", self.describe())
