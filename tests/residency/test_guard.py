"""The memory guard: how it resizes pools when memory runs short, without effect on outputs."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pairs import each_once_quick, first_quick
from tiny_pools import Spec, TinyExperts, open_engine, ops
from transformers.utils import logging as transformers_logging
from waiting import eventually

from torch_mesh import _C
from torch_mesh.pool import memory_guard
from torch_mesh.pool.memory_guard import MemoryGuard, wanted_slots
from torch_mesh.system.memory import left_bytes

GIB, MIB = 1 << 30, 1 << 20
SPEC = Spec(weights="int4", layers=3, experts=16)
SLOTS = 40


class Machine:
    """A made-up /proc and memory cgroup (version 1 or 2) with 4 GiB left of a limit of 6 GiB."""

    def __init__(self, root: Path, version: int) -> None:
        self.proc, self.group = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.group.mkdir()
        kind, line = ("cgroup2", "0::/") if version == 2 else ("cgroup", "4:memory:/")
        options = "rw" if version == 2 else "rw,memory"
        self._write(self.proc / "meminfo", f"MemAvailable: {8 * GIB // 1024} kB")
        self._write(self.proc / "self/cgroup", line)
        self._write(self.proc / "self/mountinfo", f"30 20 0:30 / {self.group} rw - {kind} {kind} {options}")
        self._hard, self._soft, self._usage = (
            ("memory.max", "memory.high", "memory.current")
            if version == 2
            else ("memory.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.usage_in_bytes")
        )
        self._write(self.group / "memory.stat", "anon 5")
        self._write(self.group / self._usage, str(2 * GIB))
        self.limit(6 * GIB)

    def limit(self, soft: int | str) -> None:
        self._write(self.group / self._hard, str(6 * GIB))
        self._write(self.group / self._soft, str(soft))

    @staticmethod
    def _write(file: Path, text: str) -> None:
        # Renamed into place, since readers of the real files never see a partial one.
        file.with_suffix(".new").write_text(text + "\n")
        os.replace(file.with_suffix(".new"), file)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


@pytest.fixture
def experts() -> TinyExperts:
    return TinyExperts(SPEC, seed=0)


@pytest.fixture
def engine(experts: TinyExperts, tmp_path: Path, reader: str) -> Iterator[_C.Engine]:
    source = _C.Source(**experts.store(tmp_path / "store").source_arguments())
    engine = open_engine(experts, source, slots=SLOTS, io=reader)
    yield engine
    engine.close()


def _output(engine: _C.Engine, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, SPEC.hidden, generator=generator)
    ids = torch.stack([torch.randperm(SPEC.experts, generator=generator)[:4] for _ in range(3)])
    weights = torch.rand(3, 4, generator=generator)
    handle = torch.tensor([engine.id, seed % SPEC.layers])
    return ops.experts(x, ids, weights, handle)


ABOUT = {"min_slots": 8, "max_slots": 1000, "record_bytes": 4 * MIB, "segment_slots": 16}


@pytest.mark.parametrize(
    ("left", "slots", "wanted"),
    [
        (512 * MIB, 800, 800),  # auto's margin, an eighth of the whole, is left
        (260 * MIB, 800, 800),  # less than the margin, but more than half of it
        (100 * MIB, 800, 688),  # 3,300 MiB - 512 MiB are 43 segments of 16
        (-1000 * MIB, 800, 416),
        (-9000 * MIB, 800, 8),  # never fewer slots than a token needs
        (620 * MIB, 800, 800),
        (900 * MIB, 800, 896),
        (9000 * MIB, 800, 1000),  # never more than the original size
    ],
)
def test_wanted_slots_for_one_pool(left: int, slots: int, wanted: int) -> None:
    assert wanted_slots(left, [_pool(slots)]) == [wanted]


def _pool(slots: int, **others: int) -> dict[str, int]:
    pool = ABOUT | {"slots": slots} | others
    return pool | {"slot_bytes": slots * pool["record_bytes"]}


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        (512 * MIB, [2000, 500, 8]),  # one margin for all pools: an eighth of 10 GiB and more
        (-2000 * MIB, [1392, 336, 8]),
        (-99000 * MIB, [8, 8, 8]),
    ],
)
def test_pools_shrink_by_the_same_fraction(left: int, wanted: list[int]) -> None:
    pools = [_pool(2000, max_slots=2000), _pool(500, max_slots=500), _pool(8, max_slots=10)]
    if left > 0:
        left = sum(pool["slot_bytes"] for pool in pools) // 7  # an eighth of the total is left
    assert wanted_slots(left, pools) == wanted


def test_pool_sizes_converge() -> None:
    """For any sizes: growth of one pool must not make another shrink."""
    draw = random.Random(1)
    for _ in range(300):
        pools = [_pool(0, max_slots=draw.randint(8, 4000), record_bytes=draw.randint(1, 16) * MIB) for _ in range(3)]
        machine = draw.randint(600, 60_000) * MIB
        sizes = [pool["max_slots"] for pool in pools]
        history = []
        for _ in range(5):
            pools = [_pool(slots, **_without_size(pool)) for slots, pool in zip(sizes, pools, strict=True)]
            sizes = wanted_slots(machine - sum(pool["slot_bytes"] for pool in pools), pools)
            history.append(sizes)
        assert history[-1] == history[-2], history


def test_pool_sizes_of_several_processes_converge() -> None:
    """Each process takes its part of the shortage or the free memory, without knowing the others' sizes."""
    draw = random.Random(2)
    for _ in range(300):
        ranks = draw.randint(2, 8)
        machine = draw.randint(2000, 120_000) * MIB
        sizes = [draw.randint(8, ABOUT["max_slots"]) for _ in range(ranks)]
        history = []
        for _ in range(30):
            left = machine - sum(slots * ABOUT["record_bytes"] for slots in sizes)
            sizes = [wanted_slots(left, [_pool(slots)], ranks)[0] for slots in sizes]
            history.append((left, sizes))
        assert history[-1] == history[-2], history
        at_minimum = all(slots == ABOUT["min_slots"] for slots in sizes)
        assert left >= 0 or at_minimum, history


def _without_size(pool: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in pool.items() if name not in ("slots", "slot_bytes")}


@pytest.mark.parametrize("machine", first_quick(1, 2), indirect=True)
def test_two_pools_answer_one_shortage_once(machine: Machine, experts: TinyExperts, tmp_path: Path) -> None:
    source = _C.Source(**experts.store(tmp_path / "store").source_arguments())
    engines = [open_engine(experts, source, slots=slots) for slots in (SLOTS, SLOTS // 2)]
    guard = MemoryGuard(machine.proc, calm=0.2)
    for engine in engines:
        guard.add(engine)
    assert [thread.name for thread in threading.enumerate()].count("torch_mesh memory guard") == 1
    machine.limit(1 * GIB)
    assert eventually(lambda: [engine.describe_size()["slots"] for engine in engines] == [1, 1])
    assert guard.remove(engines[0]) is None
    engines[0].close()
    machine.limit(6 * GIB)  # the guard goes on with the other pool
    assert eventually(lambda: engines[1].describe_size()["slots"] == SLOTS // 2)
    _end(guard, engines[1])
    engines[1].close()


def _end(guard: MemoryGuard, engine: _C.Engine) -> None:
    thread = guard.remove(engine)
    assert thread is not None
    thread.end()
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _logs_reach_pytest() -> Iterator[None]:
    """torch_mesh logs through transformers' logger, which does not propagate to the root logger by default."""
    transformers_logging.enable_propagation()
    yield
    transformers_logging.disable_propagation()


@pytest.mark.parametrize(
    ("machine", "reader"), each_once_quick([2, 1], ["uring", "threads", "buffered"]), indirect=True
)
def test_a_pool_shrinks_when_the_soft_limit_falls_and_grows_back(
    machine: Machine, engine: _C.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    guard = MemoryGuard(machine.proc, calm=0.2)
    guard.add(engine)
    expected = [_output(engine, seed) for seed in range(12)]
    with caplog.at_level(logging.INFO, logger="torch_mesh.pool.memory_guard"):
        machine.limit(1 * GIB)
        assert eventually(lambda: engine.describe_size()["slots"] == 1)
        engine.validate()
        for seed, output in enumerate(expected):
            assert torch.equal(_output(engine, seed), output)
        machine.limit(6 * GIB)
        assert eventually(lambda: engine.describe_size()["slots"] == SLOTS)
        assert eventually(lambda: len(caplog.records) == 2)  # it logs when it has finished
    engine.validate()
    stats = engine.detailed_stats()
    assert (stats["shrinks"], stats["grows"], stats["slots"], stats["max_slots"]) == (1, 1, SLOTS, SLOTS)
    assert len(caplog.records) == 2
    _end(guard, engine)


@pytest.mark.parametrize("machine", first_quick(2, 1), indirect=True)
@pytest.mark.parametrize("reader", first_quick("uring", "threads", "buffered"), indirect=True)
def test_unreadable_files_are_logged_once_and_change_nothing(
    machine: Machine, engine: _C.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ("MemTotal: 5 kB\n", "MemAvailable: many\n", "MemAvailable:\n", "\x00"):
        (machine.proc / "meminfo").write_text(broken)
        caplog.clear()
        guard = MemoryGuard(machine.proc)
        guard.add(engine)
        _output(engine, 0)
        time.sleep(0.8)
        assert len(caplog.records) == 1
        assert engine.describe_size()["slots"] == SLOTS
        _end(guard, engine)
    (machine.proc / "meminfo").unlink()
    guard = MemoryGuard(machine.proc)
    guard.add(engine)
    time.sleep(0.4)
    assert engine.describe_size()["slots"] == SLOTS
    engine.close()
    _end(guard, engine)


@pytest.mark.parametrize(("machine", "reader"), [(2, "threads")], indirect=True)
def test_a_guard_that_lacks_memory_looks_again(
    machine: Machine, engine: _C.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def lacking_at_first(proc: Path) -> int:
        looks.append(proc)
        if len(looks) == 1:
            raise MemoryError
        return left_bytes(proc)

    monkeypatch.setattr(memory_guard, "left_bytes", lacking_at_first)
    guard = MemoryGuard(machine.proc)
    machine.limit(1 * GIB)
    guard.add(engine)
    assert eventually(lambda: engine.describe_size()["slots"] == 1)
    _end(guard, engine)


def test_the_guard_ends_with_the_engine(machine: Machine, engine: _C.Engine) -> None:
    guard = MemoryGuard(machine.proc)
    guard.add(engine)
    engine.close()
    _end(guard, engine)
    assert "torch_mesh memory guard" not in {thread.name for thread in threading.enumerate()}


def test_resizing_at_random_changes_no_bit(engine: _C.Engine) -> None:
    expected = [_output(engine, seed) for seed in range(30)]
    stop = threading.Event()
    draw = random.Random(0)

    def resize() -> None:
        while not stop.is_set():
            engine.resize(draw.randint(1, SLOTS))

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(10):
            for seed, output in enumerate(expected):
                assert torch.equal(_output(engine, seed), output)
                engine.validate()
    finally:
        stop.set()
        thread.join()
    assert engine.pinned() == 0


def test_what_resize_refuses(engine: _C.Engine, experts: TinyExperts) -> None:
    for slots in (0, -1, SLOTS + 1):
        with pytest.raises(ValueError, match=f"1 to {SLOTS} slots; got {slots}"):
            engine.resize(slots)
    with pytest.raises(ValueError, match="exist nowhere else"):
        open_engine(experts, None).resize(4)
