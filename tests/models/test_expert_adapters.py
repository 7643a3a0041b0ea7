"""PEFT's adapters on experts in a pool, compared with PEFT on the same model without torch_mesh."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import layer as lora
from peft.tuners.lora.model import LoraModel
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, UNMARKED_MODELS, inputs_for, logits_of, output_of
from training import train
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, MeshError
from torch_mesh.adapters.registration import register
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import pools_of
from torch_mesh.store.convert import convert

QWEN, GPT_OSS, BY_PROJECTION = "Qwen3MoeExperts", "GptOssExperts", "MuseSparkExperts"
# Gate and up as halves; transposed, with biases and interleaved columns; no gate; a softcap; identity experts; a norm
# after the experts, for which they run unfused.
LAYERS = [QWEN, GPT_OSS, "NemotronHExperts", "Inkling2Experts", "LongcatFlashExperts", BY_PROJECTION]
WHOLE = [
    QWEN,
    GPT_OSS,
    "LongcatFlashExperts",
    "Llama4TextExperts",
]  # the last one has its parameters transposed for PEFT
_UNMARKED = {"LongcatFlashExperts": UNMARKED_MODELS["longcat_flash"], "Llama4TextExperts": UNMARKED_MODELS["llama4"]}


def _build(name: str = QWEN, dtype: torch.dtype = torch.bfloat16, **fields: object) -> PreTrainedModel:
    """A tiny model in ``dtype`` whose weights have bf16 values."""
    tiny = _UNMARKED.get(name) or TINY_MODELS[name]
    return dataclasses.replace(tiny, fields=tiny.fields | fields).build().to(torch.bfloat16).to(dtype)


def _adapted(model: PreTrainedModel, seed: int = 0, **fields: Any) -> PeftModel:
    layer = find_experts(model)[0]
    block = layer.path.split(".")[-2:]
    targets = [".".join([*block, name]) for name in layer.parameter_names[:2]]
    settings = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": targets, "init_lora_weights": False}
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**(settings | fields)))


def _experts(model: PeftModel) -> torch.nn.Module:
    """The outermost wrapper of the first layer's experts."""
    return next(module for module in model.modules() if isinstance(module, lora.ParamWrapper))


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def _agree(value: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the outputs of most tokens agree. Where rounding changes a router's choice, a token's output differs."""
    change = (expected - base).norm(dim=-1).median()
    return bool((value - expected).norm(dim=-1).median() < 0.15 * change)


def test_the_pool_is_freed_with_its_adapted_model(no_collector: None, ids: torch.Tensor) -> None:
    model = _adapted(torch_mesh.patch(_build(), resident=0.3), target_modules=["q_proj"])
    model(input_ids=ids, labels=ids).loss.backward()
    pool = weakref.ref(pools_of(model)[0])
    del model
    assert pool() is None


def _layer_gradients(
    experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaves = {"hidden states": x.clone().requires_grad_(), "routing weights": weights.clone().requires_grad_()}
    leaves |= {name: parameter for name, parameter in experts.named_parameters() if parameter.requires_grad}
    out = experts(leaves["hidden states"], ids, leaves["routing weights"])
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_peft_in_float32_at_any_residency(name: str) -> None:
    plain = _build(name, torch.float32)
    layer = find_experts(plain)[0]
    x, grad = torch.randn(2, 23, layer.hidden)
    weights, ids = torch.rand(23, layer.num_experts).softmax(-1).topk(3)
    expected = _layer_gradients(_experts(_adapted(copy.deepcopy(plain))), x, ids, weights, grad)
    assert len(expected) == 6
    found = []
    for resident in (1.0, 0.25):
        model = _adapted(torch_mesh.patch(copy.deepcopy(plain), resident=resident, weights="bf16"))
        found.append(_layer_gradients(_experts(model), x, ids, weights, grad))
        assert found[-1].keys() == expected.keys()
    # In unfused experts the gate gets the results of kernels, which round their inputs to bf16.
    tolerance = 1e-3 if layer.fused_activation is not None else 1e-2
    for key, gradient in found[0].items():
        assert _error(gradient, expected[key]) < tolerance, key
        assert torch.equal(gradient, found[1][key]), key


@pytest.mark.parametrize("name", WHOLE)
def test_an_adapted_model_has_the_output_of_plain_peft(name: str) -> None:
    plain = _build(name)
    patched = torch_mesh.patch(copy.deepcopy(plain), resident=0.3)
    inputs = inputs_for(plain)
    base = output_of(plain, inputs).float()
    adapted = _adapted(patched, lora_alpha=24)
    value = output_of(adapted.base_model.model, inputs).float()
    assert _agree(value, output_of(_adapted(plain, lora_alpha=24).base_model.model, inputs).float(), base)
    with adapted.disable_adapter():
        unadapted = output_of(adapted.base_model.model, inputs)
    assert torch.equal(unadapted, output_of(adapted.unload(), inputs))


@pytest.mark.parametrize("name", [QWEN, GPT_OSS])
def test_adapter_files_are_exchanged_with_plain_peft(name: str, tmp_path: Path) -> None:
    plain = _build(name)
    ids = inputs_for(plain)["input_ids"]
    base = logits_of(plain, ids)
    patched = torch_mesh.patch(copy.deepcopy(plain), resident=0.3)
    models = {"plain": _adapted(copy.deepcopy(plain), 1), "patched": _adapted(patched, 1)}
    for key, model in models.items():
        model.save_pretrained(tmp_path / key)
    ours, theirs = (load_file(tmp_path / key / "adapter_model.safetensors") for key in ("patched", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)  # both are drawn from one seed
    expected = logits_of(models["plain"], ids)
    of_ours = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "patched")
    assert torch.equal(logits_of(of_ours, ids), expected)
    own = logits_of(models["patched"], ids)
    assert _agree(own, expected, base)
    of_theirs = PeftModel.from_pretrained(models["patched"].unload(), tmp_path / "plain")
    assert torch.equal(logits_of(of_theirs, ids), own)


@pytest.mark.parametrize(
    "weights",
    [
        "bf16",
        "int4",
        "tcq2+tcq3",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("int8", "lut4", "tcq2")),
    ],
)
def test_experts_of_a_store_train(weights: str, ids: torch.Tensor, tmp_path: Path) -> None:
    _build().save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "store", weights)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "store", quantization_config=MeshConfig(resident=0.3), dtype="auto"
    )
    model = _adapted(model, init_lora_weights=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in before.values())
    losses = train(model, ids)
    assert min(losses[1:]) < losses[0]
    assert all(not torch.equal(model.get_parameter(name), p) for name, p in before.items())


@pytest.mark.parametrize("dense", ["none", "int8"])
def test_experts_and_other_layers_train_together(dense: str, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(_build(), resident=0.3, dense=dense)
    saved = [] if dense != "none" else ["lm_head"]
    model = _adapted(
        model,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=saved,
        lora_dropout=0.0,
        use_rslora=True,
        rank_pattern={r"layers\.1\.mlp\.experts\.down_proj": 2},
        init_lora_weights=True,
    )
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, lora.LoraLayer)}
    assert {"ParamWrapper", "Linear"} <= kinds
    losses = train(model, ids)
    assert min(losses[1:]) < losses[0]


def test_several_adapters_switch_and_combine(ids: torch.Tensor) -> None:
    plain = _build()
    patched = torch_mesh.patch(copy.deepcopy(plain), resident=0.3)
    base = logits_of(patched, ids)
    both = {}
    for key, model in (("plain", plain), ("patched", patched)):
        adapted = _adapted(model)
        first = logits_of(adapted, ids)
        torch.manual_seed(5)
        adapted.add_adapter("second", dataclasses.replace(adapted.peft_config["default"], r=7, use_rslora=True))
        assert torch.equal(logits_of(adapted, ids), first)
        adapted.set_adapter("second")
        second = logits_of(adapted, ids)
        adapted.base_model.set_adapter(["default", "second"])
        both[key] = logits_of(adapted, ids), second
        assert not torch.equal(second, first) and not torch.equal(both[key][0], second)
        adapted.set_adapter("default")
        assert torch.equal(logits_of(adapted, ids), first)
    for found, expected in zip(both["patched"], both["plain"], strict=True):
        assert _agree(found, expected, base)


# The rank and lora_alpha of adapters in files.
FILES = {"first": (4, 6), "scaled": (4, 24), "narrower": (2, 6), "wider": (7, 9)}


class Adapters:
    """Adapters of one model in files, and the logits that plain PEFT gives with each."""

    def __init__(self, name: str, folder: Path) -> None:
        self._plain = _build(name, torch.float32)
        self.folder = folder
        self.ids = inputs_for(self._plain)["input_ids"]
        self.base = logits_of(self._plain, self.ids)
        self.expected = {}
        for seed, (key, (rank, alpha)) in enumerate(FILES.items()):
            model = _adapted(copy.deepcopy(self._plain), seed, r=rank, lora_alpha=alpha, target_modules=["q_proj"])
            model.save_pretrained(folder / key)
            self.expected[key] = logits_of(model, self.ids)

    def loaded(self, patched: bool) -> PeftModel:
        """A new model with the first adapter."""
        model = copy.deepcopy(self._plain)
        if patched:
            torch_mesh.patch(model, resident=0.3, weights="bf16", dense="none", attention="model")
        return PeftModel.from_pretrained(model, self.folder / "first")

    def swap(self, model: PeftModel, key: str) -> None:
        hotswap_adapter(model, self.folder / key, "default", torch_device="cpu")


@pytest.fixture(scope="module", params=[QWEN, pytest.param(GPT_OSS, marks=pytest.mark.thorough)])
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(request.param, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    "swaps", [["scaled"], ["wider"], ["narrower"], ["wider", "first"], ["narrower", "wider"]], ids=lambda x: "-".join(x)
)
def test_a_hotswapped_adapter_is_the_one_in_its_file(adapters: Adapters, swaps: list[str]) -> None:
    """PEFT itself mixes up experts if the new adapter has a lower rank, so the reference is no hotswapped model."""
    model = adapters.loaded(patched=True)
    for key in swaps:
        logits_of(model, adapters.ids)
        adapters.swap(model, key)
    assert _agree(logits_of(model, adapters.ids), adapters.expected[swaps[-1]], adapters.base)


def test_a_hotswapped_rank_trains_and_is_described(adapters: Adapters) -> None:
    model = adapters.loaded(patched=True)
    adapters.swap(model, "wider")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert "down_proj with rank 7 in" in torch_mesh.describe_training(model)
    losses = train(model, adapters.ids)
    assert min(losses[1:]) < losses[0]


def test_a_compiled_layer_takes_a_hotswapped_rank(adapters: Adapters, fresh_dynamo: None) -> None:
    model = adapters.loaded(patched=True)
    layer = find_experts(model)[0]
    weights, ids = torch.rand(9, layer.num_experts).softmax(-1).topk(2)
    inputs = torch.randn(9, layer.hidden), ids, weights
    experts = _experts(model)
    compiled = torch.compile(experts, backend="eager")
    with torch.no_grad():
        for key in ("first", "wider", "narrower"):
            adapters.swap(model, key)
            value = compiled(*inputs)  # before the eager call, which may change the layout of the weights
            assert _error(value, experts(*inputs)) < 1e-4, key


def _each_layer(model: PeftModel, method: str, *arguments: Any) -> None:
    for module in model.modules():
        if isinstance(module, lora.LoraLayer):
            getattr(module, method)(*arguments)


def _load_over(adapters: Adapters, model: PeftModel) -> None:
    model.load_adapter(adapters.folder / "scaled", "default")


def _load_over_as_it_lies(adapters: Adapters, model: PeftModel) -> None:
    model.load_adapter(adapters.folder / "scaled", "default", low_cpu_mem_usage=True)


def _load_what_fits(adapters: Adapters, model: PeftModel) -> None:
    model.load_adapter(adapters.folder / "wider", "default", ignore_mismatched_sizes=True)


def _scale_anew(adapters: Adapters, model: PeftModel) -> None:
    _each_layer(model, "set_scale", "default", 0.5)


def _scale(adapters: Adapters, model: PeftModel) -> None:
    _each_layer(model, "scale_layer", 4.0)
    _each_layer(model, "unscale_layer", 2.0)


def _unscale(adapters: Adapters, model: PeftModel) -> None:
    _each_layer(model, "scale_layer", 4.0)
    _each_layer(model, "unscale_layer")


def _scale_by_a_tensor(adapters: Adapters, model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, lora.LoraLayer):
            module.scaling["default"] = torch.tensor(2.0)  # as PEFT does to avoid recompiling at a swap


def _scale_what_was_swapped_in(adapters: Adapters, model: PeftModel) -> None:
    adapters.swap(model, "wider")
    _each_layer(model, "set_scale", "default", 0.5)


def _delete_the_active_one(adapters: Adapters, model: PeftModel) -> None:
    model.load_adapter(adapters.folder / "wider", "second")
    model.delete_adapter("default")


def _delete_and_load_again(adapters: Adapters, model: PeftModel) -> None:
    model.load_adapter(adapters.folder / "scaled", "second")
    model.delete_adapter("default")
    model.load_adapter(adapters.folder / "wider", "default")
    model.set_adapter("default")


@pytest.mark.parametrize(
    "change",
    [
        _load_over,
        _load_over_as_it_lies,
        _load_what_fits,
        _scale_anew,
        _scale,
        _unscale,
        _scale_by_a_tensor,
        _scale_what_was_swapped_in,
        _delete_the_active_one,
        _delete_and_load_again,
    ],
)
def test_an_adapter_changes_in_place_as_in_peft(adapters: Adapters, change: Callable[..., None]) -> None:
    found = []
    for patched in (False, True):
        model = adapters.loaded(patched)
        before = logits_of(model, adapters.ids)
        change(adapters, model)
        found.append(logits_of(model, adapters.ids))
    assert _agree(found[1], found[0], adapters.base)
    assert change in (_unscale, _load_what_fits) or not _agree(found[1], before, adapters.base)


def test_a_temporary_scale_is_that_of_peft(adapters: Adapters) -> None:
    found = []
    for patched in (False, True):
        model = adapters.loaded(patched)
        with rescale_adapter_scale(model, 4.0):
            found.append(logits_of(model, adapters.ids))
    assert _agree(found[1], found[0], adapters.base)
    assert not _agree(found[1], logits_of(model, adapters.ids), adapters.base)


@pytest.mark.parametrize(
    "change",
    [
        lambda adapters, model: model.load_adapter(adapters.folder / "wider", "default"),
        lambda adapters, model: model.load_adapter(adapters.folder / "wider", "default", low_cpu_mem_usage=True),
        lambda adapters, model: model.add_weighted_adapter(["default"], [0.5], "other", combination_type="cat"),
        lambda adapters, model: model.add_weighted_adapter(["default"], [0.5], "other", combination_type="linear"),
        lambda adapters, model: prepare_model_for_compiled_hotswap(model, target_rank=8),
    ],
    ids=["load", "load low_cpu_mem_usage", "add cat", "add linear", "prepare"],
)
def test_changes_that_peft_refuses_are_refused_and_change_nothing(
    adapters: Adapters, change: Callable[..., None]
) -> None:
    with pytest.raises(Exception) as theirs:  # any error of PEFT
        change(adapters, adapters.loaded(patched=False))
    model = adapters.loaded(patched=True)
    with pytest.raises(theirs.type):
        change(adapters, model)
    assert _agree(logits_of(model, adapters.ids), adapters.expected["first"], adapters.base)


def test_adapter_weights_for_another_number_of_experts_are_refused(ids: torch.Tensor) -> None:
    model = _adapted(torch_mesh.patch(_build(), resident=0.3))
    weight = _experts(model).lora_A["default"].weight
    whole = weight.data
    for rows, message in ((whole[:-1], "multiple of its"), (whole[: len(whole) // 2], "they must be equal")):
        weight.data = rows
        with pytest.raises(MeshError, match=message):
            logits_of(model, ids)


def test_adapters_in_bf16_train(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(_build(), resident=0.3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=[], target_parameters=targets)
    narrow = get_peft_model(model, config, autocast_adapter_dtype=False)
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.bfloat16}
    losses = train(narrow, ids)
    assert min(losses[1:]) < losses[0]


def test_generation_with_an_adapter_is_that_of_the_whole_forward(ids: torch.Tensor) -> None:
    """Decode steps of one row and prompts use different kernels with the same adapters."""
    model = _adapted(torch_mesh.patch(_build(dtype=torch.float32), resident=0.3))
    generated = model.generate(
        input_ids=ids[:1], max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole = logits_of(model, generated.sequences)[0, ids.size(1) - 1 : -1]
    steps = torch.cat(generated.logits).float()
    assert (steps - whole).norm(dim=-1).median() < 0.02 * whole.norm(dim=-1).median()


@pytest.mark.parametrize(
    "patch, fields, message",
    [
        (
            {},
            {"target_parameters": ["mlp.experts.gate_up_proj_bias"]},
            "gate_up_proj and down_proj",
        ),
        ({}, {"init_lora_weights": "pissa"}, "needs the values of .*allowed for experts: True, False, 'gaussian'"),
        ({}, {"target_modules": ["experts"], "target_parameters": None}, "name parameters in target_parameters"),
        ({"lossy": {"deferred_experts": 1}}, {}, "lossy.deferred_experts"),
    ],
)
def test_unsupported_adapters_are_refused_with_the_reason(
    patch: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    model = torch_mesh.patch(_build(GPT_OSS), resident=0.3, **patch)
    with pytest.raises(MeshError, match=message):
        _adapted(model, **fields)


def test_dropout_and_merging_into_the_pool_are_refused(ids: torch.Tensor) -> None:
    patched = torch_mesh.patch(_build(), resident=0.3)
    with pytest.raises(ValueError, match="lora_dropout != 0"):
        _adapted(copy.deepcopy(patched), lora_dropout=0.1)
    model = _adapted(patched, target_modules=["q_proj"])
    expected, keys = logits_of(model, ids), list(model.state_dict())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(MeshError, match=r"mlp.experts.(down|gate_up)_proj is packed \(bf16\) and frozen"):
            merge()
        assert torch.equal(logits_of(model, ids), expected)
        assert list(model.state_dict()) == keys
    assert not any(module.merged for module in model.modules() if isinstance(module, lora.Linear))


def test_adapted_experts_stay_patched_until_they_are_unloaded(ids: torch.Tensor, tmp_path: Path) -> None:
    plain = _build()
    model = _adapted(torch_mesh.patch(copy.deepcopy(plain), resident=0.3), target_modules=["q_proj"])
    expected = logits_of(model, ids)
    for patched in (model, model.base_model.model):
        with pytest.raises(MeshError, match="has adapters on its experts.*unload"):
            torch_mesh.unpatch(patched)
    assert torch.equal(logits_of(model, ids), expected)
    base = logits_of(plain, ids)
    model.save_pretrained(tmp_path)
    unpatched = torch_mesh.unpatch(model.unload())
    assert torch.equal(logits_of(unpatched, ids), base)
    merged = PeftModel.from_pretrained(unpatched, tmp_path).merge_and_unload()
    assert _agree(logits_of(merged, ids), expected, base)


def test_training_follows_a_forward_in_inference_mode(ids: torch.Tensor) -> None:
    model = _adapted(torch_mesh.patch(_build(), resident=0.3))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.contiguous()  # the layout that a loader leaves
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    losses = train(model, ids)
    assert min(losses[1:]) < losses[0]


@pytest.mark.parametrize("name", [QWEN, BY_PROJECTION])
def test_a_model_in_float64_trains(name: str) -> None:
    plain = _build(name, torch.float32)
    layer = find_experts(plain)[0]
    x, grad = torch.randn(2, 9, layer.hidden)
    weights, ids = torch.rand(9, layer.num_experts).softmax(-1).topk(3)
    model = _adapted(torch_mesh.patch(plain, resident=0.3, weights="bf16"))
    expected = _layer_gradients(_experts(model), x, ids, weights, grad)
    model.double()
    found = _layer_gradients(_experts(model), x.double(), ids, weights.double(), grad.double())
    assert all(gradient.dtype == torch.float64 for gradient in found.values())
    assert all(_error(found[key], expected[key]) < 1e-5 for key in expected)


def test_an_adapter_added_before_patch_is_refused_with_advice(ids: torch.Tensor) -> None:
    model = _adapted(_build())
    torch_mesh.patch(model.base_model.model, resident=0.3)
    with pytest.raises(MeshError, match="get_peft_model after"):
        logits_of(model, ids)


def test_describe_training_says_which_experts_train() -> None:
    model = torch_mesh.patch(_build(), resident=0.3, weights="int8", dense="int8")
    model.requires_grad_(False)
    assert torch_mesh.describe_training(model).startswith("No experts train: those of all 3 layers are frozen (int8).")
    model = _adapted(model, target_modules=["q_proj"], rank_pattern={r"layers\.1\.mlp\.experts\.down_proj": 2})
    trainable, _ = model.get_nb_trainable_parameters()
    line = torch_mesh.describe_training(model)
    assert "down_proj with rank 2 in 1 of 3 layers" in line and "frozen (int8)" in line
    numbers = [int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit() and "," in word]
    assert sum(numbers) == trainable


def test_describe_training_counts_what_trains_of_an_adapter() -> None:
    model = _adapted(torch_mesh.patch(_build(), resident=0.3))
    counted = {"lora_A": 0, "lora_B": 0}
    for name, parameter in model.named_parameters():
        for factor in counted:
            counted[factor] += parameter.numel() if factor in name else 0
    both = torch_mesh.describe_training(model)
    assert f"{sum(counted.values()):,} parameters. " in both and "only" not in both
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)  # as by PEFT's create_lorafa_optimizer
    line = torch_mesh.describe_training(model)
    assert "down_proj with rank 4 (only lora_B) in 3 of 3 layers" in line
    assert f"{counted['lora_B']:,} parameters. " in line and line.endswith("0 other parameters train.")


def test_ranks_above_the_kernels_limit_are_refused_with_the_layer(ids: torch.Tensor) -> None:
    patched = torch_mesh.patch(_build(), resident=0.3)
    with pytest.raises(MeshError, match=r"layers\.0\.mlp\.experts\.\w+ add up to 1025.*at most 1,024"):
        _adapted(copy.deepcopy(patched), r=1025)
    model = _adapted(patched, r=600)
    model.add_adapter("second", dataclasses.replace(model.peft_config["default"], r=425))
    logits_of(model, ids)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(MeshError, match=r"layers\.0\.mlp\.experts\.\w+ add up to 1025.*at most 1,024"):
        logits_of(model, ids)


def test_peft_is_extended_once() -> None:
    torch_mesh.patch(_build(), resident=0.3)
    assert LoraModel._create_new_module._mesh_original is not None
    before = LoraModel._create_new_module
    register()
    assert LoraModel._create_new_module is before


def test_an_older_peft_is_refused_for_experts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(_build(), resident=0.3)
    monkeypatch.setattr(peft, "__version__", "0.20.1")
    with pytest.raises(MeshError, match=r"PEFT is 0\.20\.1; .* 0\.21 or later"):
        _adapted(copy.deepcopy(model))
    assert _adapted(model, target_modules=["q_proj"], target_parameters=None).peft_config
    monkeypatch.delattr(LoraModel, "_create_new_module")
    register()
