"""The pool of a model's experts."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError, ReadTimeoutError
from torch_mesh.formats import FORMATS, short_name
from torch_mesh.models.expert_range import ExpertRange
from torch_mesh.models.families import ExpertsLayer, ExpertTensors, Geometry, common_geometry
from torch_mesh.ops.device import DeviceLayer, SharedDevice
from torch_mesh.pool.memory_guard import MemoryGuard
from torch_mesh.routing.profiles import pool_profile
from torch_mesh.store.convert import pack_expert, unpack_record
from torch_mesh.store.manifest import Store
from torch_mesh.system.background import BackgroundThread
from torch_mesh.system.memory import resident_slots

_LOG = logging.getLogger(__name__)


def pool_slots(
    layers: Sequence[ExpertsLayer],
    config: MeshConfig,
    *,
    stored_layers: int,
    weights: str,
    group_size: int,
    freed: int = 0,
    regained: int = 0,
    staging: int = 0,
) -> int:
    """The number of experts that stay resident by ``config.resident``, of ``stored_layers`` layers like ``layers``; of
    a rank, its own experts.

    ``freed``: bytes that are freed only when the pool is open; ``regained``: before. ``staging``: bytes beside the
    pool, such as buffers of raw records. All experts with ``config.shared``, whose owner sets the number.
    """
    if config.shared is not None:
        return stored_layers * layers[0].num_experts
    expert_range = layers[0].expert_range
    needed, every = min_slots(layers), stored_layers * layers[0].num_experts
    if isinstance(config.resident, float) and config.resident * every < needed:
        warnings.warn(
            f"resident={config.resident!r} of {every} experts is less than a token needs in one layer, so {needed} "
            f"stay resident: give at least {math.ceil(1e5 * needed / every) / 1e5:g}, or a size.",
            stacklevel=1,  # the same line for all callers, so that Python shows it once
        )
    return resident_slots(
        config.resident,
        layers=stored_layers,
        experts=layers[0].num_experts,
        top_k=needed,
        record_bytes=record_bytes(layers, weights, group_size),
        reserved=config.workspace_bytes + staging,
        freed=freed,
        regained=regained,
        available=None if expert_range is None else expert_range.free_bytes(),
        sharing=1 if expert_range is None else expert_range.neighbours,
    )


def record_bytes(layers: Sequence[ExpertsLayer], weights: str, group_size: int) -> int:
    """Bytes of a packed expert, with padding."""
    return _C.record_bytes(weights, group_size, *common_geometry(layers).sizes)


class ExpertPool:
    """The resident experts of a model's MoE layers.

    Deep copies of a model share its pool. The engine is closed with the last reference.

    Args:
        activations: of each layer; None if the layers run unfused, through grouped_linear.
        exact: unpacking gives the weights that the model would have without torch_mesh.
        source: of the records; None: ``fill`` puts all of them into memory.
        layer_indices: the pool's layers that run, in their order; None: all.
        min_slots: the experts of one token; the pool never shrinks below.
        fallback: a pool of the same layers in another format, which computes cold experts.
        on_gpu: bool [layers, experts]; experts that this pool need not hold: they are neither warmed nor pinned, and
            warming waits for ``engine.warm_up()``.
        store: the store of ``source``, if it is one. It may have been removed since.
        expert_range: the experts of this rank; None: all.
        identity: equal for pools with equal experts; None: drawn at random.
    """

    def __init__(
        self,
        geometry: Geometry,
        layers: int,
        slots: int,
        config: MeshConfig,
        *,
        activations: Sequence[str] | None,
        weights: str,
        group_size: int,
        exact: bool,
        source: _C.Source | None = None,
        layer_indices: Sequence[int] | None = None,
        min_slots: int = 1,
        fallback: ExpertPool | None = None,
        on_gpu: torch.Tensor | None = None,
        store: Store | None = None,
        expert_range: ExpertRange | None = None,
        identity: str | None = None,
    ) -> None:
        if config.shared is not None and source is None:
            raise ValueError(
                f"shared={config.shared!r} lends the experts of a converted folder, but these weights are in memory "
                "only: open the folder with from_pretrained."
            )
        if fallback is None:
            config = config.replace(lossy={"fallback": "none"})  # every expert has a slot
        self.geometry = geometry
        self.activations = activations
        self.layers = layers
        self.weights = weights
        self.group_size = group_size
        self.exact = exact
        self.top_k = min_slots
        self.lossy = config.lossy.modes
        self.unpooled = ""  # the model's experts outside the pool
        self.choice = ""  # why max_error chose its format
        self.fallback = fallback
        self.moves_from: ExpertPool | None = None  # the pool of another format whose records move to GPUs
        self.in_memory = source is None
        self.store = store
        self.identity = secrets.token_hex(16) if identity is None else identity
        self.expert_range = expert_range
        self.threads = config.thread_count
        self.timeout = config.residency.timeout
        self.mirrors = config.mirrors
        self.workspace = config.workspace_bytes
        self.device_layers: list[DeviceLayer] = []  # layers with experts on GPUs
        wants_guard = _wants_guard(config, source is not None)
        self.engine = self._open_engine(config, slots, source, layer_indices, on_gpu)
        self.slots = self.engine.describe_size()["slots"]
        self._threads: list[BackgroundThread] = []
        self.guarded = wants_guard
        guard = None
        try:
            if wants_guard:
                guard = MemoryGuard.of_this_process()
                guard.add(self.engine, 1 if expert_range is None else expert_range.neighbours)
        except BaseException:  # such as a thread that cannot be started
            _close(self.engine, self._threads, guard, os.getpid())
            raise
        self._finalizer = weakref.finalize(self, _close, self.engine, self._threads, guard, os.getpid())
        notice_exit()
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("Opened a pool of experts: %s.", self.describe())

    def _open_engine(
        self,
        config: MeshConfig,
        slots: int,
        source: _C.Source | None,
        layer_indices: Sequence[int] | None,
        on_gpu: torch.Tensor | None,
    ) -> _C.Engine:
        experts = self.geometry.num_experts
        return _C.Engine(
            layers=self.layers,
            experts=experts,
            format=self.weights,
            group_size=self.group_size,
            **self.geometry.sizes._asdict(),
            activation=self.activations,
            slots=slots,
            policy=config.policy,
            verify=config.verify,
            io=config.io,
            threads=config.thread_count,
            workspace=config.workspace_bytes,
            timeout=config.residency.timeout,
            prefill=config.prefill,
            source=source,
            min_slots=min(self.top_k, slots),
            profile=pool_profile(config.profile, self.layers, experts, self.top_k, layer_indices, self.expert_range),
            early_layers=config.residency.early[0],
            early_experts=config.residency.early[1],
            on_gpu=[] if on_gpu is None else on_gpu.flatten().tolist(),
            fill_empty=config.residency.fill == "on" and config.shared is None,
            lender=config.shared,
        )

    def close(self) -> None:
        """Close the engine before its last reference is gone. No module may use the pool any more."""
        self._finalizer()

    def end_with(self, thread: BackgroundThread) -> None:
        """Join ``thread`` when the pool is closed."""
        self._threads.append(thread)

    @property
    def with_fallback(self) -> list[ExpertPool]:
        return [self] if self.fallback is None else [self, self.fallback]

    @property
    def shared_devices(self) -> list[SharedDevice]:
        """The shared state of each GPU with experts of this pool, in order."""
        return list(dict.fromkeys(layer.shared for layer in self.device_layers if layer.shared is not None))

    def handle(self, layer: int) -> torch.Tensor:
        """int64 [pool, layer]: the handle of a layer, an argument of the ops."""
        return torch.tensor([self.engine.id, layer], dtype=torch.int64, device="cpu")

    def fill(self, layer: int, expert: int, weights: ExpertTensors) -> None:
        """Pack one expert and make it resident permanently."""
        record = pack_expert(weights.on_cpu(), self.weights, self.group_size)
        self.engine.fill(layer, expert, record.numpy())

    def unpack_into(self, layer: int, expert: int, destination: ExpertTensors) -> None:
        """Write one expert's weights into ``destination``, in its dtype. Reads the expert if it is cold."""
        record = torch.from_numpy(self.engine.read_record(layer, expert))
        destination.copy_(unpack_record(record, self.weights, self.group_size, layer, self.geometry.sizes))

    def describe(self) -> str:
        """One line for print(model)."""
        about = self.engine.describe()
        group = "" if FORMATS[self.weights].holds_bf16 else f" (group {self.group_size})"
        every = self.layers * self.geometry.num_experts
        reads = ", of a shared pool" if about["io"] == "shared" else ", io=buffered" if about["buffered"] else ""
        if self.mirrors:
            reads += f", copies in {', '.join(self.mirrors)}"
        lossy = f", lossy: {self.lossy}" if self.lossy else ""
        resident = f"resident={about['slots']} of {every} experts, policy={about['policy']}{reads}"
        fallback = "" if self.fallback is None else f", fallback: {self.fallback.describe()}"
        unpooled = f", outside the pool: {self.unpooled}" if self.unpooled else ""
        own = "" if self.expert_range is None else f"{self.expert_range}, "
        choice = f", chosen as {self.choice}" if self.choice else ""
        return f"{own}weights={short_name(self.weights)}{group}{choice}, {resident}{lossy}{fallback}{unpooled}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertPool:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle()


def refuse_to_pickle() -> NoReturn:
    raise MeshError(
        "A patched model cannot be pickled: its experts are in a pool of this process. Pickle or torch.save the model "
        "before torch_mesh.patch or after torch_mesh.unpatch, or open the checkpoint in the other process."
    )


def min_slots(layers: Sequence[ExpertsLayer]) -> int:
    return max(min(layer.top_k, layer.num_experts) for layer in layers)


def _wants_guard(config: MeshConfig, can_shrink: bool) -> bool:
    wanted = config.residency.guard == "on" or (
        config.residency.guard == "auto" and config.resident == "auto" and config.shared is None
    )
    if wanted and not can_shrink and config.residency.guard == "on":
        warnings.warn(
            "residency.guard='on' has no effect: all experts are in memory only, so that none can be evicted. Give "
            "store= a folder.",
            stacklevel=4,
        )
    return wanted and can_shrink


_at_exit = threading.Event()


@functools.cache
def notice_exit() -> None:
    """Call after making a finalizer: exit functions run in reverse order of registration, and weakref's closes the
    pools."""
    atexit.register(_at_exit.set)


def _close(engine: _C.Engine, own_threads: Sequence[BackgroundThread], guard: MemoryGuard | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not wait for its parent's reads
        return
    threads = [*own_threads, None if guard is None else guard.remove(engine)]
    try:
        close_engine(engine, owner)
    finally:
        for thread in threads:
            if thread is not None:
                thread.end()


def close_engine(engine: _C.Engine | _C.Tables, owner: int) -> None:
    """Close ``engine``, unless this process is a forked child of ``owner``."""
    if os.getpid() != owner:
        return
    try:
        engine.close(wait=not _at_exit.is_set())
    except (ReadTimeoutError, MemoryError) as error:  # a finalizer cannot raise
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
