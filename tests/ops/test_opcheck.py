"""torch.library.opcheck for every op and kind of argument, and properties of the schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyPool, ops, routing
from torch._subclasses.fake_tensor import FakeTensorMode

SPEC = Spec(layers=2)
TOKENS, TOP_K = 5, 3
SAMPLES = 51
MUTATING = {
    "experts_deferred",
    "experts_fallback",
    "promote",
    "prefetch",
    "lookahead",
    "evict",
    "residency",
    "route",
}
FUNCTIONAL = {
    "experts",
    "experts_backward",
    "experts_adapted",
    "experts_adapted_backward",
    "grouped_linear",
    "grouped_linear_backward",
    "linear",
    "linear_backward",
    "plain_linear",
    "attention",
    "grouped_low_rank",
    "grouped_low_rank_backward",
}
ON_A_DEVICE = {"experts_split"}  # functional too; tests/gpu has its samples
OF_TABLES = {"gather_rows", "prefetch_rows"}  # test_gather_rows.py has their samples
WITHOUT_POOL = {"pack", "pack_calibrated", "unpack", "pack_linear", "pack_linear_blocks", "unpack_linear"}


def _samples(pool: TinyPool, low: TinyPool) -> list[tuple[str, tuple[Any, ...]]]:
    handle = pool.handle()
    x = torch.randn(TOKENS, SPEC.hidden)
    ids, weights = routing(SPEC, TOKENS, TOP_K)
    offsets = torch.tensor([0, 1, 1, 1, 4, 4, 4, 5, 5])
    gate_up = torch.randn(TOKENS, SPEC.gate_up_features)
    hidden = torch.randn(TOKENS, SPEC.intermediate)
    router = torch.randn(SPEC.experts, SPEC.hidden)
    gate, up, down = torch.randn(40, 72), torch.randn(40, 72), torch.randn(72, 40)
    factors = [torch.randn(SPEC.experts, 2, *sizes) for sizes in ((72,), (2, 40), (40,), (72,))]
    trained = [factor.clone().requires_grad_() for factor in factors]
    sorted_rows = (x.clone().requires_grad_(), offsets, trained[0], trained[3])
    needs_grad = (x.clone().requires_grad_(), ids, weights.clone().requires_grad_(), handle)
    return [
        ("experts", (x, ids, weights, handle)),
        ("experts", needs_grad),
        ("experts", (x.bfloat16(), ids.int(), weights.bfloat16(), handle, True)),
        ("experts", (x.t().contiguous().t(), ids, weights, handle)),
        ("experts", (x[:0], ids[:0], weights[:0], handle)),
        ("experts", (x[:1], ids[:1], weights[:1], handle)),
        ("experts", (x[:2], ids[:2], weights[:2], handle, False, router, pool.handle(1), TOP_K)),
        ("experts", (*needs_grad, False, router, pool.handle(1), TOP_K)),
        ("experts", (*needs_grad, False, router, pool.handle(1), TOP_K, router[:, 0], "sigmoid")),
        ("experts_backward", (x, x, ids, weights, handle)),
        ("experts_backward", (x.half(), x.half(), ids, weights.half(), handle, True)),
        ("experts_adapted", (x, ids, weights, handle, *factors[:2], 1.0, *factors[2:], 0.5)),
        ("experts_adapted", (*needs_grad, *trained[:2], 1.0, *trained[2:], 0.5, True)),
        ("experts_adapted", (*needs_grad, *trained[:2], 1.0, None, None, 0.5, False, router, pool.handle(1), TOP_K)),
        ("experts_adapted_backward", (x, x, ids, weights, handle, *factors[:2], 1.0, *factors[2:], 0.5)),
        ("experts_adapted_backward", (x, x, ids, weights, handle, None, None, 1.0, *factors[2:], 0.5, True)),
        ("grouped_low_rank", sorted_rows),
        ("grouped_low_rank_backward", (x, x, offsets, factors[0], factors[3])),
        ("experts_deferred", (x, ids, weights, handle, 0, False)),
        ("experts_deferred", (x, ids, weights, handle, 2, True)),
        ("experts_deferred", (x[:2], ids[:2], weights[:2], handle, 2, False, True, router, pool.handle(1), TOP_K)),
        ("experts_fallback", (x, ids, weights, handle, low.handle())),
        ("experts_fallback", (x[:2], ids[:2], weights[:2], handle, low.handle(), True, router, pool.handle(1), TOP_K)),
        ("grouped_linear", (x, offsets, handle, 0, SPEC.gate_up_features)),
        ("grouped_linear", (hidden.requires_grad_(), offsets, handle, 1, SPEC.hidden)),
        ("grouped_linear", (x[:0], torch.zeros(9, dtype=torch.long), handle, 0, SPEC.gate_up_features)),
        ("grouped_linear_backward", (gate_up, offsets, handle, 0, SPEC.hidden)),
        ("grouped_linear_backward", (x.bfloat16(), offsets, handle, 1, SPEC.intermediate)),
        ("promote", (handle, ids)),
        ("prefetch", (handle, ids)),
        ("lookahead", (x[:2], router, handle, TOP_K)),
        ("lookahead", (x[:2], router, handle, TOP_K, None, router[:, 0], "softmax")),
        ("evict", (handle, ids)),
        ("residency", (handle,)),
        ("route", (torch.randn(TOKENS, SPEC.experts), ids, handle, 0.5, 1)),
        ("pack", (gate, up, down, None, None, None, "int8", 32)),
        ("pack", (None, up.bfloat16(), down.bfloat16(), None, torch.randn(40), torch.randn(72), "bf16", 32)),
        ("pack_calibrated", (gate, up, down, None, None, None, *_moments(72), *_moments(40), "int4", 32)),
        ("unpack", (pool.weights.records[0][0], *SPEC.record_layout)),
        *_linear_samples(x),
        *_attention_samples(),
    ]


def _moments(inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(inputs, inputs) * 0.05, torch.rand(inputs)


def _linear_samples(x: torch.Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    weight, bias = torch.randn(40, SPEC.hidden), torch.randn(40)
    packed = ops.pack_linear(weight, "int8", 32)
    about = (SPEC.hidden, 40, "int8", 32)
    return [
        ("linear", (x, packed, bias, *about)),
        ("linear", (x.bfloat16().unsqueeze(0), packed, None, *about)),
        ("linear", (x[:0], packed, None, *about)),
        ("linear", (x.clone().requires_grad_(), packed, bias.clone().requires_grad_(), *about)),
        ("linear_backward", (torch.randn(2, 3, 40), packed, *about)),
        ("plain_linear", (x.bfloat16().unsqueeze(0), weight.bfloat16(), bias.bfloat16())),
        ("plain_linear", (x[:0].bfloat16(), weight.bfloat16(), None)),
        ("pack_linear", (weight.bfloat16(), "int4", 64)),
        ("pack_linear_blocks", (torch.zeros(40, 24 * 3, dtype=torch.uint8), 96, "q5_1")),
        ("unpack_linear", (packed, *about)),
    ]


def _attention_samples() -> list[tuple[str, tuple[Any, ...]]]:
    query, key, value = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 16)
    return [
        ("attention", (query, key, value, None, 0.2)),
        ("attention", (query.bfloat16(), key.bfloat16(), value.bfloat16(), torch.rand(2, 1, 1, 9) < 0.5, 0.2)),
    ]


def _ops() -> set[str]:
    names = (schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("torch_mesh::"))
    return {name.split("::")[1] for name in names}


def test_samples_cover_every_op(open_pool: OpenPool) -> None:
    assert _ops() == MUTATING | FUNCTIONAL | ON_A_DEVICE | OF_TABLES | WITHOUT_POOL
    assert {name for name, _ in _samples(open_pool(SPEC), open_pool(SPEC))} == _ops() - ON_A_DEVICE - OF_TABLES


@pytest.mark.parametrize("index", range(SAMPLES))
def test_opcheck(open_pool: OpenPool, index: int) -> None:
    # All experts stay resident, since opcheck compares repeated runs of a call.
    pool = open_pool(SPEC)
    for layer in range(SPEC.layers):
        ops.promote(pool.handle(layer), torch.arange(SPEC.experts))
    samples = _samples(pool, open_pool(SPEC))
    assert len(samples) == SAMPLES
    name, arguments = samples[index]
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_ops_that_act_on_the_pool_mutate_the_handle() -> None:
    for name in MUTATING:
        schema = getattr(ops, name).default._schema
        assert [argument.name for argument in schema.arguments if argument.is_write] == ["handle"], name
    for name in FUNCTIONAL | ON_A_DEVICE | WITHOUT_POOL:
        assert not getattr(ops, name).default._schema.is_mutable, name


def test_ops_on_a_pool_are_kept_out_of_cuda_graphs() -> None:
    for name in _ops():
        assert (torch.Tag.cudagraph_unsafe in getattr(ops, name).default.tags) == (name not in WITHOUT_POOL), name


def test_fake_kernels_follow_the_device_of_the_activations(open_pool: OpenPool) -> None:
    """The model is on a GPU and its handles are on the CPU."""
    pool = open_pool(SPEC, slots=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(TOKENS, SPEC.hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.empty(TOKENS, TOP_K, device="cuda", dtype=torch.long)
        weights = torch.empty(TOKENS, TOP_K, device="cuda")
        offsets = torch.empty(SPEC.experts + 1, device="cuda", dtype=torch.long)
        handle = pool.handle()
        outputs = [
            ops.experts(x, ids, weights, handle),
            ops.experts_split(x, ids, weights, handle),
            *ops.experts_backward(x, x, ids, weights, handle),
            ops.experts_adapted(x, ids, weights, handle, None, None, 1.0, None, None, 1.0),
            *ops.experts_adapted_backward(x, x, ids, weights, handle, None, None, 1.0, None, None, 1.0),
            ops.experts_deferred(x, ids, weights, handle, 1, False),
            ops.experts_fallback(x, ids, weights, handle, pool.handle()),
            ops.grouped_linear(x, offsets, handle, 0, SPEC.gate_up_features),
            ops.grouped_linear_backward(x, offsets, handle, 1, SPEC.intermediate),
        ]
        ops.prefetch(handle, ids)
        ops.lookahead(x, torch.empty(SPEC.experts, SPEC.hidden, device="cuda"), handle, TOP_K)
    assert [output.device.type for output in outputs] == ["cuda"] * 15
    assert pool.count("accesses") == pool.count("prefetches") == 0


def test_fake_kernels_check_shapes(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, ids, weights = torch.empty(5, 72), torch.empty(5, 3, dtype=torch.long), torch.empty(5, 3)
        handle = pool.handle()
        for arguments in ((x[0], ids, weights), (x[:4], ids, weights), (x, ids[0], weights), (x, ids, weights[:, :2])):
            with pytest.raises(RuntimeError, match="must|differ"):
                ops.experts(*arguments, handle)
        with pytest.raises(RuntimeError, match="grad must have the shape of x"):
            ops.experts_backward(x[:2], x, ids, weights, handle)
