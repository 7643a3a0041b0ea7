"""Every decorated experts class of the installed transformers, compared patched and unpatched."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from routes import by_token, given_routes, misrouted, recorded_routes
from saved import assert_same_checkpoint
from tiny_models import (
    DEEPSEEK_V4_FAILS,
    NO_LOOKAHEAD,
    SKIPPED,
    TINY_MODELS,
    all_families,
    decorated_classes,
    draw_routers,
    inputs_for,
    output_of,
)
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

import torch_mesh
import torch_mesh.patching.single_layer
from torch_mesh.lossy.decoding import ROUTING_BIAS_FAMILIES
from torch_mesh.models.families import (
    ADAPTERS,
    ROUTERS,
    UNDECORATED,
    UNMARKED,
    find_experts,
    find_router,
    router_unsupported_reason,
    supported_families,
)
from torch_mesh.modules.dense import MeshLinear
from torch_mesh.store.convert import convert

_CLASSES = sorted({name for _, name in decorated_classes()})


class _Recorder:
    """Records the inputs and the output of each experts module of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[nn.Module, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
        self.modules = [layer.module for layer in find_experts(model)]
        self._hooks = [module.register_forward_hook(self._record) for module in self.modules]

    def _record(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.calls[module] = (tuple(tensor.clone() for tensor in inputs), output.clone())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def test_every_decorated_class_is_compared_or_skipped_for_a_reason() -> None:
    covered = set(TINY_MODELS) | set(SKIPPED)
    assert set(_CLASSES) == covered, f"not covered: {set(_CLASSES) - covered}; gone: {covered - set(_CLASSES)}"
    assert not set(TINY_MODELS) & set(SKIPPED)
    assert all(SKIPPED.values())


def test_supported_families_are_those_with_a_decorated_class_or_a_known_one() -> None:
    known = {unmarked.family for unmarked in UNMARKED.values()}
    assert supported_families() == sorted({family for family, _ in decorated_classes()} | known)


@all_families
def test_families_md_is_up_to_date() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "families_page.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run tools/families_page.py"


# Families whose sources match the search for experts although they have none, and why.
_NO_EXPERTS = {
    "bamba": "it has one feed-forward layer, in a variable of that name",
    "vitpose_backbone": "its experts are parts of a vision model, chosen by the data set and not by a router",
}


@all_families
def test_every_family_whose_source_mentions_experts_is_supported_or_refused() -> None:
    speaks = re.compile(r"num_(local_|routed_)?experts\b|n_routed_experts")
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {source.parent.name for source in sources if speaks.search(source.read_text(encoding="utf-8"))}
    known = {*supported_families(), *UNDECORATED, *_NO_EXPERTS}
    assert found <= known, f"neither supported nor refused: {found - known}"
    assert not known - found, f"gone, or spoken of otherwise: {known - found}"


def _check_routers(model: nn.Module, recorder: _Recorder, without: set[int]) -> None:
    """Check that each layer of ``model`` has a router whose matrix ranks the chosen experts first. The layers
    ``without`` have a reason instead."""
    layers = find_experts(model)
    assert {index for index, layer in enumerate(layers) if find_router(model, layer) is None} == without
    for layer in layers:
        router = find_router(model, layer)
        if router is None:
            assert router_unsupported_reason(model, layer) in {
                adapter.unsupported_reason for adapter in ROUTERS.values()
            } - {""}
            continue
        assert router.weight.shape == (layer.num_experts, layer.hidden)
        if layer.module in recorder.calls:
            hidden, ids = recorder.calls[layer.module][0][:2]
            with torch.no_grad():
                wrong, clear = misrouted(router, hidden, ids, router.bias)
                assert not (wrong & clear).any(), layer.path
                if router.bias is not None:
                    wrong, clear = misrouted(router, hidden, ids, None)
                    assert (wrong & clear).any(), f"{layer.path}: its bias decides nothing"


def _check_modules(recorder: _Recorder, exact: nn.Module) -> None:
    """Check that each patched module rounds less than the unpatched one, which rounds to bf16 after every step."""
    modules = [layer.module for layer in find_experts(exact)]
    assert recorder.calls
    for module, (arguments, output) in recorder.calls.items():
        assert type(module).__name__.startswith("Mesh")
        with torch.no_grad():
            hidden, ids, weights = arguments
            expected = modules[recorder.modules.index(module)](hidden.float(), ids, weights.float())
            # Where transformers computes in float32, our two roundings to bf16 are more than its one.
            allowed = max(1.25 * (output - expected).norm(), 2**-8 * expected.norm())
            assert (module(*arguments) - expected).norm() < allowed


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_patched_model_computes_and_is_saved_as_the_unpatched_one(name: str, tmp_path: Path) -> None:
    """This holds with only the experts patched, and with the linear layers too. Families that read a weight of a linear
    layer themselves would fail."""
    if name == "DeepseekV4Experts" and DEEPSEEK_V4_FAILS:
        pytest.skip(DEEPSEEK_V4_FAILS)
    model = TINY_MODELS[name].build()
    assert name in {type(layer.module).__name__ for layer in find_experts(model)}
    draw_routers(model)
    inputs = inputs_for(model)
    exact = copy.deepcopy(model).float()
    recorder = _Recorder(model)
    with recorded_routes(model) as routes:
        unpatched = output_of(model, inputs)
    recorder.remove()
    _check_routers(model, recorder, NO_LOOKAHEAD.get(name, set()))
    with given_routes(exact, routes):
        expected = output_of(
            exact, {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
        )
    rounding = by_token(unpatched, expected).median()
    model.save_pretrained(tmp_path / "plain")

    torch_mesh.patch(model, resident=0.5, io="threads", dense="none")
    _check_modules(recorder, exact)
    with given_routes(model, routes):
        assert by_token(output_of(model, inputs), expected).median() < 2 * rounding
    assert torch_mesh.stats(model).cold_misses > 0
    torch_mesh.unpatch(model)

    torch_mesh.patch(model, resident=0.25, dense="bf16")
    assert any(isinstance(module, MeshLinear) for module in model.modules())
    with given_routes(model, routes):
        assert by_token(output_of(model, inputs), expected).median() < 2 * rounding
    # Each family has its own conversion to the names and layouts of its original checkpoints.
    model.save_pretrained(tmp_path / "patched")
    assert_same_checkpoint(tmp_path / "patched", tmp_path / "plain")
    assert {path.name for path in (tmp_path / "patched").iterdir()} == {
        path.name for path in (tmp_path / "plain").iterdir()
    }


@pytest.mark.parametrize(
    "name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts", "AriaExperts", "MuseSparkExperts"]
)
def test_unpatch_restores_every_bit(name: str) -> None:
    model = TINY_MODELS[name].build()
    classes = [type(module) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: value.requires_grad for key, value in model.named_parameters()}
    for resident in (1.0, 0.25):
        torch_mesh.patch(model, resident=resident)
        assert {key: value.shape for key, value in model.state_dict().items()} == {
            k: v.shape for k, v in before.items()
        }
        torch_mesh.unpatch(model)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[key], before[key]) for key in before)
        assert {key: value.requires_grad for key, value in model.named_parameters()} == gradients
        assert [type(module) for module in model.modules()] == classes
        assert not any(name.startswith("_mesh_") for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("family", sorted(UNDECORATED))
def test_an_undecorated_family_is_refused_for_its_own_reason(family: str) -> None:
    assert family not in supported_families()
    configs = [CONFIG_MAPPING[name] for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == family]
    assert configs
    for config in configs:
        model = nn.Module()
        model.config = config()
        with pytest.raises(torch_mesh.UnsupportedModelError, match=f"{config.model_type}.*{UNDECORATED[family]}"):
            find_experts(model)


@all_families
def test_model_types_of_routing_bias_are_those_of_transformers() -> None:
    assert not [name for name in ROUTING_BIAS_FAMILIES if name not in CONFIG_MAPPING_NAMES]


@functools.cache
def _modelings() -> list[ModuleType]:
    return [
        importlib.import_module(f"transformers.models.{family}.modeling_{family}") for family in supported_families()
    ]


@all_families
@pytest.mark.parametrize("name", sorted({*ADAPTERS, *ROUTERS}))
def test_adapted_classes_exist(name: str) -> None:
    assert any(isinstance(vars(module).get(name), type) for module in [*_modelings(), torch_mesh.patching.single_layer])


def test_experts_that_are_tied_to_others_are_patched_after_loading(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 120}
    text = {"moe_intermediate_size": 40, "intermediate_size": 40, "num_experts": 8, "top_k_experts": 3}
    config = transformers.DiffusionGemmaConfig(
        text_config={**sizes, **text, "num_hidden_layers": 2, "global_head_dim": 16, "num_global_key_value_heads": 2},
        vision_config={**sizes, "intermediate_size": 32, "num_hidden_layers": 1},
    )
    model_class: Any = transformers.DiffusionGemmaForBlockDiffusion
    model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        torch_mesh.UnsupportedModelError, match=r"is tied to model\.decoder.*then patch it with torch_mesh.patch"
    ):
        model_class.from_pretrained(tmp_path, quantization_config=torch_mesh.MeshConfig(resident=0.5))
    with pytest.raises(torch_mesh.UnsupportedModelError, match=r"is tied to model\.decoder"):
        convert(tmp_path, tmp_path / "converted", "int8")
    loaded = model_class.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    torch_mesh.unpatch(torch_mesh.patch(loaded, resident=0.5, io="threads"))
    after = loaded.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    inner = loaded.model
    assert inner.encoder.language_model.layers[1].experts.down_proj is inner.decoder.layers[1].experts.down_proj


def _tiny_unsupported(family: str) -> nn.Module:
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    if family == "jetmoe":
        return transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**small, kv_channels=16, intermediate_size=32))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=32))


@pytest.mark.parametrize("family", ["jetmoe", "llama"])
def test_unsupported_model_is_refused_with_the_list_of_supported_ones(family: str) -> None:
    with pytest.raises(torch_mesh.UnsupportedModelError, match=f"{family}.*Supported families: .*mixtral.*qwen3_moe"):
        torch_mesh.patch(_tiny_unsupported(family))
