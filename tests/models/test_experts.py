"""torch_mesh.Experts: one layer without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import all_but_pairs_thorough
from tiny_models import TINY_MODELS

import torch_mesh
from torch_mesh.store.convert import convert

EXPERTS, HIDDEN, INTERMEDIATE = 6, 72, 40


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    return gate_up.bfloat16(), down.bfloat16()


@pytest.fixture
def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(7)])
    return torch.randn(7, HIDDEN), ids, torch.rand(7, 2)


def _expected(gate_up, down, x, ids, routing, activation, gate_up_bias=None, down_bias=None) -> torch.Tensor:
    """In float64, expert by expert."""
    functions = {
        "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
        "gelu": lambda gate, up: torch.nn.functional.gelu(gate) * up,
        "gelu_tanh": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        "relu2": lambda gate, up: gate.relu().square() * up,
        "swiglu(gate=0.5,up=1)": lambda gate, up: torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-1, 1),
        "softcap(gate=1,up=2)": lambda gate, up: gate.tanh() * gate.sigmoid() * 2 * (up / 2).tanh(),
        "swigluoai": lambda gate, up: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid(),
    }
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (experts, shares) in enumerate(zip(ids.tolist(), routing.double(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            product = gate_up[expert].double() @ x[token].double()
            product += 0 if gate_up_bias is None else gate_up_bias[expert].double()
            gate, up = product.chunk(2)
            row = down[expert].double() @ functions[activation](gate, up)
            row += 0 if down_bias is None else down_bias[expert].double()
            out[token] += share * row
    return out


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


_BOUNDS = {
    "bf16": 0.01,
    "bf12": 0.01,
    "int8": 0.03,
    "int4": 0.25,
    "lut4": 0.25,
    "tcq3": 0.45,
    "tcq2+tcq3": 0.8,
    "tcq2": 0.8,
}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglu(gate=0.5,up=1)", "softcap(gate=1,up=2)")


@pytest.mark.parametrize(
    ("activation", "format", "resident"), all_but_pairs_thorough(_ACTIVATIONS, list(_BOUNDS), (1.0, 0.5))
)
def test_layer_from_tensors(weights, routed, activation: str, format: str, resident: float) -> None:
    layer = torch_mesh.Experts(*weights, activation=activation, top_k=2, weights=format, resident=resident)
    out = layer(*routed)
    assert (out.shape, out.dtype) == (routed[0].shape, routed[0].dtype)
    assert _error(out, _expected(*weights, *routed, activation)) < _BOUNDS[format]
    assert f"weights={format}" in repr(layer)


def test_a_layer_adds_its_biases(weights, routed) -> None:
    biases = {"gate_up_bias": torch.randn(EXPERTS, 2 * INTERMEDIATE), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    biases = {name: bias.bfloat16() for name, bias in biases.items()}
    layer = torch_mesh.Experts(*weights, **biases)
    assert _error(layer(*routed), _expected(*weights, *routed, "silu", **biases)) < 0.01


def test_expert_map_gives_the_expert_of_each_id(weights, routed) -> None:
    x, ids, routing = routed
    expert_map = torch.tensor([3, 3, 0, 5, 1, 2, 4])  # seven ids, two of them for the same expert
    ids = torch.randint(0, 7, ids.shape)
    mapped = torch_mesh.Experts(*weights, expert_map=expert_map)
    assert torch.equal(mapped(x, ids, routing), torch_mesh.Experts(*weights)(x, expert_map[ids], routing))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("wrong", [-1, EXPERTS + 1])
def test_ids_outside_of_the_map_are_refused(weights, routed, wrong: int) -> None:
    x, ids, routing = routed
    ids[3, 1] = wrong
    layer = torch_mesh.Experts(*weights, expert_map=torch.arange(EXPERTS + 1, dtype=torch.int32).remainder(EXPERTS))
    for run in (layer, layer.submit):
        with pytest.raises(ValueError, match=rf"topk_ids has {wrong}, .* ids in \[0, 7\)"):
            run(x, ids, routing)
    # No branch in compiled code may depend on values, and the op gets an id that it refuses.
    with pytest.raises(ValueError, match=r"is outside \[0, 6\)"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ids, routing)


@pytest.mark.parametrize("family", ["Qwen3MoeExperts", "GptOssExperts"])
def test_layer_from_a_store(tmp_path: Path, family: str) -> None:
    model = TINY_MODELS[family].build()
    model.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    torch_mesh.patch(model, weights="int8")
    x, ids, routing = torch.randn(5, 72).bfloat16(), torch.randint(0, 8, (5, 3)), torch.rand(5, 3)
    for number, decoder in enumerate(model.model.layers):
        layer = torch_mesh.Experts.from_store(tmp_path / "store", number, resident=0.5)
        assert torch.equal(layer(x, ids, routing), decoder.mlp.experts(x, ids, routing))
        assert torch_mesh.stats(layer).per_layer[number].cold_misses > 0
    with pytest.raises(ValueError, match="layer=3 is not in .* 0 to 2"):
        torch_mesh.Experts.from_store(tmp_path / "store", 3)
    with pytest.raises(ValueError, match="dense: for whole models, not for one layer of a store"):
        torch_mesh.Experts.from_store(tmp_path / "store", 0, dense="int8")
    given = {"max_error": 0.1, "store": str(tmp_path), "tables": "1GiB", "prefill": "window"}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"{name}.*: for whole models"):
            torch_mesh.Experts.from_store(tmp_path / "store", config=torch_mesh.MeshConfig(**{name: value}))
    with pytest.raises(ValueError, match="weights='int4', but the experts in .* are int8"):
        torch_mesh.Experts.from_store(tmp_path / "store", 0, weights="int4")
    with pytest.raises(ValueError, match="group_size=32, but the experts in .* have groups of 64"):
        torch_mesh.Experts.from_store(tmp_path / "store", 0, weights="int8", group_size=32)
    with pytest.raises(torch_mesh.StoreError, match="not a store"):
        torch_mesh.Experts.from_store(tmp_path / "raw")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation": "relu"},
            "activation='relu'.*'silu', 'gelu', 'gelu_tanh', 'relu2', 'swigluoai', .*with other numbers",
        ),
        ({"top_k": 7}, r"top_k=7 must be in \[1, 6\]"),
        ({"down": torch.zeros(EXPERTS, INTERMEDIATE, HIDDEN)}, r"down must be \[6, 72, 40\].*\[6, 40, 72\]"),
        ({"gate_up": torch.zeros(EXPERTS, HIDDEN)}, r"gate_up must be \[experts, 2 \* intermediate, hidden\]"),
        ({"down_bias": torch.zeros(EXPERTS, HIDDEN)}, r"gate_up_bias must be \[6, 80\].*missing"),
        ({"expert_map": torch.tensor([0, 6])}, r"experts in \[0, 6\)"),
        ({"expert_map": torch.tensor([0.5])}, "vector of integers"),
        ({"expert_map": torch.tensor([False, True])}, "vector of integers"),
        ({"weight": "int8"}, "Did you mean 'weights'"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(weights, change: dict, message: str) -> None:
    arguments = {"gate_up": weights[0], "down": weights[1]} | change
    with pytest.raises(ValueError, match=message):
        torch_mesh.Experts(**arguments)


def test_submitted_calls_give_what_forward_gives(weights, routed) -> None:
    x, ids, routing = routed
    layer = torch_mesh.Experts(*weights, top_k=2, expert_map=torch.arange(EXPERTS).flip(0), weights="int8")
    pending = [layer.submit(x[:tokens], ids[:tokens], routing[:tokens]) for tokens in (7, 1, 0, 4)]
    for tokens, call in zip((7, 1, 0, 4), pending, strict=True):
        out = call.result()
        assert torch.equal(out, layer(x[:tokens], ids[:tokens], routing[:tokens])) and not out.requires_grad
        assert torch.equal(call.result(), out)
    with torch.inference_mode():
        assert layer.submit(x, ids, routing).result().is_inference()


def test_errors_of_a_submitted_call_come_out_of_its_result(weights, routed) -> None:
    x, ids, routing = routed
    layer = torch_mesh.Experts(*weights, top_k=2)
    wrong, right = layer.submit(x, ids + EXPERTS, routing), layer.submit(x, ids, routing)
    with pytest.raises(ValueError, match=r"is outside \[0, 6\)"):
        wrong.result()
    assert torch.equal(right.result(), layer(x, ids, routing))
    with pytest.raises(ValueError, match="torch.no_grad"):
        layer.submit(x.requires_grad_(), ids, routing)
