"""A model on a CUDA device with its experts on the CPU: arguments are copied over, results back."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_pools import OpenPool, Spec, ops, routing
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import torch_mesh

pytestmark = pytest.mark.gpu

SPEC = Spec(layers=2)


def _inputs(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(tokens, SPEC.hidden), *routing(SPEC, tokens, 3))


def _cuda(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_come_back_on_the_device(open_pool: OpenPool, dtype: torch.dtype) -> None:
    pool = open_pool(SPEC, slots=5)
    x, ids, weights = _inputs()
    x = x.to(dtype)
    out = ops.experts(*_cuda((x, ids, weights)), pool.handle())
    assert out.device.type == "cuda" and out.dtype == dtype
    assert torch.equal(out.cpu(), ops.experts(x, ids, weights, pool.handle()))


def test_a_submitted_forward_reads_its_input_in_the_order_of_the_stream() -> None:
    layer = torch_mesh.Experts(torch.randn(4, 2 * 32, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16(), top_k=2)
    x, new, weights = torch.randn(6, 64).cuda(), torch.randn(6, 64).cuda(), torch.rand(6, 2).cuda()
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(3, 1).cuda()
    expected = layer(new, ids, weights)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)  # cycles, about half a second
        x.copy_(new)
        assert torch.equal(layer.submit(x, ids, weights).result(), expected)


def test_gradients_come_back_on_the_device(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    gradients = []
    inputs = _inputs()
    grad = torch.randn(6, SPEC.hidden)
    for device in ("cpu", "cuda"):
        x, ids, weights = (tensor.to(device) for tensor in inputs)
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        ops.experts(x, ids, weights, pool.handle()).backward(grad.to(device))
        assert x.grad is not None and weights.grad is not None
        assert x.grad.device == x.device and weights.grad.device == weights.device
        gradients.append((x.grad.cpu(), weights.grad.cpu()))
    for value, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(value, expected)


def test_grouped_linear_and_its_gradient(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    offsets = torch.tensor([0, 2, 2, 3, 3, 5, 6, 6, 6])
    results = []
    x, grad = torch.randn(6, SPEC.hidden), torch.randn(6, SPEC.gate_up_features)
    for device in ("cpu", "cuda"):
        rows = x.to(device).detach().requires_grad_()
        out = ops.grouped_linear(rows, offsets.to(device), pool.handle(), 0, SPEC.gate_up_features)
        out.backward(grad.to(device))
        assert out.device == rows.device and rows.grad is not None
        results.append((out.detach().cpu(), rows.grad.cpu()))
    for value, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(value, expected)


def test_hints_take_ids_on_the_device(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=6)
    ops.promote(pool.handle(), torch.tensor([1, 3], device="cuda"))
    assert pool.ready() == {1, 3}
    ops.evict(pool.handle(), torch.tensor([3], device="cuda"))
    ops.prefetch(pool.handle(), torch.tensor([5], device="cuda"))
    pool.engine.drain()
    assert pool.ready() == {1, 5}
    router = torch.zeros(SPEC.experts, SPEC.hidden, device="cuda")
    router[7] = 1.0
    ops.lookahead(torch.ones(1, SPEC.hidden, device="cuda"), router, pool.handle(), 1)
    pool.engine.drain()
    assert pool.ready() == {1, 5, 7}
    assert ops.residency(pool.handle()).device.type == "cpu"


def test_errors_are_those_of_the_cpu(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    x, ids, weights = _cuda(_inputs())
    ids[2, 1] = 8
    with pytest.raises(ValueError, match="expert id 8 of token 2, choice 1"):
        ops.experts(x, ids, weights, pool.handle())
    with pytest.raises(ValueError, match="handle is an int64 CPU tensor"):
        ops.experts(x.cpu(), ids.cpu(), weights.cpu(), pool.handle().int())


def test_work_queued_on_the_current_stream_is_waited_for(open_pool: OpenPool) -> None:
    """The arguments are still being computed, on a stream other than the default one."""
    pool = open_pool(SPEC, in_memory=True)
    x, ids, weights = _inputs()
    expected = ops.experts(x, ids, weights, pool.handle())
    device_x, device_ids, device_weights = _cuda((torch.zeros_like(x), ids, weights))
    source = x.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        device_x.copy_(source)
        out = ops.experts(device_x, device_ids, device_weights, pool.handle())
        doubled = out * 2
    stream.synchronize()
    assert torch.equal(doubled.cpu(), expected * 2)


def test_compiled_on_the_device(open_pool: OpenPool) -> None:
    pool = open_pool(SPEC, slots=5)
    x, ids, weights = _cuda(_inputs())

    def run(x: Tensor, ids: Tensor, weights: Tensor, handle: Tensor, next_handle: Tensor) -> Tensor:
        ops.prefetch(next_handle, ids)
        return ops.experts(x, ids, weights, handle) + x

    expected = run(x, ids, weights, pool.handle(0), pool.handle(1))
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # the third run would replay a CUDA graph if the op allowed one
        out = compiled(x, ids, weights, pool.handle(0), pool.handle(1))
        torch.testing.assert_close(out, expected)
        ops.evict(pool.handle(0), torch.arange(SPEC.experts))
    assert pool.count("evicted", 0) >= 4 and pool.count("cold_misses", 0) >= 5


def test_a_model_on_the_device_gives_the_tokens_of_the_cpu() -> None:
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    original = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    prompt = torch.randint(3, 96, (2, 7))
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    models = {}
    for device in ("cpu", "cuda"):
        model = torch_mesh.patch(copy.deepcopy(original), resident=0.5, weights="int8")
        models[device] = model.to(device)
    logits = {device: model(prompt.to(device)).logits.cpu() for device, model in models.items()}
    torch.testing.assert_close(logits["cuda"], logits["cpu"], rtol=0.02, atol=0.05)
    mask = torch.ones_like(prompt)
    tokens = {
        device: model.generate(prompt.to(device), attention_mask=mask.to(device), **settings).cpu()
        for device, model in models.items()
    }
    agree = (tokens["cuda"] == tokens["cpu"]).float().mean()
    assert agree > 0.8, "one token may tip on rounding, most may not"
