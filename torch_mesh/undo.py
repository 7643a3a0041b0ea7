"""A model is patched as a whole or not at all: what takes everything back when patching does not come to its end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .announce import withdraw
from .families import ExpertsLayer
from .modules import unpacked_parameters
from .pool import ExpertPool


class Undo:
    """What a model was before, and what has been made for it since: ``pools``, and named ``stores``.

    It keeps the parameters that are replaced, so that the very same come back; but for layers whose parameters were freed, which get their
    values from their pool.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pools: list[ExpertPool] = []
        self.stores: list[Path] = []
        self._model = model
        self._before = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self._parameters: dict[Any, dict[str, Any]] = {
            module: dict(module._parameters) for module, _, _ in self._before
        }
        self._freed: dict[Any, tuple[Any, torch.device]] = {}

    def free(self, layer: ExpertsLayer, device: torch.device) -> None:
        """Lets go of the parameters of a layer that is installed; they were on ``device``."""
        self._freed[layer.module] = layer, device
        del self._parameters[layer.module]

    def take_back(self) -> None:
        freed = [known for module, known in self._freed.items() if module not in self._parameters]
        for layer, device in freed:
            self._parameters[layer.module] = _unpacked(layer, device)
        rounded = [layer.module._mesh_pool.weights for layer, _ in freed if not layer.module._mesh_pool.exact]
        if rounded:
            warnings.warn(
                f"Patching ended early. The originals of {len(rounded)} layers of experts had been freed, which have weights rounded to "
                f"{rounded[0]} now: load the model anew to have the originals.",
                stacklevel=4,
            )
        withdraw(self._model)
        for module, cls, attributes in self._before:
            module.__class__ = cls
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            module._parameters.clear()
            module._parameters.update(self._parameters[module])
        for pool in self.pools:  # at once: frames that an error keeps alive refer to them
            pool.close()
        for folder in self.stores:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[Undo]:
    """Within, whatever ends patching, Ctrl-C included, makes ``model`` what it was."""
    undo = Undo(model)
    try:
        yield undo
    except BaseException:
        with _uninterrupted():
            undo.take_back()
        raise


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C waits, or it would leave a model of which half is taken back."""
    # Only the main thread gets it, and a handler that C code has set cannot be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    waiting: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def _unpacked(layer: ExpertsLayer, device: torch.device) -> dict[str, Any]:
    module: Any = layer.module
    values = unpacked_parameters(layer, device)
    return {
        name: nn.Parameter(values[name], requires_grad=module._mesh_parameters[name]) if name in values else parameter
        for name, parameter in module._parameters.items()
    }
