"""Supported families whose experts transformers does not mark: llama4, longcat_flash and step3p7."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from routes import assert_same_layer, by_token, rounded_to_bytes
from safetensors.torch import load_file, save_file
from tiny_models import UNMARKED_MODELS
from transformers import NllbMoeConfig, PreTrainedModel
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from upstream import sees_with_llama4

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.models.families import UNMARKED, find_experts, find_router, supported_families
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store

_WITH_VISION = pytest.param("llama4 with vision", marks=sees_with_llama4)


def _build(name: str) -> Any:
    return UNMARKED_MODELS[name].build()


def _prompt() -> torch.Tensor:
    return torch.randint(3, 100, (2, 11))


@torch.no_grad()
def _logits(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    return model(input_ids=prompt, use_cache=False).logits


class _Blocks:
    """The inputs of each block with experts in a plain model, its output in float32, and its errors in bf16 and
    int8."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.exact, self.rounding, self.moved = [], [], []
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.paths = [layer.path.rpartition(".")[0] for layer in find_experts(model)]
        handles = [
            model.get_submodule(path).register_forward_pre_hook(
                lambda _, given, path=path: self.inputs.__setitem__(path, given)
            )
            for path in self.paths
        ]
        _logits(model, prompt)
        for handle in handles:
            handle.remove()
        for path in self.paths:
            block, wide = model.get_submodule(path), [each.float() for each in self.inputs[path]]
            self.exact.append(_output(copy.deepcopy(block).float(), wide))
            self.rounding.append(by_token(_output(block, self.inputs[path]), self.exact[-1]).median())
            self.moved.append(by_token(_output(rounded_to_bytes(block), wide), self.exact[-1]).median())

    def assert_same(self, patched: PreTrainedModel, weights: str = "bf16") -> None:
        """Check the blocks' outputs for the recorded inputs. Routers in bf16 choose the same experts. The reference in
        float32 may decide ties differently, but only for a few tokens."""
        for path, exact, rounding, moved in zip(self.paths, self.exact, self.rounding, self.moved, strict=True):
            error = by_token(_output(patched.get_submodule(path), self.inputs[path]), exact).median()
            assert error < 2 * (rounding + moved * (weights == "int8")), path


@torch.no_grad()
def _output(block: Any, inputs: Sequence[Any]) -> torch.Tensor:
    output = block(*inputs)
    return (output[0] if isinstance(output, tuple) else output).flatten(0, -2).float()


def test_every_unmarked_family_has_a_tiny_model() -> None:
    families = {unmarked.family for unmarked in UNMARKED.values()}
    assert families == {tiny.family for tiny in UNMARKED_MODELS.values()} and families <= set(supported_families())


@pytest.mark.parametrize("name", (*sorted(set(UNMARKED_MODELS) - set(_WITH_VISION.values)), _WITH_VISION))
def test_patching_keeps_the_output_and_unpatching_restores_the_weights(name: str) -> None:
    model, prompt = _build(name), _prompt()
    classes = [type(module) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    blocks = _Blocks(model, prompt)
    layers = find_experts(model)
    assert all(find_router(model, layer) is not None for layer in layers)
    for resident in (1.0, 0.5):
        torch_mesh.patch(model, resident=resident, io="threads")
        assert len(list(patched_modules(model))) == len(layers)
        blocks.assert_same(model)
        assert not torch_mesh.stats(model).lookahead_unsupported_reasons
        torch_mesh.unpatch(model)
        assert [type(module) for module in model.modules()] == classes
        assert not any(key.startswith("_mesh_") for module in model.modules() for key in vars(module))
        after = model.state_dict()
        computing = {f"{layer.path}.{key}": layer.num_experts for layer in layers for key in layer.parameter_names}
        for key, value in before.items():  # rows that nothing computes with are restored as zeros
            count = computing.get(key, len(value) if value.dim() else None)
            assert torch.equal(
                after[key][:count] if value.dim() else after[key], value[:count] if value.dim() else value
            )
            assert count is None or not after[key][count:].any()


@pytest.mark.parametrize("name", ("llama4", "longcat_flash", "step3p7"))
def test_bits_do_not_depend_on_residency(name: str) -> None:
    model, prompt = _build(name), _prompt()
    outputs = []
    for resident in (1.0, 0.5):
        torch_mesh.patch(model, resident=resident, io="threads")
        outputs.append((_logits(model, prompt), model.generate(prompt, max_new_tokens=2, do_sample=False)))
        torch_mesh.unpatch(model)
    for logits, tokens in outputs[1:]:
        assert torch.equal(logits, outputs[0][0]) and torch.equal(tokens, outputs[0][1])


@pytest.mark.parametrize("name", (_WITH_VISION, "longcat_flash", "step3p7"))
def test_unmarked_families_open_convert_plan_and_save(name: str, tmp_path: Path) -> None:
    model, prompt = _build(name), _prompt()
    expected = _logits(model, prompt)
    model.save_pretrained(tmp_path / "raw")
    store = convert(tmp_path / "raw", tmp_path / "store", "bf16").store
    assert store.manifest.shape.experts == 8
    computed = _logits(torch_mesh.patch(copy.deepcopy(model), resident=0.5, io="threads"), prompt)
    for folder in (tmp_path / "raw", tmp_path / "store"):
        config = MeshConfig(resident=0.5, io="threads")
        patched = type(model).from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16).eval()
        assert torch.equal(_logits(patched, prompt), computed)
        shape = find_sizes(folder, config).shape
        assert (shape.layers, shape.experts) == (len(find_experts(model)), 8)
    patched.save_pretrained(tmp_path / "saved")
    plain = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).eval()
    assert torch.equal(_logits(plain, prompt), expected)


@pytest.mark.parametrize("name", ("llama4, three experts a token", "longcat_flash", "step3p7"))
def test_gradients_reach_routers_and_hidden_states(name: str) -> None:
    model = _build(name).float()
    layer = find_experts(model)[-1]
    block = model.get_submodule(layer.path.rpartition(".")[0])
    x = torch.randn(2, 5, layer.hidden)

    def gradients() -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        output = block(inputs)
        output = output[0] if isinstance(output, tuple) else output
        routers = [value for key, value in block.named_parameters() if key.startswith(("router", "gate"))]
        return list(torch.autograd.grad(output.square().sum(), [inputs, *routers]))

    for parameter in layer.parameters.values():
        parameter.data = parameter.data.bfloat16().float()
    expected = gradients()
    torch_mesh.patch(model, resident=0.5, io="threads")
    # The inputs of a few products are rounded to bf16, by up to 2**-9 each: at most 0.003 of the norm in 13 seeds.
    for found, theirs in zip(gradients(), expected, strict=True):
        assert found.shape == theirs.shape and (found - theirs).norm() < 0.02 * theirs.norm()


def test_a_checkpoint_without_rows_for_identity_experts_opens(tmp_path: Path) -> None:
    """Published checkpoints have no gate_up rows for identity experts. transformers alone refuses them."""
    model, prompt = _build("longcat_flash"), _prompt()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for expert in range(8, 13):
            for part in ("gate", "up"):
                del tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    patched = type(model).from_pretrained(tmp_path, quantization_config=MeshConfig(resident=0.5, io="threads"))
    assert torch.equal(_logits(patched.eval(), prompt), _logits(torch_mesh.patch(model), prompt))


def test_layers_of_a_store_have_limits_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _build("step3p7")
    model.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "store", "bf16")
    names = open_store(tmp_path / "store").manifest.shape.activation
    assert isinstance(names, tuple) and names[0] == "silu" and len(set(names)) == 3
    again = convert(tmp_path / "raw", tmp_path / "store", "bf16")
    assert again.existed
    assert main(["inspect", str(tmp_path / "store")]) == 0
    assert "silu or swiglu(gate=" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(9)])
    x, routing = torch.randn(9, 72).bfloat16(), torch.rand(9, 3)
    for number, layer in enumerate(find_experts(model)):
        experts = torch_mesh.Experts.from_store(tmp_path / "store", number, resident=0.5)
        assert_same_layer(experts, layer.module, (x, ids, routing))


def test_recording_a_trace_needs_a_patch_and_no_identity_experts(tmp_path: Path) -> None:
    model, prompt = _build("llama4"), _prompt()[:1]
    with (
        pytest.raises(MeshError, match="patch the model first"),
        torch_mesh.record_trace(model, tmp_path / "trace.npz"),
    ):
        pass
    torch_mesh.patch(model)
    with torch_mesh.record_trace(model, tmp_path / "trace.npz"):
        _logits(model, prompt)
    assert torch_mesh.load_trace(tmp_path / "trace.npz").ids.shape == (11, 2, 1)
    identities = torch_mesh.patch(_build("longcat_flash"))
    file = tmp_path / "other.npz"
    with (
        pytest.raises(MeshError, match="5 identity experts"),
        torch_mesh.record_trace(identities, file),
    ):
        pass


def test_a_failed_patch_leaves_the_block_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = _build("llama4"), _prompt()
    classes, expected = [type(module) for module in model.modules()], _logits(model, prompt)

    def fail(*_: Any) -> None:
        raise UnsupportedModelError("no")

    monkeypatch.setattr("torch_mesh.patching.modes.set_config_metadata", fail)
    with pytest.raises(UnsupportedModelError, match="no"):
        torch_mesh.patch(model, resident=0.5)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(_logits(model, prompt), expected)


@pytest.mark.parametrize("name", ("llama4", "longcat_flash", "step3p7"))
def test_unmarked_families_run_with_int8_layers_and_experts(name: str) -> None:
    model, prompt = _build(name), _prompt()
    blocks = _Blocks(model, prompt)
    torch_mesh.patch(model, weights="int8", group_size=64, dense="int8", resident=0.5, io="threads")
    blocks.assert_same(model, "int8")
    assert _logits(model, prompt).isfinite().all()
    if name != "llama4":
        torch_mesh.unpatch(model, lossy=True)
        torch_mesh.patch(model, resident=0.5, lossy={"deferred_experts": 1})
        assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape == (2, 14)


@pytest.mark.parametrize("name", ("llama4", "longcat_flash"))
def test_an_activation_without_a_kernel_runs_unfused(name: str) -> None:
    model, prompt = _build(name), _prompt()
    for layer in find_experts(model):
        layer.module.act_fn = torch.nn.ReLU()  # type: ignore[assignment]
    blocks = _Blocks(model, prompt)
    torch_mesh.patch(model, resident=0.5, io="threads")
    assert not any(module._mesh_fused for module in patched_modules(model))
    blocks.assert_same(model)


def test_nllb_moe_calls_two_experts_whatever_its_router_chose() -> None:
    """The family is refused for this reason. If this test fails, transformers has fixed it."""
    config = NllbMoeConfig(d_model=16, num_experts=8, encoder_ffn_dim=24)
    block = NllbMoeSparseMLP(config, 24).eval()
    called = set()
    for number in range(8):
        block.experts[f"expert_{number}"].register_forward_hook(lambda *_, number=number: called.add(number))
    with torch.no_grad():
        x = torch.randn(1, 40, 16)
        chosen = block.router(x.flatten(0, 1), None)[0].argmax(-1)
        block(x)
    assert called == {0, 1} and len(set(chosen.tolist())) > 2
