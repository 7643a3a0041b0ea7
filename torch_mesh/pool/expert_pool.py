"""The engine of one model, and who owns it."""

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
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .. import _C
from ..config import MeshConfig
from ..errors import MeshError, ReadTimeoutError
from ..formats import FORMATS, short_name
from ..models.families import ExpertsLayer, ExpertTensors, Geometry, common_geometry
from ..ops.device import DeviceLayer, SharedDevice
from ..routing.profiles import pool_profile
from ..store.convert import pack_expert, unpack_record
from ..store.manifest import Store
from ..system.background import BackgroundThread
from ..system.memory import resident_slots
from .memory_guard import MemoryGuard

if TYPE_CHECKING:
    from ..hf.expert_parallel import Share

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
    """How many experts ``config.resident`` keeps, of ``stored_layers`` layers like ``layers``: of a rank, of its own
    ones.

    ``freed``: bytes that will be given back, but only when the pool is there; ``regained``: before. ``staging``: what
    will be taken beside it, as by the buffers that raw records are read into. As many as there are where another
    process lends them, which says how many.
    """
    if config.shared is not None:
        return stored_layers * layers[0].num_experts
    share = layers[0].share
    needed, every = least_slots(layers), stored_layers * layers[0].num_experts
    if isinstance(config.resident, float) and config.resident * every < needed:
        warnings.warn(
            f"resident={config.resident!r} of {every} experts is less than a token needs in one layer, so {needed} "
            f"stay resident: give at least {math.ceil(1e5 * needed / every) / 1e5:g}, or a size.",
            stacklevel=1,  # one place for all that open a pool, so that it is said once
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
        available=None if share is None else share.free_bytes(),
        sharing=1 if share is None else share.neighbours,
    )


def record_bytes(layers: Sequence[ExpertsLayer], weights: str, group_size: int) -> int:
    """Of one packed expert, padding included."""
    shape = common_geometry(layers)
    return _C.record_bytes(weights, group_size, shape.hidden, shape.intermediate, shape.has_gate, shape.has_bias)


class ExpertPool:
    """The resident experts of a model's MoE layers.

    Every patched module holds a reference; deep copies of a model share its pool, whose weights are frozen. The engine
    is closed when the last reference is gone.

    ``activations`` are those of its layers, None where these go through grouped_linear. ``exact`` says that unpacking
    gives back the very weights that the model would have without torch_mesh. ``source=None`` keeps all records in
    memory; they are put there by ``fill``. ``places`` are the layers of the pool's that run, in their order, if not all
    do. ``least_slots``, as many as one token needs, are kept however little memory is left. ``fallback``: the pool of
    the same layers in another format, whose records stand in for cold ones. ``on_gpu`` bool [layers, experts]: those
    that nobody will ask this pool for at first: they are neither warmed nor pinned whatever a profile says, and warming
    waits for ``engine.warm_up()``. ``store``: where the records of ``source`` are, if that is a store; it may be gone
    by now. ``share``: of the model's experts, where this pool is one rank's. ``identity``: the same wherever the
    experts are the same; without one it is drawn.
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
        places: Sequence[int] | None = None,
        least_slots: int = 1,
        fallback: ExpertPool | None = None,
        on_gpu: torch.Tensor | None = None,
        store: Store | None = None,
        share: Share | None = None,
        identity: str | None = None,
    ) -> None:
        if config.shared is not None and source is None:
            raise ValueError(
                f"shared={config.shared!r} lends the experts of a converted folder, and these weights are in memory "
                "only: open the folder with "
                "from_pretrained."
            )
        if fallback is None:
            config = config.replace(lossy={"fallback": "none"})  # every expert has a slot
        self.geometry = geometry
        self.activations = activations
        self.layers = layers
        self.slots = slots
        self.weights = weights
        self.group_size = group_size
        self.exact = exact
        self.top_k = least_slots
        self.lossy = config.lossy.modes
        self.left_alone = ""  # the experts of the model that are not in it
        self.choice = ""  # why its format was taken, where max_error chose it
        self.fallback = fallback
        self.moves_from: ExpertPool | None = None  # what moves to GPUs, if not this pool: one in another format
        self.in_memory = source is None
        self.store = store
        self.identity = secrets.token_hex(16) if identity is None else identity
        self.share = share
        self.threads = config.thread_count
        self.timeout = config.residency.timeout
        self.workspace = config.workspace_bytes
        self.device_layers: list[DeviceLayer] = []  # whose experts lie on GPUs
        self.engine = _C.Engine(
            layers=layers,
            experts=geometry.num_experts,
            format=weights,
            group_size=group_size,
            hidden=geometry.hidden,
            intermediate=geometry.intermediate,
            gated=geometry.has_gate,
            bias=geometry.has_bias,
            activation=activations,
            slots=slots,
            policy=config.policy,
            verify=config.verify,
            io=config.io,
            threads=config.thread_count,
            workspace=config.workspace_bytes,
            timeout=config.residency.timeout,
            prefill=config.prefill,
            source=source,
            least_slots=min(least_slots, slots),
            profile=pool_profile(config.profile, layers, geometry.num_experts, self.top_k, places, share),
            early_layers=config.residency.early[0],
            early_experts=config.residency.early[1],
            elsewhere=[] if on_gpu is None else on_gpu.flatten().tolist(),
            fill_empty=config.residency.fill == "on" and config.shared is None,
            lender=config.shared,
        )
        self.slots = self.engine.describe_size()["slots"]
        self._threads: list[BackgroundThread] = []
        guard = MemoryGuard.of_this_process() if _wants_guard(config, source is not None) else None
        self.guarded = guard is not None
        try:
            if guard is not None:
                guard.add(self.engine, 1 if share is None else share.neighbours)
        except BaseException:  # such as no thread for it
            _close(self.engine, self._threads, guard, os.getpid())
            raise
        self._finalizer = weakref.finalize(self, _close, self.engine, self._threads, guard, os.getpid())
        notice_exit()
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("A pool of experts: %s.", self.describe())

    def close(self) -> None:
        """Before its last reference is gone: for a pool that no module uses."""
        self._finalizer()

    def end_with(self, thread: BackgroundThread) -> None:
        """Waits for ``thread``, which ends when the engine is closed, whenever the pool is closed."""
        self._threads.append(thread)

    @property
    def shared_devices(self) -> list[SharedDevice]:
        """Of the GPUs that hold some of its experts, in order."""
        return list(dict.fromkeys(layer.shared for layer in self.device_layers if layer.shared is not None))

    def handle(self, layer: int) -> torch.Tensor:
        """int64 [pool, layer, generation], by which the ops name a layer of this pool."""
        return torch.tensor([self.engine.id, layer, self.engine.generation], dtype=torch.int64)

    def fill(self, layer: int, expert: int, weights: ExpertTensors) -> None:
        """Packs one expert and makes it resident, for good."""
        record = pack_expert(weights.on_cpu(), self.weights, self.group_size)
        self.engine.fill(layer, expert, record.numpy())

    def unpack_into(self, layer: int, expert: int, destination: ExpertTensors) -> None:
        """Writes one expert's weights into ``destination``, in its dtype; reads the expert if it is cold."""
        record = torch.from_numpy(self.engine.read_record(layer, expert))
        shape = self.geometry
        gate_up, down, gate_up_bias, down_bias = unpack_record(
            record,
            self.weights,
            self.group_size,
            layer,
            (shape.hidden, shape.intermediate, shape.has_gate, shape.has_bias),
        )
        destination.down.copy_(down)
        for stacked, gate, up in (
            (gate_up, destination.gate, destination.up),
            (gate_up_bias, destination.gate_bias, destination.up_bias),
        ):
            if gate is not None:
                gate.copy_(stacked[: shape.intermediate])
            if up is not None:
                up.copy_(stacked[-shape.intermediate :])
        if destination.down_bias is not None:
            destination.down_bias.copy_(down_bias)

    def describe(self) -> str:
        """One line for print(model)."""
        about = self.engine.describe()
        group = "" if FORMATS[self.weights].holds_bf16 else f" (group {self.group_size})"
        every = self.layers * self.geometry.num_experts
        place = ", of a shared pool" if about["io"] == "shared" else ", io=buffered" if about["buffered"] else ""
        lossy = f", lossy: {self.lossy}" if self.lossy else ""
        resident = f"resident={about['slots']} of {every} experts, policy={about['policy']}{place}"
        stand_ins = "" if self.fallback is None else f", stand-ins: {self.fallback.describe()}"
        left_alone = f", left alone: {self.left_alone}" if self.left_alone else ""
        share = "" if self.share is None else f"{self.share}, "
        choice = f", chosen as {self.choice}" if self.choice else ""
        return f"{share}weights={short_name(self.weights)}{group}{choice}, {resident}{lossy}{stand_ins}{left_alone}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertPool:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle()


def refuse_to_pickle() -> NoReturn:
    raise MeshError(
        "A patched model cannot be pickled: its experts are in a pool of this process. Pickle or torch.save the model "
        "before torch_mesh.patch or after torch_mesh.unpatch, or let the other process open the checkpoint itself."
    )


def least_slots(layers: Sequence[ExpertsLayer]) -> int:
    """As many experts as one token needs, of those that there are."""
    return max(min(layer.top_k, layer.num_experts) for layer in layers)


def _wants_guard(config: MeshConfig, can_shrink: bool) -> bool:
    wanted = config.residency.guard == "on" or (
        config.residency.guard == "auto" and config.resident == "auto" and config.shared is None
    )
    if wanted and not can_shrink and config.residency.guard == "on":
        warnings.warn(
            "residency.guard='on' does nothing here: all experts are in memory and nowhere else. Name a store=, so "
            "that some can go.",
            stacklevel=4,
        )
    return wanted and can_shrink


_at_exit = threading.Event()


@functools.cache
def notice_exit() -> None:
    """To be called when a finalizer has been made: functions that are registered later run earlier, and weakref's own
    closes the pools."""
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
    """Unless this process is a forked child of ``owner``."""
    if os.getpid() != owner:
        return
    try:
        engine.close(wait=not _at_exit.is_set())
    except (ReadTimeoutError, MemoryError) as error:  # nobody could catch it here
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
