"""The time of a token, from sizes, hit rate and the machine's speeds."""

from __future__ import annotations

from dataclasses import dataclass

from torch_mesh.planning.sizes import Sizes

# With lookahead: the fraction of the reading time that a layer waits for, and reads relative to no prefetch
# (docs/decisions/0018).
_PREFETCH_WAITING = 0.6
_PREFETCH_READS = 1.1


@dataclass(frozen=True)
class Speeds:
    """Bytes per second, and seconds. ``measured`` names those that were measured on this machine."""

    disk: float  # reads of one record's size, several at a time
    experts: float  # packed experts, computed for one token
    dense: float  # all other weights, likewise
    layer_seconds: float  # of each layer's attention, norms, router and Python, without compilation
    measured: tuple[str, ...]


def token_seconds(
    sizes: Sizes, speeds: Speeds, hits: float, prefetch: bool, experts_of_token: float | None = None
) -> float:
    """Seconds of one token of one sequence. ``experts_of_token``: on the busiest rank; the network's time is not
    included.

    Without ``prefetch`` reads add to computing: a layer has too little of either for much overlap. With it a part of
    them is hidden.
    """
    shape = sizes.shape
    assert sizes.dense_bytes_per_token is not None
    used = shape.layers * (shape.top_k if experts_of_token is None else experts_of_token) * sizes.expert_bytes
    reading = (1 - hits) * used / speeds.disk
    computing = used / speeds.experts
    dense = sizes.dense_bytes_per_token / speeds.dense + shape.layers * speeds.layer_seconds
    if not prefetch:
        return dense + computing + reading
    return max(_PREFETCH_READS * reading, dense + computing + _PREFETCH_WAITING * reading)
