"""A model is patched, or opened, as a whole or not at all: what takes everything back when that does not come to its
end."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import MeshConfig
from ..errors import StoreError
from ..hf.kv_cache import uninstall_caches
from ..hf.model_config import clear_config_metadata, set_config_metadata
from ..hf.saving import PatchedModelQuantizer, attach_quantizer
from ..models.families import ExpertsLayer
from ..modules.experts import restored_parameters
from ..pool.expert_pool import ExpertPool
from ..pool.row_tables import RowTables
from ..store.folders import partial_path
from ..store.writer import remove_made_from
from ..system.memory import shortage

_Closed = TypeVar("_Closed", ExpertPool, RowTables)


class Undo:
    """What has been made for a model that nobody has yet, and that goes with the error: its pools."""

    keeps_originals = False  # whether parameters that are replaced stay in memory until the end

    def __init__(self) -> None:
        self._pools: list[ExpertPool | RowTables] = []

    def closing(self, pool: _Closed) -> _Closed:
        """Notes a pool, or tables, to be closed."""
        self._pools.append(pool)
        return pool

    def free(self, layer: ExpertsLayer, device: torch.device) -> None:
        """Lets go of the parameters of a layer that is installed; they were on ``device``."""

    def roll_back(self) -> None:
        """Makes the model what it was."""

    def clean_up(self) -> None:
        """Removes what was made; all of it, whatever happens to one."""
        with contextlib.ExitStack() as stack:
            for pool in self._pools:  # at once: frames that an error keeps alive refer to them
                stack.callback(pool.close)


class PatchUndo(Undo):
    """What a model that somebody has was before, and what has been made for it since: pools, and stores.

    It keeps the parameters that are replaced, so that the very same come back; but for layers whose parameters were
    freed, which get their values from their pool. What it keeps is in memory until patching has ended, beside the pool:
    ``pool_slots`` counts on it.
    """

    keeps_originals = True

    def __init__(self, model: nn.Module, config: MeshConfig) -> None:
        super().__init__()
        self._stores: list[tuple[Path, str]] = []
        self._model = model
        self.config = config
        self._before = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self._parameters: dict[Any, dict[str, Any]] = {
            module: dict(module._parameters) for module, _, _ in self._before
        }
        self._freed: dict[Any, tuple[Any, torch.device]] = {}

    def free(self, layer: ExpertsLayer, device: torch.device) -> None:
        self._freed[layer.module] = layer, device
        del self._parameters[layer.module]

    def new_store(self, folder: Path) -> str:
        """Notes a store that is about to be written; returns the fingerprint by which it is known there, and that no
        other has."""
        fingerprint = secrets.token_hex(16)
        self._stores.append((folder, fingerprint))
        return fingerprint

    def roll_back(self) -> None:
        """But where there is no room for originals that were freed, those layers stay in their pool."""
        freed = [known for module, known in self._freed.items() if module not in self._parameters]
        rounded = [layer.module._mesh_pool.weights for layer, _ in freed if not layer.module._mesh_pool.exact]
        needed = sum(layer.nbytes for layer, device in freed if device.type == "cpu")
        left = shortage(needed)
        stay = {layer.module for layer, _ in freed} if left is not None else set()
        around = {layer.block for layer, _ in freed if layer.module in stay}
        if not stay:
            for layer, device in freed:
                self._parameters[layer.module] = {**layer.module._parameters, **restored_parameters(layer, device)}
        clear_config_metadata(self._model)
        uninstall_caches(self._model)
        for module, cls, attributes in self._before:
            if module in stay or module in around:
                continue
            module.__class__ = cls
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            module._parameters.clear()
            module._parameters.update(self._parameters[module])
        # Warnings at last, since one may be an error.
        if stay:
            self._go_on_with(stay)
            lossy = ", lossy=True" if rounded else ""
            warnings.warn(
                f"Patching ended early, and there is no room to take it back: {len(stay)} layers of experts are in "
                "the pool alone, their "
                f"originals would take {needed:,} bytes, and {left:,} are free. Those layers stay patched, and the "
                "model runs: free some "
                f"memory and call torch_mesh.unpatch(model{lossy}), or save it, or go on with it.",
                stacklevel=6,
            )
        elif rounded:
            warnings.warn(
                f"Patching ended early. The originals of {len(rounded)} layers of experts had been freed, which have "
                "weights rounded to "
                f"{rounded[0]} now: load the model anew to have the originals.",
                stacklevel=6,
            )

    def _go_on_with(self, stay: set[nn.Module]) -> None:
        """Makes the model one of which ``stay`` is patched, and nothing beside those."""
        for module in stay:
            any_module: Any = module
            any_module._mesh_deferred = 0  # what one defers may have nobody to add it
            any_module._mesh_pool.lossy = ""
        self._pools.clear()
        self._stores.clear()
        config = self.config.replace(
            dense="none", attention="model", speculation="off", lossy={"deferred_experts": 0, "routing_bias": 0.0}
        )
        attach_quantizer(self._model, PatchedModelQuantizer(config, pre_quantized=False))
        set_config_metadata(self._model, config)

    def clean_up(self) -> None:
        with contextlib.ExitStack() as stack:
            for folder, fingerprint in self._stores:
                stack.callback(_remove_store, folder, fingerprint)
            stack.callback(super().clean_up)


@contextlib.contextmanager
def undone_on_error(undo: Undo) -> Iterator[Undo]:
    """Within, whatever ends it, Ctrl-C included, takes everything back."""
    try:
        yield undo
    except BaseException:
        try:
            with _uninterrupted():
                undo.roll_back()
        finally:
            undo.clean_up()  # Ctrl-C ends it: a pool may wait for its reads, and a store for another process
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


def _remove_store(folder: Path, fingerprint: str) -> None:
    try:
        remove_made_from(folder, fingerprint)
    except (OSError, StoreError) as error:
        warnings.warn(
            f"Patching ended early, and what it has written cannot be removed ({error}). Remove {folder} and "
            f"{partial_path(folder)}, as far as they are there.",
            stacklevel=2,
        )
