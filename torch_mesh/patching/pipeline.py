"""How a model's experts come into a pool: the one sequence of ``patch``, ``from_pretrained`` and ``Experts.from_store``.

What differs between them is an ``Origin``. A mode is a check in ``check`` or at the head of ``assemble``, and a step below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _C
from ..adapters.registration import watch as watch_peft
from ..config import MeshConfig
from ..gpu.choosing import check_gpu_weights, choose_experts
from ..gpu.placement import Placement
from ..gpu.placing import gpu_pool_bytes, move_experts, open_gpu_pool
from ..hf.attention import check_attention, take_attention
from ..hf.expert_parallel import Share
from ..hf.kv_cache import take_caches
from ..hf.model_config import announce
from ..hf.parallelism_checks import check_forwards
from ..hf.saving import PatchedModelQuantizer, attach_quantizer
from ..lossy.decoding import check_lossy, make_lossy
from ..lossy.fallback import check_fallback, split_pool
from ..models.families import ExpertsLayer, common_geometry, find_experts, pool_activations
from ..modules.dense import dense_bytes, pack_dense, take_products
from ..modules.experts import install
from ..modules.packed_weight import device_of
from ..pool.expert_pool import ExpertPool, least_slots, pool_slots
from ..pool.secondary_pool import Records, format_of, open_other, other_config
from ..pool.shared_pool import check_shared
from ..prefetch.lookahead import check_predictor, connect
from ..routing.profiles import check_profile
from ..speculation.models import check_speculation, take_speculation
from ..speculation.mtp import take_mtp
from ..statistics.log import start_log
from ..store.convert import checked_group_size, convert_model
from ..store.disk_cache import unnamed_folder
from ..store.progress import progress_bar
from .rollback import PatchUndo, Undo, undone_on_error
from .unpooled import announce_left_alone


class Origin:
    """Where the experts of a model come from.

    ``weights`` and ``group_size`` are those of the pool that is to be, ``exact`` as there. Its records have ``layers`` layers, of which the
    model's are ``places``; ``resident`` is a share of ``counted`` layers.
    """

    undo: Undo
    weights: str
    group_size: int
    exact: bool
    layers: int
    counted: int
    places: Sequence[int]
    share: Share | None = None  # of the model's experts, if it is one rank's
    only_format: str | None = None  # of all records at hand, if the originals are not
    freed: int = 0  # bytes that the model gives back when the pool is there
    staging: int = 0  # bytes that reading takes beside a pool

    def records(self, weights: str) -> contextlib.AbstractContextManager[Records]:
        """The experts in ``weights``, to be opened within: whoever has its files open keeps them."""
        raise NotImplementedError

    def check_other(self, weights: str) -> None:
        """Raises StoreError where a second pool cannot have records in another format."""

    def stays_in_memory(self, slots: int) -> bool:
        """Whether ``slots`` hold all that there is, and are filled with what the model has in its parameters."""
        return False


class OfRecords(Origin):
    """Experts that are read from where their records are; their model is nobody's yet."""

    def __init__(self, exact: bool, only_format: str | None = None) -> None:
        self.undo = Undo()
        self.exact = exact
        self.only_format = only_format

    def set_records(self, records: Records) -> None:
        """Those in the pool's format."""
        if self.share is not None:
            own = self.share.source_arguments(records.source_arguments)
            records = dataclasses.replace(records, source_arguments=own)
        self._records = records
        self.weights, self.group_size = records.weights, records.group_size
        self.layers = self.counted = records.layers
        self.places = records.places
        self.staging = _C.Source(**records.source_arguments).staging_bytes

    @property
    def stored(self) -> bool:
        """Whether a store has them."""
        return self._records.store is not None

    def records(self, weights: str) -> contextlib.AbstractContextManager[Records]:
        return contextlib.nullcontext(self._records if weights == self.weights else self.other_records(weights))

    def other_records(self, weights: str) -> Records:
        """Those in another format: found, or made."""
        raise NotImplementedError


class OfLoadedModel(Origin):
    """The experts of a model that is in memory."""

    def __init__(self, model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig) -> None:
        self._model = model
        self._config = config
        self._all = sum(layer.num_experts for layer in layers)
        parameters = (parameter for layer in layers for parameter in layer.parameters.values())
        self.freed = sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")
        self.weights = format_of(config)
        self.group_size = checked_group_size(self.weights, config.group_size)
        self.exact = self.weights == "bf16" and layers[0].dtype == torch.bfloat16
        self.layers = self.counted = len(layers)
        self.places = range(len(layers))
        self.undo: PatchUndo = PatchUndo(model, config)

    def stays_in_memory(self, slots: int) -> bool:
        return slots == self._all and self._config.store is None and self._config.io != "mmap"

    @contextlib.contextmanager
    def records(self, weights: str) -> Iterator[Records]:
        config = self._config if weights == self.weights else other_config(self._config, weights)
        with _store_folder(config) as folder:
            fingerprint = self.undo.new_store(folder)
            with progress_bar(f"Packing experts to {weights}") as progress:
                store = convert_model(
                    self._model,
                    folder,
                    weights,
                    config.group_size,
                    fingerprint=fingerprint,
                    private=config.store is None,
                    progress=progress,
                ).store
            yield Records.of_store(store, self.places)


def check(model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig, origin: Origin) -> None:
    """Raises what ``config`` cannot have with such a model, loaded or about to be: before anything is read or written for it."""
    check_shared(config, layers)
    check_attention(model, config)
    check_speculation(model, config)
    check_predictor(layers, config)
    check_profile(config, layers)
    check_lossy(model, layers, config)
    check_fallback(model, layers, config, origin.weights)
    check_gpu_weights(config, origin.only_format)
    # What cannot be had of these layers and the memory of now cannot be had of more layers and less memory.
    pool_slots(layers, config, stored_layers=len(layers), weights=origin.weights, group_size=origin.group_size)


def assemble(
    model: nn.Module,
    layers: list[ExpertsLayer],
    config: MeshConfig,
    origin: Origin,
    quantizer: PatchedModelQuantizer,
) -> None:
    """Patches a model that has passed ``check``, and all of whose weights but those of ``origin`` are where they stay.

    Whatever refuses does so before the first step; an error or Ctrl-C in a later one is for ``origin.undo``.
    """
    check_forwards(layers)
    check_predictor(layers, config, model)
    placement = choose_experts(model, layers, config, origin.weights, origin.group_size, origin.layers, origin.places)
    for_pool = placement.adjusted(config)
    if placement.needs_pool(origin.weights):
        origin.check_other(placement.weights)
    slots, stand_ins = _choose_slots(model, layers, config, origin, placement)
    watch_peft()
    with undone_on_error(origin.undo) as undo:
        pack_dense(model, layers, config)  # before the pool, which takes what memory is left
        gpu_pool = None
        if placement.needs_pool(origin.weights):
            with origin.records(placement.weights) as others:
                gpu_pool = undo.closing(open_gpu_pool(layers, config, others))
        pool = _open_pool(layers, for_pool, origin, placement, slots, stand_ins)
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        start_log(pool, config, name, origin.places)
        for layer, place in zip(layers, origin.places, strict=True):
            device = device_of(layer.module)
            if pool.in_memory:
                for expert in range(layer.num_experts):
                    pool.fill(place, expert, layer.expert(expert))
            install(layer, pool, place)
            if pool.in_memory:
                undo.free(layer, device)
        if not pool.in_memory:
            connect(model, layers, config)
        make_lossy(model, layers, config)
        take_products(model, layers, config)
        take_attention(model, config)
        take_caches(model)
        take_speculation(model, config)
        take_mtp(model, _patch_heads)
        move_experts(layers, pool, placement, gpu_pool)
        announce_left_alone(model, layers)
        attach_quantizer(model, quantizer)
        announce(model, config)


def _patch_heads(heads: nn.Module, config: MeshConfig) -> None:
    """MTP layers of a patched model, which transformers opens when it first drafts with them."""
    layers = find_experts(heads)
    origin = OfLoadedModel(heads, layers, config)
    check(heads, layers, config, origin)
    assemble(heads, layers, config, origin, PatchedModelQuantizer(config, pre_quantized=False))


def _choose_slots(
    model: nn.Module, layers: Sequence[ExpertsLayer], config: MeshConfig, origin: Origin, placement: Placement
) -> tuple[int, int]:
    """How many experts are resident, and how many stand-ins for others."""
    packed: Any = {"weights": origin.weights, "group_size": origin.group_size}
    dense_freed, dense_taken = dense_bytes(model, layers, config)
    kept = origin.undo.keeps_originals  # until the pool is there
    slots = pool_slots(
        layers,
        config,
        stored_layers=origin.counted,
        **packed,
        freed=origin.freed + (dense_freed if kept else 0),
        regained=0 if kept else dense_freed,
        staging=origin.staging + gpu_pool_bytes(layers, placement, origin.weights, config) + dense_taken,
    )
    if not origin.stays_in_memory(slots):
        slots = placement.cpu_slots(slots, origin.layers * layers[0].num_experts, least_slots(layers))
    return split_pool(layers, config, slots, stored_layers=origin.layers, **packed)


def _open_pool(
    layers: Sequence[ExpertsLayer],
    config: MeshConfig,
    origin: Origin,
    placement: Placement,
    slots: int,
    stand_ins: int,
) -> ExpertPool:
    fixed: Any = {
        "activations": pool_activations(layers, origin.places, origin.layers),
        "weights": origin.weights,
        "group_size": origin.group_size,
        "exact": origin.exact,
        "least_slots": least_slots(layers),
    }
    geometry = common_geometry(layers)
    if origin.stays_in_memory(slots):
        return origin.undo.closing(ExpertPool(geometry, origin.layers, slots, config, **fixed))
    fallback = None
    if stand_ins > 0:
        with origin.records(config.lossy.fallback) as low:
            fallback = open_other(layers, config, low, slots=stand_ins, least_slots=least_slots(layers))
            origin.undo.closing(fallback)
    with origin.records(origin.weights) as records:
        pool = ExpertPool(
            geometry,
            records.layers,
            slots,
            config,
            **fixed,
            source=_C.Source(**records.source_arguments),
            places=records.places,
            fallback=fallback,
            elsewhere=placement.elsewhere(records.layers, records.places),
            store=records.store,
            share=origin.share,
        )
        return origin.undo.closing(pool)


@contextlib.contextmanager
def _store_folder(config: MeshConfig) -> Iterator[Path]:
    if config.store is not None:
        yield Path(config.store)
        return
    with unnamed_folder() as folder:
        yield folder / "experts"
