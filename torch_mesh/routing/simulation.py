"""Simulate a pool of a given size on recorded routing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch_mesh.routing.profiles import Profile
from torch_mesh.routing.traces import Trace

BOUND = "belady"  # optimal, with knowledge of the future
_SIMULATED = "simulated"  # a predictor of a given recall


def policy_names() -> list[str]:
    """Every policy that can be simulated: "auto", those of a pool, and the bound."""
    from torch_mesh import _C

    return [*_C.policy_names(), BOUND]


def predictor_names() -> list[str]:
    return ["off", "lookahead", _SIMULATED]


@dataclass(frozen=True)
class Hardware:
    """``disk_speed`` and ``memory_speed`` in bytes/s, ``expert_bytes`` of a packed expert, ``other_bytes`` of all other
    weights or, instead, ``other_seconds`` of a forward without its experts.

    None is unknown: times are then in units of one expert's read, and computing one takes half of that.
    """

    expert_bytes: float
    disk_speed: float
    memory_speed: float
    other_bytes: float = 0.0
    other_seconds: float | None = None

    def read_seconds(self) -> float:
        return self.expert_bytes / self.disk_speed

    def expert_seconds(self) -> float:
        return self.expert_bytes / self.memory_speed

    def rest_seconds(self, trace: Trace) -> float:
        """Seconds of each layer without its experts."""
        other = self.other_bytes / self.memory_speed if self.other_seconds is None else self.other_seconds
        return other / trace.layers


@dataclass(frozen=True)
class Row:
    """One replay. Rates are fractions of all accesses: one expert of one forward of a layer."""

    trace: str
    policy: str
    resident: float
    slots: int
    hit_rate: float  # resident when their layer began
    wait_rate: float  # not resident, and waited for
    deferred_rate: float  # not resident, and deferred by a layer
    stall_fraction: float  # fraction of virtual time spent waiting for reads
    reads_per_token: float  # demand and prefetch
    bytes_per_token: float | None
    prefetch: str
    prefetched: int  # reads
    prefetch_used: int
    prefetch_unused: int
    recall: float | None  # of the predictor, at the number of requested experts
    decision_ns: float  # CPU time per access in policy, predictor and slot table
    tokens_per_second: float | None
    early_hit_rate: float | None  # of experts that early_experts soft-pins, over the whole trace
    other_hit_rate: float | None  # of all others

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def simulate(
    trace: Trace,
    policy: str,
    resident: float,
    *,
    prompts: slice | None = None,
    predictor: str = "off",
    prefetch: int | None = None,
    recall: float = 0.75,
    seed: int = 0,
    profile: Profile | None = None,
    early_experts: str | tuple[int, int] = "off",
    prefill: str = "auto",
    deferred_experts: int = 0,
    as_decode: bool = False,
    hardware: Hardware | None = None,
) -> Row:
    """Replay all of ``trace`` with floor(resident * all experts) slots, at least top_k; the cache persists across
    sequences.

    ``prompts`` limits ``hit_rate`` to some of the sequences, after those before them have warmed the pool. ``prefetch``
    experts (default top_k) are predicted ahead of each layer of a decode step. If the trace has ``forwards``, prompts
    are replayed as prompts, or with ``as_decode`` as a step for each token. ``prefill``, ``deferred_experts``,
    ``profile`` and ``early_experts`` are as in MeshConfig. docs/traces.md describes the virtual clock.

    Raises ValueError for unknown names and for a fraction outside (0, 1].
    """
    from torch_mesh import _C

    if not 0 < resident <= 1:
        raise ValueError(f"resident must be in (0, 1]; got {resident}")
    if predictor not in predictor_names():
        raise ValueError(f"predictor is '{predictor}'; allowed: {', '.join(predictor_names())}")
    requested = 0 if predictor == "off" else trace.top_k if prefetch is None else prefetch
    slots = max(trace.top_k, int(resident * trace.layers * trace.experts + 1e-9))
    early_layers, early_in_each = (0, 0) if isinstance(early_experts, str) else early_experts
    counts = _C.replay(
        trace.ids,
        experts=trace.experts,
        policy=policy,
        slots=slots,
        scores=trace.scores,
        lookahead=trace.lookahead if predictor == "lookahead" else None,
        sequences=trace.offsets[:-1],
        forwards=None if as_decode else trace.forwards,
        prefill=prefill,
        deferred=deferred_experts,
        predictor=predictor,
        prefetch=requested,
        recall=recall,
        seed=seed,
        read_seconds=hardware.read_seconds() if hardware else 1.0,
        expert_seconds=hardware.expert_seconds() if hardware else 0.5,
        rest_seconds=hardware.rest_seconds(trace) if hardware else 0.0,
        profile=profile.arrays() if profile else None,
        early_layers=early_layers,
        early_experts=early_in_each,
    )
    begin, end = trace.token_range(prompts)
    hits = int(counts["hits"][begin:end].sum())
    accesses, early, early_hits = counts["accesses"], counts["early_accesses"], counts["early_hits"]
    reads = counts["promoted"] / trace.tokens
    return Row(
        trace=trace.name,
        policy=policy,
        resident=resident,
        slots=slots,
        hit_rate=hits / int(counts["accesses_of"][begin:end].sum()),
        wait_rate=(counts["cold_misses"] + counts["inflight_misses"]) / accesses,
        deferred_rate=counts["deferred"] / accesses,
        stall_fraction=counts["stalled_seconds"] / counts["virtual_seconds"],
        reads_per_token=reads,
        bytes_per_token=reads * hardware.expert_bytes if hardware else None,
        prefetch=predictor,
        prefetched=counts["prefetched"],
        prefetch_used=counts["prefetch_used"],
        prefetch_unused=counts["prefetched"] - counts["prefetch_used"],
        recall=counts["predicted_right"] / accesses if requested else None,
        decision_ns=1e9 * counts["decision_seconds"] / accesses,
        tokens_per_second=trace.tokens / counts["virtual_seconds"] if hardware else None,
        early_hit_rate=early_hits / early if early else None,
        other_hit_rate=(int(counts["hits"].sum()) - early_hits) / (accesses - early) if accesses > early else None,
    )
