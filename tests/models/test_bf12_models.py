"""Models whose weights are in bf12: all results have the bits of bf16, at any residency."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from saved import saved_tensors
from tiny_models import TINY_MODELS, inputs_for, output_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.store import convert as converting
from torch_mesh.store.convert import convert, stored_expert
from torch_mesh.store.manifest import Store, is_store, open_store
from torch_mesh.store.verify import verify

QWEN = "Qwen3MoeExperts"


def _spread_exponents(model: PreTrainedModel) -> None:
    """Scale some weights of every matrix down so far that they become exceptions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.where(torch.rand(parameter.shape) < 3e-4, 2.0**-20, 1.0))


def _build(name: str = QWEN) -> PreTrainedModel:
    model = TINY_MODELS[name].build().bfloat16()
    _spread_exponents(model)
    return model


def _open(folder: Path, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(**fields))


@pytest.mark.parametrize("resident", [0.3, 1.0])
@pytest.mark.parametrize("name", [QWEN, "GptOssExperts"])
def test_a_patched_model_has_the_bits_of_bf16(name: str, resident: float) -> None:
    model = _build(name)
    inputs = inputs_for(model)
    before = {path: value.clone() for path, value in model.state_dict().items()}
    results = []
    for weights in ("bf16", "bf12"):
        torch_mesh.patch(model, weights=weights, dense=weights, resident=resident)
        assert f"weights={weights}" in repr(model)
        results.append(output_of(model, inputs))
        torch_mesh.unpatch(model)  # bf12 is exact, so lossy=True is not needed
        assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert torch.equal(*results)


ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _adapted(model: Any) -> Any:
    fields: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ON_EXPERTS, "r": 2}
    return peft.get_peft_model(model, peft.LoraConfig(**fields, init_lora_weights=False))


def test_losses_and_gradients_of_adapters_have_the_bits_of_bf16() -> None:
    results = []
    for weights in ("bf16", "bf12"):
        torch.manual_seed(3)
        adapted = _adapted(torch_mesh.patch(_build(), weights=weights, dense=weights, resident=0.4))
        ids = torch.arange(24).view(2, 12)
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]
        assert gradients and all(gradient is not None for gradient in gradients)
        results.append([loss.detach(), *gradients])
    assert all(torch.equal(of_bf16, of_bf12) for of_bf16, of_bf12 in zip(*results, strict=True))


def test_drafts_are_accepted_as_in_bf16() -> None:
    results = []
    for weights in ("bf16", "bf12"):
        torch.manual_seed(3)
        model = torch_mesh.patch(_build(), weights=weights, dense=weights, resident=0.4, speculation="lookup")
        prompt = torch.arange(3, 7).repeat(4)[None]
        results.append(model.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False))
    assert torch.equal(*results)


def test_the_example_model_keeps_every_bit(mesh_tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch_mesh.patch(model, weights="bf12", dense="bf12")
    packed = {name: weight for name, weight in model.named_parameters() if isinstance(weight, torch_mesh.PackedWeight)}
    assert len(packed) > 30
    for name, weight in packed.items():
        assert torch.equal(weight.unpacked().view(torch.int16), before[name].view(torch.int16))
    model.save_pretrained(tmp_path / "saved")
    original, saved = saved_tensors(mesh_tiny), saved_tensors(tmp_path / "saved")
    assert original.keys() == saved.keys()
    assert all(torch.equal(original[name].view(torch.int16), saved[name].view(torch.int16)) for name in original)


def _merged(base: Path, adapter: Path, folder: Path, weights: str = "auto") -> list[torch.Tensor]:
    """All weights of a base with an adapter merged into it."""
    store = torch_mesh.merge(base, adapter, folder, weights=weights).store
    experts = [stored_expert(store, *record) for record in store.records()]
    rest = saved_tensors(store.folder)
    return [part for own in experts for part in own if part is not None] + [rest[name] for name in sorted(rest)]


def test_merged_adapters_have_the_bits_of_bf16(tmp_path: Path) -> None:
    model = _build()
    model.save_pretrained(tmp_path / "raw")
    for weights in ("bf16", "bf12"):
        convert(tmp_path / "raw", tmp_path / weights, weights)
    adapted = _adapted(torch_mesh.patch(model, weights="bf12"))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = _merged(tmp_path / "bf16", tmp_path / "adapter", tmp_path / "merged16")
    for base, weights in (("bf12", "auto"), ("bf12", "bf16"), ("raw", "bf12")):
        values = _merged(tmp_path / base, tmp_path / "adapter", tmp_path / f"merged-{base}-{weights}", weights)
        assert all(torch.equal(value, same) for value, same in zip(values, expected, strict=True))
    assert open_store(tmp_path / "merged-bf12-auto").manifest.weights == "bf12"

    name, factor = next((name, each) for name, each in adapted.named_parameters() if "experts.lora_B" in name)
    layer = name.partition("layers.")[2].partition(".")[0]
    with torch.no_grad():  # gives expert 5 outputs of so many exponents that they do not fit
        own = factor.view(factor.size(0), -1, 8)[..., 5]
        own.mul_(2.0 ** torch.arange(own.size(0)).remainder(64)[:, None])
    adapted.save_pretrained(tmp_path / "large")
    with pytest.raises(ValueError, match=f"layers.{layer}.mlp.experts, expert 5: .*Use bf16"):
        torch_mesh.merge(tmp_path / "bf12", tmp_path / "large", tmp_path / "refused")


def test_checkpoints_convert_open_and_are_saved_as_they_were(tmp_path: Path) -> None:
    model = _build()
    model.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "bf16", "bf16")
    convert(tmp_path / "raw", tmp_path / "bf12", "bf12")
    inputs = inputs_for(model)
    store = open_store(tmp_path / "bf12")
    assert (store.manifest.weights, store.manifest.group_size) == ("bf12", 0)
    expected = output_of(_open(tmp_path / "bf16", resident=0.4), inputs)
    opened = _open(tmp_path / "bf12", resident=0.4)
    assert torch.equal(output_of(opened, inputs), expected)
    assert torch_mesh.stats(opened).cold_misses > 0
    assert all(module._mesh_pool.exact for module in patched_modules(opened))
    opened.save_pretrained(tmp_path / "saved")
    assert not is_store(tmp_path / "saved")  # nothing was rounded, so it is an ordinary checkpoint
    original, saved = saved_tensors(tmp_path / "raw"), saved_tensors(tmp_path / "saved")
    assert original.keys() == saved.keys()
    assert all(torch.equal(original[name], saved[name]) for name in original)


def test_a_raw_checkpoint_is_converted_once(tmp_path: Path) -> None:
    model = _build()
    model.save_pretrained(tmp_path / "raw")
    inputs = inputs_for(model)
    expected = output_of(_open(tmp_path / "raw", weights="bf16"), inputs)
    opened = _open(tmp_path / "raw", weights="bf12", store=str(tmp_path / "store"), resident=0.4)
    assert torch.equal(output_of(opened, inputs), expected)
    assert open_store(tmp_path / "store").manifest.weights == "bf12"


def _fill_with_random_bits(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.randint(-(1 << 15), 1 << 15, weight.shape).short().view(torch.bfloat16).nan_to_num())


def _bits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.view(torch.int16).clone() for name, value in model.state_dict().items()}


def test_experts_that_do_not_fit_into_bf12_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build()
    _fill_with_random_bits(model.model.layers[1].mlp.experts.down_proj[2])
    model.save_pretrained(tmp_path / "raw")
    refused = "^model.layers.1.mlp.experts, expert 2: .*Use bf16"
    with pytest.raises(ValueError, match=refused):
        convert(tmp_path / "raw", tmp_path / "store", "bf12")
    before = _bits(model)
    for resident in (0.5, 1.0):
        with pytest.raises(ValueError, match=refused):
            torch_mesh.patch(model, weights="bf12", resident=resident)
        assert all(torch.equal(bits, before[name]) for name, bits in _bits(model).items())
    with pytest.raises(ValueError, match=refused):
        _open(tmp_path / "raw", weights="bf12")
    monkeypatch.setattr(
        "torch_mesh.planning.choosing.choose_format",
        lambda folder, config: (config.replace(weights="bf12", max_error=None), "the fastest"),
    )
    with pytest.raises(ValueError, match=f"{refused}.*in place of max_error"):
        _open(tmp_path / "raw", max_error=0.0, resident="1MiB")


@pytest.mark.parametrize("from_pretrained", [False, True])
def test_auto_converts_to_bf12_if_all_experts_fit(tmp_path: Path, from_pretrained: bool) -> None:
    def make(name: str) -> Store:
        if from_pretrained:
            _open(tmp_path / "raw", store=str(tmp_path / name), resident=0.4)
            assert find_sizes(tmp_path / "raw", MeshConfig(store=str(tmp_path / "planned"))).weights == "bf12"
        else:
            convert(tmp_path / "raw", tmp_path / name, "auto")
        return open_store(tmp_path / name)

    model = _build()
    model.save_pretrained(tmp_path / "raw")
    inputs = inputs_for(model)
    assert make("store").manifest.weights == "bf12"
    outputs = [output_of(_open(tmp_path / name, resident=0.4), inputs) for name in ("store", "raw")]
    assert torch.equal(*outputs)
    assert convert(tmp_path / "raw", tmp_path / "plain", "bf16").store.manifest.weights == "bf16"
    assert make("plain").manifest.weights == "bf16", "made by its name, or by an earlier release"

    _fill_with_random_bits(model.model.layers[1].mlp.experts.down_proj[2])
    model.save_pretrained(tmp_path / "raw")
    with pytest.warns(UserWarning, match=r"^model.layers.1.mlp.experts, expert 2: .*store in bf16"):
        store = make("second")
    assert store.manifest.weights == "bf16" and list(verify(store)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert convert(tmp_path / "raw", tmp_path / "second", "auto").existed


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_conversion_to_bf16_for_want_of_room_continues(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _build()
    _fill_with_random_bits(model.model.layers[2].mlp.experts.down_proj[5])
    model.save_pretrained(tmp_path / "raw")
    if force:
        convert(tmp_path / "raw", tmp_path / "store", "bf16")
    packed: list[tuple[str, int, int]] = []
    interrupted = True
    original = converting.pack_from_checkpoint

    def pack(experts: Any, layer: int, expert: int, weights: str, group_size: int) -> torch.Tensor:
        if interrupted and weights == "bf16" and layer == 2:
            raise KeyboardInterrupt
        packed.append((weights, layer, expert))
        return original(experts, layer, expert, weights, group_size)

    monkeypatch.setattr(converting, "pack_from_checkpoint", pack)
    make = functools.partial(convert, tmp_path / "raw", tmp_path / "store", "auto", force=force, workers=1)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="store in bf16"):
        make()
    finished = {each for each in packed if each[0] == "bf16"}
    assert len(finished) == 16
    packed.clear()
    interrupted = False
    store = make().store
    assert {weights for weights, *_ in packed} == {"bf16"}
    assert len(finished & set(packed)) <= 3, "finished records were packed again"
    assert store.manifest.weights == "bf16" and list(verify(store)) == []


def test_auto_says_that_it_rounds(tmp_path: Path) -> None:
    TINY_MODELS[QWEN].build().float().save_pretrained(tmp_path / "raw")
    with pytest.warns(UserWarning, match="are fp32; they are rounded to bf16") as warned:
        store = convert(tmp_path / "raw", tmp_path / "store", "auto").store
    assert [each.filename for each in warned] == [__file__]
    assert store.manifest.weights == "bf12"


def test_linear_layers_that_do_not_fit_into_bf12_are_named() -> None:
    model = _build()
    name = "model.layers.1.self_attn.o_proj.weight"
    values = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model.get_parameter(name)
    kept = weight.detach().clone()
    _fill_with_random_bits(weight)
    random, before = weight.detach().clone(), _bits(model)
    with pytest.raises(ValueError, match=f"^{name}: .*Use bf16"):
        torch_mesh.patch(model, dense="bf12")
    assert all(torch.equal(bits, before[name]) for name, bits in _bits(model).items())
    with torch.no_grad():
        weight.copy_(kept)
    torch_mesh.patch(model, dense="bf12")
    packed: Any = model.get_parameter(name)
    with pytest.raises(torch_mesh.MeshError, match=f"Use bf16.*{name}"):
        packed.data.copy_(random)
    model.load_state_dict(values)
    assert torch.equal(packed.unpacked(), kept)


def test_packed_layers_take_three_quarters_of_bf16() -> None:
    model = _build()
    torch_mesh.patch(model, dense="bf12")
    for _, linear in packed_linears(model):
        assert linear.exact
        blocks = -(-linear.out_features // 64) * -(-linear.in_features // 64)
        assert linear._mesh_packed.numel() == blocks * 64 * 97
