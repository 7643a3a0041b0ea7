"""The Triton kernels against float64 and the CPU's op, in both paths: few rows and many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from device_layers import DEVICE, device_layer, on_device
from hypothesis import given
from hypothesis import strategies as st
from tiny_pools import ACTIVATIONS, OpenPool, Spec, TinyExperts, as_bf16, assert_agrees, ops, routing
from torch import Tensor

pytest.importorskip("triton")

import quick_interpreter  # noqa: F401
from torch_mesh.ops import experts_triton, launches, triton_kernels
from torch_mesh.ops.device import DeviceLayer

from torch_mesh import _C

pytestmark = pytest.mark.device

Experts = Callable[[Spec], TinyExperts]

# Weights are exact and sums are fp32, so only the rounding of operands to bf16 remains.
agrees = functools.partial(assert_agrees, operands=as_bf16)

FORMATS = [Spec(weights="bf16"), Spec(weights="bf12")] + [
    Spec(weights=weights, group_size=group)
    for weights in ("int8", "int4", "lut4", "tcq2", "tcq3")
    for group in (32, 64, 128)
]
# Records of a checkpoint's codes. Where the depth is no multiple of 128, fp8's last scale is of half a group.
PASSTHROUGH_FORMATS = [
    Spec(weights="mxfp4", hidden=65, intermediate=70, experts=3, bias=True, activation="swigluoai"),
    Spec(weights="nvfp4", hidden=129, intermediate=17, experts=2, bias=True),
    Spec(weights="nvfp4", hidden=41, intermediate=70, experts=3, gated=False),
    Spec(weights="fp8", group_size=128, hidden=264, intermediate=72, experts=2, bias=True),
    Spec(weights="fp8", group_size=0, hidden=41, intermediate=70, experts=3, gated=False),
    Spec(weights="fp8", group_size=32, hidden=65, intermediate=31, experts=3),
    Spec(weights="int8_fp16", group_size=64, hidden=41, intermediate=70, experts=2),
    Spec(weights="int4_fp16", group_size=128, hidden=129, intermediate=31, experts=3, gated=False),
]
ODD = [
    Spec(weights="bf16", hidden=65, intermediate=1),
    Spec(weights="bf12", hidden=65, intermediate=1),
    Spec(weights="bf12", hidden=136, intermediate=70, experts=3, gated=False, bias=True),
    Spec(weights="bf16", hidden=1, intermediate=63, experts=1),
    Spec(weights="bf16", bias=True),
    Spec(weights="int8", hidden=129, intermediate=31, group_size=64),
    Spec(weights="int8", bias=True, gated=False),
    Spec(weights="int4", hidden=41, intermediate=70, group_size=32),
    Spec(weights="int4", hidden=264, intermediate=72, group_size=128, experts=2, bias=True),
    Spec(weights="lut4", hidden=41, intermediate=70, group_size=32, gated=False),
    Spec(weights="int4", hidden=65, intermediate=70, group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="tcq2", hidden=65, intermediate=1, group_size=32, gated=False),
    Spec(weights="tcq2", hidden=264, intermediate=130, group_size=128, experts=2, bias=True),
    Spec(weights="tcq3", hidden=129, intermediate=31, group_size=64, experts=3),
    Spec(weights="tcq2+tcq3", hidden=65, intermediate=136, group_size=64, bias=True),
    Spec(weights="tcq3", hidden=65, intermediate=70, group_size=32, bias=True, activation="swigluoai"),
]
SPLIT = [
    Spec(weights="bf16", hidden=136, intermediate=130, experts=3, bias=True),
    Spec(weights="bf12", hidden=200, intermediate=136, experts=3),
    Spec(weights="int8", hidden=200, intermediate=136, group_size=64, experts=3),
    Spec(weights="int4", hidden=136, intermediate=200, group_size=32, experts=3),
    Spec(weights="lut4", hidden=200, intermediate=136, group_size=128, experts=3, gated=False, bias=True),
    Spec(weights="int8", hidden=136, intermediate=130, group_size=32, experts=3, bias=True, activation="swigluoai"),
    Spec(weights="nvfp4", hidden=136, intermediate=130, experts=3),
    Spec(weights="fp8", group_size=128, hidden=264, intermediate=200, experts=3, gated=False),
    Spec(weights="tcq2", hidden=264, intermediate=136, group_size=64, experts=3),
    Spec(weights="tcq3", hidden=136, intermediate=200, group_size=32, experts=3),
    Spec(weights="tcq2+tcq3", hidden=136, intermediate=130, group_size=32, experts=3),
]
# One for each way in which a kernel decodes a block: as it is, a table, groups of scales, trellises of both widths.
SPLIT_SMOKE = (SPLIT[0], SPLIT[4], SPLIT[6], SPLIT[10])


def _name(spec: Spec) -> str:
    group = [] if spec.weights == "bf16" else [f"g{spec.group_size}"]
    parts = [spec.weights, *group, f"{spec.hidden}x{spec.intermediate}", f"e{spec.experts}"]
    return "-".join(parts + ["bias"] * spec.bias + ["ungated"] * (not spec.gated))


def _run(
    layer: DeviceLayer,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    sentinels: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    x, ids, weights = on_device((x, ids, weights))
    return experts_triton.experts(x, ids, weights, layer, sentinels, dtype).cpu()


# Odd sizes, at which an access beyond a row shows.
SMOKE = (ODD[0], ODD[2], ODD[5], ODD[8], ODD[9], PASSTHROUGH_FORMATS[0], PASSTHROUGH_FORMATS[1], PASSTHROUGH_FORMATS[3])


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=[pytest.mark.smoke] * (spec in SMOKE)) for spec in FORMATS + ODD + PASSTHROUGH_FORMATS],
    ids=_name,
)
def test_agrees_with_float64(experts_of: Experts, spec: Spec) -> None:
    experts = experts_of(spec)
    layer = device_layer(experts, range(spec.experts))
    top_k = min(3, spec.experts)
    for tokens in (1, 4):
        x = torch.randn(tokens, spec.hidden)
        ids, weights = routing(spec, tokens, top_k)
        agrees(_run(layer, x, ids, weights), experts, x, ids, weights)
    assert launches.uses_tiles(4 * top_k, spec.experts) and not launches.uses_tiles(1, spec.experts)


def _take_any_codes(experts: TinyExperts) -> None:
    """Fill the down projection of the first record with random codes and scales."""
    spec, record = experts.spec, experts.records[0][0].clone()
    layout = _C.record_layout(*spec.record_layout)
    start, size = layout["down_offset"], layout["down_block_bytes"]
    block = record[start : start + size]  # the only block
    groups = size // layout["group_bytes"]
    header = size - groups * layout["group_bytes"]
    codes = torch.randint(256, block[header:].shape, dtype=torch.uint8)
    if spec.weights == "fp8":
        codes[codes & 127 == 127] = 8  # NaN, which no record has
    scales = codes.view(groups, -1)[:, : layout["scales_bytes"]]
    kept = block[header:].view(groups, -1)[:, : layout["scales_bytes"]]
    exponents = torch.randint(64, 190, scales.shape, dtype=torch.uint8) * (torch.rand(scales.shape) > 0.1)
    scales.copy_({"mxfp4": exponents, "nvfp4": scales % 127}.get(spec.weights, kept))
    block[header:] = codes
    if spec.weights == "nvfp4":
        block[:8] = torch.tensor([0.37, 3.1]).view(torch.uint8)
    elif spec.weights == "fp8" and spec.group_size == 32:
        block[:64] = 0
    experts.records[0][0] = record


@pytest.mark.parametrize(
    ("weights", "group"),
    [("mxfp4", 32), ("nvfp4", 16), ("fp8", 128), ("fp8", 0), ("fp8", 32), ("int8_fp16", 32), ("int4_fp16", 128)]
    + [(weights, group) for weights in ("tcq2", "tcq3") for group in (32, 64, 128)],
)
def test_every_code_is_decoded_to_its_value(seed: int, weights: str, group: int) -> None:
    spec = Spec(weights=weights, group_size=group, experts=1, hidden=40, intermediate=136)
    experts = TinyExperts(spec, seed)
    _take_any_codes(experts)
    expected = experts.unpacked[0][0][1].T
    expected = torch.where(expected.abs() < 2.0**-100, 0, expected)  # scales of E8M0's byte 0
    many, few, some = _decoded_down(experts)
    torch.testing.assert_close(many, expected, rtol=2**-21, atol=0)
    torch.testing.assert_close(few, expected[some], rtol=2**-21, atol=0)


def _decoded_down(experts: TinyExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first down projection as the kernels decode it: the identity times it, float64 [intermediate, hidden], by the
    kernel of many rows; and some of its rows, with their indices, by the one of few rows.
    """
    spec, few = experts.spec, 12
    depth, hidden = spec.intermediate, spec.hidden
    layer = device_layer(experts, [0])
    record, width = layer.record, -(-depth // 64) * 64
    rows = torch.zeros(depth, width, dtype=torch.int16, device=DEVICE)
    rows[:, :depth].fill_diagonal_(0x3F80)
    records, zeros = layer.records.view(torch.int32), torch.zeros(depth, dtype=torch.long, device=DEVICE)
    shape = hidden, depth, width, record.steps(depth), record.words, record.down, record.down_block, record.down_bias
    how = {"FORMAT": spec.weights, "GROUP": record.group_size, "BIAS": False}
    blocks = -(-hidden // 64)

    products = torch.full((depth, hidden), float("nan"), device=DEVICE)
    order, tile_rows = torch.arange(depth, device=DEVICE), torch.arange(0, depth, 128, device=DEVICE)
    grouping = order, torch.tensor([0, depth], device=DEVICE), zeros[: len(tile_rows)], tile_rows
    triton_kernels.down_many[len(tile_rows), blocks](
        rows, *grouping, layer.table, records, products, 1, *shape, **how, ROWS=128
    )

    some = torch.randperm(depth)[:few]
    of_few = torch.full((1, few, hidden), float("nan"), device=DEVICE)
    place = zeros[:few], layer.table, records
    triton_kernels.down_few[few, blocks, 1](
        rows[some].contiguous(), *place, of_few, few, 1, *shape, **how, SPLITS=1, STAGES=2
    )
    return products.cpu().double(), of_few[0].cpu().double(), some


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has products of small experts split, too."""
    monkeypatch.setattr(launches, "_MIN_DEPTH", 64)


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.smoke] * (spec in SPLIT_SMOKE)) for spec in SPLIT], ids=_name
)
def test_split_products_agree_with_float64(experts_of: Experts, spec: Spec) -> None:
    assert launches.splits(1, 6, spec.hidden) > 1 and launches.splits(1, 4, spec.intermediate) > 1
    experts = experts_of(spec)
    x = torch.randn(1, spec.hidden)
    ids, weights = routing(spec, 1, 2)
    agrees(_run(device_layer(experts, range(spec.experts)), x, ids, weights), experts, x, ids, weights)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("weights", ["bf12", "bf16", "fp8", "int4", "int8", "lut4", "mxfp4", "nvfp4", "tcq2", "tcq3"])
def test_records_of_a_pool_agree_with_float64(open_pool: OpenPool, weights: str, tokens: int) -> None:
    pool = open_pool(Spec(weights=weights), in_memory=True)
    x = torch.randn(tokens, pool.spec.hidden)
    ids, gates = routing(pool.spec, tokens, 3)
    out = _run(device_layer(pool.weights, range(8)), x, ids, gates)
    agrees(out, pool.weights, x, ids, gates)


def _of_bf16_and_bf12() -> tuple[TinyExperts, TinyExperts]:
    """The same weights in both formats, with exponents that are not in the table of their tile: exceptions."""
    plain = Spec(weights="bf16", hidden=200, intermediate=136, experts=3, bias=True)
    of_bf16, of_bf12 = TinyExperts(plain, 0), TinyExperts(replace(plain, weights="bf12"), 0)
    for expert, record in enumerate(of_bf16.records[0]):
        gate_up, down, *biases = ops.unpack(record, *plain.record_layout)
        for weight in (gate_up, down):
            at = torch.randint(weight.numel(), (8,))
            weight.view(-1)[at] *= 2.0 ** torch.randint(-60, -20, at.shape)
        parts = *gate_up.chunk(2), down, *biases[0].chunk(2), biases[1]
        of_bf16.records[0][expert] = ops.pack(*parts, "bf16", 0)
        of_bf12.records[0][expert] = ops.pack(*parts, "bf12", 0)
    return of_bf16, of_bf12


def test_bf12_is_decoded_to_the_weights_of_bf16() -> None:
    of_bf16, of_bf12 = _of_bf16_and_bf12()
    many, few, some = _decoded_down(of_bf12)
    _, down, *_ = ops.unpack(of_bf16.records[0][0], *of_bf16.spec.record_layout)
    assert torch.equal(many, down.T.double())
    assert torch.equal(few, down.T.double()[some])


@pytest.mark.parametrize(
    "tokens",
    [
        # A card's threads add up their parts of a sum in an order that the compiler chooses, for each format another.
        pytest.param(1, marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="few rows have another order of sums")),
        4,
    ],
)
def test_sums_of_bf12_have_the_bits_of_bf16(tokens: int) -> None:
    of_bf16, of_bf12 = _of_bf16_and_bf12()
    x = torch.randn(tokens, of_bf16.spec.hidden)
    ids, weights = routing(of_bf16.spec, tokens, 2)
    out, same = (_run(device_layer(each, range(3)), x, ids, weights) for each in (of_bf12, of_bf16))
    assert torch.equal(out, same)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_each_activation(experts_of: Experts, activation: str, tokens: int) -> None:
    spec = Spec(weights="bf16", activation=activation)
    experts = experts_of(spec)
    x = torch.randn(tokens, spec.hidden) * 3
    ids, weights = routing(spec, tokens, 2)
    agrees(_run(device_layer(experts, range(8)), x, ids, weights), experts, x, ids, weights)


@pytest.mark.parametrize("tokens", [1, 4])
def test_swigluoai_of_infinities_and_nan_is_as_in_torch(seed: int, tokens: int) -> None:
    """Biases set gate and up of one column to the values of a case."""
    spec = Spec(weights="bf16", experts=1, intermediate=4, bias=True, activation="swigluoai")
    experts = TinyExperts(spec, seed)
    gate_up, down, bias, down_bias = ops.unpack(experts.records[0][0], *spec.record_layout)
    x, ids, weights = torch.randn(tokens, spec.hidden), torch.zeros(tokens, 1, dtype=torch.long), torch.ones(tokens, 1)
    nan, inf = float("nan"), float("inf")
    for case in ((inf, 1.0), (1.0, inf), (1.0, -inf), (inf, -inf), (-1e30, 1.0), (-inf, 1.0), (nan, 1.0), (1.0, nan)):
        bias.view(2, 4)[:, 2] = torch.tensor(case)
        experts.records[0][0] = ops.pack(*gate_up.chunk(2), down, *bias.chunk(2), down_bias, "bf16", 32)
        experts.__dict__.pop("unpacked", None)
        out = _run(device_layer(experts, [0]), x, ids, weights)
        expected = experts.reference(x, ids, weights, operands=as_bf16)
        assert torch.equal(out.isnan(), expected.isnan())
        if not expected.isnan().all():
            agrees(out, experts, x, ids, weights)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(weights="mxfp4", experts=3, bias=True, activation="swigluoai"),
        Spec(weights="nvfp4", experts=3),
        Spec(weights="fp8", group_size=128, experts=3),
    ],
    ids=lambda spec: spec.weights,
)
def test_nan_in_a_row_spoils_only_that_row(experts_of: Experts, spec: Spec, tokens: int) -> None:
    experts = experts_of(spec)
    x = torch.randn(tokens, spec.hidden)
    x[0, spec.hidden - 1] = float("nan")
    ids, weights = routing(spec, tokens, 2)
    out = _run(device_layer(experts, range(3)), x, ids, weights)
    assert out[0].isnan().all()
    if tokens > 1:
        agrees(out[1:], experts, x[1:], ids[1:], weights[1:])


@pytest.mark.parametrize("tokens", [1, 4])
def test_experts_that_are_not_on_the_device_add_nothing(experts_of: Experts, tokens: int) -> None:
    """With none, some or all experts of a layer on the device."""
    spec = Spec(weights="bf16")
    experts = experts_of(spec)
    x = torch.randn(tokens, spec.hidden)
    ids, weights = routing(spec, tokens, 3)
    for count in (0, 3, 8):
        hot = torch.randperm(8)[:count].tolist()
        out = _run(device_layer(experts, hot), x, ids, weights)
        here = torch.isin(ids, torch.tensor(hot, dtype=torch.long))
        assert (out[~here.any(dim=1)] == 0).all()
        agrees(out, experts, x, ids.masked_fill(~here, -1), weights)


@pytest.mark.parametrize("tokens", [1, 4])
def test_sentinels_are_skipped_and_wrong_ids_make_nan(experts_of: Experts, tokens: int) -> None:
    spec = Spec(weights="bf16")
    experts = experts_of(spec)
    layer = device_layer(experts, range(8))
    x = torch.randn(tokens, spec.hidden)
    ids, weights = routing(spec, tokens, 3)
    ids[0] = torch.tensor([2, 8, 100])
    out = _run(layer, x, ids, weights, sentinels=True)
    agrees(out, experts, x, ids, weights)
    for wrong in (torch.tensor([2, 8, 3]), torch.tensor([-1, 2, 3])):
        ids[0] = wrong
        out = _run(layer, x, ids, weights)
        assert out[0].isnan().all() and not out[1:].isnan().any()


def test_an_expert_repeated_within_a_token_counts_each_time(experts_of: Experts) -> None:
    spec = Spec(weights="int4")
    experts = experts_of(spec)
    x, weights = torch.randn(5, spec.hidden), torch.rand(5, 3)
    ids = torch.tensor([[3, 3, 3], [0, 1, 0], [7, 7, 2], [4, 5, 6], [3, 3, 3]])
    for tokens in (1, 5):
        out = _run(device_layer(experts, range(8)), x[:tokens], ids[:tokens], weights[:tokens])
        agrees(out, experts, x[:tokens], ids[:tokens], weights[:tokens])


@pytest.mark.parametrize("weights", ["int8", "mxfp4", "fp8", "tcq2", "tcq3"])
def test_no_tokens_or_no_choices_give_zeros(experts_of: Experts, weights: str) -> None:
    layer = device_layer(experts_of(Spec(weights=weights)), range(8))
    for tokens, top_k in ((0, 3), (4, 0)):
        ids, weights = torch.empty(tokens, top_k, dtype=torch.long), torch.empty(tokens, top_k)
        out = _run(layer, torch.randn(tokens, 72), ids, weights)
        assert out.shape == (tokens, 72) and (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_takes_any_dtype_and_stride(experts_of: Experts, dtype: torch.dtype) -> None:
    spec = Spec(weights="int8")
    experts = experts_of(spec)
    layer = device_layer(experts, range(8))
    x = torch.randn(spec.hidden, 4).t().to(dtype)
    ids, weights = routing(spec, 4, 3)
    out = _run(layer, x, ids.int().t().contiguous().t(), weights.to(dtype), dtype=dtype)
    assert out.dtype == dtype
    agrees(out, experts, x, ids, weights.to(dtype))


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("tokens", [2, 8])
def test_bits_do_not_depend_on_slots_token_order_or_unused_experts(experts_of: Experts, tokens: int) -> None:
    """With other slots, another order of tokens, and other unused experts."""
    spec = Spec(weights="bf16", hidden=136, experts=6)
    experts = experts_of(spec)
    x = torch.randn(tokens, spec.hidden)
    ids, weights = routing(spec, tokens, 2)
    out = _run(device_layer(experts, range(6)), x, ids, weights)
    order = torch.randperm(tokens)
    moved = _run(device_layer(experts, torch.randperm(6).tolist()), x[order], ids[order], weights[order])
    assert torch.equal(moved, out[order])
    used = ids.unique().tolist()
    assert torch.equal(_run(device_layer(experts, used), x, ids, weights), out)


def test_a_small_workspace_is_used_in_chunks(experts_of: Experts) -> None:
    spec = Spec(weights="int8")
    experts = experts_of(spec)
    x = torch.randn(6, spec.hidden)
    ids, weights = routing(spec, 6, 3)
    for workspace in (1, 5 * 3 * (4 * 72 + 2 * 64)):
        out = _run(device_layer(experts, range(8), workspace=workspace), x, ids, weights)
        agrees(out, experts, x, ids, weights)


@given(
    data=st.data(),
    experts=st.integers(1, 9),
    rows=st.sampled_from([16, 32]),
    count=st.integers(1, 90),
)
def test_tiles_hold_each_pair_once(data: st.DataObject, experts: int, rows: int, count: int) -> None:
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, experts + 1), min_size=count, max_size=count)))
    tensors = experts_triton._group(ids.to(DEVICE), experts, rows)
    order, starts, tile_experts, tile_rows = (tensor.tolist() for tensor in tensors)
    held = []
    for expert, first in zip(tile_experts, tile_rows, strict=True):
        if expert == experts:
            continue
        pairs = order[first : min(first + rows, starts[expert + 1])]
        assert pairs and all(ids[pair] == expert for pair in pairs)
        held += pairs
    expected = [pair for pair, expert in enumerate(ids.tolist()) if 0 <= expert < experts]
    assert sorted(held) == expected


@given(pairs=st.integers(1, 5000), blocks=st.integers(1, 200), depth=st.integers(1, 20000), experts=st.integers(1, 512))
def test_launches_follow_from_shapes(pairs: int, blocks: int, depth: int, experts: int) -> None:
    splits = launches.splits(pairs, blocks, depth)
    assert splits in (1, 2, 4, 8, 16) and (splits == 1 or depth >= 128 * splits)
    for format, sizes in launches.TILE_ROWS.items():
        rows = launches.tile_rows(format, pairs, experts)
        assert rows in sizes and (rows >= pairs / experts or rows == sizes[-1])
