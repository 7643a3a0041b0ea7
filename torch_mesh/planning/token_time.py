"""How long a token takes, from sizes, hits and the machine's speeds."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import Sizes

# Of the time that reading takes, what is waited for with lookahead; and what is read, over no prefetch:
# docs/decisions/0018.
_PREFETCH_WAITING = 0.6
_PREFETCH_READS = 1.1


@dataclass(frozen=True)
class Speeds:
    """Bytes per second, and seconds. ``measured`` names those that were measured on this machine and not given."""

    disk: float  # reads of one record's size, several at a time
    experts: float  # packed weights of experts, computed for one token
    dense: float  # all other weights, likewise
    layer_seconds: float  # what each layer takes besides, eagerly: attention, norms, router, Python
    measured: tuple[str, ...]


def token_seconds(
    sizes: Sizes, speeds: Speeds, hits: float, prefetch: bool, experts_of_token: float | None = None
) -> float:
    """Seconds that one token of one sequence takes; with ranks it has ``experts_of_token`` on the busiest, and the
    network takes more.

    What is cold is waited for: a layer reads too little at a time, and has too little else to compute, for much of it
    to overlap. With ``prefetch`` a part is there in time.
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
