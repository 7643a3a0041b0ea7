"""Simulate expert parallelism on recorded routing: each machine with a pool and a disk, and a network between them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from torch_mesh.routing.simulation import Hardware
from torch_mesh.routing.traces import Trace

PLACEMENTS = ("contiguous", "apart")
DISPATCHES = ("all_reduce", "all_to_all")

_NUMBER_BYTES = 2  # hidden states in bf16
_COUNT_BYTES = 8  # the row count of an expert, which all_to_all sends first
_BITS = {"gbit/s": 1e9, "mbit/s": 1e6, "gb/s": 8e9, "mb/s": 8e6}
_SECONDS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
_NETWORK = re.compile(rf"([0-9.]{{1,20}})({'|'.join(_BITS)}),([0-9.]{{1,20}})({'|'.join(_SECONDS)})")


@dataclass(frozen=True)
class Network:
    """``bandwidth`` of each machine's link in bytes/s; ``latency`` of a message in seconds."""

    bandwidth: float
    latency: float

    @classmethod
    def parse(cls, text: str) -> Network:
        """Parse ``"10Gbit/s,0.2ms"``. Raises ValueError for other formats and zero bandwidth."""
        match = _NETWORK.fullmatch(text.replace(" ", "").lower())
        try:
            if match and (bits := float(match[1]) * _BITS[match[2]]) > 0:
                return cls(bits / 8, float(match[3]) * _SECONDS[match[4]])
        except ValueError:  # for example 1.2.3
            pass
        raise ValueError(
            f"--network is '{text}'; allowed: a bandwidth in Gbit/s, Mbit/s, GB/s or MB/s and a latency in s, ms or "
            "us, such as 10Gbit/s,0.2ms"
        )


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines of the same ``hardware``, one rank each.

    ``hidden``: size of a token's hidden state. ``one_disk``: the machines share a disk, as ranks on one machine do.
    """

    nodes: int
    hidden: int
    hardware: Hardware
    network: Network
    placement: str = "contiguous"
    dispatch: str = "all_reduce"
    one_disk: bool = False


@dataclass(frozen=True)
class NodesRow:
    """One replay on several machines. Rates are fractions of all machines' accesses; bytes are totals."""

    trace: str
    policy: str
    resident: float
    nodes: int
    placement: str
    dispatch: str
    slots: int  # slots of each machine
    hit_rate: float
    busiest: float  # fraction of a token's experts on the machine with most of them
    read_bytes_per_token: float
    sent_bytes_per_token: float
    stall_fraction: float  # mean fraction of the time that a machine waits for its own reads
    network_fraction: float  # fraction of the time in exchanges
    tokens_per_second: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def simulate_nodes(
    trace: Trace,
    policy: str,
    resident: float,
    cluster: Cluster,
    *,
    prompts: slice | None = None,
    lookahead: bool = False,
    prefetch: int | None = None,
    prefill: str = "auto",
    as_decode: bool = False,
) -> NodesRow:
    """Replay ``trace`` on machines that each keep ``resident`` of their own experts. docs/scaleout.md has the time
    model.

    After each layer, all machines wait for the last one and for the exchange of ``cluster.dispatch``. ``lookahead``:
    each machine prefetches its own experts among the ``prefetch`` (default top_k) best predictions of the next layer's
    router. ``prompts`` limits the counts to some sequences, except for bytes read and ``stall_fraction``; "apart"
    places experts by the sequences before them. Other arguments are as in ``simulate``.

    Raises ValueError for experts that do not divide evenly, a placement without sequences to learn from, and as
    ``simulate`` does.
    """
    from torch_mesh import _C

    _check(trace, resident, cluster, lookahead)
    nodes = cluster.nodes
    begin, end = trace.token_range(prompts)
    owners = _place(trace, cluster, begin)
    own = trace.experts // nodes
    slots = max(min(trace.top_k, own), int(resident * trace.layers * own + 1e-9))
    requested = min(trace.top_k if prefetch is None else prefetch, trace.experts)
    forwards = None if as_decode else trace.forwards
    starts = np.arange(trace.tokens) if forwards is None else forwards
    exchange = _exchange(trace, cluster, owners, starts)
    counts = _C.replay_ranks(
        _divided_ids(trace, owners, nodes, starts if cluster.dispatch == "all_to_all" else None),
        exchange.seconds,
        experts=own,
        policy=policy,
        slots=slots,
        lookahead=_divided(_best(trace.lookahead, requested), owners, nodes)
        if lookahead and trace.lookahead is not None
        else None,
        sequences=trace.offsets[:-1],
        forwards=forwards,
        prefill=prefill,
        predictor="lookahead" if lookahead else "off",
        prefetch=min(requested, own) if lookahead else 0,
        read_seconds=cluster.hardware.read_seconds(),
        expert_seconds=cluster.hardware.expert_seconds(),
        rest_seconds=cluster.hardware.rest_seconds(trace),
        one_disk=cluster.one_disk,
    )
    counted = (starts >= begin) & (starts < end)
    seconds = float(counts[0]["seconds_of"][begin:end].sum())  # the same on each
    tokens = end - begin
    return NodesRow(
        trace=trace.name,
        policy=policy,
        resident=resident,
        nodes=nodes,
        placement=cluster.placement,
        dispatch=cluster.dispatch,
        slots=slots,
        hit_rate=_sum(counts, "hits", begin, end) / _sum(counts, "accesses_of", begin, end),
        busiest=float(_on_each(trace.ids[begin:end], owners, nodes).max(axis=0).mean()),
        read_bytes_per_token=sum(count["promoted"] for count in counts) * cluster.hardware.expert_bytes / trace.tokens,
        sent_bytes_per_token=float(exchange.sent[counted].sum()) / tokens,
        stall_fraction=max(
            0.0, sum(count["stalled_seconds"] for count in counts) / nodes / counts[0]["virtual_seconds"]
        ),
        network_fraction=float(exchange.seconds[counted].sum()) / seconds,
        tokens_per_second=tokens / seconds,
    )


def _check(trace: Trace, resident: float, cluster: Cluster, lookahead: bool) -> None:
    if not 0 < resident <= 1:
        raise ValueError(f"resident must be in (0, 1]; got {resident}")
    if cluster.nodes < 1 or trace.experts % cluster.nodes:
        raise ValueError(
            f"nodes={cluster.nodes} does not divide the {trace.experts} experts of a layer in {trace.name} evenly: "
            "choose a divisor"
        )
    if lookahead and cluster.one_disk and cluster.nodes > 1:
        raise ValueError(
            "prefetching from one shared disk is not simulated: leave prefetch off, or give each machine a disk"
        )
    if lookahead and trace.lookahead is None:
        raise ValueError(f"{trace.name} has no lookahead scores; record it with lookahead=True, or leave prefetch off")


def _sum(counts: list[dict[str, npt.NDArray[np.int64]]], name: str, begin: int, end: int) -> int:
    return sum(int(count[name][begin:end].sum()) for count in counts)


def _place(trace: Trace, cluster: Cluster, learned: int) -> npt.NDArray[np.int32]:
    """[layers, experts]: the machine of each expert."""
    each = trace.experts // cluster.nodes
    contiguous = np.repeat(np.arange(cluster.nodes, dtype=np.int32), each)
    if cluster.placement == "contiguous":
        return np.tile(contiguous, (trace.layers, 1))
    if cluster.placement != "apart":
        raise ValueError(f"placement is '{cluster.placement}'; allowed: {', '.join(PLACEMENTS)}")
    if learned == 0:
        raise ValueError(
            "placement 'apart' learns from sequences before the counted ones: leave some, for example with --prompts "
            "35:"
        )
    return np.stack([_apart(_together(trace, layer, learned), cluster.nodes) for layer in range(trace.layers)])


def _together(trace: Trace, layer: int, tokens: int) -> npt.NDArray[np.float64]:
    """[experts, experts]: how many of the first ``tokens`` use both; the diagonal counts single experts."""
    used = np.zeros((tokens, trace.experts), np.float32)
    np.put_along_axis(used, trace.ids[:tokens, layer], 1, axis=1)
    return (used.T @ used).astype(np.float64)


def _apart(together: npt.NDArray[np.float64], nodes: int) -> npt.NDArray[np.int32]:
    """Greedy placement: the hottest first, each on the machine with the fewest joint uses; then pairwise swaps, best
    first, while they help."""
    experts = len(together)
    owners = np.full(experts, -1, np.int32)
    free = np.full(nodes, experts // nodes)
    heat, between = np.diag(together).copy(), together - np.diag(np.diag(together))
    shared = np.zeros((experts, nodes))  # joint uses with the experts on each machine
    for expert in np.argsort(-heat, kind="stable"):
        node = int(np.where(free > 0, shared[expert], np.inf).argmin())
        owners[expert] = node
        free[node] -= 1
        shared[:, node] += between[:, expert]
    while True:
        here = shared[np.arange(experts), owners]
        there = shared[:, owners]  # [a, b]: joint uses of a with the machine of b
        gain = here[:, None] + here[None, :] - there - there.T + 2 * between
        gain[owners[:, None] == owners[None, :]] = 0
        a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[a, b] <= 0:
            return owners
        for mover, to in ((a, owners[b]), (b, owners[a])):
            shared[:, owners[mover]] -= between[:, mover]
            shared[:, to] += between[:, mover]
        owners[a], owners[b] = owners[b], owners[a]


def _owners_of(ids: npt.NDArray[np.int32], owners: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return owners[np.arange(len(owners))[None, :, None], ids]


def _on_each(ids: npt.NDArray[np.int32], owners: npt.NDArray[np.int32], nodes: int) -> npt.NDArray[np.int64]:
    """[nodes, tokens, layers]: how many of a token's experts each machine has."""
    nodes_of_ids = _owners_of(ids, owners)
    return np.stack([(nodes_of_ids == node).sum(axis=2) for node in range(nodes)])


def _divided_ids(
    trace: Trace, owners: npt.NDArray[np.int32], nodes: int, starts: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int32]:
    """[nodes, tokens, layers, top_k]: each machine's own expert numbers, padded with -1.

    ``starts``: the first tokens of forwards. A machine without any row in one runs its first expert on a row of zeros,
    as transformers' AllToAllEP does.
    """
    numbers = np.empty_like(owners)
    for node in range(nodes):
        numbers[owners == node] = np.tile(np.arange(trace.experts // nodes), trace.layers)
    own = _owners_of(trace.ids, numbers)
    nodes_of_ids = _owners_of(trace.ids, owners)
    parts = []
    for node in range(nodes):
        order = np.argsort(nodes_of_ids != node, axis=2, kind="stable")
        part = np.take_along_axis(np.where(nodes_of_ids == node, own, -1), order, axis=2)
        if starts is not None:
            forward, layer = np.nonzero(np.maximum.reduceat(part[..., 0], starts, axis=0) < 0)
            part[starts[forward], layer, 0] = 0
        parts.append(part)
    return np.stack(parts)


def _divided(values: npt.NDArray[np.float32], owners: npt.NDArray[np.int32], nodes: int) -> npt.NDArray[np.float32]:
    """[nodes, tokens, layers, experts of one]"""
    parts = []
    for node in range(nodes):
        own = np.stack([np.flatnonzero(layer == node) for layer in owners])
        parts.append(np.take_along_axis(values, own[None], axis=2))
    return np.stack(parts)


def _best(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    """The ``count`` best of each layer, the others 0: the predictions that a rank requests."""
    kept = np.zeros_like(scores)
    best = np.argpartition(-scores, count - 1, axis=2)[..., :count] if count else np.empty((*scores.shape[:2], 0), int)
    np.put_along_axis(kept, best, np.take_along_axis(scores, best, axis=2), axis=2)
    return kept


@dataclass(frozen=True)
class _Exchange:
    """Times and bytes of each exchange: [forwards, layers]."""

    seconds: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]  # bytes, by all machines


def _exchange(
    trace: Trace, cluster: Cluster, owners: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]
) -> _Exchange:
    if cluster.dispatch not in DISPATCHES:
        raise ValueError(f"dispatch is '{cluster.dispatch}'; allowed: {', '.join(DISPATCHES)}")
    rows = np.diff([*starts, trace.tokens])
    if cluster.nodes == 1:
        nothing = np.zeros((len(rows), trace.layers))
        return _Exchange(nothing, nothing)
    if cluster.dispatch == "all_reduce":
        return _all_reduce(rows, trace.layers, cluster)
    return _all_to_all(trace, cluster, owners, starts, rows)


def _all_reduce(rows: npt.NDArray[np.int64], layers: int, cluster: Cluster) -> _Exchange:
    """A ring all-reduce of all rows, as in gloo: 2 (N - 1) steps, in each of which every machine sends an N-th of
    them."""
    nodes, network = cluster.nodes, cluster.network
    size = rows[:, None] * np.full(layers, float(_NUMBER_BYTES * cluster.hidden))
    steps = 2 * (nodes - 1)
    return _Exchange(steps * (network.latency + size / nodes / network.bandwidth), steps * size)


def _all_to_all(
    trace: Trace,
    cluster: Cluster,
    owners: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> _Exchange:
    """transformers' AllToAllEP: each machine has a part of the rows, sends counts and then rows to the experts'
    machines, and gets results back; a ring distributes the sums."""
    nodes, network = cluster.nodes, cluster.network
    part = -(-rows // nodes)
    forward = np.repeat(np.arange(len(rows)), rows)
    sender = (np.arange(trace.tokens) - starts[forward]) // part[forward]
    row_bytes = float(_NUMBER_BYTES * cluster.hidden)
    busiest = np.zeros((len(rows), trace.layers))  # rows that one machine sends, or receives
    moved = np.zeros_like(busiest)
    for layer in range(trace.layers):
        receiver = owners[layer][trace.ids[:, layer]]
        away = receiver != sender[:, None]
        for ends in (sender[:, None], receiver):
            keys = np.broadcast_to(forward[:, None] * nodes + ends, receiver.shape)[away]
            each = np.bincount(keys, minlength=len(rows) * nodes).reshape(-1, nodes)
            busiest[:, layer] = np.maximum(busiest[:, layer], each.max(axis=1))
        moved[:, layer] = each.sum(axis=1) * row_bytes
    counts = (nodes - 1) * _COUNT_BYTES * (trace.experts // nodes)  # sent by each
    gathered = part[:, None] * row_bytes
    seconds = (
        (network.latency + counts / network.bandwidth)
        + 2 * (network.latency + busiest * row_bytes / network.bandwidth)
        + (nodes - 1) * (network.latency + gathered / network.bandwidth)
    )
    return _Exchange(seconds, nodes * counts + 2 * moved + nodes * (nodes - 1) * gathered)
