"""Roll back a model that an error or Ctrl-C left partially patched or opened."""

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

from torch_mesh.config import MeshConfig
from torch_mesh.errors import StoreError
from torch_mesh.hf.kv_cache import uninstall_caches
from torch_mesh.hf.model_config import clear_config_metadata, set_config_metadata
from torch_mesh.hf.saving import PatchedModelQuantizer, attach_quantizer
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.modules.experts import restored_parameters
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.pool.row_tables import RowTables
from torch_mesh.store.folders import partial_path
from torch_mesh.store.writer import remove_made_from
from torch_mesh.system.memory import shortage

_Closed = TypeVar("_Closed", ExpertPool, RowTables)


class Undo:
    """Roll back a model that is being opened: close its pools. The partial model is discarded with the error."""

    keeps_originals = False  # whether replaced parameters stay in memory until the end

    def __init__(self) -> None:
        self._pools: list[ExpertPool | RowTables] = []

    def closing(self, pool: _Closed) -> _Closed:
        """Register a pool, or tables, to be closed."""
        self._pools.append(pool)
        return pool

    def free(self, layer: ExpertsLayer, device: torch.device) -> None:
        """Free the original parameters of an installed layer, which were on ``device``."""

    def roll_back(self) -> None:
        """Restore the model."""

    def clean_up(self) -> None:
        """Remove everything that was made, also if removing one part fails."""
        with contextlib.ExitStack() as stack:
            for pool in self._pools:  # explicitly: the traceback refers to them
                stack.callback(pool.close)


class PatchUndo(Undo):
    """Roll back a loaded model: restore its modules, close its pools and remove its new stores.

    Keeps the replaced parameters until patching has ended. Layers whose parameters were freed get their values from
    their pool.
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
        """Register a store before it is written, and return a unique fingerprint that identifies it."""
        fingerprint = secrets.token_hex(16)
        self._stores.append((folder, fingerprint))
        return fingerprint

    def roll_back(self) -> None:
        """Restore the model. If there is no memory for originals that were freed, those layers stay patched."""
        freed = [known for module, known in self._freed.items() if module not in self._parameters]
        rounded = [layer.module._mesh_pool.weights for layer, _ in freed if not layer.module._mesh_pool.exact]
        needed = sum(layer.nbytes for layer, device in freed if device.type == "cpu")
        left = shortage(needed)
        still_patched = {layer.module for layer, _ in freed} if left is not None else set()
        around = {layer.block for layer, _ in freed if layer.module in still_patched}
        if not still_patched:
            for layer, device in freed:
                self._parameters[layer.module] = {**layer.module._parameters, **restored_parameters(layer, device)}
        clear_config_metadata(self._model)
        uninstall_caches(self._model)
        for module, cls, attributes in self._before:
            if module in still_patched or module in around:
                continue
            module.__class__ = cls
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            module._parameters.clear()
            module._parameters.update(self._parameters[module])
        # Warnings come last, since a filter may make them errors.
        if still_patched:
            self._keep_patched(still_patched)
            lossy = ", lossy=True" if rounded else ""
            warnings.warn(
                f"Patching ended early, and memory is short to undo it: {len(still_patched)} layers of experts are "
                f"only in the pool, their originals take {needed:,} bytes, and {left:,} are free. Those layers stay "
                f"patched, and the model runs. Free memory and call torch_mesh.unpatch(model{lossy}), or save or use "
                "the model.",
                stacklevel=6,
            )
        elif rounded:
            warnings.warn(
                f"Patching ended early. The originals of {len(rounded)} layers of experts had been freed, so that "
                f"their weights are rounded to {rounded[0]} now: load the model again to have the originals.",
                stacklevel=6,
            )

    def _keep_patched(self, still_patched: set[nn.Module]) -> None:
        for module in still_patched:
            any_module: Any = module
            any_module._mesh_deferred = 0  # the next layer may not be patched and cannot add deferred products
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
    """Roll back if the body ends with an error or Ctrl-C."""
    try:
        yield undo
    except BaseException:
        try:
            with _uninterrupted():
                undo.roll_back()
        finally:
            undo.clean_up()  # interruptible: a pool may wait for reads, and a store for another process
        raise


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay a second Ctrl-C, which would leave a partially restored model."""
    # Only the main thread gets signals, and a handler set by C code cannot be restored.
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
            f"Patching ended early, and its store cannot be removed ({error}). Remove {folder} and "
            f"{partial_path(folder)}, if they exist.",
            stacklevel=2,
        )
