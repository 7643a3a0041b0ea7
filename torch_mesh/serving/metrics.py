"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torch_mesh.serving.kept_keys import Counts
from torch_mesh.serving.progress import Progress
from torch_mesh.statistics.counters import PHASES, Stats

# Counters of a pool by phase, with their descriptions.
_BY_PHASE = {
    "forwards": "Forwards of the model.",
    "accesses": "Experts that forwards used.",
    "hits": "Of those, resident ones.",
    "cold_misses": "Of those, ones that had to be read.",
    "inflight_misses": "Of those, ones that were being read already.",
    "prefetches": "Reads that were queued before a forward needed them.",
    "prefetches_used": "Of those, ones that a forward used.",
    "prefetches_unused": "Of those, ones that were evicted, or failed, before a forward used them.",
    "promoted": "Reads that made an expert resident.",
    "evicted": "Experts that lost their slot to others.",
    "failed": "Reads that ended in an error.",
    "second_reads": "Reads that were repeated after a wrong checksum.",
}
_PREFIX_COUNTS = {
    "hits": "Prompts of which a beginning was read from the prefix cache.",
    "tokens": "Tokens of these beginnings.",
    "read_bytes": "Bytes of keys and values that were read from it.",
    "written_bytes": "Bytes of keys and values that were written to it.",
}
_REQUEST_COUNTS = {
    "prompt_tokens": "Tokens of the prompts.",
    "reused_tokens": "Of those, tokens whose keys had been kept.",
    "generated_tokens": "Tokens that were generated.",
}


class Metrics:
    """A collector. ``now`` returns the statistics of the model and the counts of the server at each scrape."""

    def __init__(self, now: Callable[[], tuple[Stats, Counts]], progress: Progress) -> None:
        self._progress = progress
        self._now = now
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        stats, counts = self._now()
        for name, about in _BY_PHASE.items():
            yield _by_phase(stats, name, f"torch_mesh_{name}", about)
        yield _by_phase(stats, "bytes_read", "torch_mesh_read_bytes", "Bytes of experts that were read.")
        yield _by_phase(stats, "stall_seconds", "torch_mesh_wait_seconds", "Time that forwards waited for reads.")
        yield GaugeMetricFamily("torch_mesh_slots", "Experts that may be resident now.", stats.slots)
        yield GaugeMetricFamily("torch_mesh_slots_limit", "Experts that may be resident at most.", stats.max_slots)
        for name, about in _REQUEST_COUNTS.items():
            yield CounterMetricFamily(
                f"torch_mesh_{name}", f"{about} Not with continuous batching.", getattr(counts, name)
            )
        for name, about in _PREFIX_COUNTS.items():
            yield CounterMetricFamily(f"torch_mesh_prefix_{name}", about, getattr(counts.prefixes, name))
        reading = self._progress.tokens
        yield GaugeMetricFamily("torch_mesh_reading_tokens", "Tokens of the prompt that is being read.", reading)
        done = self._progress.fraction if reading else 0
        yield GaugeMetricFamily("torch_mesh_reading_fraction", "How much of it has been read.", done)
        yield GaugeMetricFamily(
            "torch_mesh_kept_keys_bytes", "Keys and values of conversations in memory.", counts.kept_bytes
        )
        yield GaugeMetricFamily("torch_mesh_kept_tokens", "Tokens of conversations in memory.", counts.kept_tokens)


def _by_phase(stats: Stats, counter: str, name: str, about: str) -> CounterMetricFamily:
    """Counts of prompts and decode steps, without those of other calls."""
    family = CounterMetricFamily(name, about, labels=["phase"])
    for phase in PHASES:
        family.add_metric([phase], getattr(getattr(stats, phase), counter))
    return family
