"""Under any fault a forward gives the right bits or an error that names the place. The pool stays usable."""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_pools import Spec, TinyExperts, open_engine, ops
from torch import Tensor

from torch_mesh import _C, ChecksumError, PoolClosedError, ReadError, ReadTimeoutError

SPEC = Spec(weights="int8", layers=3, experts=12, hidden=72, intermediate=40)
TOP_K = 3

# The injected faults, and the errors that each may cause.
FAULTS: dict[str, tuple[dict[str, float], tuple[type[Exception], ...]]] = {
    "eio_once": ({"eio_once": 0.5}, ()),
    "eio_always": ({"eio_always": 0.08}, (ReadError,)),
    "short_read": ({"short_read": 0.7}, ()),
    "eintr": ({"eintr": 0.5}, ()),
    "eagain": ({"eagain": 0.5}, ()),
    "delay": ({"delay": 0.7, "max_delay": 0.001}, ()),
    "reorder": ({"reorder": 0.7, "max_delay": 0.001}, ()),
    "bit_flip": ({"bit_flip": 0.2}, (ChecksumError,)),
    "wrong_offset": ({"wrong_offset": 0.2}, (ChecksumError,)),
    "everything": (
        {"eio_once": 0.1, "eio_always": 0.03, "short_read": 0.2, "eintr": 0.1, "eagain": 0.1}
        | {"delay": 0.3, "reorder": 0.2, "max_delay": 0.001, "bit_flip": 0.1, "wrong_offset": 0.1},
        (ReadError, ChecksumError),
    ),
}
# A thousand in all, over each fault with each reader.
FORWARDS = 1000 // len(FAULTS) // (2 if _C.features()["uring"] else 3)


class Served:
    """The experts of SPEC on disk, a resident engine as the reference, and engines over the store."""

    def __init__(self, folder: Path) -> None:
        self.experts = TinyExperts(SPEC, seed=1)
        self.store = self.experts.store(folder / "store")
        self.resident = open_engine(self.experts, None, threads=1)

    def open(self, **options: object) -> _C.Engine:
        source = _C.Source(**self.store.source_arguments())
        return open_engine(self.experts, source, **{"slots": 8, "threads": 1, "verify": "always"} | options)

    def forward(self, engine: _C.Engine, layer: int, seed: int) -> Tensor:
        """Run a forward and check its bits. The engine's errors propagate."""
        x, weights, ids = batch(seed)
        out = ops.experts(x, ids, weights, handle(engine, layer))
        assert torch.equal(out, ops.experts(x, ids, weights, handle(self.resident, layer)))
        return out

    def check_error(self, error: Exception, layer: int, seed: int) -> None:
        assert isinstance(error, (ReadError, ChecksumError, ReadTimeoutError))
        assert error.layer == layer
        assert error.expert in batch(seed)[2].flatten().tolist()
        file, offset = self.store.manifest.locate(layer, error.expert)
        assert error.file == str(self.store.folder / self.store.manifest.record_files[file].name)
        assert error.offset is not None
        assert offset <= error.offset < offset + self.store.manifest.record_bytes
        assert error.file in str(error) and str(error.offset) in str(error)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, routing weights and ids of one to four tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 + seed % 4
    weights, ids = torch.rand(tokens, SPEC.experts, generator=generator).topk(TOP_K)
    return torch.randn(tokens, SPEC.hidden, generator=generator), weights, ids


def handle(engine: _C.Engine, layer: int) -> Tensor:
    return torch.tensor([engine.id, layer])


def expect_at_rest(engine: _C.Engine) -> None:
    engine.drain()
    engine.validate()
    assert engine.pinned() == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("faults"))


def one_of_a_thousand(served: Served, engine: _C.Engine, draw: random.Random) -> str:
    """Run a forward whose experts may be resident, being prefetched, evicted or failed."""
    layer, seed = draw.randrange(SPEC.layers), draw.randrange(2**31)
    ids = batch(seed)[2]
    hint = draw.choice([None, ops.prefetch, ops.evict])
    if hint is not None:
        hint(handle(engine, layer), ids[0])
    try:
        served.forward(engine, layer, seed)
    except (ReadError, ChecksumError) as error:
        served.check_error(error, layer, seed)
        assert engine.pinned() == 0
        engine.validate()
        return type(error).__name__
    return "right"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_thousand_forwards_are_right_or_say_where_they_failed(
    served: Served, fault: str, reader: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    faults, allowed = FAULTS[fault]
    descriptors = len(os.listdir("/proc/self/fd"))
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(5):
        engine = served.open(
            io=reader, policy=draw.choice(_C.policy_names()), faults={"seed": draw.randrange(2**31), **faults}
        )
        for _ in range(FORWARDS // 5):
            outcomes[one_of_a_thousand(served, engine, draw)] += 1
        expect_at_rest(engine)
        if "eio_always" not in faults:
            outlast_errors(served, engine, draw)
        engine.close()
    record_property("outcomes", dict(outcomes))
    print(fault, reader, dict(outcomes))
    assert set(outcomes) <= {"right", *(error.__name__ for error in allowed)}
    assert outcomes["right"] > 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    engine = served.open(io=reader)
    for layer in range(SPEC.layers):
        served.forward(engine, layer, draw.randrange(2**31))
    expect_at_rest(engine)
    engine.close()


def outlast_errors(served: Served, engine: _C.Engine, draw: random.Random) -> None:
    """Repeat a forward until it is right: a transient error leaves no trace in the pool."""
    layer, seed = draw.randrange(SPEC.layers), draw.randrange(2**31)
    for _ in range(200):
        try:
            served.forward(engine, layer, seed)
        except (ReadError, ChecksumError) as error:
            served.check_error(error, layer, seed)
        else:
            break
    else:
        pytest.fail("200 attempts in a row met a passing fault")
    expect_at_rest(engine)


def test_a_bad_sector_fails_each_time_and_affects_no_other_expert(served: Served, reader: str, seed: int) -> None:
    engine = served.open(io=reader, faults={"seed": seed, "eio_always": 0.15})
    bad: dict[tuple[int, int], int] = {}
    for attempt in range(2):
        for layer in range(SPEC.layers):
            for expert in range(SPEC.experts):
                try:
                    ops.promote(handle(engine, layer), torch.tensor([expert]))
                except ReadError as error:
                    assert (error.layer, error.expert, error.errno) == (layer, expert, errno.EIO)
                    assert attempt == 0 or bad[layer, expert] == error.offset
                    bad[layer, expert] = error.offset or 0
                else:
                    assert (layer, expert) not in bad
    good = [expert for expert in range(SPEC.experts) if (0, expert) not in bad]
    x, weights, _ = batch(seed)
    ids = torch.tensor(random.Random(seed).choices(good, k=weights.numel())).view_as(weights)
    right = ops.experts(x, ids, weights, handle(served.resident, 0))
    assert torch.equal(ops.experts(x, ids, weights, handle(engine, 0)), right)
    expect_at_rest(engine)
    engine.close()


def test_a_late_read_is_a_timeout_and_the_next_forward_is_right(served: Served, reader: str, seed: int) -> None:
    engine = served.open(io=reader, timeout=0.02, slots=TOP_K, faults={"seed": seed, "delay": 1, "max_delay": 0.5})
    for attempt in range(4):
        layer = attempt % SPEC.layers
        one_token = 4 * (seed % 2**20 + attempt)
        begin = time.monotonic()
        with pytest.raises(ReadTimeoutError) as caught:
            while True:  # all reads of a forward may happen to be fast
                served.forward(engine, layer, one_token)
                one_token += 4
        assert time.monotonic() - begin < 10
        if caught.value.expert is not None:  # otherwise the wait for a slot timed out
            served.check_error(caught.value, layer, one_token)
        assert engine.pinned() == 0
        engine.validate()
        wait_for_reads(engine)
        served.forward(engine, layer, one_token)  # the late read has landed meanwhile
    expect_at_rest(engine)
    engine.close(wait=False)  # waiting would time out after 20 ms


def wait_for_reads(engine: _C.Engine) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            engine.drain()
            return
        except ReadTimeoutError:
            assert time.monotonic() < deadline


def test_closing_with_reads_under_way_waits_for_their_buffers(served: Served, reader: str, seed: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = served.open(io=reader, faults={"seed": seed, "delay": 1, "max_delay": 0.2})
    stale = handle(engine, 0)
    ops.prefetch(stale, torch.arange(4))
    engine.close()
    engine.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(PoolClosedError):
        ops.residency(stale)
    with pytest.raises(PoolClosedError):
        engine.pinned()


def test_a_truncated_file_is_an_error_until_it_is_restored(tmp_path: Path, reader: str, seed: int) -> None:
    served = Served(tmp_path)
    engine = served.open(io=reader, slots=TOP_K)
    path = served.store.folder / served.store.manifest.record_files[0].name
    whole = path.read_bytes()
    last = SPEC.layers - 1
    with path.open("r+b") as file:
        file.truncate(served.store.manifest.locate(last, 0)[1] + 100)
    with pytest.raises(ReadError) as caught:
        served.forward(engine, last, seed)
    served.check_error(caught.value, last, seed)
    expect_at_rest(engine)
    served.forward(engine, 0, seed)
    with path.open("r+b") as file:
        file.write(whole)
        os.fsync(file.fileno())
    served.forward(engine, last, seed)
    expect_at_rest(engine)
    engine.close()
    served.resident.close()
