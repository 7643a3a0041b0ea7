"""Pad the rows of a server's matrix products, so that prompts of all lengths share a few compiled products.

On processors with bf16 products torch multiplies with oneDNN. It compiles 0.33 MB of code for each number of rows (up
to about a thousand) and each shape of weights, and never frees it. Masked attention compiles less code, but for each
pair of numbers of rows and keys. A server with prompts of all lengths would grow by a gigabyte (docs/decisions/0072).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torch_mesh.hf.torch_compat import is_tracing, multiplies_bf16

# (n, size): n rows or more are padded to a multiple of ``size``. torch computes attention in blocks of these sizes.
_LINEAR = ((1024, 64), (0, 32))
_ATTENTION = ((768, 256), (192, 64), (0, 32))
_KEY_MULTIPLE, _MAX_PADDED_KEYS = 64, 2048  # padding copies the keys, so longer ones are not padded
_DECODED_ROWS = 4  # forwards of so few rows are not padded: they need few products
_forward = threading.local()  # the mode of this thread's forward: batches and the worker may compute at the same time


def pad_products(model: nn.Module) -> None:
    """Let forwards of ``model`` with more than 4 tokens pad the rows of bf16 and fp16 products on the CPU."""
    if multiplies_bf16():
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)


class PaddedProducts(TorchFunctionMode):
    """Pads the rows of ``functional.linear`` and ``functional.scaled_dot_product_attention``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            func = _padded_linear
        elif func is functional.scaled_dot_product_attention:
            func = _padded_attention
        return func(*args, **(kwargs or {}))


def _padding(rows: int, sizes: Sequence[tuple[int, int]]) -> int:
    """The number of rows to add."""
    return -rows % next(size for from_rows, size in sizes if rows >= from_rows) if rows > _DECODED_ROWS else 0


def _with_rows(tensor: Tensor, rows: int, value: float = 0.0) -> Tensor:
    return functional.pad(tensor, (0, 0, 0, rows), value=value) if rows else tensor


def _is_compiled(input: Tensor) -> bool:
    return input.is_cpu and input.dtype in (torch.bfloat16, torch.float16)


def _padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.numel() // max(1, input.size(-1))
    padding = _padding(rows, _LINEAR)
    if not padding or not _is_compiled(input):
        return functional.linear(input, weight, bias)
    padded = _with_rows(input.reshape(rows, -1), padding)
    return functional.linear(padded, weight, bias)[:rows].view(*input.shape[:-1], -1)


def _padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    rows, keys = query.size(-2), key.size(-2)
    if _is_compiled(query) and (attn_mask is not None or (is_causal and rows == keys)):
        padding = _padding(rows, _ATTENTION)
        key_padding = padding if attn_mask is None else -keys % _KEY_MULTIPLE if keys <= _MAX_PADDED_KEYS else 0
        query, key, value = _with_rows(query, padding), _with_rows(key, key_padding), _with_rows(value, key_padding)
        if attn_mask is not None:
            if key_padding:
                hidden = False if attn_mask.dtype == torch.bool else -torch.inf
                attn_mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
                attn_mask = functional.pad(attn_mask, (0, key_padding), value=hidden)
            if attn_mask.size(-2) == rows > 1:
                attn_mask = _with_rows(attn_mask, padding, True)  # added rows see all keys
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
    return attended[..., :rows, :]


def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    tokens = next((each.shape[:2].numel() for each in given if isinstance(each, Tensor)), 0)
    if tokens > _DECODED_ROWS and not torch.is_grad_enabled() and not is_tracing():
        _forward.mode = PaddedProducts()
        _forward.mode.__enter__()


def _end(model: Any, *_: Any) -> None:
    mode = vars(_forward).pop("mode", None)
    if mode is not None:
        mode.__exit__(None, None, None)
