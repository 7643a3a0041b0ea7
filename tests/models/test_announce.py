"""What transformers sees of a patched model: its quantization config, its memory footprint, and its dtype."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS, UNMARKED_MODELS, Tiny, build, logits_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.trainer_utils import validate_quantization_for_training

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.experts import PackedModule, patched_modules
from torch_mesh.store.convert import convert


def _made(how: str, folder: Path, **fields: Any) -> PreTrainedModel:
    if how == "patched":
        return torch_mesh.patch(build(), **fields)
    build().save_pretrained(folder / "raw")
    if how == "raw":
        return AutoModelForCausalLM.from_pretrained(folder / "raw", quantization_config=MeshConfig(**fields))
    convert(folder / "raw", folder / "store", fields.pop("weights"))
    return AutoModelForCausalLM.from_pretrained(folder / "store", quantization_config=MeshConfig(**fields))


@pytest.mark.parametrize("how", ["patched", "raw", "converted"])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_the_config_describes_the_patch_and_allows_training_and_casts(
    how: str, weights: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    model = _made(how, tmp_path, weights=weights, resident=0.4)
    for part in (model, model.model):
        quantization = part.config.quantization_config
        assert isinstance(quantization, MeshConfig)
        assert (quantization.quant_method, quantization.weights, quantization.resident, quantization.group_size) == (
            "mesh",
            weights,
            0.4,
            64,
        )
    assert f'"weights": "{weights}"' in str(model.config)
    expected = logits_of(model, ids)
    validate_quantization_for_training(model)  # the check that Trainer makes
    assert torch.equal(logits_of(model.to("cpu"), ids), expected)
    assert model.half().to(torch.bfloat16).float().dtype == torch.float32
    clone = copy.deepcopy(model)
    torch_mesh.unpatch(model, lossy=True)
    assert not hasattr(model.config, "quantization_config") and not hasattr(model.model.config, "quantization_config")
    assert clone.config.quantization_config.weights == weights
    torch_mesh.unpatch(clone, lossy=True)


def test_unpatch_restores_another_quantization_config() -> None:
    model = build()
    model.config.quantization_config = {"quant_method": "unknown to transformers"}
    torch_mesh.patch(model)
    assert model.config.quantization_config.weights == "bf16"
    torch_mesh.unpatch(model)
    assert model.config.quantization_config == {"quant_method": "unknown to transformers"}


@pytest.mark.parametrize(
    "tiny", [TINY_MODELS["Qwen3MoeExperts"], UNMARKED_MODELS["llama4 with vision"]], ids=["one-config", "nested"]
)
def test_an_ordinary_model_of_a_patched_models_config_stays_one(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.build()
    other = type(model)(model.config).bfloat16()
    torch_mesh.patch(model, weights="int4")
    other.save_pretrained(tmp_path)
    assert "mesh" not in (tmp_path / "config.json").read_text()
    assert model.config.quantization_config.weights == "int4"
    torch_mesh.patch(other)
    clone = copy.deepcopy(other)
    torch_mesh.unpatch(model, lossy=True)
    assert other.config.quantization_config.weights == "bf16"
    for each in (other, clone):
        torch_mesh.unpatch(each)
        assert "mesh" not in str(each.config)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_saved_model_opens_with_the_same_logits(weights: str, tmp_path: Path, ids: torch.Tensor) -> None:
    model = _made("raw", tmp_path, weights=weights, resident=0.4)
    expected = logits_of(model, ids)
    model.save_pretrained(tmp_path / "saved")
    assert model.config.quantization_config.weights == weights
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert ("quantization_config" in config) == ("transformers_weights" in config) == (weights == "int8")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert bool(list(patched_modules(opened))) == (weights == "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=MeshConfig(resident=0.4))
    assert torch.equal(logits_of(again, ids), expected)


def test_the_config_of_a_loaded_model_opens_its_checkpoint(tmp_path: Path, ids: torch.Tensor) -> None:
    model = _made("raw", tmp_path, weights="int8", policy="lru")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "raw", config=model.config)
    assert "weights=int8" in repr(again) and "policy=lru" in repr(again)
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "raw"), "quantization_config")


def _plain_bytes(model: PreTrainedModel, buffers: bool = True) -> int:
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *(model.buffers() if buffers else ())]}
    packed = [
        m._parameters[name] for m in model.modules() if isinstance(m, PackedModule) for name in m._mesh_parameters
    ]
    return sum(tensor.nbytes for tensor in tensors.values() if not any(tensor is each for each in packed))


def test_the_memory_footprint_counts_the_pool_and_packed_layers(tmp_path: Path) -> None:
    plain = build()
    whole = plain.get_memory_footprint()
    assert whole == _plain_bytes(plain)
    model = torch_mesh.patch(copy.deepcopy(plain), weights="int8", resident=0.4)
    pool = next(patched_modules(model))._mesh_pool.engine.describe()["pool_bytes"]
    assert 0 < pool < whole
    for part in (model, model.model, copy.deepcopy(model)):
        assert part.get_memory_footprint() == _plain_bytes(part) + pool
        assert part.get_memory_footprint(return_buffers=False) == _plain_bytes(part, buffers=False) + pool
    torch_mesh.unpatch(model, lossy=True)
    assert model.get_memory_footprint() == whole

    both = torch_mesh.patch(copy.deepcopy(plain), resident=0.5, dense="int8", lossy={"fallback": "int4"})
    experts = next(patched_modules(both))._mesh_pool
    packed = sum(module._mesh_packed.nbytes for module in both.modules() if hasattr(module, "_mesh_packed"))
    pools = experts.engine.describe()["pool_bytes"] + experts.fallback.engine.describe()["pool_bytes"]
    assert both.get_memory_footprint() == _plain_bytes(both) + packed + pools


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "DeepseekV4Experts", "GptOssExperts"])
@pytest.mark.parametrize("dense", ["none", "int8"])
def test_a_model_in_float64_computes(name: str, dense: str, ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(name), resident=0.4, dense=dense).float()
    expected = logits_of(model, ids).double()
    logits = logits_of(model.double(), ids)
    assert logits.dtype == torch.float64
    # An input that differs in its last bit may be rounded to another bf16 value, so that a token takes other experts.
    by_token = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert by_token.median() < (5e-3 if dense == "none" else 0.03)
    torch_mesh.unpatch(model, lossy=True)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_model_in_float64_has_gradients(ids: torch.Tensor) -> None:
    model = torch_mesh.patch(build(), resident=0.5).double().train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient.dtype == torch.float64 and gradient.norm() > 0


def test_a_new_model_from_a_patched_models_config_is_saved_and_opened(tmp_path: Path, ids: torch.Tensor) -> None:
    patched = torch_mesh.patch(build(), weights="int8", resident=0.4)
    fresh = type(patched)._from_config(patched.config, dtype=torch.bfloat16).eval()
    fresh.save_pretrained(tmp_path / "fresh")
    assert "mesh" not in (tmp_path / "fresh" / "config.json").read_text()
    patched.config.save_pretrained(tmp_path / "fresh")
    assert "mesh" in (tmp_path / "fresh" / "config.json").read_text()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh", quantization_config=MeshConfig(resident=0.4))
    assert next(patched_modules(opened))._mesh_pool.weights == "int8"
    assert torch.equal(logits_of(opened, ids), logits_of(torch_mesh.patch(fresh, weights="int8"), ids))
    convert(tmp_path / "fresh", tmp_path / "store", "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "store", quantization_config=MeshConfig(resident=0.4))
    assert torch.equal(logits_of(again, ids), logits_of(opened, ids))


def test_the_config_of_a_model_with_a_store_names_no_store(tmp_path: Path, ids: torch.Tensor) -> None:
    build().save_pretrained(tmp_path / "raw")
    patched = torch_mesh.patch(build(), weights="int8", resident=0.4, store=tmp_path / "own")
    assert patched.config.quantization_config.store is None
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "raw", config=patched.config)
    assert logits_of(opened, ids).isfinite().all() and list(patched_modules(opened))
