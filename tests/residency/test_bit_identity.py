"""Outputs are bit-identical wherever experts are, and however they got there."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from raw_experts import RawExperts
from tiny_pools import Spec, TinyExperts, open_engine, ops
from torch import Tensor

from torch_mesh import _C

LAYERS, EXPERTS = 3, 12
SPECS = {
    weights: Spec(weights=weights, layers=LAYERS, experts=EXPERTS, hidden=72, intermediate=40)
    for weights in ("bf16", "int8", "int4")
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every read succeeds, at random times and in random order.
UNRULY = {
    "delay": 0.3,
    "max_delay": 0.0003,
    "reorder": 0.3,
    "short_read": 0.1,
    "eintr": 0.1,
    "eagain": 0.1,
    "eio_once": 0.1,
}


@dataclass(frozen=True)
class Combination:
    weights: str  # of SPECS, or "raw"
    slots: int
    reader: str
    policy: str
    tokens: int
    top_k: int
    dtype: torch.dtype
    threads: int
    workspace: int
    verify: str
    unruly: bool
    hints: bool
    profile: bool
    early_layers: int
    seed: int

    @classmethod
    def draw(cls, draw: random.Random, readers: list[str]) -> Combination:
        top_k = draw.randint(1, 4)
        fraction = draw.choice([0.0, 0.0, 0.1, 0.2, 0.3, 0.45, 0.7])
        weights = draw.choice(["raw", *SPECS])
        return cls(
            weights=weights,
            slots=max(top_k, int(fraction * LAYERS * EXPERTS)),
            reader=draw.choice(readers),
            policy=draw.choice(_C.policy_names()),
            tokens=draw.choice([1, 1, 2, 5, 12]),
            top_k=top_k,
            dtype=draw.choice(DTYPES),
            threads=draw.choice([1, 1, 2]),
            workspace=draw.choice([1, 20_000, 64 << 20]),
            verify=draw.choice(["first", "always", "never"]),
            unruly=draw.random() < 0.8,
            hints=draw.random() < 0.5,
            profile=draw.random() < 0.5,
            early_layers=draw.choice([0, 0, 1, 3]),
            seed=draw.randrange(2**31),
        )

    def kept(self) -> dict[str, object]:
        """Options for warm start and soft pins."""
        rng = np.random.default_rng(self.seed)
        profile = np.full(LAYERS, 50), rng.integers(0, 51, (LAYERS, EXPERTS))
        return {
            "profile": profile if self.profile else None,
            "early_layers": self.early_layers,
            "early_experts": 2,
        }


def forward_all(engine: _C.Engine, it: Combination, hints: bool) -> list[Tensor]:
    """Run every layer three times, each on the output of the one before."""
    generator = torch.Generator().manual_seed(it.seed)
    hidden = SPECS["bf16"].hidden
    outputs = []
    for _ in range(3):
        x = torch.randn(it.tokens, hidden, generator=generator).to(it.dtype)
        for layer in range(LAYERS):
            scores = torch.rand(it.tokens, EXPERTS, generator=generator)
            weights, ids = scores.topk(it.top_k)
            handle = torch.tensor([engine.id, layer])
            if hints:
                after = torch.tensor([engine.id, (layer + 1) % LAYERS])
                ops.prefetch(after, ids[0] + (EXPERTS - ids[0] - 1) // 2)
            out = ops.experts(x, ids, weights, handle)
            outputs.append(out)
            x = x + out
    return outputs


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyExperts | RawExperts]:
    made: dict[str, TinyExperts | RawExperts] = {
        weights: TinyExperts(spec, seed=number) for number, (weights, spec) in enumerate(SPECS.items())
    }
    made["raw"] = RawExperts(SPECS["bf16"], tmp_path_factory.mktemp("raw") / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def source_of(
    experts: dict[str, TinyExperts | RawExperts], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], _C.Source]:
    @functools.cache
    def source_of(weights: str) -> _C.Source:
        found = experts[weights]
        if isinstance(found, RawExperts):
            return found.source
        return _C.Source(**found.store(tmp_path_factory.mktemp(weights) / "store").source_arguments())

    return source_of


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.thorough)])
def test_drawn_combinations_equal_the_fully_resident_run(
    count: int,
    experts: dict[str, TinyExperts | RawExperts],
    source_of: Callable[[str], _C.Source],
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    draw = random.Random(seed)
    unavailable = _C.features()["uring"]
    readers = ["threads", "buffered"] if unavailable else ["uring", "threads", "buffered"]
    cold, fewest_slots = 0, 0
    for number in range(count):
        it = Combination.draw(draw, readers)
        shared = {"threads": it.threads, "workspace": it.workspace}
        resident = open_engine(experts[it.weights], None, **shared)
        expected = forward_all(resident, it, hints=False)
        resident.close()
        engine = open_engine(
            experts[it.weights],
            source_of(it.weights),
            **shared,
            slots=it.slots,
            io=it.reader,
            policy=it.policy,
            **it.kept(),
            verify=it.verify,
            faults={"seed": it.seed, **UNRULY} if it.unruly else None,
        )
        outputs = forward_all(engine, it, it.hints)
        for step, (output, right) in enumerate(zip(outputs, expected, strict=True)):
            assert torch.equal(output, right), f"step {step} of combination {number}, {it}"
        engine.drain()
        engine.validate()
        assert engine.pinned() == 0, it
        stats = engine.stats()
        cold += stats["cold_misses"].sum() > 0 and stats["evicted"].sum() > 0
        fewest_slots += it.slots == it.top_k
        engine.close()
    record_property("combinations with cold misses and evictions", int(cold))
    print(f"{cold} of {count} combinations had cold misses and evictions; {fewest_slots} had top-k slots")
    assert cold >= count / 2
    assert fewest_slots > 0
