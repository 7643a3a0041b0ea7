"""pack and unpack: one expert to its record and back."""

from __future__ import annotations

import pytest
import torch
from pairs import all_but_pairs_thorough
from tiny_pools import Spec, ops, relative_error
from torch import Tensor

from torch_mesh import _C

ERROR = {
    "bf16": 0.003,
    "bf12": 0.003,
    "int8": 0.01,
    "int4": 0.17,
    "lut4": 0.17,
    "tcq3": 0.4,
    "tcq2": 0.8,
    "tcq2+tcq3": 0.8,
}
SHAPES = [(72, 40), (1, 1), (1, 130), (130, 1), (64, 64), (129, 257)]


def _expert(spec: Spec) -> dict[str, Tensor | None]:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns)

    biases = (torch.randn(spec.intermediate), torch.randn(spec.intermediate), torch.randn(spec.hidden))
    return {
        "gate": matrix(spec.intermediate, spec.hidden) if spec.gated else None,
        "up": matrix(spec.intermediate, spec.hidden),
        "down": matrix(spec.hidden, spec.intermediate),
        "gate_bias": biases[0] if spec.bias and spec.gated else None,
        "up_bias": biases[1] if spec.bias else None,
        "down_bias": biases[2] if spec.bias else None,
    }


def _pack(spec: Spec, expert: dict[str, Tensor | None]) -> Tensor:
    return ops.pack(*expert.values(), spec.weights, spec.group_size)


@pytest.mark.parametrize(
    ("weights", "gated", "bias"), all_but_pairs_thorough(sorted(ERROR), (False, True), (False, True))
)
def test_unpack_gives_back_what_was_packed(weights: str, gated: bool, bias: bool) -> None:
    for hidden, intermediate in SHAPES:
        for group_size in (32, 64, 128):
            spec = Spec(
                weights=weights,
                group_size=group_size,
                hidden=hidden,
                intermediate=intermediate,
                gated=gated,
                bias=bias,
            )
            expert = _expert(spec)
            record = _pack(spec, expert)
            assert record.dtype == torch.uint8 and record.shape == (_C.record_bytes(**spec.geometry),)
            assert record.numel() % 4096 == 0
            gate_up, down, gate_up_bias, down_bias = ops.unpack(record, *spec.record_layout)
            halves = [half for half in (expert["gate"], expert["up"]) if half is not None]
            for value, expected in ((gate_up, torch.cat(halves)), (down, expert["down"])):
                assert value.dtype == torch.float32 and value.shape == expected.shape
                assert (value - expected).abs().max() <= 2 * ERROR[weights] * expected.abs().max()
            if not bias:
                assert gate_up_bias.shape == down_bias.shape == (0,)
                continue
            halves = [half for half in (expert["gate_bias"], expert["up_bias"]) if half is not None]
            assert torch.equal(gate_up_bias, torch.cat(halves)) and torch.equal(down_bias, expert["down_bias"])


@pytest.mark.parametrize("weights", sorted(ERROR))
def test_the_error_is_that_of_the_format(weights: str) -> None:
    spec = Spec(weights=weights, group_size=64, hidden=512, intermediate=256)
    expert = _expert(spec)
    gate_up, down, _, _ = ops.unpack(_pack(spec, expert), *spec.record_layout)
    assert relative_error(gate_up, torch.cat([expert["gate"], expert["up"]])) < ERROR[weights]
    assert relative_error(down, expert["down"]) < ERROR[weights]


def test_bf16_is_exact() -> None:
    spec = Spec(weights="bf16", bias=True)
    expert = {name: tensor.bfloat16() for name, tensor in _expert(spec).items() if tensor is not None}
    gate_up, down, gate_up_bias, down_bias = ops.unpack(_pack(spec, expert), *spec.record_layout)
    assert torch.equal(gate_up, torch.cat([expert["gate"], expert["up"]]).float())
    assert torch.equal(down, expert["down"].float())
    assert torch.equal(gate_up_bias, torch.cat([expert["gate_bias"], expert["up_bias"]]).float())
    assert torch.equal(down_bias, expert["down_bias"].float())


@pytest.mark.parametrize("weights", sorted(ERROR))
def test_packing_unpacked_values_is_stable(weights: str) -> None:
    """A record can hold the values that it unpacks to."""
    spec = Spec(weights=weights)
    once = ops.unpack(_pack(spec, _expert(spec)), *spec.record_layout)
    gate, up = once[0].split(spec.intermediate)
    twice = ops.unpack(ops.pack(gate, up, once[1], None, None, None, weights, spec.group_size), *spec.record_layout)
    for first, second in zip(once[:2], twice[:2], strict=True):
        assert relative_error(second, first) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    spec = Spec(bias=True)
    expert = {name: tensor.to(dtype) for name, tensor in _expert(spec).items() if tensor is not None}
    record = _pack(spec, expert)
    transposed = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in expert.items()}
    every_other = {name: torch.stack([t, t], dim=-1).flatten(-2)[..., ::2] for name, t in expert.items()}
    interleaved = torch.stack([expert["gate"], expert["up"]], dim=1).flatten(0, 1)
    assert torch.equal(_pack(spec, transposed), record)
    assert torch.equal(_pack(spec, every_other), record)
    assert torch.equal(_pack(spec, expert | {"gate": interleaved[::2], "up": interleaved[1::2]}), record)
    assert torch.equal(
        ops.unpack(record.repeat(2, 1).t()[:, 0], *spec.record_layout)[1], ops.unpack(record, *spec.record_layout)[1]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down": torch.zeros(72, 41)}, r"down must be \[72, 40\]; got \[72, 41\]"),
        ({"gate": torch.zeros(41, 72)}, r"gate must be \[40, 72\]; got \[41, 72\]"),
        ({"up": torch.zeros(40)}, r"up and down must be matrices; got \[40\]"),
        ({"up": torch.zeros(40, 72, dtype=torch.float64)}, "up has dtype Double; allowed: bfloat16, float16, float32"),
        ({"up_bias": None}, "either all projections have a bias or none has"),
        ({"gate_bias": None}, "either all projections have a bias or none has"),
        ({"down_bias": None}, "either all projections have a bias or none has"),
        ({"down_bias": torch.zeros(72, 1)}, r"down_bias must be \[72\]; got \[72, 1\]"),
    ],
)
def test_wrong_tensors(change: dict[str, Tensor | None], message: str) -> None:
    spec = Spec(bias=True)
    with pytest.raises(ValueError, match=message):
        _pack(spec, _expert(spec) | change)


def test_wrong_formats_and_sizes() -> None:
    spec = Spec()
    expert = _expert(spec)
    with pytest.raises(ValueError, match="int3"):
        ops.pack(*expert.values(), "int3", 32)
    for group_size in (0, 48, -32, 2**32 + 32):
        with pytest.raises(ValueError, match="group_size"):
            ops.pack(*expert.values(), "int8", group_size)
    record = _pack(spec, expert)
    for hidden, intermediate in ((0, 40), (72, -1), (2**20 + 1, 40), (2**32 + 72, 40)):
        with pytest.raises(ValueError, match="hidden|intermediate"):
            ops.unpack(record, "int8", 32, hidden, intermediate, True, False)
    for wrong in (record[:-1], record.view(torch.int8), record[None]):
        with pytest.raises(ValueError, match="record must be a uint8 CPU tensor of .* bytes; got"):
            ops.unpack(wrong, *spec.record_layout)


@pytest.mark.parametrize(("weights", "bound", "most"), [("tcq2", 0.25, (0.28, 0.3)), ("tcq3", 0.125, (0.146, 0.152))])
def test_trellis_errors_are_near_the_theoretical_limit(weights: str, bound: float, most: tuple[float, float]) -> None:
    """For Gaussian weights the relative error is at least 1/4 with two bits and 1/8 with three. Short columns lose a
    little more."""
    gaussian = torch.randn(128, 512)
    record = ops.pack(None, gaussian, gaussian.T, None, None, None, weights, 128)
    up, down = ops.unpack(record, weights, 128, 512, 128, False, False)[:2]
    assert bound < relative_error(up, gaussian) < most[0]
    assert bound < relative_error(down, gaussian.T) < most[1]
