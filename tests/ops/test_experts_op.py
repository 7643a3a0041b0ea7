"""torch.ops.torch_mesh.experts against the same layer in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm
from pairs import each_once_quick, every_other_quick
from tiny_pools import (
    ACTIVATIONS,
    FLOAT_PRODUCTS,
    WEIGHTS,
    OpenPool,
    Spec,
    TinyExperts,
    assert_agrees,
    engine_options,
    ops,
    relative_error,
    routing,
    spec_with,
)

from torch_mesh import _C

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ODD = [
    Spec(weights="bf16", hidden=72, intermediate=40),
    Spec(weights="bf16", hidden=65, intermediate=1),
    Spec(weights="bf16", hidden=1, intermediate=63, experts=1),
    Spec(weights="int8", hidden=129, intermediate=31, group_size=64),
    Spec(weights="int8", hidden=200, intermediate=136, group_size=128, experts=3),
    Spec(weights="int4", hidden=71, intermediate=130, group_size=32),
    Spec(weights="int4", hidden=264, intermediate=72, group_size=128, experts=2),
    Spec(weights="lut4", hidden=71, intermediate=130, group_size=32),
    Spec(weights="bf16", bias=True),
    Spec(weights="bf12", hidden=129, intermediate=63, bias=True),
    Spec(weights="bf12", hidden=1, intermediate=130, gated=False),
    Spec(weights="int8", bias=True, gated=False),
    Spec(weights="int4", gated=False),
    Spec(weights="bf16", hidden=65, intermediate=63, bias=True, activation="swigluoai"),
    Spec(weights="int8", hidden=129, intermediate=31, group_size=64, bias=True, activation="swigluoai"),
    Spec(weights="int4", hidden=71, intermediate=130, group_size=128, activation="swigluoai"),
    Spec(weights="lut4", hidden=200, intermediate=72, group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="int8_fp16", hidden=129, intermediate=31, group_size=64),
    Spec(weights="int4_fp16", hidden=71, intermediate=130, group_size=32, gated=False),
    Spec(weights="mxfp4", hidden=200, intermediate=72, group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="mxfp4", hidden=65, intermediate=1, group_size=32),
    Spec(weights="nvfp4", hidden=71, intermediate=130, group_size=16),
    Spec(weights="fp8", hidden=264, intermediate=136, group_size=128, experts=2),
    Spec(weights="fp8", hidden=71, intermediate=130, group_size=0, bias=True),
    Spec(weights="fp8", hidden=129, intermediate=31, group_size=32, gated=False),
    Spec(weights="tcq2", hidden=264, intermediate=130, group_size=128, experts=2),
    Spec(weights="tcq2", hidden=71, intermediate=31, group_size=32, bias=True, activation="swigluoai"),
    Spec(weights="tcq3", hidden=200, intermediate=136, group_size=64),
    Spec(weights="tcq2+tcq3", hidden=200, intermediate=136, group_size=64),
    Spec(weights="tcq2+tcq3", hidden=71, intermediate=130, group_size=128, bias=True),
    Spec(weights="tcq3", hidden=65, intermediate=1, group_size=32, gated=False),
    Spec(weights="int4", hidden=71, intermediate=63, activation="swiglu(gate=0.9,up=0.7)"),
    Spec(weights="int8", hidden=129, intermediate=31, bias=True, activation="softcap(gate=1.5,up=2)"),
    Spec(weights="lut4", hidden=65, intermediate=130, gated=False, activation="relu2"),
]


def _name(spec: Spec) -> str:
    parts = [
        spec.weights,
        f"g{spec.group_size}",
        f"{spec.hidden}x{spec.intermediate}",
        f"e{spec.experts}",
        str(spec.activation),
    ]
    return "-".join(parts + ["bias"] * spec.bias + ["ungated"] * (not spec.gated))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    each_once_quick(ODD, DTYPES),
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else _name(value),
)
def test_agrees_with_float64(open_pool: OpenPool, spec: Spec, dtype: torch.dtype) -> None:
    pool = open_pool(spec, in_memory=True)
    for tokens in (1, 2, 7, 40, 100):
        x = torch.randn(tokens, spec.hidden).to(dtype)
        ids, weights = routing(spec, tokens, min(3, spec.experts))
        out = ops.experts(x, ids, weights, pool.handle())
        assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
        assert_agrees(out, pool.weights, x, ids, weights)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_each_activation(open_pool: OpenPool, activation: str) -> None:
    spec = Spec(weights="bf16", activation=activation)
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(9, spec.hidden) * 3
    ids, weights = routing(spec, 9, 2)
    out = ops.experts(x, ids, weights, pool.handle())
    assert_agrees(out, pool.weights, x, ids, weights)


def test_layers_have_activations_of_their_own(open_pool: OpenPool) -> None:
    names = ("silu", "swiglu(gate=0.9,up=0.7)", "relu2")
    spec = Spec(weights="bf16", layers=3, activations=names)
    pool = open_pool(spec, slots=5)
    for layer in range(3):
        x, grad = (torch.randn(2, 9, spec.hidden) * 3).bfloat16().float()
        x.requires_grad_()
        ids, weights = routing(spec, 9, 2)
        out, exact = ops.experts(x, ids, weights, pool.handle(layer)), pool.weights.reference(x, ids, weights, layer)
        assert_agrees(out, pool.weights, x, ids, weights, layer)
        (found,), (expected,) = (torch.autograd.grad(value, x, grad.to(value.dtype)) for value in (out, exact))
        assert relative_error(found, expected) < 1e-4  # sums in float32
    for wrong in (("silu",) * 2, ("silu",) * 4, ()):
        with pytest.raises(ValueError, match="activation names .* for 3 layers|activation is an empty list"):
            open_pool(Spec(layers=3), in_memory=True, activation=list(wrong))


@pytest.mark.parametrize("weights", every_other_quick(WEIGHTS, 0))
def test_every_top_k(open_pool: OpenPool, weights: str) -> None:
    spec = Spec(weights=weights)
    pool = open_pool(spec, slots=spec.experts)
    x = torch.randn(5, spec.hidden)
    for top_k in range(1, spec.experts + 1):
        ids, gates = routing(spec, 5, top_k)
        assert_agrees(ops.experts(x, ids, gates, pool.handle()), pool.weights, x, ids, gates)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_tokens_on_one_expert(open_pool: OpenPool, weights: str) -> None:
    spec = Spec(weights=weights)
    pool = open_pool(spec, slots=1)
    x = torch.randn(70, spec.hidden)
    ids = torch.full((70, 1), 5)
    gates = torch.rand(70, 1)
    assert_agrees(ops.experts(x, ids, gates, pool.handle()), pool.weights, x, ids, gates)
    assert pool.ready() == {5}


def test_an_expert_repeated_within_a_token_counts_each_time(open_pool: OpenPool) -> None:
    spec = Spec(weights="bf16")
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(4, spec.hidden)
    ids = torch.tensor([[3, 3, 3], [0, 1, 0], [7, 7, 2], [4, 5, 6]])
    gates = torch.rand(4, 3)
    assert_agrees(ops.experts(x, ids, gates, pool.handle()), pool.weights, x, ids, gates)


def test_no_tokens(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=2)
    for dtype in DTYPES:
        x = torch.empty(0, spec.hidden, dtype=dtype)
        out = ops.experts(x, torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2), pool.handle())
        assert out.shape == x.shape and out.dtype == dtype
    assert pool.count("accesses") == 0


@pytest.mark.parametrize("tokens", [1, 3])
def test_tokens_without_choices_give_zeros(open_pool: OpenPool, tokens: int) -> None:
    spec = Spec()
    pool = open_pool(spec, slots=2)
    x = torch.randn(tokens, spec.hidden)
    out = ops.experts(x, torch.empty(tokens, 0, dtype=torch.long), torch.empty(tokens, 0), pool.handle())
    assert torch.equal(out, torch.zeros_like(x))


def test_dtypes_and_strides_of_arguments_do_not_matter(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(6, spec.hidden)
    ids, gates = routing(spec, 6, 3)
    gates = gates.bfloat16().float()
    handle = pool.handle()
    expected = ops.experts(x, ids, gates, handle)

    spaced = torch.randn(6, 2 * spec.hidden)
    spaced[:, : spec.hidden] = x
    every_other = torch.randn(12, spec.hidden)
    every_other[::2] = x
    same_x = {
        "transposed": x.t().contiguous().t(),
        "part of wider rows": spaced[:, : spec.hidden],
        "every other row": every_other[::2],
        "every other column": torch.stack([x, x], dim=2).flatten(1)[:, ::2],
    }
    for how, same in same_x.items():
        assert torch.equal(same, x)
        out = ops.experts(same, ids, gates, handle)
        assert torch.equal(out, expected) and out.is_contiguous(), how

    assert torch.equal(ops.experts(x, ids.int(), gates, handle), expected)
    assert torch.equal(ops.experts(x, ids.t().contiguous().t(), gates.t().contiguous().t(), handle), expected)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(ops.experts(x, ids, gates.to(dtype), handle), expected)

    one = x[:1].expand(6, -1)
    repeated = ops.experts(one, ids[:1].expand(6, -1), gates[:1].expand(6, -1), handle)
    assert torch.equal(repeated, repeated[:1].expand(6, -1))


def test_a_tokens_output_does_not_depend_on_its_batch(open_pool: OpenPool) -> None:
    """In prompts an expert's number of rows may select another kernel, which changes only rounding."""
    for weights in WEIGHTS:
        spec = Spec(weights=weights)
        pool = open_pool(spec, in_memory=True)
        x = torch.randn(33, spec.hidden)
        ids, gates = routing(spec, 33, 2)
        together = ops.experts(x, ids, gates, pool.handle())
        alone = torch.cat(
            [ops.experts(x[i : i + 1], ids[i : i + 1], gates[i : i + 1], pool.handle()) for i in range(33)]
        )
        # Floats are summed in another order, which may change the rounding of a hidden value.
        if weights in FLOAT_PRODUCTS:
            assert relative_error(together, alone) < 1e-3
        else:
            assert torch.equal(together, alone), weights


@pytest.mark.parametrize(("weights", "spread"), each_once_quick(WEIGHTS, [False, True]))
def test_a_decode_tokens_bits_do_not_depend_on_other_tokens(open_pool: OpenPool, weights: str, spread: bool) -> None:
    """Also if all tokens use the same experts: drafts verified together must get the bits of plain decoding."""
    spec = Spec(weights=weights, hidden=328, intermediate=200)
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(_C.MAX_DECODE_ROWS, spec.hidden).bfloat16()
    ids, gates = routing(spec, len(x), 2)
    if not spread:
        ids = torch.tensor([[3, 5]]).expand(len(x), 2)
    alone = torch.cat([ops.experts(x[[i]], ids[[i]], gates[[i]], pool.handle()) for i in range(len(x))])
    for rows in range(2, len(x) + 1):
        assert torch.equal(ops.experts(x[:rows], ids[:rows], gates[:rows], pool.handle()), alone[:rows]), rows


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_rows_stay_in_their_row(open_pool: OpenPool, weights: str, bad: float) -> None:
    spec = Spec(weights=weights)
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(40, spec.hidden)
    ids, gates = routing(spec, 40, 3)
    expected = ops.experts(x, ids, gates, pool.handle())
    x[11, 3] = bad
    out = ops.experts(x, ids, gates, pool.handle())
    assert not out[11].isfinite().any()
    out[11] = expected[11]
    assert torch.equal(out, expected)


def test_bad_routing_weights_stay_in_their_row(open_pool: OpenPool) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(5, spec.hidden)
    ids, gates = routing(spec, 5, 2)
    expected = ops.experts(x, ids, gates, pool.handle())
    gates[2, 1] = float("nan")
    out = ops.experts(x, ids, gates, pool.handle())
    assert out[2].isnan().all()
    out[2] = expected[2]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("top_k", [1, 4])
def test_sentinels_are_skipped(open_pool: OpenPool, top_k: int) -> None:
    spec = Spec()
    pool = open_pool(spec, in_memory=True)
    x = torch.randn(12, spec.hidden)
    ids, gates = routing(spec, 12, top_k, sentinels=True)
    ids[0] = spec.experts
    ids[7] = torch.iinfo(torch.int32).max
    gates[7] = float("nan")  # expert parallelism leaves arbitrary weights at sentinels
    out = ops.experts(x, ids, gates, pool.handle(), True)
    assert torch.equal(out[[0, 7]], torch.zeros(2, spec.hidden))
    here = ids < spec.experts
    assert_agrees(out, pool.weights, x, ids, gates.where(here, 0))
    assert not out[~here.any(1)].any()


@pytest.mark.parametrize("weights", every_other_quick(WEIGHTS, 1))
def test_a_tiny_workspace_gives_equal_results(open_pool: OpenPool, weights: str) -> None:
    """With chunks of one token only the rows per expert change."""
    spec = Spec(weights=weights)
    x = torch.randn(50, spec.hidden)
    ids, gates = routing(spec, 50, 4)
    whole = open_pool(spec, slots=spec.experts)
    expected = ops.experts(x, ids, gates, whole.handle())
    for workspace in (1, 10_000, 60_000):
        pool = open_pool(spec, slots=4, workspace=workspace)
        out = ops.experts(x, ids, gates, pool.handle())
        if weights in FLOAT_PRODUCTS:  # float sums, here in another order
            assert_agrees(out, whole.weights, x, ids, gates)
        else:
            assert torch.equal(out, expected), workspace
        assert pool.count("accesses") > whole.count("accesses")


def test_workspace_stays_within_what_was_given(open_pool: OpenPool) -> None:
    spec = spec_with(Spec(), hidden=256, intermediate=128)
    pool = open_pool(spec, in_memory=True, workspace=200_000)
    ids, gates = routing(spec, 500, 4)
    ops.experts(torch.randn(500, spec.hidden), ids, gates, pool.handle())
    # Each buffer and each expert's rows are rounded up to cache lines.
    assert pool.engine.describe()["workspace_bytes"] <= 200_000 + 64 * (3 + spec.experts)


# Loads the extension alone, since importing the package takes longer than everything else.
# Loading the extension selects the instruction set, so each gets a child, forked from a process that imported torch.
_RUN_EXPERTS = """
import importlib.util, os, sys, torch
extension, folder, *isas = sys.argv[1:]
calls = torch.load(folder + "/calls")

def run(isa):
    os.environ["TORCH_MESH_ISA"] = isa
    spec = importlib.util.spec_from_file_location("_C", extension)
    _C = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_C)
    outputs = []
    for call in calls:
        engine = _C.Engine(**call["engine"], source=None)
        for expert, record in enumerate(call["records"]):
            engine.fill(0, expert, record.numpy())
        handle = torch.tensor([engine.id, 0])
        outputs += [torch.ops.torch_mesh.experts(*arguments, handle) for arguments in call["arguments"]]
    torch.save({"isa": _C.features()["isa"], "outputs": outputs}, f"{folder}/{isa}")

for isa in isas:
    child = os.fork()
    if child == 0:
        run(isa)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, isa
"""


def test_integer_formats_give_the_same_bits_on_every_instruction_set(
    experts_of: Callable[[Spec], TinyExperts], tmp_path: Path
) -> None:
    calls = [
        {
            "engine": engine_options(spec),
            "records": experts_of(spec).records[0],
            "arguments": [(torch.randn(tokens, spec.hidden), *routing(spec, tokens, 3)) for tokens in (1, 5, 40)],
        }
        for spec in map(Spec, ("int8", "int4", "lut4", "mxfp4", "nvfp4", "tcq2", "tcq3", "tcq2+tcq3"))
    ]
    torch.save(calls, tmp_path / "calls")
    isas = _C.features()["isas"].split()
    warm.run(_RUN_EXPERTS, _C.__file__, tmp_path, *isas).check_returncode()

    results = {isa: torch.load(tmp_path / isa) for isa in isas}
    for isa in isas:
        assert results[isa]["isa"] == isa
        for output, expected in zip(results[isa]["outputs"], results["scalar"]["outputs"], strict=True):
            assert torch.equal(output, expected), isa


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_subnormal_weights_count_even_if_torch_flushes_subnormals(open_pool: OpenPool, tokens: int) -> None:
    spec = Spec(weights="fp8", group_size=0, hidden=64, intermediate=64, gated=False, activation="relu2", experts=1)
    pool = open_pool(spec, in_memory=True)
    record = pool.weights.records[0][0].clone()
    block = record[: 2 * (256 + 64 * 64)].view(2, -1)  # up and down: scales, then codes
    block[:, 256:] &= 0x87
    pool.engine.fill(0, 0, record.numpy())
    values = ops.unpack(record, "fp8", 0, 64, 64, False, False)
    up, down = values[0].double(), values[1].double()
    x = torch.randn(tokens, 64).bfloat16()
    arguments = (x, torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), pool.handle())
    usual = ops.experts(*arguments)
    hidden = (x.double() @ up.T).relu().square().bfloat16().double()
    assert relative_error(usual, hidden @ down.T) < 2**-8  # the precision of x's dtype
    try:
        torch.set_flush_denormal(True)
        assert torch.equal(ops.experts(*arguments), usual)
    finally:
        torch.set_flush_denormal(False)


def test_allocates_nothing_but_its_output(open_pool: OpenPool) -> None:
    """Counts tensor memory; tests/engine counts the engine's own allocations."""
    spec = Spec()
    pool = open_pool(spec)
    x = torch.randn(1, spec.hidden, dtype=torch.bfloat16)
    ids, weights = routing(spec, 1, 2)
    handle = pool.handle()
    for _ in range(3):
        ops.experts(x, ids, weights, handle)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = ops.experts(x, ids, weights, handle)
    allocated = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage]
    assert sum(allocated) == out.nbytes, allocated
