"""``dense=``: the linear layers outside the experts, packed."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from routes import Computed
from tiny_models import TINY_MODELS, Tiny, logits_of
from tiny_pools import as_bytes
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, MeshError
from torch_mesh.models.families import find_experts
from torch_mesh.modules.dense import MeshLinear, PlainLinear, _mapped_files, dense_bytes, find_dense
from torch_mesh.modules.experts import change_class
from torch_mesh.modules.packed_weight import PackedLinearWeight

QWEN = "Qwen3MoeExperts"


def _assert_same(model: PreTrainedModel, original: PreTrainedModel, ids: torch.Tensor) -> None:
    """Check that ``model`` computes the output of ``original`` with the weights of ``model``'s packed layers."""
    plain, packed = copy.deepcopy(original), dict(_packed_layers(model))
    for path, module in packed.items():
        plain.get_submodule(path).weight = nn.Parameter(module.unpacked_weight())  # a tied weight becomes separate
    computed = Computed.by(plain, functools.partial(logits_of, ids=ids))
    formats = {(module._mesh_format, module._mesh_group_size) for module in packed.values()} - {("bf16", 0)}
    if not formats:
        computed.assert_same(model)
        return
    [(_, group_size)] = formats
    operands, exact = as_bytes(group_size), copy.deepcopy(plain).float()

    def rounds(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return operands(inputs[0].double().flatten(0, -2)).view(inputs[0].shape).float()

    for path in packed:
        exact.get_submodule(path).register_forward_pre_hook(rounds)
    computed.assert_same(model, moved=computed.error(exact))


def _packed_layers(model: nn.Module) -> list[tuple[str, MeshLinear]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, MeshLinear)]


def test_print_names_every_packed_layer_and_leaves_the_router_alone() -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), dense="int8", group_size=32)
    packed = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, MeshLinear)}
    assert packed == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert "(lm_head): MeshLinear(in_features=72, out_features=120, bias=False, weights=int8 (group 32))" in repr(model)
    assert all(isinstance(module, nn.Linear) for module in model.modules() if isinstance(module, MeshLinear))


@pytest.mark.parametrize("dense", ["bf16", "int8", "int4", "lut4"])
def test_outputs_are_those_of_the_packed_weights(ids: torch.Tensor, dense: str) -> None:
    original = TINY_MODELS[QWEN].build()
    model = torch_mesh.patch(copy.deepcopy(original), dense=dense)
    _assert_same(model, original, ids)
    for path, module in _packed_layers(model):
        weight = original.get_submodule(path).weight.detach()
        expected = torch.ops.torch_mesh.pack_linear(weight, dense, module._mesh_group_size)
        assert torch.equal(module._mesh_packed, expected), path


def test_unpatch_restores_bf16_layers_and_refuses_rounded_ones(ids: torch.Tensor) -> None:
    model = TINY_MODELS[QWEN].build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits_of(model, ids)
    torch_mesh.unpatch(torch_mesh.patch(model, dense="bf16"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(model, ids), expected)
    assert all(type(module) is not MeshLinear for module in model.modules())

    torch_mesh.patch(model, dense="int8")
    with pytest.raises(MeshError, match="rounded to int8.*lossy=True"):
        torch_mesh.unpatch(model)
    packed = {path: module.unpacked_weight() for path, module in _packed_layers(model)}
    torch_mesh.unpatch(model, lossy=True)
    for name, tensor in model.state_dict().items():
        restored = packed.get(name.removesuffix(".weight"), before[name])
        assert torch.equal(tensor, restored) and (restored is before[name] or not torch.equal(restored, before[name]))
    assert model.lm_head.weight.requires_grad


def test_a_head_tied_to_the_embedding_is_tied_again(ids: torch.Tensor) -> None:
    model = TINY_MODELS[QWEN].build()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    original = copy.deepcopy(model)
    torch_mesh.patch(model, dense="int8")
    assert isinstance(model.lm_head, MeshLinear)
    assert not model.model.embed_tokens.weight.is_meta
    _assert_same(model, original, ids)
    torch_mesh.unpatch(model, lossy=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_from_pretrained_packs_linear_layers(tmp_path: Path, ids: torch.Tensor) -> None:
    source = TINY_MODELS[QWEN].build()
    source.save_pretrained(tmp_path / "model")

    exact = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=MeshConfig(dense="bf16", resident=0.5), dtype=torch.bfloat16
    )
    assert isinstance(exact.lm_head, MeshLinear)
    exact.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in source.state_dict().items())

    rounded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=MeshConfig(dense="int4", resident=0.5), dtype=torch.bfloat16
    )
    assert torch.equal(logits_of(rounded, ids), logits_of(torch_mesh.patch(source, dense="int4", resident=0.5), ids))


def test_small_weights_are_copied_out_of_the_mapped_file(tmp_path: Path) -> None:
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path)

    def mapped(dense: str) -> set[str]:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MeshConfig(dense=dense))
        files = list(_mapped_files())
        return {
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is nn.Parameter and any(first <= parameter.data_ptr() < last for first, last in files)
        }

    small = {name for name in mapped("none") if name.endswith(("gate.weight", "norm.weight"))}
    assert small and not small & mapped("int8")


def test_a_model_opened_in_inference_mode_computes_outside_of_it(tmp_path: Path, ids: torch.Tensor) -> None:
    TINY_MODELS[QWEN].build().save_pretrained(tmp_path)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MeshConfig(dense="int8"))
        expected = logits_of(model, ids)
    assert torch.equal(logits_of(model, ids), expected)


def test_moving_and_casting_leave_the_packed_bytes_alone(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), dense="int8", weights="int8")
    packed = model.lm_head._mesh_packed
    model.float()
    assert model.lm_head._mesh_packed is packed and packed.dtype == torch.uint8
    assert logits_of(model, ids).isfinite().all()
    assert isinstance(model.lm_head.weight, PackedLinearWeight) and model.lm_head.weight.dtype == torch.float32


def test_gradients_pass_through_packed_layers(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), dense="bf16")
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded, use_cache=False).logits.float().square().sum().backward()
    assert embedded.grad is not None and embedded.grad.isfinite().all() and embedded.grad.abs().sum() > 0


def test_generate_compiled_with_a_static_cache_gives_the_eager_tokens(ids: torch.Tensor) -> None:
    from transformers import CompileConfig

    torch._dynamo.reset()
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), dense="int8", weights="int8", resident=0.5)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    eager = model.generate(ids, disable_compile=True, **options)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager")
    compile_config._compile_all_devices = True
    assert torch.equal(model.generate(ids, compile_config=compile_config, **options), eager)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a processor without native bf16 products."""
    monkeypatch.setattr("torch_mesh.modules.dense.multiplies_any_rows", lambda: True)


def _plain(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, PlainLinear)}


@pytest.mark.usefixtures("emulated")
def test_by_default_weights_stay_unpacked(ids: torch.Tensor, tmp_path: Path) -> None:
    model = TINY_MODELS[QWEN].build()
    original = copy.deepcopy(model)
    weights, expected = dict(model.named_parameters()), logits_of(model, ids)
    torch_mesh.patch(model)
    assert _plain(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert all(parameter is weights[name] for name, parameter in model.named_parameters() if "experts" not in name)
    value = logits_of(model, ids)
    _assert_same(model, original, ids)
    assert 'products=torch_mesh (dense="int8" reads half of all such layers, off by 0.6%' in repr(model.lm_head)
    assert repr(model).count("off by 0.6%") == 1

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=MeshConfig(resident=0.5), dtype=torch.bfloat16
    )
    assert _plain(again) == _plain(model) and torch.equal(logits_of(again, ids), value)
    torch_mesh.unpatch(model)
    assert not _plain(model) and type(model.lm_head) is nn.Linear and torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_packed_layer_follows_autocast_as_torchs_does(dtype: torch.dtype, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), resident=1.0, dense="int8").to(dtype)
    head, x = model.lm_head, torch.randn(3, 72, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.linear(x, head.unpacked_weight()).dtype
        value = head(x)
        assert value.dtype == torch.compile(head, backend="eager", fullgraph=True)(x).dtype == expected
        assert logits_of(model, ids).isfinite().all()
    value.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.usefixtures("emulated")
def test_an_unpacked_layer_uses_torch_for_autocast_gradients_and_fp32(ids: torch.Tensor) -> None:
    linear = torch_mesh.patch(TINY_MODELS[QWEN].build()).lm_head
    x, weight = torch.randn(3, 72).bfloat16(), linear.weight
    functional = torch.nn.functional.linear
    with torch.no_grad():
        assert torch.equal(linear(x), torch.ops.torch_mesh.plain_linear(x, weight, None))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(x), functional(x, weight))
    value = linear(x)
    assert torch.equal(value, functional(x, weight))
    value.float().sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    with torch.no_grad():
        weight.add_(1)  # as an optimizer does
        assert torch.equal(linear(x), torch.ops.torch_mesh.plain_linear(x, weight, None))
        linear.float()
        assert torch.equal(linear(x.float()), functional(x.float(), linear.weight))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("widened", [1, 200, 1 << 23], ids=["one-output", "three-outputs", "all"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_gradient_of_a_frozen_layer_is_exact_to_one_rounding(
    biased: bool, widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_mesh.modules.dense._MAX_FP32_VALUES", widened)  # how many weights are widened at a time
    linear: Any = nn.Linear(72, 40, bias=biased).bfloat16().requires_grad_(False)
    change_class(linear, PlainLinear)
    x = torch.randn(2, 3, 72).bfloat16().requires_grad_()
    value = linear(x)
    # For inputs that need gradients the op itself uses torch's product.
    assert torch.equal(value, torch.ops.torch_mesh.plain_linear(x.detach(), linear.weight, linear.bias))
    grad = torch.randn_like(value)
    (own,) = torch.autograd.grad(value, x, grad)
    assert own.shape == x.shape
    torch.testing.assert_close(own.double(), grad.double() @ linear.weight.double(), rtol=2**-8, atol=1e-6)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), x, grad)[0], own)


@pytest.mark.usefixtures("emulated")
def test_a_frozen_layer_that_is_not_packed_takes_one_vector() -> None:
    linear: Any = nn.Linear(72, 40).bfloat16().requires_grad_(False)
    change_class(linear, PlainLinear)
    x, grad = torch.randn(72).bfloat16().requires_grad_(), torch.randn(40).bfloat16()
    value = linear(x)
    assert torch.equal(value, linear(x[None])[0])
    (own,) = torch.autograd.grad(value, x, grad)
    assert torch.equal(own, torch.autograd.grad(linear(x[None]), x, grad[None])[0])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("max_rows", [None, 4])
def test_torch_computes_an_unpacked_layer_of_a_jagged_input(max_rows: int | None) -> None:
    linear: Any = nn.Linear(72, 40).bfloat16().requires_grad_(False)
    change_class(linear, PlainLinear)
    linear._mesh_max_rows = max_rows
    rows = [torch.randn(count, 72).bfloat16() for count in (1, 2)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    own, expected = linear(jagged), nn.functional.linear(jagged, linear.weight, linear.bias)
    assert torch.equal(own.values(), expected.values())


@pytest.mark.usefixtures("emulated")
def test_second_derivatives_of_a_frozen_layer_that_is_not_packed() -> None:
    linear: Any = nn.Linear(72, 40).bfloat16().requires_grad_(False)
    change_class(linear, PlainLinear)
    x = torch.randn(3, 72).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(linear(x).float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    weight = linear.weight.double()
    expected = 2 * torch.ones(3, 72).double() @ weight.t() @ weight
    # The first derivative is rounded to bf16, and so is the next product.
    assert (second.double() - expected).norm() <= 2 * 2**-8 * expected.norm()


@pytest.mark.usefixtures("emulated")
def test_derivatives_of_forward_mode_of_a_layer_that_is_not_packed() -> None:
    linear = torch_mesh.patch(TINY_MODELS[QWEN].build()).lm_head.requires_grad_(False)
    x, tangent = torch.randn(2, 3, 72).bfloat16()
    assert torch.equal(torch.func.jvp(linear, (x,), (tangent,))[1], torch.nn.functional.linear(tangent, linear.weight))
    assert torch.equal(torch.func.jacfwd(linear)(x[0]), linear.weight)
    assert torch.equal(linear(x), torch.ops.torch_mesh.plain_linear(x, linear.weight, None))


@pytest.mark.usefixtures("emulated")
def test_a_head_tied_to_the_embedding_stays_tied(ids: torch.Tensor) -> None:
    model = TINY_MODELS[QWEN].build()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    torch_mesh.patch(model)
    assert isinstance(model.lm_head, PlainLinear) and model.lm_head.weight is model.model.embed_tokens.weight


def test_auto_keeps_the_layers_that_torch_computes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_mesh.modules.dense.multiplies_any_rows", lambda: True)
    assert not _plain(torch_mesh.patch(TINY_MODELS[QWEN].build().float()))
    assert not _plain(torch_mesh.patch(TINY_MODELS[QWEN].build(), dense="none"))
    monkeypatch.setattr("torch_mesh.modules.dense.multiplies_any_rows", lambda: False)
    model = torch_mesh.patch(TINY_MODELS[QWEN].build())
    head = model.lm_head
    assert "products=torch_mesh up to 4 rows (dense=" in repr(head)
    x = torch.randn(5, 72).bfloat16()
    with torch.no_grad():
        assert torch.equal(head(x), torch.nn.functional.linear(x, head.weight))
        for rows in (1, 2, 4):
            assert torch.equal(head(x[:rows]), torch.ops.torch_mesh.plain_linear(x[:rows], head.weight, None))
            assert torch.equal(head(x[None, :rows])[0], head(x[:rows]))
    torch_mesh.unpatch(model)
    assert type(head) is nn.Linear and "_mesh_max_rows" not in vars(head)
    drafting = torch_mesh.patch(TINY_MODELS[QWEN].build(), speculation="lookup").lm_head
    assert "products=torch_mesh up to 16 rows" in repr(drafting)


@pytest.mark.usefixtures("emulated")
def test_merging_an_adapter_into_a_layer_that_is_not_packed(ids: torch.Tensor) -> None:
    peft = pytest.importorskip("peft")
    original = TINY_MODELS[QWEN].build()
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=4, init_lora_weights=False)
    merged = []
    for model in (original, torch_mesh.patch(copy.deepcopy(original), resident=0.5)):
        torch.manual_seed(1)
        merged.append(peft.get_peft_model(model, config).merge_and_unload())
    assert _plain(merged[1]) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert torch.equal(merged[0].lm_head.weight, merged[1].lm_head.weight)
    _assert_same(merged[1], merged[0], ids)


def test_adapters_are_not_packed_and_a_layer_alone_has_nothing_to_pack() -> None:
    with pytest.raises(torch_mesh.UnsupportedModelError, match="no linear layers beside its experts"):
        torch_mesh.Experts(torch.randn(4, 80, 72), torch.randn(4, 72, 40), dense="int8")
    model = TINY_MODELS[QWEN].build()
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Linear(72, 40)
    torch_mesh.patch(model, dense="int8")
    assert type(model.model.layers[0].self_attn.q_proj.lora_A) is nn.Linear


def test_a_layer_that_is_not_in_memory_is_refused_before_anything_changes() -> None:
    model = TINY_MODELS[QWEN].build()
    model.lm_head.to("meta")
    with pytest.raises(torch_mesh.UnsupportedModelError, match=r"lm_head\.weight is torch\.bfloat16 on meta"):
        torch_mesh.patch(model, dense="int8")
    assert "Mesh" not in repr(model)
    with pytest.raises(
        ValueError,
        match="dense='int3' is unknown; it is one of 'auto', 'none', 'codes', 'bf16', 'bf12', 'int8', 'int4', 'lut4'",
    ):
        MeshConfig(dense="int3")


class _NestedRouter(nn.Module):
    """A router as some families have it: its matrix is a linear layer one level down."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        hidden, experts = gate.weight.size(1), gate.weight.size(0)
        self.mix, self.proj = nn.Linear(hidden, hidden), nn.Linear(hidden, experts)


def test_nested_linear_layers_of_a_router_are_not_packed() -> None:
    model = Tiny("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 40}).build()
    block = model.model.layers[1].mlp
    block.gate = _NestedRouter(block.gate).bfloat16()
    names = {path for path, _ in find_dense(model, find_experts(model))}
    assert "model.layers.1.self_attn.q_proj" in names and "lm_head" in names
    assert not any("gate" in name for name in names)


def test_layers_that_transformers_keeps_in_fp32_are_not_packed() -> None:
    model = TINY_MODELS[QWEN].build()
    model._keep_in_fp32_modules_strict = {"self_attn.k_proj"}
    names = {path for path, _ in find_dense(model, find_experts(model))}
    assert "model.layers.0.self_attn.q_proj" in names
    assert not any(name.endswith("k_proj") for name in names)


def test_rounding_fp32_layers_to_bf16_gives_a_warning() -> None:
    model = TINY_MODELS[QWEN].build().float()
    with pytest.warns(UserWarning, match="Linear layers in torch.float32 are rounded to bf16"):
        torch_mesh.patch(model, dense="bf16", weights="int8")


def test_memory_that_packing_frees_is_counted_and_a_tied_head_frees_none() -> None:
    model = TINY_MODELS[QWEN].build()
    layers = find_experts(model)

    def saving(dense: str) -> int:
        freed, taken = dense_bytes(model, layers, dense=dense, group_size=64)
        return freed - taken

    before = saving("int8")
    head = model.lm_head.weight.nbytes
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert saving("int8") == before - head
    assert saving("auto") == 0
