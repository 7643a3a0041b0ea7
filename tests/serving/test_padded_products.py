"""Prompts of all lengths share a few of torch's compiled matrix products."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_mesh.serving import padded_products
from torch_mesh.serving.padded_products import pad_products

HEADS, SIZE, EARLIER = 2, 8, 7


class Layer(nn.Module):
    """Attention between two linear layers: causal, or with earlier keys and a mask of the given dtype."""

    def __init__(self, mask: torch.dtype | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.into, self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE), nn.Linear(HEADS * SIZE, 3, bias=False)

    def forward(self, inputs_embeds: torch.Tensor, broken: bool = False) -> torch.Tensor:
        if broken:
            raise OverflowError
        rows = inputs_embeds.size(1)
        query = self.into(inputs_embeds).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        if self.mask is None:
            attended = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        else:
            keys = functional.pad(query, (0, 0, EARLIER, 0), value=0.5)
            mask = torch.ones(rows, EARLIER + rows, dtype=torch.bool).tril(EARLIER)
            if self.mask != torch.bool:
                mask = torch.zeros(mask.shape, dtype=self.mask).masked_fill_(~mask, -torch.inf)
            attended = functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The numbers of rows of torch's products."""
    found: dict[str, set[int]] = {"linear": set(), "attention": set(), "keys": set()}
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def count(func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if func is linear:
            found["linear"].add(args[0].numel() // args[0].size(-1))
        elif func is attention:
            found["attention"].add(args[0].size(-2))
            found["keys"].add(args[1].size(-2))

    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            count(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(padded_products, "multiplies_bf16", lambda: True)
    with Counts():  # outside the mode that pads
        yield found


@pytest.mark.parametrize("mask", [None, torch.bool, torch.bfloat16], ids=["causal", "masked", "added"])
def test_lengths_share_numbers_of_rows(given: dict[str, set[int]], mask: torch.dtype | None) -> None:
    layer = Layer(mask).bfloat16().requires_grad_(False)
    plain = Layer(mask and torch.bool).requires_grad_(False)
    plain.load_state_dict(layer.state_dict())
    pad_products(layer)
    for rows in (5, 31, 32, 33, 95, 191, 192, 193, 767, 768, 1023, 1024, 1025, 2100):
        x = torch.randn(1, rows, HEADS * SIZE).bfloat16()
        for found in given.values():
            found.clear()
        with torch.no_grad():
            value = layer(inputs_embeds=x)
        step = 32 if rows < 192 else 64 if rows < 768 else 256
        linear_step = 32 if rows < 1024 else 64
        assert given["linear"] == {-(-rows // linear_step) * linear_step}
        assert given["attention"] == {-(-rows // step) * step}
        if mask is None:
            assert given["keys"] == given["attention"]
        else:
            keys = rows + EARLIER
            assert given["keys"] == {keys if keys > 2048 else -(-keys // 64) * 64}
        assert value.shape == (1, rows, 3) and value.dtype == torch.bfloat16
        expected = plain(x.float())
        # The products, the attention's weights and its result are rounded to bf16.
        assert (value - expected).norm() <= 4 * 2**-8 * expected.norm()


@pytest.mark.parametrize("rows", [1, 4])
def test_decode_steps_are_left_alone(given: dict[str, set[int]], rows: int) -> None:
    layer = Layer().bfloat16()
    pad_products(layer)
    with torch.no_grad():
        layer(inputs_embeds=torch.randn(1, rows, HEADS * SIZE).bfloat16())
    assert given == {"linear": {rows}, "attention": {rows}, "keys": {rows}}


def test_training_and_fp32_are_left_alone(given: dict[str, set[int]]) -> None:
    layer = Layer().bfloat16()
    pad_products(layer)
    layer(inputs_embeds=torch.randn(1, 33, HEADS * SIZE).bfloat16()).sum().backward()
    with torch.no_grad():
        layer.float()(inputs_embeds=torch.randn(1, 33, HEADS * SIZE))
    assert given == {"linear": {33}, "attention": {33}, "keys": {33}}


def test_a_failed_forward_ends_the_padding(given: dict[str, set[int]]) -> None:
    layer = Layer().bfloat16()
    pad_products(layer)
    x = torch.randn(1, 33, HEADS * SIZE).bfloat16()
    with torch.no_grad(), pytest.raises(OverflowError):
        layer(inputs_embeds=x, broken=True)
    functional.linear(x, layer.out.weight)
    assert given["linear"] == {33}


def test_a_decode_step_beside_a_prompt_does_not_end_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_products, "multiplies_bf16", lambda: True)
    layer, began, ended = Layer().bfloat16().requires_grad_(False), threading.Event(), threading.Event()
    pad_products(layer)

    def wait(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].size(1) > 1:  # only the prompt waits
            began.set()
            assert ended.wait(60)

    layer.into.register_forward_pre_hook(wait)

    @torch.no_grad()
    def compute(rows: int) -> tuple[int, int]:
        """Return the number of function modes before and after the forward."""
        before = torch._C._len_torch_function_stack()
        layer(inputs_embeds=torch.randn(1, rows, HEADS * SIZE).bfloat16())
        return before, torch._C._len_torch_function_stack()

    with ThreadPoolExecutor(2) as threads:
        prompt = threads.submit(compute, 33)
        assert began.wait(60)
        step = threads.submit(compute, 1)
        try:
            assert step.result(60) == (0, 0)
        finally:
            ended.set()
        assert prompt.result(60) == (0, 0)
