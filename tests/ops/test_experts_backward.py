"""Gradients of the experts op for hidden states and routing weights, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from tiny_pools import ACTIVATIONS, OpenPool, Spec, TinyPool, ops, relative_error, routing
from torch import Tensor

SPECS = [
    Spec(weights=weights, activation=activation)
    for weights in ("bf16", "bf12", "int8", "int4", "lut4", "tcq2", "tcq3", "tcq2+tcq3")
    for activation in (ACTIVATIONS if weights == "bf16" else ("silu", "swigluoai"))
]
SPECS += [
    Spec(weights="mxfp4", group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="nvfp4", group_size=16),
    Spec(weights="fp8", group_size=128),
    Spec(weights="int4_fp16"),
    Spec(weights="bf16", gated=False, bias=True),
    Spec(weights="int8", gated=False, activation="relu2"),
    Spec(weights="int4", gated=False),
    Spec(weights="int8", bias=True),
    Spec(weights="bf16", bias=True, activation="swigluoai"),
]


def _name(spec: Spec) -> str:
    return "-".join([spec.weights, str(spec.activation)] + ["bias"] * spec.bias + ["ungated"] * (not spec.gated))


def _gradients(
    pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor, sentinels: bool = False
) -> tuple[Tensor, Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = ops.experts(x, ids, weights, pool.handle(), sentinels)
    return torch.autograd.grad(out, (x, weights), grad)


def _expected(pool: TinyPool, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with exact activations: their rounding counts as the identity (straight-through)."""
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    return torch.autograd.grad(pool.weights.reference(x, ids, weights), (x, weights), grad.double())


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_agrees_with_autograd_in_float64(open_pool: OpenPool, spec: Spec) -> None:
    pool = open_pool(spec, slots=3)
    for tokens, top_k in ((1, 1), (9, 3), (30, spec.experts)):
        x, grad = torch.randn(2, tokens, spec.hidden)
        ids, weights = routing(spec, tokens, top_k)
        gradients = _gradients(pool, x, ids, weights, grad)
        for gradient, expected in zip(gradients, _expected(pool, x, ids, weights, grad), strict=True):
            assert gradient.shape == expected.shape
            assert relative_error(gradient, expected) < 1e-4  # terms of a routing weight's may cancel


def test_beyond_the_limit_of_swigluoai_there_is_no_gradient(open_pool: OpenPool) -> None:
    spec = Spec(weights="bf16", bias=True, activation="swigluoai")
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, 9, spec.hidden)
    ids, weights = routing(spec, 9, 3)
    gradients = _gradients(pool, x * 8, ids, weights, grad)
    for gradient, expected in zip(gradients, _expected(pool, x * 8, ids, weights, grad), strict=True):
        assert relative_error(gradient, expected) < 1e-5
    # Nor has a gate that is far below zero.
    x_grad, weights_grad = _gradients(pool, x * 1e9, ids, weights, grad)
    assert not x_grad.any() and weights_grad.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_dtypes_of_their_inputs(open_pool: OpenPool, dtype: torch.dtype) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, 11, spec.hidden).to(dtype)
    ids, weights = routing(spec, 11, 3)
    for weights_dtype in (torch.float32, dtype):
        rounded = weights.to(weights_dtype)
        x_grad, weights_grad = _gradients(pool, x, ids, rounded, grad)
        expected_x, expected_weights = _expected(pool, x, ids, rounded, grad)
        assert x_grad.dtype == dtype and weights_grad.dtype == weights_dtype
        assert relative_error(x_grad, expected_x) < torch.finfo(dtype).eps
        assert relative_error(weights_grad, expected_weights) < torch.finfo(weights_dtype).eps + 1e-5


def test_repeated_experts_and_strided_arguments(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, spec.hidden, 6).transpose(1, 2)
    ids = torch.tensor([[3, 3, 3], [0, 1, 0], [7, 7, 2], [4, 5, 6], [1, 1, 0], [2, 0, 2]], dtype=torch.int32)
    weights = torch.rand(3, 6).t()
    for gradient, expected in zip(
        _gradients(pool, x, ids, weights, grad), _expected(pool, x, ids, weights, grad), strict=True
    ):
        assert relative_error(gradient, expected) < 1e-5


def test_sentinels_have_no_gradient(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, 12, spec.hidden)
    ids, weights = routing(spec, 12, 4, sentinels=True)
    ids[5] = spec.experts
    x_grad, weights_grad = _gradients(pool, x, ids, weights, grad, sentinels=True)
    expected_x, expected_weights = _expected(pool, x, ids, weights, grad)
    assert relative_error(x_grad, expected_x) < 1e-5 and relative_error(weights_grad, expected_weights) < 1e-5
    assert not x_grad[5].any() and not weights_grad[ids >= spec.experts].any()


def test_no_tokens_and_no_choices(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=2)
    for tokens, top_k in ((0, 2), (3, 0)):
        x = torch.randn(tokens, spec.hidden)
        ids, weights = routing(spec, tokens, top_k)
        x_grad, weights_grad = _gradients(pool, x, ids, weights, x)
        assert torch.equal(x_grad, torch.zeros_like(x)) and weights_grad.shape == weights.shape


def test_only_inputs_that_require_grad_get_one(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x, grad = torch.randn(2, 5, spec.hidden)
    ids, weights = routing(spec, 5, 2)
    handle = pool.handle()
    assert not ops.experts(x, ids, weights, handle).requires_grad
    expected_x, expected_weights = _gradients(pool, x, ids, weights, grad)
    only_x = x.clone().requires_grad_()
    ops.experts(only_x, ids, weights, handle).backward(grad)
    assert torch.equal(only_x.grad, expected_x)
    only_weights = weights.clone().requires_grad_()
    ops.experts(x, ids, only_weights, handle).backward(grad)
    assert torch.equal(only_weights.grad, expected_weights)
    assert handle.grad is None and not handle.requires_grad


def test_gradients_have_the_same_bits_at_any_residency(open_pool: OpenPool, seed: int) -> None:
    spec = Spec()
    x, grad = torch.randn(2, 20, spec.hidden)
    ids, weights = routing(spec, 20, 4)
    expected = _gradients(open_pool(spec, in_memory=True), x, ids, weights, grad)
    faults = {"seed": seed, "delay": 0.5, "reorder": 0.5, "max_delay": 0.001}
    for slots, policy in ((1, "lru"), (2, "heat"), (5, "lfu"), (8, "lru")):
        pool = open_pool(spec, slots=slots, policy=policy, faults=faults)
        for gradient, same in zip(_gradients(pool, x, ids, weights, grad), expected, strict=True):
            assert torch.equal(gradient, same)
        assert pool.count("cold_misses") > 0 and (slots == 8) == (pool.count("evicted") == 0)


def test_the_pool_may_change_between_forward_and_backward(open_pool: OpenPool) -> None:
    """Ops that mutate the handle must not count as having changed what backward needs."""
    spec = Spec()
    pool = open_pool(spec, slots=4)
    handle = pool.handle()
    x, grad = torch.randn(2, 6, spec.hidden)
    ids, weights = routing(spec, 6, 3)
    expected, _ = _gradients(pool, x, ids, weights, grad)
    x.requires_grad_()
    out = ops.experts(x, ids, weights, handle)
    ops.evict(handle, torch.arange(spec.experts))
    ops.promote(handle, torch.tensor([0, 5]))
    out.backward(grad)
    assert torch.equal(x.grad, expected)


def test_second_derivatives_are_refused(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(2, spec.hidden, requires_grad=True)
    ids, weights = routing(spec, 2, 2)
    out = ops.experts(x, ids, weights, pool.handle())
    for grad in (torch.ones_like(out), out):
        (x_grad,) = torch.autograd.grad(out, x, grad, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="experts_backward is not implemented"):
            x_grad.sum().backward()
