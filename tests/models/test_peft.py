"""PEFT's adapters on patched models: beside the experts, on packed layers, and where PEFT itself finds the experts."""

from __future__ import annotations

import copy
import functools
import re
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from routes import Computed
from safetensors.torch import load_file
from tiny_models import build, logits_of
from training import STEPS, train, trainer_for
from transformers import AutoModelForCausalLM, PreTrainedModel
from upstream import loads_adapters

import torch_mesh
from torch_mesh import MeshConfig, MeshError
from torch_mesh.modules.dense import MeshLinear
from torch_mesh.modules.packed_weight import PackedWeight

QWEN = "Qwen3MoeExperts"
ATTENTION = ["q_proj", "v_proj"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_trainer.py"


def _computed(model: torch.nn.Module, ids: torch.Tensor) -> Computed:
    return Computed.by(model, functools.partial(logits_of, ids=ids))


def _with_adapter(model: PreTrainedModel, seed: int = 0, **fields: object) -> PeftModel:
    torch.manual_seed(seed)
    fields = {"r": 4, "target_modules": ATTENTION, "init_lora_weights": False} | fields
    return get_peft_model(model, LoraConfig(**fields))


def _learns(model: PeftModel, ids: torch.Tensor) -> bool:
    """Whether training steps lower the loss of this text. It need not fall at each, for a random router may change its
    choice."""
    losses = train(model, ids)
    return min(losses[1:]) < losses[0]


@pytest.mark.parametrize("dense", ["none", "bf16", "int8"])
def test_an_adapter_changes_the_output_as_it_does_without_torch_mesh(dense: str, ids: torch.Tensor) -> None:
    plain = build()
    patched = torch_mesh.patch(copy.deepcopy(plain), resident=0.3, dense=dense)
    base, moved = logits_of(patched, ids), _computed(plain, ids).error(patched)
    plain, patched = _with_adapter(plain), _with_adapter(patched)
    assert {p.device.type for p in patched.parameters() if p.requires_grad} == {"cpu"}
    assert not any(isinstance(p, PackedWeight) for p in patched.parameters() if p.requires_grad)
    assert torch.equal(logits_of(patched, ids), logits_of(patched, ids))  # reads no uninitialized memory
    computed = _computed(plain, ids)
    computed.assert_same(patched, moved)
    with patched.disable_adapter():
        assert torch.equal(logits_of(patched, ids), base)
        assert computed.error(patched) > 2 * (computed.rounding + moved), "the adapter adds nothing"


@pytest.mark.parametrize("dense", ["none", "int8"])
@pytest.mark.parametrize("source", ["patched", "converted"])
def test_a_trained_adapter_opens_on_an_unpatched_model(
    source: str, dense: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    original = build()
    if source == "patched":
        model = torch_mesh.patch(copy.deepcopy(original), resident=0.3, dense=dense)
    else:
        original.save_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            quantization_config=MeshConfig(resident=0.3, dense=dense, weights="int8", store=tmp_path / "store"),
            dtype=torch.bfloat16,
        )
    model = _with_adapter(model, init_lora_weights=True)
    assert _learns(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(original, tmp_path / "adapter")
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert trained and all(torch.equal(p, again.get_parameter(name)) for name, p in trained.items())


@pytest.mark.parametrize("dense, tied", [("bf16", False), ("int8", True)])
def test_an_adapter_on_a_packed_head_is_saved_without_the_bases_weight(
    dense: str, tied: bool, ids: torch.Tensor, tmp_path: Path
) -> None:
    plain = build(tie_word_embeddings=tied)
    model = _with_adapter(torch_mesh.patch(copy.deepcopy(plain), dense=dense), target_modules=["q_proj", "lm_head"])
    trainer_for(model, tmp_path).train()
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    assert all(".lora_" in name for name in load_file(checkpoint / "adapter_model.safetensors"))
    again = PeftModel.from_pretrained(torch_mesh.patch(copy.deepcopy(plain), dense=dense), checkpoint)
    assert torch.equal(logits_of(again, ids), logits_of(model.eval(), ids))
    unpatched = PeftModel.from_pretrained(plain, checkpoint)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert trained and all(torch.equal(p, unpatched.get_parameter(name)) for name, p in trained.items())


@pytest.mark.parametrize("dense", ["none", "bf16"])
def test_all_linear_layers_outside_the_experts_can_be_adapted(dense: str, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.3, dense=dense)
    model = _with_adapter(
        model, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"], init_lora_weights=True
    )
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(adapted) == 4 * 3 + 1
    assert all(isinstance(module.base_layer, MeshLinear) == (dense != "none") for module in adapted)
    assert _learns(model, ids)


def test_all_linear_adapts_a_model_whose_experts_peft_leaves_alone(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build("GptOssExperts"), resident=0.3, dense="bf16")
    model = _with_adapter(model, target_modules="all-linear", init_lora_weights=True)
    assert any(hasattr(module, "lora_A") and isinstance(module.base_layer, MeshLinear) for module in model.modules())
    assert _learns(model, ids)


@pytest.mark.parametrize(
    "fields",
    [{"target_modules": ["gate_proj", "up_proj", "down_proj"]}, {"target_modules": "all-linear"}],
    ids=["by module", "all-linear"],
)
def test_names_of_linear_layers_that_peft_takes_for_experts_train_them(fields: dict, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.3)
    expected = logits_of(model, ids)
    adapted = _with_adapter(model, **fields, init_lora_weights=True)
    assert "of 3 layers" in torch_mesh.describe_training(adapted)
    assert _learns(adapted, ids)
    assert torch.equal(logits_of(adapted.unload(), ids), expected)


@pytest.mark.parametrize("dense", ["none", "int8"])
def test_a_target_parameter_trains_unless_its_layer_is_packed(dense: str, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.3, dense=dense)
    base = logits_of(model, ids)
    fields = {"target_modules": [], "target_parameters": ["q_proj.weight", "mlp.experts.down_proj"]}
    if dense == "int8":  # PEFT would parametrize a weight that the layer's forward does not read
        with pytest.raises(MeshError, match=r"q_proj\.weight, which is packed \(int8\).*target_modules"):
            _with_adapter(model, **fields)
        return
    adapted = _with_adapter(model, **fields)
    assert not torch.equal(logits_of(adapted, ids), base)
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in adapted.named_parameters() if "q_proj.lora_A" in name}
    assert found and all(gradient.any() for gradient in found.values())


def test_several_adapters_switch(ids: torch.Tensor) -> None:
    model = _with_adapter(torch_mesh.patch(build(), resident=0.3, dense="bf16"))
    first = logits_of(model, ids)
    torch.manual_seed(1)
    model.add_adapter("second", LoraConfig(r=8, target_modules=["k_proj"], init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.equal(logits_of(model, ids), first)
    model.set_adapter("default")
    assert torch.equal(logits_of(model, ids), first)


def test_variants_that_read_the_base_weight_get_its_values(ids: torch.Tensor) -> None:
    plain = build()
    patched = torch_mesh.patch(copy.deepcopy(plain), dense="bf16")
    for fields in ({"use_dora": True}, {"init_lora_weights": "olora"}):
        if "use_dora" in fields:
            plain_adapted, adapted = (_with_adapter(copy.deepcopy(model), **fields) for model in (plain, patched))
            _computed(plain_adapted, ids).assert_same(adapted)
        else:  # this variant subtracts part of the base weight
            with pytest.raises(MeshError, match=r"_proj\.weight, which is packed \(bf16\) and frozen"):
                _with_adapter(copy.deepcopy(patched), **fields)


@pytest.mark.parametrize("dense", ["none", "bf16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"trainable_token_indices": [3, 4]},
        {"modules_to_save": ["embed_tokens"]},
    ],
)
def test_unpatch_below_an_adapter_ties_the_head_again(fields: dict, dense: str, ids: torch.Tensor) -> None:
    plain = build(tie_word_embeddings=True)
    patched = _with_adapter(torch_mesh.patch(copy.deepcopy(plain), dense=dense), **fields)
    plain = _with_adapter(plain, **fields)
    torch_mesh.unpatch(patched)
    assert not any(name.startswith("_mesh_") for module in patched.modules() for name in vars(module))
    found, expected = ([name for name, _ in model.named_parameters()] for model in (patched, plain))  # tied ones once
    assert found == expected
    assert torch.equal(logits_of(patched, ids), logits_of(plain, ids))


def test_merging_into_a_packed_layer_is_refused_and_into_another_one_works(ids: torch.Tensor) -> None:
    model = _with_adapter(torch_mesh.patch(build(), resident=0.3, dense="int8"))
    with pytest.raises(MeshError, match=r"q_proj\.weight, which is packed \(int8\) and frozen.*dense='none'"):
        model.merge_and_unload()
    plain = build()
    model = _with_adapter(torch_mesh.patch(copy.deepcopy(plain), resident=0.3))
    _computed(_with_adapter(plain).merge_and_unload(), ids).assert_same(model.merge_and_unload())


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_a_refused_merge_leaves_all_adapters(merge: str, ids: torch.Tensor) -> None:
    """PEFT merges layer by layer, and would have removed the adapter of the embedding."""
    patched = torch_mesh.patch(build(), resident=0.3, dense="int8")
    model = _with_adapter(patched, target_modules=["embed_tokens", "q_proj"])
    expected, keys = logits_of(model, ids), list(model.state_dict())
    assert any("embed_tokens.lora_" in key for key in keys)
    with pytest.raises(MeshError, match=r"layers\.0.*q_proj\.weight, which is packed \(int8\) and frozen"):
        getattr(model, merge)()
    assert list(model.state_dict()) == keys and torch.equal(logits_of(model, ids), expected)


def test_modules_to_save_train_unless_they_are_packed(ids: torch.Tensor) -> None:
    model = _with_adapter(torch_mesh.patch(build(), resident=0.3), modules_to_save=["lm_head"], init_lora_weights=True)
    assert _learns(model, ids)
    with pytest.raises(MeshError, match=r"Cannot compute gradients of lm_head\.weight"):
        _with_adapter(torch_mesh.patch(build(), dense="int8"), modules_to_save=["lm_head"])
    packed = torch_mesh.patch(build(), dense="int8").requires_grad_(False)
    with pytest.raises(MeshError, match=r"requires_grad_\(not isinstance\(each, torch_mesh.PackedWeight\)\)"):
        packed.requires_grad_(True)
    for each in packed.parameters():  # as the error says
        each.requires_grad_(not isinstance(each, torch_mesh.PackedWeight))
    assert all(each.requires_grad != isinstance(each, torch_mesh.PackedWeight) for each in packed.parameters())


@loads_adapters
def test_an_adapter_is_loaded_into_a_packed_model(ids: torch.Tensor, tmp_path: Path) -> None:
    plain = build()
    patched = torch_mesh.patch(copy.deepcopy(plain), resident=0.3, dense="bf16")
    adapted = _with_adapter(plain)
    adapted.save_pretrained(tmp_path / "adapter")
    base = logits_of(patched, ids)
    patched.load_adapter(str(tmp_path / "adapter"))
    value = logits_of(patched, ids)
    assert not torch.equal(value, base) and torch.equal(value, logits_of(patched, ids))
    patched.disable_adapters()
    assert torch.equal(logits_of(patched, ids), base)


# Paths of the experts differ, NemotronH's have no gate, Inkling2 has a q_proj that is not linear.
@pytest.mark.parametrize("family", ["Qwen3Moe", "GraniteMoe", "Jamba", "NemotronH", "Gemma4Text", "Inkling2"])
def test_the_example_trains_experts_in_families_with_other_names(family: str) -> None:
    model = torch_mesh.patch(build(f"{family}Experts"), resident=0.5)
    config = runpy.run_path(str(EXAMPLE))["lora_config"](model, 4)
    described = torch_mesh.describe_training(get_peft_model(model, config))
    assert re.match("Experts train by adapters: down_proj .*up_proj", described)
