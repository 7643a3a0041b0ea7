"""Simulating a recorded run gives the counts of the run's own pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import _C
from torch_mesh.routing.simulation import Hardware, simulate
from torch_mesh.routing.traces import load_trace

# Reads that end at once, since the live pool's read times cannot be reproduced.
FAST = Hardware(expert_bytes=1e3, disk_speed=1e15, memory_speed=1e6)


@pytest.mark.parametrize(
    ("prefill", "deferred", "resident"),
    [
        ("auto", 0, 0.4),
        ("window", 2, 0.25),
        pytest.param("off", 0, 0.25, marks=pytest.mark.thorough),
        pytest.param("window", 0, 0.25, marks=pytest.mark.thorough),
        pytest.param("off", 2, 0.4, marks=pytest.mark.thorough),
    ],
)
def test_a_recorded_run_is_simulated_to_a_tenth_of_a_point(
    tmp_path: Path, mesh_tiny: Path, seed: int, prefill: str, deferred: int, resident: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    torch_mesh.patch(
        model,
        resident=resident,
        weights="int8",
        prefetch="off",
        prefill=prefill,
        lossy={"deferred_experts": deferred},
        residency={"guard": "off"},
    )
    random = torch.Generator().manual_seed(seed)
    with torch_mesh.record_trace(model, tmp_path / "trace.npz"):
        for length in (120, 30, 9, 200):
            prompt = torch.randint(3, 250, (1, length), generator=random)
            model.generate(prompt, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    counts = torch_mesh.stats(model).to_dict()
    live = {
        name: counts["prefill"][name] + counts["decode"][name]
        for name in ("accesses", "hits", "cold_misses", "inflight_misses", "deferred")
    }

    trace = load_trace(tmp_path / "trace.npz")
    assert trace.forwards is not None
    assert len(trace.forwards) == 4 * 40  # a prompt, and a step for all tokens but the last
    row = simulate(trace, "auto", resident, prefill=prefill, deferred_experts=deferred, hardware=FAST)
    accesses = live["accesses"]
    # A prefetch that was still in flight in the live pool is a hit where reads take no time.
    ready = (live["hits"] + live["inflight_misses"]) / accesses
    assert row.hit_rate == pytest.approx(ready, abs=1e-3)
    assert row.wait_rate == pytest.approx(live["cold_misses"] / accesses, abs=1e-3)
    assert row.deferred_rate == pytest.approx(live["deferred"] / accesses, abs=1e-3)
    assert 0 < row.hit_rate < 1 and (row.deferred_rate > 0) == (deferred > 0)


def test_replaying_ranks_names_the_array_of_another_shape() -> None:
    ids = np.zeros((2, 1, 1, 1), dtype=np.int32)
    of_one_rank = np.zeros((1, 1, 1, 1), dtype=np.float32)
    with pytest.raises(ValueError, match="lookahead must be"):
        _C.replay_ranks(ids, np.zeros((1, 1)), experts=1, policy="lru", slots=1, lookahead=of_one_rank)
