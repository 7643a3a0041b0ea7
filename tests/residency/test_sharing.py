"""Several models, several threads, forked children, and leaks of closed engines."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pairs import each_once_quick, first_quick
from tiny_pools import Spec, TinyExperts, open_engine, ops
from torch import Tensor

from torch_mesh import _C, ForkedProcessError, PoolClosedError

SPECS = {
    weights: Spec(weights=weights, layers=2, experts=12, hidden=72, intermediate=40) for weights in ("bf16", "int4")
}
UNRULY = {"delay": 0.5, "max_delay": 0.0005, "reorder": 0.3, "short_read": 0.1, "eio_once": 0.1}
# Seconds: a child or a thread may be slow on a busy machine; this detects a hang.
PATIENCE = 60.0

Open = Callable[..., _C.Engine]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyExperts]:
    made = {weights: TinyExperts(spec, seed=3) for weights, spec in SPECS.items()}
    for weights, each in made.items():
        each.store(tmp_path_factory.mktemp(weights) / "store")
    return made


@pytest.fixture
def open_cold(experts: dict[str, TinyExperts], tmp_path: Path) -> Open:
    def open_cold(weights: str = "bf16", **options: object) -> _C.Engine:
        source = _C.Source(**experts[weights].store(tmp_path).source_arguments())
        return open_engine(experts[weights], source, **{"slots": 5, "threads": 1} | options)

    return open_cold


def forward(engine_id: int, layer: int, seed: int, tokens: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(tokens, 12, generator=generator).topk(2)
    return ops.experts(torch.randn(tokens, 72, generator=generator), ids, weights, torch.tensor([engine_id, layer]))


def run_and_compare(engine: _C.Engine, resident: _C.Engine, seed: int, forwards: int = 40) -> None:
    draw = random.Random(seed)
    for _ in range(forwards):
        layer, batch = draw.randrange(2), draw.randrange(2**31)
        assert torch.equal(forward(engine.id, layer, batch), forward(resident.id, layer, batch))


def expect_at_rest(engine: _C.Engine) -> None:
    engine.drain()
    engine.validate()
    assert engine.pinned() == 0


@pytest.mark.parametrize("slots", [2, 5])
def test_threads_share_one_small_pool(
    experts: dict[str, TinyExperts], open_cold: Open, reader: str, slots: int, seed: int
) -> None:
    resident = open_engine(experts["int4"], None, threads=1)
    engine = open_cold("int4", slots=slots, io=reader, faults={"seed": seed, **UNRULY})
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(run_and_compare, engine, resident, seed + number) for number in range(3)]
        for each in running:
            each.result(PATIENCE)
    assert engine.stats()["evicted"].sum() > 0
    expect_at_rest(engine)
    engine.close()
    resident.close()


def test_two_models_run_at_the_same_time(experts: dict[str, TinyExperts], open_cold: Open, seed: int) -> None:
    residents = {weights: open_engine(experts[weights], None, threads=1) for weights in SPECS}
    engines = {
        "bf16": open_cold("bf16", io="auto", slots=3, faults={"seed": seed, **UNRULY}),
        "int4": open_cold("int4", io="threads", slots=3, faults={"seed": seed, **UNRULY}),
    }
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run_and_compare, engines[weights], residents[weights], seed) for weights in SPECS]
        for each in running:
            each.result(PATIENCE)
    for engine in engines.values():
        expect_at_rest(engine)
        engine.close()
    for engine in residents.values():
        engine.close()


def test_closing_during_forwards_ends_them_cleanly(
    experts: dict[str, TinyExperts], open_cold: Open, reader: str, seed: int
) -> None:
    resident = open_engine(experts["bf16"], None, threads=1)
    descriptors = len(os.listdir("/proc/self/fd"))
    for attempt in range(5):
        engine = open_cold(io=reader, faults={"seed": seed + attempt, **UNRULY})
        ids, running = engine.id, threading.Barrier(4)

        def run_until_closed(number: int, ids: int = ids, running: threading.Barrier = running) -> int:
            draw, done = random.Random(number), 0
            running.wait(PATIENCE)
            while True:
                layer, batch = draw.randrange(2), draw.randrange(2**31)
                try:
                    output = forward(ids, layer, batch)
                except PoolClosedError:
                    return done
                assert torch.equal(output, forward(resident.id, layer, batch))
                done += 1

        with ThreadPoolExecutor(3) as threads:
            results = [threads.submit(run_until_closed, seed + number) for number in range(3)]
            running.wait(PATIENCE)
            time.sleep(0.05)
            engine.close()
            assert len(os.listdir("/proc/self/fd")) == descriptors, "close() came back before the forwards had ended"
            assert sum(result.result(PATIENCE) for result in results) > 0
    resident.close()


def test_several_threads_may_close_one_engine(open_cold: Open) -> None:
    for _ in range(10):
        engine = open_cold()
        forward(engine.id, 0, 1)
        with ThreadPoolExecutor(4) as threads:
            for each in [threads.submit(engine.close) for _ in range(4)]:
                each.result(PATIENCE)


def in_child(action: Callable[[], None]) -> int:
    """Return the exit status of a forked child that runs ``action`` and exits as a Python program does."""
    child = os.fork()
    if child == 0:
        try:
            action()
            gc.collect()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  no exception may continue in the parent's test code
            os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("threads", "reader"), each_once_quick([1, 2], ["uring", "threads", "buffered"]), indirect=["reader"]
)
def test_a_forked_child_is_refused_and_the_parent_goes_on(
    experts: dict[str, TinyExperts], open_cold: Open, reader: str, threads: int, seed: int
) -> None:
    resident = open_engine(experts["bf16"], None, threads=threads)
    engine = open_cold(io=reader, threads=threads, faults={"seed": seed, "delay": 1, "max_delay": 0.05})
    run_and_compare(engine, resident, seed, forwards=3)
    handle = torch.tensor([engine.id, 0])
    ops.prefetch(handle, torch.arange(5))  # reads are in flight at the fork
    owned = [engine]
    del engine

    def use_and_drop() -> None:
        calls: list[Callable[[], object]] = [
            lambda: forward(owned[0].id, 0, seed),
            lambda: forward(resident.id, 0, seed),
            lambda: ops.promote(handle, torch.arange(3)),
            lambda: ops.prefetch(handle, torch.arange(3)),
            lambda: ops.residency(handle),
            lambda: owned[0].read_record(0, 0),
            lambda: owned[0].drain(),
            lambda: owned[0].stats(),
        ]
        for number, call in enumerate(calls):
            try:
                call()
            except ForkedProcessError:
                continue
            raise AssertionError(f"call {number} did not notice the fork")
        owned.clear()  # drops the last reference, as garbage collection may in a child

    assert in_child(use_and_drop) == 0
    run_and_compare(owned[0], resident, seed + 1, forwards=10)
    expect_at_rest(owned[0])
    owned.pop().close()
    resident.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("children", first_quick(40, 150))
def test_no_forked_child_hangs_on_its_parents_locks(open_cold: Open, children: int, seed: int) -> None:
    """Another thread may hold any lock (registry of pools, pool, workspace) during a fork."""
    engine, ending = open_cold(), threading.Event()
    handle, ids = torch.tensor([engine.id, 0]), torch.zeros(1, 1, dtype=torch.int64)
    scores = torch.zeros(1, 12)

    def look() -> None:
        while not ending.is_set():
            ops.residency(handle)
            ops.route(scores, ids, handle, 1.0, 0)

    def open_and_close() -> None:
        while not ending.is_set():
            open_cold().close()

    calls: list[Callable[[], object]] = [
        lambda: ops.residency(handle),
        lambda: ops.route(scores, ids, handle, 1.0, 0),
        lambda: forward(engine.id, 0, seed),
        engine.describe,
        engine.close,
    ]

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except ForkedProcessError:
            return True
        return False

    with ThreadPoolExecutor(3) as threads:
        busy = [threads.submit(each) for each in (look, look, open_and_close)]
        try:
            for number in range(children):
                child = os.fork()
                if child == 0:
                    try:
                        signal.alarm(int(PATIENCE))  # kills a child that hangs
                        os._exit(0 if all(map(refused, calls)) else 1)
                    finally:
                        os._exit(2)
                assert os.waitpid(child, 0)[1] == 0, f"child {number}"
        finally:
            ending.set()
        for each in busy:
            each.result(PATIENCE)
    expect_at_rest(engine)
    engine.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_may_open_an_engine_of_its_own(
    experts: dict[str, TinyExperts], open_cold: Open, seed: int
) -> None:
    parents = open_cold()
    right = forward(parents.id, 0, seed)

    def open_and_run() -> None:
        torch.set_num_threads(1)
        own = open_cold()
        assert torch.equal(forward(own.id, 0, seed), right)
        own.close()

    assert in_child(open_and_run) == 0
    assert torch.equal(forward(parents.id, 0, seed), right)
    parents.close()


def anonymous_bytes() -> int:
    """Return this process's anonymous memory.

    Private memory would not do: a library's page becomes private when the last other process that uses it ends.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("explicit", [True, False], ids=["closed", "dropped"])
def test_fifty_engines_leak_nothing(open_cold: Open, reader: str, explicit: bool, seed: int) -> None:
    def cycle() -> None:
        engine = open_cold(io=reader)
        forward(engine.id, 0, seed)
        ops.prefetch(torch.tensor([engine.id, 1]), torch.arange(6))
        if explicit:
            engine.close()

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(5):  # warm-up: some memory is allocated once
        cycle()
    before, memory = counts(), anonymous_bytes()
    for _ in range(50):
        cycle()
    # The kernel may list a thread for a moment after its join, so either count may include an ended one.
    deadline = time.monotonic() + PATIENCE
    while any(now > then for now, then in zip(counts(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(now <= then for now, then in zip(counts(), before, strict=True)), (counts(), before)
    # A pool has five records of 32 KiB, a workspace and the reader's tables. Fifty leaked ones exceed this.
    assert anonymous_bytes() - memory < 4 << 20
