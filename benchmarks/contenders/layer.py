"""One layer of experts, the same for every system: weights, routing, inputs, and the timing of a call.

NumPy only, since every contender has its own environment. A few experts are repeated for all, each copy in its own
memory. One-row calls go through the experts in groups, so that none is in a cache when it is used.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
DISTINCT = 8  # the first call's experts, for layer_output()


@dataclass(frozen=True)
class Variant:
    """One implementation of the layer. Each of a token's experts has the weight 1 / k.

    ``prepare`` converts x [tokens, hidden] in float32 and ids [tokens, k] to the arguments of ``forward``; ``to_numpy``
    converts its result to [tokens, hidden]. ``weight_bytes``: memory of the layer's experts.
    """

    prepare: Callable[[Array, Array], Any]
    forward: Callable[[Any], Any]
    to_numpy: Callable[[Any], Array]
    weight_bytes: int


def weights(seed: int) -> tuple[Array, Array]:
    """gate_up [distinct, 2 * intermediate, hidden] and down [distinct, hidden, intermediate], float32 of bf16
    values."""
    generator = np.random.default_rng(seed)

    def gaussian(*shape: int) -> Array:
        return rounded_to_bf16(0.02 * generator.standard_normal((DISTINCT, *shape), dtype=np.float32))

    return gaussian(2 * INTERMEDIATE, HIDDEN), gaussian(HIDDEN, INTERMEDIATE)


def repeated(distinct: Array) -> Array:
    """One entry per expert: expert e has the weights of ``distinct[e % DISTINCT]``."""
    return np.tile(distinct, (EXPERTS // DISTINCT, *[1] * (distinct.ndim - 1)))


def rounded_to_bf16(values: Array) -> Array:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(values: Array) -> Array:
    """float32 that are bf16 values -> uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def hidden_states(tokens: int, seed: int) -> Array:
    generator = np.random.default_rng(seed + 1)
    return rounded_to_bf16(generator.standard_normal((tokens, HIDDEN), dtype=np.float32))


def random_ids(tokens: int, seed: int) -> Array:
    generator = np.random.default_rng(seed + 2)
    return np.argsort(generator.random((tokens, EXPERTS)), axis=1)[:, :TOP_K]


def next_ids() -> list[Array]:
    return [np.arange(first, first + TOP_K)[None] for first in range(0, EXPERTS, TOP_K)]


class Layer:
    """The contender of layer_peers.py: several variants of one system."""

    def __init__(self, variants: Mapping[str, Variant], seed: int) -> None:
        self.variants, self.seed = variants, seed
        self.arguments: dict[tuple[str, int], Iterator[Any]] = {}

    def facts(self) -> dict[str, Any]:
        return {
            name: {"weight_bytes": variant.weight_bytes, "output": self._first_output(variant)}
            for name, variant in self.variants.items()
        }

    def measure(self, variant: str, tokens: int, calls: int) -> dict[str, Any]:
        """Return the median seconds of some calls."""
        chosen = self.variants[variant]
        key = variant, tokens
        if key not in self.arguments:
            self.arguments[key] = itertools.cycle(self._prepared(chosen, tokens))
        seconds = []
        for given in itertools.islice(self.arguments[key], calls):
            begin = time.perf_counter()
            chosen.forward(given)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": statistics.median(seconds)}

    def _prepared(self, variant: Variant, tokens: int) -> list[Any]:
        x = hidden_states(tokens, self.seed)
        ids = next_ids() if tokens == 1 else [random_ids(tokens, self.seed)]
        return [variant.prepare(x, chosen) for chosen in ids]

    def _first_output(self, variant: Variant) -> list[float]:
        """Return the output of one token through the first experts, to compare with layer_output()."""
        [given, *_] = self._prepared(variant, 1)
        return variant.to_numpy(variant.forward(given)).astype(np.float64).reshape(-1).tolist()


def layer_output(seed: int) -> Array:
    """Return the first output in float64, which every variant's approximates."""
    x = hidden_states(1, seed)[0].astype(np.float64)
    output = np.zeros(HIDDEN)
    for gate_up, down in zip(*weights(seed), strict=True):
        gate, up = np.split(gate_up.astype(np.float64) @ x, 2)
        output += down.astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up) / TOP_K
    return output
