"""Errors of the ops: their types and attributes. The pool works afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyPool, engine_options, ops, routing
from torch import Tensor

import torch_mesh
from torch_mesh import _C, validators

SPEC = Spec(layers=2)


def _call(pool: TinyPool, layer: int = 0) -> Tensor:
    """One token that uses experts 1 and 5."""
    x = torch.linspace(-1, 1, SPEC.hidden)[None]
    return ops.experts(x, torch.tensor([[1, 5]]), torch.tensor([[0.25, 0.75]]), pool.handle(layer))


@pytest.fixture
def expected(open_pool: OpenPool) -> Tensor:
    return _call(open_pool(SPEC, in_memory=True))


@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize(("bad", "token", "choice"), [(-1, 0, 0), (8, 2, 1), (2**40, 1, 2), (-(2**40), 6, 2)])
def test_a_wrong_id_is_named_with_its_position(
    open_pool: OpenPool, bad: int, token: int, choice: int, sentinels: bool
) -> None:
    pool = open_pool(SPEC, slots=4)
    x = torch.randn(7, SPEC.hidden)
    ids, weights = routing(SPEC, 7, 3)
    ids[token, choice] = bad
    if sentinels and bad > 0:
        ops.experts(x, ids, weights, pool.handle(), True)
        return
    message = rf"expert id {bad} of token {token}, choice {choice} is outside \[0, 8\)"
    with pytest.raises(ValueError, match=message):
        ops.experts(x, ids, weights, pool.handle(), sentinels)
    with pytest.raises(ValueError, match=message):
        ops.experts_backward(x, x, ids, weights, pool.handle(), sentinels)
    assert pool.count("accesses") == 0


def test_wrong_shapes_and_dtypes(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    x = torch.randn(3, 72)
    ids, weights = routing(SPEC, 3, 2)
    cases = [
        ((x[0], ids, weights), r"x must be \[tokens, hidden=72\]; got \[72\]"),
        ((x[:, :71], ids, weights), r"x must be \[tokens, hidden=72\]; got \[3, 71\]"),
        ((x.double(), ids, weights), "x has dtype Double; allowed: bfloat16, float16, float32"),
        ((x, ids[:2], weights[:2]), r"topk_ids must be \[tokens=3, k\]; got \[2, 2\]"),
        ((x, ids[0], weights[0]), r"topk_ids must be \[tokens=3, k\]; got \[2\]"),
        ((x, ids.float(), weights), "topk_ids has dtype Float; allowed: int64, int32"),
        ((x, ids, weights[:, :1]), r"topk_weights must have the shape of topk_ids, \[3, 2\]; got \[3, 1\]"),
        ((x, ids, ids), "topk_weights has dtype Long; allowed: a floating dtype"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.experts(*arguments, pool.handle())
    with pytest.raises(ValueError, match=r"grad must have the shape of x, \[3, 72\]; got \[2, 72\]"):
        ops.experts_backward(x[:2], x, ids, weights, pool.handle())


def test_ops_without_derivatives_refuse_them(open_pool: OpenPool) -> None:
    pool, low = open_pool(SPEC, slots=4), open_pool(SPEC, slots=4)
    x, query = torch.randn(2, SPEC.hidden), torch.randn(1, 2, 1, 16)
    ids, weights = routing(SPEC, 2, 2)
    offsets = torch.tensor([0, 1, 2])
    a, b = torch.randn(2, 3, SPEC.hidden), torch.randn(2, 3, 5)
    calls: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: ops.experts_deferred(x, ids, weights, pool.handle(), 1, False), x),
        (lambda weights: ops.experts_deferred(x, ids, weights, pool.handle(), 1, False), weights),
        (lambda x: ops.experts_fallback(x, ids, weights, pool.handle(), low.handle()), x),
        (lambda x: ops.experts_split(x, ids, weights, pool.handle()), x),
        (lambda query: ops.attention(query, query, query, None, 0.25), query),
        (lambda a: ops.grouped_low_rank(x, offsets, a, b), a),
        (lambda b: ops.grouped_low_rank(x, offsets, a, b), b),
    ]
    for call, at in calls:
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), pytest.raises(NotImplementedError, match="forward (mode|AD)"):
                torch.func.jvp(call, (at,), (at,))

    def grad(call: Callable[[Tensor], Tensor], at: Tensor) -> None:
        torch.func.grad(lambda at: call(at).sum())(at)

    for call, at in (*calls[:3], calls[4]):  # the others have a formula
        with pytest.raises(RuntimeError, match="is not implemented"):
            grad(call, at)
    for transform in (grad, torch.func.vjp, lambda call, at: torch.func.jacrev(call)(at)):
        with pytest.raises(NotImplementedError, match=r"no derivatives by torch\.func"):
            transform(lambda x: ops.experts(x, ids, weights, pool.handle()), x)
    out = ops.attention(query.requires_grad_(), query, query, None, 0.25)
    with pytest.raises(RuntimeError, match="attention is not implemented"):
        out.sum().backward()


def test_wrong_handles(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    x = torch.randn(1, 72)
    ids, weights = routing(SPEC, 1, 2)
    for handle in (pool.handle()[:1], pool.handle().int(), pool.handle().float(), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"a torch_mesh handle is an int64 CPU tensor \[pool, layer\]"):
            ops.experts(x, ids, weights, handle)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"the handle names layer {layer}; its pool has layers \[0, 2\)"):
            ops.residency(pool.handle(layer))
    stale = pool.handle()
    stale[0] += 1 << 40
    with pytest.raises(torch_mesh.PoolClosedError, match=rf"\({stale[0]}\) is closed.*patch it again"):
        ops.experts(x, ids, weights, stale)


def test_experts_without_a_fused_activation_refer_to_grouped_linear(open_pool: OpenPool) -> None:
    pool = open_pool(Spec(activation=None), in_memory=True)
    x = torch.randn(2, 72)
    ids, weights = routing(SPEC, 2, 2)
    for call in (ops.experts, lambda *arguments: ops.experts_backward(x, *arguments)):
        with pytest.raises(ValueError, match="activation of their own; use grouped_linear"):
            call(x, ids, weights, pool.handle())


def test_an_activation_of_gate_and_up_needs_a_gate(open_pool: OpenPool) -> None:
    with pytest.raises(
        ValueError, match='"swigluoai" and "softcap" combine gate and up, and these experts have no gate; allowed'
    ):
        open_pool(Spec(gated=False, activation="swigluoai"), in_memory=True)
    with pytest.raises(ValueError, match='unknown activation "swiglu"; there are "silu", .* and "swigluoai"'):
        open_pool(Spec(activation="swiglu"), in_memory=True)


def test_every_op_refuses_a_closed_pool(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    handle = pool.handle()
    x = torch.randn(2, 72)
    ids, weights = routing(SPEC, 2, 2)
    offsets = torch.tensor([0, 2, 2, 2, 2, 2, 2, 2, 2])
    _call(pool)
    pool.close()
    pool.close()
    calls = [
        lambda: ops.experts(x, ids, weights, handle),
        lambda: ops.experts(x.requires_grad_(), ids, weights, handle),
        lambda: ops.experts_backward(x, x, ids, weights, handle),
        lambda: ops.experts_deferred(x.detach(), ids, weights, handle, 1, False),
        lambda: ops.experts_fallback(x.detach(), ids, weights, handle, handle),
        lambda: ops.grouped_linear(x, offsets, handle, 0, 80),
        lambda: ops.grouped_linear_backward(torch.randn(2, 80), offsets, handle, 0, 72),
        lambda: ops.promote(handle, ids),
        lambda: ops.prefetch(handle, ids),
        lambda: ops.evict(handle, ids),
        lambda: ops.residency(handle),
        pool.engine.stats,
        pool.engine.describe,
        pool.engine.drain,
        lambda: pool.engine.read_record(0, 0),
    ]
    for call in calls:
        with pytest.raises(torch_mesh.PoolClosedError):
            call()


def test_a_forward_outlives_the_close_of_its_pool(open_pool: OpenPool, expected: Tensor) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 3, "delay": 1.0, "max_delay": 0.4})
    results: list[Tensor] = []
    forward = threading.Thread(target=lambda: results.append(_call(pool)))
    forward.start()
    deadline = time.monotonic() + 10
    while pool.count("accesses") == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    pool.close()
    forward.join()
    assert torch.equal(results[0], expected)


def test_a_failed_read_says_where(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 1, "eio_always": 1.0})
    for call in (lambda: _call(pool, 1), lambda: ops.promote(pool.handle(1), torch.tensor([1, 5]))):
        with pytest.raises(torch_mesh.ReadError) as caught:
            call()
        error = caught.value
        assert error.layer == 1 and error.expert in (1, 5) and error.errno == 5
        assert error.file is not None and Path(error.file).is_file()
        assert error.offset is not None and error.offset % 4096 == 0
        pool.engine.drain()
    with pytest.raises(torch_mesh.ReadError):
        pool.engine.read_record(0, 7)
    assert pool.count("failed", 1) >= 2


def test_a_failed_prefetch_raises_nothing(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 1, "eio_always": 1.0})
    ops.prefetch(pool.handle(), torch.tensor([1, 5]))
    pool.engine.drain()
    assert pool.ready() == set() and pool.count("failed") == 2


def test_wrong_bytes_are_a_checksum_error(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, verify="always", faults={"seed": 1, "bit_flip": 1.0})
    with pytest.raises(torch_mesh.ChecksumError) as caught:
        _call(pool)
    assert caught.value.layer == 0 and caught.value.expert in (1, 5) and caught.value.offset is not None


def test_backward_raises_the_errors_of_its_reads(open_pool: OpenPool) -> None:
    x = torch.randn(2, 72)
    ids, weights = routing(SPEC, 2, 2)
    pool = open_pool(SPEC, slots=2, faults={"seed": 1, "eio_always": 1.0})
    with pytest.raises(torch_mesh.ReadError) as caught:
        ops.experts_backward(x, x, ids, weights, pool.handle())
    assert caught.value.errno == 5


def test_a_pool_recovers_when_the_disk_does(open_pool: OpenPool, expected: Tensor) -> None:
    """Half of the chunks fail each time: some calls raise, and the others are right."""
    pool = open_pool(SPEC, slots=4, verify="always", faults={"seed": 1, "bit_flip": 0.5})
    outcomes = []
    for _ in range(40):
        try:
            outcomes.append(torch.equal(_call(pool), expected))
        except torch_mesh.ChecksumError:
            outcomes.append(None)
        pool.engine.drain()
        ops.evict(pool.handle(), torch.arange(8))
    assert True in outcomes and None in outcomes and False not in outcomes


def test_a_wait_times_out(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, timeout=0.1, faults={"seed": 2, "delay": 1.0, "max_delay": 1.5})
    with pytest.raises(torch_mesh.ReadTimeoutError) as caught:
        ops.promote(pool.handle(), torch.arange(4))
    assert caught.value.layer == 0 and caught.value.expert is not None and caught.value.file is not None
    assert pool.engine.pinned() == 0
    _until_idle(pool)


def _until_idle(pool: TinyPool) -> None:
    """Wait for all reads, for longer than the pool's time-out."""
    deadline = time.monotonic() + 10
    while 1 in pool.residency() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 not in pool.residency()


def test_ctrl_c_ends_a_wait_and_leaves_the_pool_usable(open_pool: OpenPool, expected: Tensor) -> None:
    pool = open_pool(SPEC, slots=8, faults={"seed": 2, "delay": 1.0, "max_delay": 4.0})
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ops.promote(pool.handle(), torch.arange(8))
    assert pool.engine.pinned() == 0 and 1 in pool.residency(), "the reads ended before the signal came"
    assert torch.equal(_call(pool), expected)


def test_ctrl_c_ends_the_wait_of_close(open_pool: OpenPool, expected: Tensor) -> None:
    pool = open_pool(SPEC, slots=8, faults={"seed": 2, "delay": 1.0, "max_delay": 4.0})
    outputs: list[Tensor] = []
    forward = threading.Thread(target=lambda: outputs.append(_call(pool)))
    forward.start()
    while 1 not in pool.residency():
        time.sleep(0.01)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.engine.close()
    assert forward.is_alive(), "the reads ended before the signal came"
    forward.join(timeout=60)
    assert torch.equal(outputs[0], expected)  # the running forward keeps its experts
    pool.engine.close()


def test_an_exception_of_a_signal_handler_propagates_from_the_op(open_pool: OpenPool) -> None:
    class AlarmError(Exception):
        pass

    def raise_alarm(*_: object) -> None:
        raise AlarmError("wake up")

    pool = open_pool(SPEC, slots=8, faults={"seed": 2, "delay": 1.0, "max_delay": 2.0})
    before = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(AlarmError):
            ops.promote(pool.handle(), torch.arange(8))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_run_while_an_op_waits(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=8, faults={"seed": 2, "delay": 1.0, "max_delay": 0.6})
    steps = 0
    done = threading.Event()

    def count() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1
            time.sleep(0.002)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before, begin = steps, time.monotonic()
        ops.promote(pool.handle(), torch.arange(8))
        waited, made = time.monotonic() - begin, steps - before
    finally:
        done.set()
        thread.join()
    assert waited > 0.1, "nothing was waited for"
    assert made >= 10


def test_two_threads_on_a_small_pool(open_pool: OpenPool) -> None:
    """Both need more than half of the slots. They must not deadlock."""
    spec = Spec(layers=2)
    exact, pool = open_pool(spec, in_memory=True), open_pool(spec, slots=3)
    inputs = [(torch.randn(5, 72), *routing(spec, 5, 4)) for _ in range(2)]
    wrong: list[int] = []

    def forwards(which: int) -> None:
        reference = ops.experts(*inputs[which], exact.handle(which))
        wrong.extend(
            step for step in range(40) if not torch.equal(ops.experts(*inputs[which], pool.handle(which)), reference)
        )

    threads = [threading.Thread(target=forwards, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not wrong
    assert sum(pool.count("accesses", layer) for layer in range(2)) == 40 * sum(
        len(ids.unique()) for _, ids, _ in inputs
    )


def test_a_forked_child_gets_an_error(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    _call(pool)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _call(pool)
        except torch_mesh.ForkedProcessError as error:  # loading a model in the child would hang in OpenMP
            status = int("get_context('spawn')" not in str(error))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _call(pool)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("threads", 1025, "threads is 1025; allowed: 1 to 1024"),
        ("threads", 10**9, "threads is 1000000000; allowed: 1 to 1024"),
        ("threads", -1, "threads is -1; allowed: 1 to 1024"),
        ("timeout", 9.3e9, "timeout is 9300000000.000000 seconds; allowed: 0.001 to 1000000000"),
        ("timeout", 1e300, "allowed: 0.001 to 1000000000"),
        ("timeout", float("nan"), "allowed: 0.001 to 1000000000"),
        ("timeout", -1.0, "allowed: 0.001 to 1000000000"),
        ("timeout", 0.0, "allowed: 0.001 to 1000000000"),
        ("timeout", 1e-5, "allowed: 0.001 to 1000000000"),
        ("faults", {"max_delay": 2e9}, "max_delay is 2000000000.000000 seconds; allowed: 0 to 1000000000"),
    ],
)
def test_impossible_values_are_refused(open_pool: OpenPool, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_pool(SPEC, slots=4, **{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slotz": 4}, "Engine knows no slotz="),
        ({"slots": 4.5}, "slots= of Engine is 4.5; it must be int"),
        ({"slots": None}, "slots= of Engine is None; it must be int"),
        ({"min_slots": "2"}, "min_slots= of Engine is '2'; it must be int"),
        ({"source": 3}, "source= of Engine is 3; it must be"),
    ],
)
def test_an_option_of_another_name_or_type_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _C.Engine(**{"source": None, **engine_options(SPEC), **options})


def test_a_missing_required_option_is_named() -> None:
    options = engine_options(SPEC)
    del options["policy"]
    with pytest.raises(TypeError, match="Engine needs policy="):
        _C.Engine(source=None, **options)


def test_the_longest_time_out_does_not_overflow(open_pool: OpenPool) -> None:
    slow = {"seed": 1, "delay": 1.0, "max_delay": 0.05}
    pool = open_pool(SPEC, slots=4, timeout=_C.MAX_TIMEOUT, faults=slow)
    _call(pool)
    assert not pool.engine.wait_for_forwards(0, 10, 0.01)
    with pytest.raises(ValueError, match="patience is .*; allowed: 0 to 1000000000"):
        pool.engine.wait_for_forwards(0, 10, 9.3e9)


def test_an_engine_takes_torchs_threads_up_to_its_limit(open_pool: OpenPool) -> None:
    before = torch.get_num_threads()
    pools = [open_pool(SPEC, slots=4, threads=0)]
    try:
        torch.set_num_threads(_C.MAX_THREADS + 1)
        pools.append(open_pool(SPEC, slots=4, threads=0))
    finally:
        torch.set_num_threads(before)
    assert [pool.engine.describe()["threads"] for pool in pools] == [before, _C.MAX_THREADS]


def test_an_engine_works_with_its_limit_of_threads(open_pool: OpenPool, expected: Tensor) -> None:
    assert torch.equal(_call(open_pool(SPEC, slots=4, threads=_C.MAX_THREADS)), expected)


def test_the_configuration_has_the_limits_of_the_engine() -> None:
    assert (validators.MAX_THREADS, validators.MAX_TIMEOUT) == (_C.MAX_THREADS, _C.MAX_TIMEOUT)
