"""torch.ops.torch_mesh.attention: a few query rows over a cache."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_pools import ops, relative_error
from torch import Tensor

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}
# batch, heads, key_value_heads, tokens, keys, key_dim, value_dim
SHAPES = [
    (1, 32, 4, 1, 576, 128, 128),
    (1, 1, 1, 1, 1, 16, 16),
    (2, 8, 8, 3, 700, 64, 64),
    (3, 6, 2, 4, 257, 192, 128),  # DeepSeek's: values are narrower than keys
    (1, 16, 16, 1, 33, 256, 256),
    (1, 40, 1, 2, 1000, 96, 48),  # more rows than one task takes
]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, shared, tokens, keys, key_dim, value_dim = shape
    sizes = ((heads, tokens, key_dim), (shared, keys, key_dim), (shared, keys, value_dim))
    query, key, value = (torch.randn(batch, *size).to(dtype) for size in sizes)
    return query, key, value


def _masks(shape: tuple[int, ...]) -> dict[str, Tensor | None]:
    batch, _, _, tokens, keys, _, _ = shape
    seen = torch.rand(batch, 1, tokens, keys) < 0.7
    seen[..., 0] = True
    return {
        "none": None,
        "bool": seen,
        "a cache with room": (torch.arange(keys) < max(1, keys // 3)).expand(batch, 1, tokens, keys),
        "one for all": seen[:1, :, :1],
        "added": torch.randn(batch, 1, tokens, keys),
        "bf16": torch.zeros(batch, 1, tokens, keys).masked_fill(~seen, torch.finfo(torch.bfloat16).min).bfloat16(),
    }


def _expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    group = query.size(1) // key.size(1)
    key, value = (tensor.double().repeat_interleave(group, 1) for tensor in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = _inputs(shape, dtype)
    for name, mask in _masks(shape).items():
        out = ops.attention(query, key, value, mask, 0.2)
        assert out.dtype == dtype and out.is_contiguous()
        assert relative_error(out, _expected(query, key, value, mask, 0.2)) < TOLERANCE[dtype], name


def test_views_of_a_cache_are_read_in_place() -> None:
    query, _, _ = _inputs((2, 8, 2, 1, 1, 64, 64))
    cache = torch.randn(2, 2, 900, 64)
    key = cache[:, :, 100:400]
    value = torch.randn(2, 300, 2, 64).transpose(1, 2)
    strided = torch.randn(2, 8, 64, 1).transpose(2, 3)
    expected = _expected(query, key, value, None, 0.1)
    assert relative_error(ops.attention(query, key, value, None, 0.1), expected) < 1e-6
    dense = ops.attention(strided.contiguous(), key.contiguous(), value.contiguous(), None, 0.1)
    assert torch.equal(ops.attention(strided, key, value, None, 0.1), dense)


def test_any_threads_give_the_same_bits() -> None:
    query, key, value = _inputs((2, 32, 4, 2, 3000, 128, 128), torch.bfloat16)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(ops.attention(query, key, value, None, 0.1))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("heads,shared", [(4, 4), (6, 2), (8, 1), (28, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_bits_do_not_depend_on_other_tokens(heads: int, shared: int, dtype: torch.dtype) -> None:
    """Verified drafts equal the tokens of plain decoding because of this."""
    for tokens in (2, 5, 16):
        query, key, value = _inputs((2, heads, shared, tokens, 600, 64, 48), dtype)
        seen = torch.ones(tokens, 600, dtype=torch.bool).tril(600 - tokens)
        alone = [
            ops.attention(query[:, :, [token]], key[:, :, :length], value[:, :, :length], None, 0.2)
            for token, length in enumerate(range(601 - tokens, 601))
        ]
        for mask in (seen, torch.zeros(tokens, 600, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)):
            assert torch.equal(ops.attention(query, key, value, mask[None, None], 0.2), torch.cat(alone, dim=1)), tokens


def test_masked_keys_are_not_read() -> None:
    """A static cache holds arbitrary values behind its end; a padding token attends to nothing."""
    query, key, value = _inputs((1, 4, 2, 2, 600, 32, 32))
    mask = torch.zeros(1, 1, 2, 600, dtype=torch.bool)
    mask[:, :, 0, :40] = True
    key[:, :, 40:], value[:, :, 40:] = math.nan, math.nan
    out = ops.attention(query, key, value, mask, 0.3)
    expected = _expected(query[:, :, :1], key[:, :, :40], value[:, :, :40], None, 0.3)
    assert relative_error(out[:, :1], expected) < 1e-6
    assert not out[:, 1].any()


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_the_rows_that_see_it_and_no_others(where: str) -> None:
    inputs = dict(zip(("query", "key", "value"), _inputs((2, 4, 2, 1, 300, 32, 32)), strict=True))
    inputs[where][1, -1, -1, -1] = math.nan
    out = ops.attention(*inputs.values(), None, 0.3)
    assert not out[0].isnan().any() and out[1, :, -1].isnan().any()
    assert not out[1, :, 0].isnan().any()  # these rows use another key head


def test_large_scores_do_not_overflow() -> None:
    query, key, value = _inputs((1, 2, 1, 1, 600, 32, 32))
    out = ops.attention(query * 1e4, key, value, None, 1.0)
    assert relative_error(out, _expected(query * 1e4, key, value, None, 1.0)) < 1e-4


def test_no_tokens_and_no_keys() -> None:
    query, key, value = _inputs((1, 4, 2, 1, 8, 32, 32))
    assert ops.attention(query[:, :, :0], key, value, None, 1.0).shape == (1, 0, 4, 32)
    assert not ops.attention(query, key[:, :, :0], value[:, :, :0], None, 1.0).any()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"key": (1, 3, 8, 32), "value": (1, 3, 8, 32)}, "divisor of heads"),
        ({"query": (1, 4, 1, 24), "key": (1, 2, 8, 24)}, "multiples of 16"),
        ({"query": (1, 4, 1, 512), "key": (1, 2, 8, 512)}, "up to 256"),
        ({"key": (2, 2, 8, 32)}, "query must be"),
        ({"value": (1, 2, 9, 32)}, "query must be"),
        ({"query": (4, 1, 32)}, "query must be"),
        ({"mask": (1, 4, 1, 8)}, "mask must be"),
        ({"mask": (1, 1, 1, 7)}, "mask must be"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"query": (1, 4, 1, 32), "key": (1, 2, 8, 32), "value": (1, 2, 8, 32), "mask": (1, 1, 1, 8)} | change
    with pytest.raises(ValueError, match=message):
        ops.attention(*(torch.randn(shape) for shape in shapes.values()), 1.0)


def test_wrong_dtypes_are_named() -> None:
    query, key, value = _inputs((1, 4, 2, 1, 8, 32, 32))
    with pytest.raises(ValueError, match="key has dtype Double"):
        ops.attention(query, key.double(), value, None, 1.0)
    with pytest.raises(ValueError, match="mask has dtype Long"):
        ops.attention(query, key, value, torch.ones(1, 1, 1, 8, dtype=torch.int64), 1.0)


def test_the_fake_kernel_agrees_and_compiles() -> None:
    query, key, value = _inputs((2, 8, 2, 2, 40, 64, 48), torch.bfloat16)
    mask = torch.rand(2, 1, 2, 40) < 0.5
    torch.library.opcheck(torch.ops.torch_mesh.attention.default, (query, key, value, mask, 0.5))
    compiled = torch.compile(lambda *tensors: ops.attention(*tensors, 0.5) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, key, value, mask), ops.attention(query, key, value, mask, 0.5) * 2)
