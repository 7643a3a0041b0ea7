"""Asynchronous forwards of a layer."""

from __future__ import annotations

import atexit
import functools
import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.ops.device import DeviceLayer, find
from torch_mesh.ops.experts_split import SplitForward
from torch_mesh.system.background import TaskThreads

# Errors of a forward that ``result`` raises; KeyboardInterrupt is raised at once.
_ERRORS = (RuntimeError, ValueError, MemoryError)


class PendingExperts(ABC):
    """What ``torch_mesh.Experts.submit`` returns."""

    @abstractmethod
    def result(self) -> Tensor:
        """Wait for the layer's output, [tokens, hidden] in the dtype of ``x``. Every call returns the same.

        On a GPU the output belongs to the stream that was current at ``submit``; call ``result`` with that stream
        current, in one thread at a time, and before 64 further forwards of layers on that GPU begin. A long prompt
        counts as several. Later, ``result`` may raise the error of one of these, whose own output is then NaN without
        an error.

        Raises the error of this forward; on a GPU, ``submit`` raises a pending error of an earlier one.

        A forward captured by a CUDA graph is not waited for: ``torch_mesh.synchronize(model)`` raises errors of a
        replay.
        """


def submit(module: MeshExperts, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        raise ValueError("submit() records no gradients: call the layer, or submit under torch.no_grad().")
    if module._mesh_device == x.device:
        return _OnDevice(find(module._mesh_handle), x, topk_ids, topk_weights)
    return _OnWorker(module, x, topk_ids, topk_weights)


class _OnWorker(PendingExperts):
    """One worker thread of the process runs these in order; the op releases the GIL."""

    def __init__(self, module: MeshExperts, x: Tensor, *routing: Tensor) -> None:
        # Inputs on a GPU are copied in the order of the caller's stream; the current stream is that of a thread.
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        inference = torch.is_inference_mode_enabled()
        self._task = _worker(os.getpid()).submit(_run, inference, stream, module, x, *routing)

    def result(self) -> Tensor:
        return self._task.result()


def _run(inference: bool, stream: torch.cuda.Stream | None, module: MeshExperts, *inputs: Tensor) -> Tensor:
    with torch.inference_mode() if inference else torch.no_grad():
        if stream is None:
            return module(*inputs)
        with torch.cuda.stream(stream):
            return module(*inputs)


@functools.cache
def _worker(process: int) -> TaskThreads:
    """Keyed by process: threads do not survive a fork."""
    threads = TaskThreads(1)

    def end() -> None:
        if os.getpid() == process:
            threads.close()

    atexit.register(end)  # no forward may run while the interpreter ends
    return threads


class _OnDevice(PendingExperts):
    def __init__(self, layer: DeviceLayer, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        assert layer.shared is not None
        self._host = layer.shared.host
        self._captured = layer.shared.capturing()
        self._forward: SplitForward | None = None  # until it is finished
        self._ticket: int | None = None  # of a finished forward, until it has been waited for
        self._output: Tensor | None = None
        self._error: Exception | None = None
        try:
            with torch.no_grad():
                self._forward = SplitForward(x, topk_ids, topk_weights, layer)
        except _ERRORS as error:
            self._error = error

    def result(self) -> Tensor:
        if self._forward is not None:
            self._finish(self._forward)
        if self._ticket is not None:
            try:
                self._host.wait(self._ticket)
            except _ERRORS as error:
                self._error = error
            self._ticket = None
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def _finish(self, forward: SplitForward) -> None:
        # A forward cannot be finished twice. This error stays if Ctrl-C ends the call below.
        self._error = MeshError("An earlier result() of this forward was interrupted: submit the forward again.")
        self._forward = None
        ticket = None if self._captured else forward.ticket
        try:
            with torch.no_grad():
                self._output = forward.finish()
        except _ERRORS as error:
            self._error = error
        else:
            self._ticket = ticket
            self._error = None
