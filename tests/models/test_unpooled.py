"""Models with experts of several shapes: one shape goes into the pool, the others stay unpatched."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import each_once_quick
from quantized import KINDS, change_config, rewrite
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, PackedWeight
from torch_mesh.models.families import find_experts, unpooled_layers
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.planning.plan import plan
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store

_TOKENS = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
_SPECIAL = {"image_token_id": 100, "video_token_id": 103}


def _ernie(text: int = 96, vision: int = 32) -> PreTrainedModel:
    """A model with experts for text and others for images in each layer. The checkpoint has them in one list."""
    config = Ernie4_5_VLMoeConfig(
        text_config={
            **_TOKENS,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": [text, vision],
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
        **_SPECIAL,
    )
    return _random(Ernie4_5_VLMoeForConditionalGeneration, config)


def _dots() -> PreTrainedModel:
    """A model with experts in its vision tower too: more in each layer and fewer for each token."""
    config = transformers.Dots3NoteConfig(
        text_config={
            **_TOKENS,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 40,
            "shared_experts_intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_topk": 8,
            "index_head_dim": 32,
            "index_n_heads": 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "pyramid_num_routed": [-1, 2, 4],
            "num_attention_heads": 2,
            "patch_size": 4,
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "feature_size": 16,
            "downsample_hidden_size": 8,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
        **_SPECIAL,
        audio_token_id=102,
    )
    return _random(transformers.Dots3NoteForConditionalGeneration, config)


def _random(model_class: Any, config: Any) -> PreTrainedModel:
    model = model_class._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(0, 0.15)
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.size(-1) ** -0.5)
    return model


_MODELS: dict[str, Callable[[], PreTrainedModel]] = {"ernie4_5_vl_moe": _ernie, "dots3_note": _dots}
_newer = pytest.mark.skipif(not hasattr(transformers, "Dots3NoteConfig"), reason="this transformers has no Dots3Note")
_IMAGE_TOKENS = torch.tensor([[0, 0, 1, 1, 1, 0, 0]])


def _run(model: Any) -> list[torch.Tensor]:
    """Logits of a text, and the output of the layers for images. Together they use experts of both kinds."""
    tokens = torch.arange(3, 10).unsqueeze(0)
    with torch.no_grad():
        if isinstance(model, Ernie4_5_VLMoeForConditionalGeneration):
            inner = model.model.language_model
            embedded = model.get_input_embeddings()(tokens)
            seen = inner(inputs_embeds=embedded, moe_mm_token_type_ids=_IMAGE_TOKENS, use_cache=False).last_hidden_state
        else:
            pixels = torch.linspace(-2, 2, 16 * 48).view(16, 48).bfloat16()
            seen = model.model.vision_tower(pixels, torch.tensor([[1, 4, 4]])).last_hidden_state
        return [model(input_ids=tokens, use_cache=False).logits.float(), seen.float()]


def _close(model: Any, expected: list[torch.Tensor], most: float) -> None:
    for output, right in zip(_run(model), expected, strict=True):
        by_token = (output - right).norm(dim=-1) / right.norm(dim=-1)
        assert by_token.median() < most  # rounding may change single choices of experts


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _check_kinds(model: Any, bits: dict[str, torch.Tensor]) -> None:
    """Check that text experts are in a pool, and that the others have the values ``bits`` in transformers' class."""
    pooled, others = find_experts(model), unpooled_layers(model)
    assert [type(layer.module).__name__[:4] for layer in pooled] == ["Mesh"] * 2
    assert all(".layers." in layer.path and "vision" not in layer.path for layer in pooled)
    assert len(others) == 2 and all("vision" in layer.path for layer in others)
    for layer in others:
        assert not isinstance(layer.module, MeshExperts)
        for name, parameter in layer.parameters.items():
            assert torch.equal(parameter, bits[f"{layer.path}.{name}"])
    size = f"(2 layers, {sum(layer.nbytes for layer in others):,} bytes)"
    assert f"outside the pool: {others[0].kind} {size}" in repr(model)


def test_quantized_experts_of_another_shape_are_dequantized(tmp_path: Path, cache: Path) -> None:
    made, model = KINDS["ct_int4"](), _ernie()
    model.save_pretrained(tmp_path / "raw")

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
            parts, _ = made.quantize(tensors.pop(name).float())
            tensors.update({name.removesuffix(".weight") + part: tensor for part, tensor in parts.items()})

    rewrite(tmp_path / "raw", quantize)
    change_config(tmp_path / "raw", quantization_config=dict(made.config))
    config = MeshConfig(resident=0.5, io="threads")
    opened: Any = type(model).from_pretrained(tmp_path / "raw", quantization_config=config)
    convert(tmp_path / "raw", tmp_path / "store", "auto")
    stored: Any = type(model).from_pretrained(tmp_path / "store", quantization_config=config)
    kept = [
        {f"{layer.path}.{name}": tensor for layer in unpooled_layers(each) for name, tensor in layer.parameters.items()}
        for each in (opened, stored)
    ]
    assert kept[0] and all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())
    assert all(torch.equal(*pair) for pair in zip(_run(opened), _run(stored), strict=True))


@pytest.fixture(params=_MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "dots3_note" and _newer.args[0]:
        pytest.skip(_newer.kwargs["reason"])
    return _MODELS[request.param]()


@pytest.fixture
def checkpoint(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_patching_takes_the_experts_with_most_bytes_and_unpatching_restores_them(model: PreTrainedModel) -> None:
    bits, expected = _values(model), _run(model)
    kept = [parameter for layer in unpooled_layers(model) for parameter in layer.parameters.values()]
    for resident in (0.5, 1.0):
        with pytest.warns(UserWarning, match=r"several shapes.*stay in memory.*vision.*layers, [0-9,]+ bytes"):
            torch_mesh.patch(model, resident=resident, io="threads")
        _check_kinds(model, bits)
        assert all(
            a is b
            for a, b in zip(kept, (p for x in unpooled_layers(model) for p in x.parameters.values()), strict=True)
        )
        _close(model, expected, 0.03)
        assert torch_mesh.stats(model).accesses > 0
        assert len(torch_mesh.stats(model).per_layer) == 2
        torch_mesh.unpatch(model)
        after = model.state_dict()
        assert list(after) == list(bits) and all(torch.equal(after[name], bits[name]) for name in bits)


def test_a_raw_checkpoint_is_opened_and_saved_unchanged(
    model: PreTrainedModel, checkpoint: Path, tmp_path: Path
) -> None:
    bits, expected = _values(model), _run(model)
    opened: Any = type(model).from_pretrained(checkpoint, quantization_config=MeshConfig(resident=0.5, io="threads"))
    _check_kinds(opened, bits)
    _close(opened, expected, 0.03)
    opened.save_pretrained(tmp_path / "saved")
    assert _tensors(tmp_path / "saved").keys() == _tensors(checkpoint).keys()
    again = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert again.keys() == bits.keys() and all(torch.equal(again[name], bits[name]) for name in bits)


@pytest.mark.parametrize(
    ("way", "model"), each_once_quick(["raw", "converted", "patched"], [*_MODELS]), indirect=["model"]
)
def test_rounded_experts_are_saved_apart_from_the_others(
    model: PreTrainedModel, checkpoint: Path, way: str, tmp_path: Path
) -> None:
    """The others keep the names and numbers that they have in the checkpoint."""
    bits = _values(model)
    convert(checkpoint, tmp_path / "converted", "int8")
    config = MeshConfig(resident=0.5, io="threads")
    if way != "converted":
        config = config.replace(weights="int8", store=str(tmp_path / "store"))
    rounded: Any = model
    if way == "patched":
        torch_mesh.patch(rounded, config=config)
    else:
        folder = tmp_path / "converted" if way == "converted" else checkpoint
        rounded = type(model).from_pretrained(folder, quantization_config=config)
    expected = _run(rounded)
    rounded.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    saved, converted = (_all_tensors(tmp_path / name) for name in ("saved", "converted"))
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in converted.items()}
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.values())
    again: Any = type(model).from_pretrained(tmp_path / "saved", quantization_config=MeshConfig(resident=0.3))
    _check_kinds(again, bits)
    assert all(map(torch.equal, _run(again), expected))
    torch_mesh.unpatch(rounded, lossy=True)


@pytest.mark.parametrize(("weights", "model"), each_once_quick(["bf16", "int8"], [*_MODELS]), indirect=["model"])
def test_a_converted_checkpoint_has_the_other_experts_unchanged(
    model: PreTrainedModel, checkpoint: Path, weights: str, tmp_path: Path
) -> None:
    bits, expected = _values(model), _run(model)
    with pytest.warns(UserWarning, match=r"Experts of other shapes stay as they are: .*vision.*\(2 layers"):
        convert(checkpoint, tmp_path / "converted", weights)
    manifest = open_store(tmp_path / "converted").manifest
    assert manifest.modules == tuple(layer.path for layer in find_experts(model))
    opened: Any = type(model).from_pretrained(
        tmp_path / "converted", quantization_config=MeshConfig(resident=0.5, io="threads")
    )
    _check_kinds(opened, bits)
    _close(opened, expected, 0.03 if weights == "bf16" else 0.1)
    assert opened.dtype == torch.bfloat16
    torch_mesh.unpatch(opened, lossy=True)
    if weights == "bf16":
        after = opened.state_dict()
        assert all(torch.equal(after[name], bits[name]) for name in bits)


def test_plan_counts_the_other_experts_to_the_rest_of_the_model(
    model: PreTrainedModel, checkpoint: Path, tmp_path: Path
) -> None:
    config = MeshConfig(resident=0.5, io="threads")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(checkpoint, tmp_path / "converted", "int4")
    others = unpooled_layers(model)
    for folder in (checkpoint, tmp_path / "converted"):
        sizes = plan(folder, config).sizes
        assert (sizes.shape.layers, sizes.shape.experts, sizes.shape.top_k) == (2, 8, 3)
        assert sizes.unpooled_bytes == sum(layer.nbytes for layer in others)
        assert f"{others[0].kind} (2 layers, {sizes.unpooled_bytes:,} bytes)" in sizes.unpooled
        opened: Any = type(model).from_pretrained(folder, quantization_config=config)
        plain = [parameter for parameter in opened.parameters() if not isinstance(parameter, PackedWeight)]
        loaded = sum(parameter.nbytes for parameter in plain)
        assert sizes.dense_bytes == sizes.dense_bytes_loading == loaded
        embedding = opened.get_input_embeddings().weight
        tied = opened.get_output_embeddings().weight is embedding
        assert sizes.dense_bytes_per_token == loaded - sizes.unpooled_bytes - (0 if tied else embedding.nbytes)


def test_a_missing_expert_of_the_others_is_named(model: PreTrainedModel, checkpoint: Path, tmp_path: Path) -> None:
    [file] = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    last = (
        "model.layers.2.mlp.experts.15"
        if isinstance(model, Ernie4_5_VLMoeForConditionalGeneration)
        else "experts.3.fc2"
    )
    lost = next(name for name in tensors if last in name and "shared" not in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(torch_mesh.StoreError, match=r"has \d+ of \d+ experts"):
        type(model).from_pretrained(checkpoint, quantization_config=MeshConfig(resident=0.5))
    with pytest.raises(torch_mesh.StoreError, match=r"has \d+ of \d+ experts"):
        convert(checkpoint, tmp_path / "converted", "int4")
    assert not (tmp_path / "converted").exists()


def test_too_many_experts_are_named(tmp_path: Path) -> None:
    model = _ernie()
    model.save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    extra = {
        name.replace("experts.15.", "experts.16."): tensor.clone()
        for name, tensor in tensors.items()
        if "experts.15." in name
    }
    save_file(tensors | extra, file, {"format": "pt"})
    with pytest.raises(torch_mesh.StoreError, match=r"experts\.16\..*is for more experts than the model has"):
        type(model).from_pretrained(tmp_path, quantization_config=MeshConfig(resident=0.5))


def test_kinds_of_one_shape_share_a_pool_and_refuse_deferred_experts() -> None:
    model = _ernie(text=64, vision=64)
    assert len(find_experts(model)) == 4 and not unpooled_layers(model)
    with pytest.raises(
        torch_mesh.UnsupportedModelError, match="lossy.deferred_experts=2 is unsupported for.*text_moe.*vision_moe"
    ):
        torch_mesh.patch(model, resident=0.5, lossy={"deferred_experts": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_mesh.patch(model, resident=0.5, io="threads")
    assert "outside the pool" not in repr(model)


@pytest.mark.parametrize("family", [pytest.param("Dots3Note", marks=_newer), "Ernie4_5_VLMoe", "Qwen3OmniMoe"])
def test_at_published_sizes_the_text_experts_go_into_the_pool(family: str) -> None:
    fields: dict[str, Any] = {}
    if family == "Qwen3OmniMoe":  # its defaults lack these
        fields["talker_config"] = {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 768}}
    config = getattr(transformers, f"{family}Config")(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    pooled, others = find_experts(model), unpooled_layers(model)
    assert len({layer.geometry for layer in pooled}) == len({layer.kind for layer in pooled}) == 1
    assert "text_moe" in pooled[0].path or "language_model" in pooled[0].path or "thinker" in pooled[0].path
    assert others and not {layer.kind for layer in others} & {layer.kind for layer in pooled}
    assert sum(layer.nbytes for layer in pooled) > 2 * sum(layer.nbytes for layer in others)


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("model*.safetensors") for name, t in load_file(path).items()}


def _tensors(folder: Path) -> dict[str, Any]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    return load_file(folder / "model.safetensors")
