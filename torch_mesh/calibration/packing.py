"""Calibrated records of a checkpoint's experts."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from torch_mesh import _C
from torch_mesh.calibration import CALIBRATE_TOKENS
from torch_mesh.calibration.collecting import collect, text_documents, text_sequences
from torch_mesh.calibration.moments import METHOD, InputMoments, Moments, blended, feedback_of, in_batches, sample_of
from torch_mesh.calibration.rows import LayerRows, RowFiles
from torch_mesh.errors import MeshError
from torch_mesh.models.families import ExpertsLayer, ExpertTensors, apply_gate, find_experts
from torch_mesh.store.checkpoint import CheckpointExperts
from torch_mesh.store.header import store_error
from torch_mesh.store.manifest import Calibration
from torch_mesh.store.store_plan import Scratch

if TYPE_CHECKING:
    from torch_mesh.store.convert import Calibrate

_LOG = logging.getLogger(__name__)


def on_text(text: str | os.PathLike[str], tokens: int = CALIBRATE_TOKENS) -> Calibrate:
    """The ``calibrate`` of ``convert``: by a text (a plain file, or .jsonl with a ``text`` in each line).

    Raises as ``text_documents`` does, before ``convert`` downloads a model.
    """
    text_documents(os.fspath(text), tokens)

    def calibrate(experts: CheckpointExperts, model: PreTrainedModel, weights: str, group_size: int) -> Calibrator:
        return Calibrator(experts, model, os.fspath(text), tokens, weights, group_size)

    return calibrate


class Calibrator:
    """Pack the experts of a checkpoint by the first ``tokens`` tokens of the file ``text``. ``model`` is on the meta
    device.

    Raises MeshError and OSError for unusable texts, before anything is written.
    """

    def __init__(
        self,
        experts: CheckpointExperts,
        model: PreTrainedModel,
        text: str,
        tokens: int,
        weights: str,
        group_size: int,
    ) -> None:
        self._experts = experts
        self._layers = layers = find_experts(model)
        self._weights, self._group_size = weights, group_size
        self._sequences = text_sequences(experts.folder, text, tokens, _longest(model.config))
        shape = experts.shape
        # If the surrounding module is replaced, each choice of a token is a row of its own, times its routing weight.
        top_k, rows_per_token = (shape.top_k, 1) if layers[0].block is None else (1, shape.top_k)
        self._files = RowFiles(shape.layers, top_k, shape.hidden, self._sequences.numel(), rows_per_token)
        self._folder: Path | None = None  # the folder of the rows, once they are complete
        self._seen: dict[int, _SeenLayer] = {}  # the last two layers, which may be packed at the same time
        self._lock = threading.Lock()

    @cached_property
    def calibration(self) -> Calibration:
        """The entry for the store's manifest."""
        return Calibration(
            text=hashlib.blake2b(self._sequences.numpy().tobytes(), digest_size=16).hexdigest(),
            tokens=self._sequences.numel(),
            sequence_length=self._sequences.shape[1],
            method=METHOD,
        )

    @property
    def scratch(self) -> Scratch:
        return Scratch(self._files.names, self._files.bytes, self._collect)

    def _collect(self, folder: Path, done: Callable[[int], None]) -> None:
        rows = collect(self._experts.folder, self._sequences, self._files, folder, done)
        if missed := [self._layers[layer].path for layer, count in enumerate(rows) if not count]:
            _LOG.warning("No token of the text runs through %s: packed without calibration.", ", ".join(missed))
        self._folder = folder

    def pack(self, layer: int, expert: int) -> torch.Tensor:
        """One expert's record, uint8 [record bytes]."""
        tensors = self._experts.read_expert(layer, expert)
        for name, part in tensors._asdict().items():
            if part is not None and not bool(torch.isfinite(part).all()):
                raise store_error(
                    self._experts.folder,
                    f"{name} of expert {expert} in {self._layers[layer].path} is not finite: convert without "
                    "calibration",
                )
        try:
            hidden, intermediate = self._layer_seen(layer).moments(
                self._layers[layer], expert, tensors, *_C.calibration_order(self._weights)
            )
        except MeshError as problem:
            raise MeshError(f"{self._layers[layer].path}, expert {expert}: {problem}") from None
        return pack_calibrated(tensors, hidden, intermediate, self._weights, self._group_size)

    def _layer_seen(self, layer: int) -> _SeenLayer:
        assert self._folder is not None
        with self._lock:  # threads must not compute it twice
            if layer not in self._seen:
                self._seen = {layer: _SeenLayer(self._files.read(self._folder, layer))} | dict(
                    [*self._seen.items()][:1]
                )
            return self._seen[layer]


def _longest(config: Any) -> int | None:
    """The longest sequence the model has positions for; None if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def pack_calibrated(
    tensors: ExpertTensors, hidden: InputMoments, intermediate: InputMoments, weights: str, group_size: int
) -> torch.Tensor:
    """One expert's packed record, uint8 [record bytes]: ``hidden`` is the input of gate and up, ``intermediate`` that
    of down."""
    return torch.ops.torch_mesh.pack_calibrated(
        *tensors,
        hidden.feedback,
        hidden.importance,
        intermediate.feedback,
        intermediate.importance,
        weights,
        group_size,
    )


class _SeenLayer:
    """The recorded inputs of one layer's experts."""

    def __init__(self, rows: LayerRows) -> None:
        self._rows = rows
        self._sample = rows.hidden[sample_of(len(rows.hidden))].float()
        every = Moments(rows.hidden.shape[1])
        ones = torch.ones(len(rows.hidden))
        in_batches(rows.hidden, torch.arange(len(ones)), ones, every.add)
        self._shared = every.mean()

    def moments(
        self, layer: ExpertsLayer, expert: int, tensors: ExpertTensors, streams: int, step: int
    ) -> tuple[InputMoments, InputMoments]:
        """The moments for gate and up, and for down, in a format's ``_C.calibration_order``."""
        tokens, choice = (self._rows.ids == expert).nonzero(as_tuple=True)
        routing = self._rows.weights[tokens, choice].square()
        hidden, intermediate = Moments(layer.hidden), Moments(layer.intermediate)
        gate_up = _gate_up(tensors)

        def seen_by_down(rows: torch.Tensor) -> torch.Tensor:
            return apply_gate(layer.module, torch.nn.functional.linear(rows, *gate_up))

        def use(rows: torch.Tensor, weights: torch.Tensor) -> None:
            hidden.add(rows, weights)
            intermediate.add(seen_by_down(rows), weights)

        in_batches(self._rows.hidden, tokens, routing, use)
        of_sample = Moments(layer.intermediate)
        of_sample.add(seen_by_down(self._sample), torch.ones(len(self._sample)))
        return (
            feedback_of(blended(hidden, self._shared), streams, step),
            feedback_of(blended(intermediate, of_sample.mean()), streams, step),
        )


def _gate_up(tensors: ExpertTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate first, in fp32, and the biases."""
    weights = [part.float() for part in (tensors.gate, tensors.up) if part is not None]
    biases = [part.float() for part in (tensors.gate_bias, tensors.up_bias) if part is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None
