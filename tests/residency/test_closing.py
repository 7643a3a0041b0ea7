"""Closing an engine, deleting a model and ending a process work even if pending reads never end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from tiny_pools import Spec, TinyExperts, open_engine, ops

from torch_mesh import _C, ReadTimeoutError, _testing
from torch_mesh.pool.expert_pool import _close

# Seconds; only a hang takes this long.
PATIENCE = 300.0

PRELUDE = """
import ctypes, errno, functools, os, signal, sys, threading, time
from pathlib import Path
import torch
from tiny_pools import Spec, TinyExperts, open_engine, ops
from torch_mesh import _C, _testing, MeshConfig, ReadTimeoutError
from torch_mesh.models.families import Geometry
from torch_mesh.pool.expert_pool import ExpertPool

experts = TinyExperts(Spec(layers=2), 0)
source = _C.Source(**experts.store(Path(sys.argv[1])).source_arguments())
NEVER = {"seed": 1, "delay": 1, "max_delay": 86400.0}

def prefetch(handle):
    begun = _testing.chunks_given()
    ops.prefetch(handle, torch.arange(4))
    while _testing.chunks_given() == begun:  # or closing drops it
        time.sleep(0.001)

def open_stuck(timeout):
    engine = open_engine(experts, source, slots=8, io=sys.argv[2], timeout=timeout, threads=1, faults=NEVER)
    prefetch(torch.tensor([engine.id, 1]))
    return engine
"""

STUCK = """
engine = open_stuck(0.5)
try:
    engine.close()
except ReadTimeoutError as error:
    assert "what they read into is freed when they end" in str(error), error
else:
    raise AssertionError("reads that last for a day have ended")

engine = open_stuck(2.0)
x, ids, weights = torch.randn(1, 72), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
handle, failed = torch.tensor([engine.id, 0]), []
def forward():
    try:
        ops.experts(x, ids, weights, handle)
    except ReadTimeoutError as error:
        failed.append(error)
thread = threading.Thread(target=forward)
thread.start()
while engine.pinned() == 0:
    assert thread.is_alive(), failed
    time.sleep(0.001)
del engine  # under a forward that waits for its own read
thread.join()
assert failed

engine = open_stuck(1e6)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    engine.close()
except KeyboardInterrupt:
    print("interrupted")

engine = open_stuck(1e6)
_C.Engine = functools.partial(_C.Engine, interpose=_testing.faults(**NEVER))
spec = experts.spec
geometry = Geometry(spec.experts, spec.hidden, spec.intermediate, spec.gated, spec.bias, fused=True)
residency, stats = {"timeout": 1e6, "guard": "on"}, {"file": sys.argv[1] + ".jsonl"}
config = MeshConfig(io=sys.argv[2], threads=1, residency=residency, stats=stats)
packed = {"weights": spec.weights, "group_size": spec.group_size, "exact": False}
pools = [
    ExpertPool(geometry, spec.layers, 8, config, activations=["silu"] * spec.layers, source=source, **packed)
    for _ in range(2)
]
for pool in pools:
    prefetch(pool.handle(1))
print("at the end", flush=True)
"""

REFUSE_ENTER = """
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]

def refuse_enter(error):
    # io_uring_enter, 426 everywhere; all else is allowed.
    refuse, allow = Filter(0x06, 0, 0, 0x00050000 | error), Filter(0x06, 0, 0, 0x7FFF0000)
    code = (Filter * 4)(Filter(0x20, 0, 0, 0), Filter(0x15, 0, 1, 426), refuse, allow)
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(4, code)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
        print("no seccomp here", flush=True)
        os._exit(0)
"""

FORBID_ENTER = """
refuse_enter(errno.EPERM)
assert "io_uring_enter is forbidden" in _C.features()["uring"], _C.features()["uring"]
try:
    open_engine(experts, source, slots=8, io="uring")
except ValueError as error:
    assert "io_uring cannot be used: io_uring_enter is forbidden" in str(error), error
else:
    raise AssertionError("a ring that nothing can be put into was opened")
engine = open_engine(experts, source, slots=8, io="auto")
about = engine.describe()
assert about["io"] == "threads" and any("io_uring_enter is forbidden" in note for note in about["notes"]), about
ops.promote(torch.tensor([engine.id, 0]), torch.arange(8))
assert engine.stats()["promoted"][0] == 8
engine.close()
"""


# Transient errors are waited out, in two processes at once.
LACK_MEMORY = """
_C.features()  # the rest of it takes time as well
child = os.fork()
refuse_enter(errno.EAGAIN if child else errno.ENOMEM)
begin = time.process_time()
why = _C.features()["uring"]
busy = time.process_time() - begin
reason = "Resource temporarily unavailable" if child else "Cannot allocate memory"
assert why == f"io_uring_enter failed ({reason})", why
assert busy < 2, "it was asked again and again"
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def run(script: str, *arguments: str) -> str:
    """Return what the program printed; fail if it does not end or exits with an error."""
    done = warm.run(PRELUDE + script, *arguments, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "reader",
    ["uring", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("threads", "buffered"))],
    indirect=True,
)
def test_reads_that_never_end_do_not_block_close_del_or_exit(reader: str, tmp_path: Path) -> None:
    assert run(STUCK, str(tmp_path / "store"), reader).split("\n") == ["interrupted", "at the end", ""]


@pytest.mark.thorough
def test_io_uring_is_not_used_if_entering_the_ring_is_forbidden(tmp_path: Path) -> None:
    if why := _C.features()["uring"]:
        pytest.skip(why)
    if "no seccomp" in run(REFUSE_ENTER + FORBID_ENTER, str(tmp_path / "store")):
        pytest.skip("this process may not install a seccomp filter")


@pytest.mark.thorough
def test_io_uring_is_not_used_if_entering_lacks_memory(tmp_path: Path) -> None:
    if why := _C.features()["uring"]:
        pytest.skip(why)
    if "no seccomp" in run(REFUSE_ENTER + LACK_MEMORY, str(tmp_path / "store")):
        pytest.skip("this process may not install a seccomp filter")


@contextlib.contextmanager
def slow_engine(folder: Path) -> Iterator[_C.Engine]:
    """An engine with a read that takes longer than its time-out. At the end its files are closed."""
    descriptors = len(os.listdir("/proc/self/fd"))
    experts = TinyExperts(Spec(), 0)
    slow = {"seed": 6, "delay": 1.0, "max_delay": 2.0}
    source = _C.Source(**experts.store(folder).source_arguments())
    engine = open_engine(experts, source, slots=4, timeout=0.05, faults=slow)
    begun = _testing.chunks_given()
    ops.prefetch(torch.tensor([engine.id, 0]), torch.arange(2))
    while _testing.chunks_given() == begun:  # else closing would drop the read before it begins
        time.sleep(0.001)
    yield engine
    deadline = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/fd")) > descriptors:  # the files are closed once the reads have ended
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_dropping_a_model_with_slow_reads_warns(tmp_path: Path) -> None:
    message = "reads of a closed engine take longer than the time-out of 50 ms"
    with slow_engine(tmp_path / "store") as engine, pytest.warns(RuntimeWarning, match=message):
        _close(engine, (), None, os.getpid())


def test_a_later_close_waits_for_what_an_earlier_one_left(tmp_path: Path) -> None:
    with slow_engine(tmp_path / "store") as engine:
        engine.close(wait=False)
        for _ in range(2):
            with pytest.raises(ReadTimeoutError, match="what they read into is freed when they end"):
                engine.close()
    engine.close()
