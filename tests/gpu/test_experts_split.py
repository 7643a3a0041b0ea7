"""torch.ops.torch_mesh.experts_split: one layer's experts on the device and in the pool."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal
import threading

import pytest
import torch
from device_layers import DEVICE, device_layer, device_record, on_device
from tiny_pools import (
    OpenPool,
    Spec,
    TinyExperts,
    TinyPool,
    as_bf16,
    assert_agrees,
    assert_rounded,
    cpu_operands,
    ops,
    routing,
)
from torch import Tensor

pytest.importorskip("triton")

import quick_interpreter  # noqa: F401
from torch_mesh.ops import device
from torch_mesh.ops.streaming import Costs

import torch_mesh
from torch_mesh import _C

pytestmark = pytest.mark.device

SPEC = Spec(layers=2, weights="bf16")


def _place(pool: TinyPool, hot: list[int]) -> device.DeviceLayer:
    """Register a device layer with the ``hot`` experts. The op finds it only while the caller holds the result."""
    shared = device.SharedDevice(pool.handle(), DEVICE)
    layer = device_layer(pool.weights, hot, shared=shared)
    device.register(pool.handle(), layer)
    return layer


def _lend(
    layer: device.DeviceLayer, batch: int, costs: Costs, up: device.DeviceRecord | None = None
) -> device.SharedDevice:
    """Let prompts copy experts to the device, through two buffers full of NaN. ``up`` describes the pool's records, if
    they have another format than the device's."""
    assert layer.shared is not None
    up = up or layer.record
    buffers = [torch.full((batch, up.words * 4), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    layer.shared.lend(buffers[0], buffers[1], up)
    layer.shared.costs = costs
    return layer.shared


FREE_COPIES = Costs(0.0, 1.0, 1.0)  # every expert that may be copied is


def _split(pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, sentinels: bool = False) -> Tensor:
    return ops.experts_split(*on_device((x, ids, weights)), pool.handle(), sentinels).cpu()


def _assert_agrees(
    out: Tensor,
    layer: device.DeviceLayer,
    there: TinyExperts,
    in_memory: TinyExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Each expert is computed in the format, and with the operands, of the place where it is.

    Experts that are copied to the device have bf16 operands. These round less than bytes, so the same bound holds.
    """
    on_card, none = layer.here[ids.clamp(max=in_memory.spec.experts - 1)], in_memory.spec.experts
    up, down = ids.masked_fill(~on_card, none), ids.masked_fill(on_card, none)
    exact = there.reference(x, up, weights) + in_memory.reference(x, down, weights)
    rounded = there.reference(x, up, weights, operands=as_bf16)
    rounded += in_memory.reference(x, down, weights, operands=cpu_operands(in_memory.spec))
    assert_rounded(out, rounded, exact, few=True)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4", "int8", "lut4", "mxfp4", "tcq2", "tcq3"])
def test_any_split_gives_the_cpus_output_within_rounding(open_pool: OpenPool, weights: str, tokens: int) -> None:
    pool = open_pool(Spec(weights=weights), slots=4)
    x = torch.randn(tokens, pool.spec.hidden)
    ids, gates = routing(pool.spec, tokens, 3)
    for count in (0, 4, 8):
        layer = _place(pool, torch.randperm(8)[:count].tolist())
        out = _split(pool, x, ids, gates)
        assert layer.complete == (count == 8)
        _assert_agrees(out, layer, pool.weights, pool.weights, x, ids, gates)


def _counting_experts(count: int) -> TinyExperts:
    """Expert e adds 1 to column e of the output."""
    spec = Spec(weights="bf16", experts=count, hidden=count, intermediate=3, gated=False, bias=True)
    experts = TinyExperts(spec, seed=0)
    up, down = torch.zeros(3, count), torch.zeros(count, 3)
    experts.records = [
        [ops.pack(None, up, down, None, torch.zeros(3), torch.eye(count)[e], "bf16", 64) for e in range(count)]
    ]
    return experts


@pytest.mark.parametrize("tokens", [2, 5])
def test_each_routed_expert_is_computed_exactly_once_for_every_possible_split(tokens: int) -> None:
    count, top_k = 4, 2
    experts = _counting_experts(count)
    spec = experts.spec
    engine = _C.Engine(
        layers=1, experts=count, activation="silu", slots=count, policy="lru", verify="never", io="threads", threads=1,
        workspace=1 << 20, timeout=30.0, source=None, **spec.geometry,
    )  # fmt: skip
    for e, record in enumerate(experts.records[0]):
        engine.fill(0, e, record.numpy())
    pool = TinyPool(experts, engine)
    try:
        for hot in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(count + 1)):
            layer = _place(pool, list(hot))
            engine.reset_stats()
            ids = torch.randint(0, count, (tokens, top_k))  # ids may repeat within a token
            out = _split(pool, torch.randn(tokens, count), ids, torch.ones(tokens, top_k))
            assert torch.equal(out, torch.nn.functional.one_hot(ids, count).sum(1).float())
            cold = set(ids.unique().tolist()) - set(hot)
            assert pool.count("accesses") == len(cold), (
                "the CPU computes those that are not on the device, and no others"
            )
            assert layer.complete == (len(hot) == count)
    finally:
        pool.close()


@pytest.mark.smoke
def test_experts_on_the_device_are_never_read(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=3)
    layer = _place(pool, [0, 2, 5, 6, 7])
    ids, weights = torch.tensor([[0, 1, 2], [5, 6, 7], [3, 4, 0]]), torch.rand(3, 3)
    _split(pool, torch.randn(3, SPEC.hidden), ids, weights)
    pool.engine.drain()
    assert pool.ready() == {1, 3, 4} and pool.count("promoted") == 3 and not layer.complete


def test_a_layer_that_is_wholly_on_the_device_does_not_use_the_pool(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=3)
    layer = _place(pool, list(range(8)))
    x = torch.randn(6, SPEC.hidden)
    ids, weights = routing(SPEC, 6, 3)
    out = _split(pool, x.bfloat16(), ids, weights)
    assert layer.complete and out.dtype == torch.bfloat16
    assert_agrees(out, pool.weights, x.bfloat16(), ids, weights)
    assert pool.count("forwards") == pool.count("accesses") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_is_rounded_once(open_pool: OpenPool, dtype: torch.dtype) -> None:
    pool = open_pool(SPEC)
    x = torch.randn(4, SPEC.hidden).to(dtype)
    ids, weights = routing(SPEC, 4, 3)
    layer = _place(pool, [1, 2, 3])
    out = _split(pool, x, ids, weights)
    exact = _split(pool, x.float(), ids, weights)
    assert out.dtype == dtype and torch.equal(out, exact.to(dtype)) and layer.here.sum() == 3


def test_sentinels_add_nothing(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    x, weights = torch.randn(2, SPEC.hidden), torch.rand(2, 3)
    ids = torch.tensor([[8, 1, 5], [9, 100, 2]])
    for hot in ([], [1, 2], list(range(8))):
        layer = _place(pool, hot)
        out = _split(pool, x, ids, weights, sentinels=True)
        assert_agrees(out, pool.weights, x, ids, weights)
        assert layer.here.sum() == len(hot)


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_wrong_id_makes_nan_and_is_raised_by_the_next_forward(open_pool: OpenPool, wrong: int) -> None:
    pool = open_pool(SPEC)
    layer = _place(pool, [1, 2])
    x, weights = torch.randn(2, SPEC.hidden), torch.rand(2, 3)
    ids = torch.tensor([[1, 2, 3], [4, wrong, 5]])
    right = torch.tensor([[1, 2, 3], [4, 0, 5]])
    for _ in range(2):
        assert _split(pool, x, ids, weights).isnan().all()
        with pytest.raises(ValueError, match=rf"expert id {wrong} of token 1, choice 1 is outside \[0, 8\)"):
            _split(pool, x, right, weights)
        out = _split(pool, x, right, weights)
        assert_agrees(out, pool.weights, x, right, weights)
    assert layer.shared is not None and layer.shared.stats()["failed"] == 2 and layer.shared.stats()["calls"] == 4


def test_errors_say_what_was_given(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    x = torch.randn(2, SPEC.hidden)
    ids, weights = routing(SPEC, 2, 3)
    with pytest.raises(ValueError, match="names no layer with experts on a device"):
        _split(pool, x, ids, weights)
    layer = _place(pool, [1, 2])
    with pytest.raises(ValueError, match=r"x must be \[tokens, hidden=72\]; got \[2, 71\]"):
        _split(pool, x[:, :71], ids, weights)
    with pytest.raises(ValueError, match="topk_ids has dtype torch.float32"):
        _split(pool, x, ids.float(), weights)
    with pytest.raises(ValueError, match="topk_weights has dtype torch.int64"):
        _split(pool, x, ids, ids)
    del layer  # as when the layer's model is deleted
    with pytest.raises(ValueError, match="names no layer"):
        _split(pool, x, ids, weights)


def test_a_failed_read_makes_nan_and_is_raised_once(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 1, "eio_always": 1.0})
    layer = _place(pool, [0, 1, 2])
    assert layer.shared is not None
    x, weights = torch.randn(1, SPEC.hidden), torch.rand(1, 3)
    assert _split(pool, x, torch.tensor([[0, 1, 5]]), weights).isnan().all()
    with pytest.raises(torch_mesh.ReadError) as error:
        layer.shared.host.synchronize()
    assert (error.value.layer, error.value.expert) == (0, 5) and error.value.errno
    layer.shared.host.synchronize()
    ids = torch.tensor([[0, 1, 2]])
    out = _split(pool, x, ids, weights)
    assert_agrees(out, pool.weights, x, ids, weights)
    counts = layer.shared.stats()
    assert (counts["calls"], counts["all_on_device"], counts["failed"]) == (2, 1, 1)


def test_with_failing_reads_each_output_is_right_or_nan_and_raised(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": random.randrange(2**31), "eio_always": 0.1, "delay": 0.2})
    layer = _place(pool, [0, 1, 2])
    failed, raised = 0, 0
    for _ in range(30):
        x = torch.randn(2, SPEC.hidden)
        ids, weights = routing(SPEC, 2, 3)
        try:
            out = _split(pool, x, ids, weights)
        except torch_mesh.ReadError:
            raised += 1
            continue
        if out.isnan().any():
            assert out.isnan().all()
            failed += 1
        else:
            assert_agrees(out, pool.weights, x, ids, weights)
    assert layer.shared is not None and layer.shared.stats()["failed"] == failed and 0 <= failed - raised <= 1


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_split_of_a_prompt_computes_each_expert_once(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """All ways to divide ``count`` experts into those on the device, those copied to it and those on the CPU."""
    spec = Spec(weights="bf16", experts=count, hidden=40, intermediate=24)
    pool = open_pool(spec, slots=2)
    tokens, top_k = 3, 2
    chosen: list[int] = []
    seen: list[list[int]] = []

    def choose(rows: list[int], *costs: float) -> list[int]:
        seen.append(rows)
        return [expert for expert in chosen if rows[expert] > 0]

    monkeypatch.setattr(importlib.import_module("torch_mesh.ops.experts_split"), "choose_streamed", choose)
    for split in itertools.product(("device", "streamed", "host"), repeat=count):
        hot, chosen = ([e for e in range(count) if split[e] == where] for where in ("device", "streamed"))
        random.shuffle(chosen)
        layer = _place(pool, hot)
        shared = _lend(layer, random.choice([1, 2, 4]), FREE_COPIES)
        pool.engine.reset_stats()
        x, ids, weights = (
            torch.randn(tokens, spec.hidden),
            torch.randint(0, count, (tokens, top_k)),
            torch.rand(tokens, top_k),
        )
        out = _split(pool, x, ids, weights)
        assert_agrees(out, pool.weights, x, ids, weights)
        routed = set(ids.unique().tolist())
        counts = shared.stats()
        if layer.complete:
            assert (counts["complete"], counts["calls"], counts["streamed"]) == (1, 0, 0)
            continue
        assert seen.pop() == [0 if e in hot else int((ids == e).sum()) for e in range(count)] and not seen
        assert counts["streamed"] == len(routed & set(chosen))
        assert counts["bytes_streamed"] == counts["streamed"] * layer.records.size(1)
        assert counts["all_on_device"] == (not routed - set(hot) - set(chosen))


@pytest.mark.parametrize("weights", [pytest.param("int4", marks=pytest.mark.smoke), "bf16"])
def test_the_costs_decide_how_many_experts_a_prompt_copies(open_pool: OpenPool, weights: str) -> None:
    spec = Spec(weights=weights, hidden=40, intermediate=24)
    pool = open_pool(spec, slots=3)
    layer = _place(pool, [0, 1])
    x, gates = torch.randn(6, spec.hidden), torch.rand(6, 3)
    ids = torch.tensor([[0, 2, 3], [1, 2, 3], [0, 2, 3], [2, 3, 4], [1, 2, 5], [0, 2, 6]])
    for costs, streamed in ((Costs(1e9, 1, 1), 0), (Costs(2, 1, 0), 2), (FREE_COPIES, 5)):
        shared = _lend(layer, 2, costs)
        shared.reset_stats()
        out = _split(pool, x, ids, gates)
        assert shared.stats()["streamed"] == streamed
        _assert_agrees(out, layer, pool.weights, pool.weights, x, ids, gates)
        assert torch.equal(_split(pool, x, ids, gates), out), "whatever is resident by now"
        before = shared.stats()["streamed"]
        _split(pool, x[:1], ids[:1], gates[:1])  # fewer pairs than experts
        assert shared.stats()["streamed"] == before, "a decode step streams nothing"


@pytest.mark.parametrize(
    ("there", "in_memory"),
    [
        ("bf16", "int4"),
        ("int4", "fp8"),
        ("tcq3", "tcq2"),
        pytest.param("int4", "int8", marks=pytest.mark.slow),
        pytest.param("lut4", "bf16", marks=pytest.mark.slow),
    ],
)
def test_each_expert_is_computed_in_the_format_of_its_place(open_pool: OpenPool, there: str, in_memory: str) -> None:
    """The two formats hold different weights, so that the test sees which of them computed an expert."""
    pool, on_card = open_pool(Spec(weights=in_memory), slots=4), TinyExperts(Spec(weights=there), seed=99)
    shared = device.SharedDevice(pool.handle(), DEVICE)
    layer = device_layer(on_card, [0, 3, 5], shared=shared)
    device.register(pool.handle(), layer)
    x, gates = torch.randn(6, pool.spec.hidden), torch.rand(6, 3)
    ids = torch.tensor([[0, 2, 3], [1, 2, 3], [0, 2, 3], [2, 3, 4], [1, 2, 5], [0, 2, 6]])
    for costs, streamed in ((Costs(1e9, 1, 1), 0), (Costs(2, 1, 0), 1), (FREE_COPIES, 4)):
        _lend(layer, 2, costs, device_record(pool.spec)).reset_stats()
        out = _split(pool, x, ids, gates)
        assert shared.stats()["streamed"] == streamed
        _assert_agrees(out, layer, on_card, pool.weights, x, ids, gates)
        assert torch.equal(_split(pool, x, ids, gates), out)


def test_a_failed_read_for_the_device_is_raised_and_later_calls_succeed(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4, faults={"seed": 1, "eio_always": 1.0})
    layer = _place(pool, [0, 1, 2])
    shared = _lend(layer, 2, FREE_COPIES)
    x, weights = torch.randn(6, SPEC.hidden), torch.rand(6, 3)
    for _ in range(3):
        with pytest.raises(torch_mesh.ReadError):
            _split(pool, x, torch.tensor([[0, 1, 5]] * 6), weights)
    ids = torch.tensor([[0, 1, 2]] * 6)
    out = _split(pool, x, ids, weights)
    assert_agrees(out, pool.weights, x, ids, weights)
    shared.host.synchronize()
    assert shared.stats()["streamed"] == 0 and shared.stats()["failed"] == 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="CUDA itself refuses a forked child")
def test_a_forked_child_is_refused(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    layer = _place(pool, [1, 2])
    x, (ids, weights) = torch.randn(2, SPEC.hidden), routing(SPEC, 2, 3)
    _split(pool, x, ids, weights)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends the child, and so the test
        try:
            ops.experts_split(x, ids, weights, pool.handle())
        except torch_mesh.ForkedProcessError:
            del layer  # this also deletes the device, which belongs to the parent, without an error
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert not _split(pool, x, ids, weights).isnan().any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="CUDA itself refuses a forked child")
def test_a_forked_child_does_not_end_its_parents_turn(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC)
    layer = _place(pool, [1, 2])
    shared = _lend(layer, 2, FREE_COPIES)
    assert shared.uplift is not None
    ending = threading.Event()

    def busy() -> None:
        while not ending.is_set():
            shared.host.stats()  # calls the driver

    for _ in range(4):
        _split(pool, torch.randn(1, SPEC.hidden), torch.tensor([[3]]), torch.ones(1, 1))
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(30):
            with shared.uplift.turn(shared.stream()) as turn:
                turn.bring(0, [3])
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        signal.alarm(20)  # a hang ends the child, and so the test
                        turn.__exit__(None, None, None)
                        status = 0
                    finally:
                        os._exit(status)
                assert os.waitpid(child, 0)[1] == 0
    finally:
        ending.set()
        thread.join()


def test_gradients_are_those_of_the_layer_on_the_cpu(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    layer = _place(pool, [0, 3, 4, 6])
    x, (ids, weights), grad = torch.randn(6, SPEC.hidden), routing(SPEC, 6, 3), torch.randn(6, SPEC.hidden)
    gradients = []
    for run in (_split, lambda pool, *inputs: ops.experts(*inputs, pool.handle())):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        run(pool, inputs[0], ids, inputs[1]).backward(grad)
        gradients.append([value.grad for value in inputs])
    for value, expected in zip(*gradients, strict=True):
        assert value is not None and torch.equal(value, expected)
    assert not layer.complete


@pytest.mark.parametrize("hot", [[1, 2, 5], list(range(8))], ids=["some", "all"])
def test_opcheck(open_pool: OpenPool, hot: list[int]) -> None:
    pool = open_pool(SPEC, slots=5)
    layer = _place(pool, hot)
    x, (ids, weights) = torch.randn(5, SPEC.hidden), routing(SPEC, 5, 3)
    for tokens in (0, 1, 3):
        arguments = on_device((x[:tokens], ids[:tokens], weights[:tokens]))
        torch.library.opcheck(ops.experts_split.default, (*arguments, pool.handle()))
    arguments = [x.to(DEVICE).requires_grad_(), ids.to(DEVICE), weights.to(DEVICE).requires_grad_(), pool.handle()]
    torch.library.opcheck(ops.experts_split.default, tuple(arguments))
    assert layer.complete == (len(hot) == 8)


def test_compiled_equals_eager_and_layers_share_one_graph(open_pool: OpenPool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    pool = open_pool(SPEC)
    layers = []
    for index, hot in enumerate(([1, 2, 5], list(range(8)))):
        shared = device.SharedDevice(pool.handle(), DEVICE)
        layers.append(device_layer(pool.weights, hot, index, shared=shared))
        device.register(pool.handle(index), layers[-1])
    x, ids, weights = on_device((torch.randn(5, SPEC.hidden), *routing(SPEC, 5, 3)))

    def run(handle: Tensor) -> Tensor:
        return ops.experts_split(x, ids, weights, handle) * 2

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for index in (0, 1, 0):
        assert torch.equal(compiled(pool.handle(index)), run(pool.handle(index)))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_graphs_are_cut_around_the_op() -> None:
    assert torch.Tag.cudagraph_unsafe in ops.experts_split.default.tags
