"""from_pretrained of checkpoints that another tool has quantized."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import (
    KINDS,
    MIXED,
    Tensors,
    change_config,
    exact_values,
    rewrite,
    write_deepseek_v4,
    write_gpt_oss,
    write_quantized,
)
from routes import Routes, by_token, given_routes, recorded_routes
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_model
from tiny_models import DEEPSEEK_V4_FAILS
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)
from transformers.integrations import compressed_tensors

import torch_mesh
from torch_mesh import MeshConfig, MeshError, StoreError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store.convert import convert

IDS = torch.tensor([[5, 9, 17, 33, 2, 64, 5, 71, 90]])
OWN = {"fp8": FineGrainedFP8Config, "mxfp8": FineGrainedFP8Config, "compressed-tensors": CompressedTensorsConfig}


@pytest.fixture(autouse=True)
def _in_cache(cache: Path) -> None:
    """Conversions go to the test's cache."""


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def _unquantized(folder: Path, values: Tensors, to: Path) -> Path:
    """A checkpoint of the same model with these weights."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(config))
    save_file({name: value.bfloat16() for name, value in values.items()}, to / "model.safetensors", {"format": "pt"})
    return to


def _load(folder: Path, config: Any = None, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    given = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given)


def _routed_logits(model: PreTrainedModel) -> tuple[torch.Tensor, Routes]:
    with recorded_routes(model) as routes:
        return _logits(model), routes


def _assert_close(model: PreTrainedModel, expected: tuple[torch.Tensor, Routes], most: float) -> None:
    """Check the logits with the experts that ``expected`` chose, for rounding changes the choice of random routers."""
    logits, routes = expected
    assert torch.isfinite(logits).all()
    with given_routes(model, routes):
        assert by_token(_logits(model), logits).median() <= most


# The values of each kind are compared in tests/store/test_sources.py.
QUICK = ("fp8", "awq", "bnb_nf4")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.thorough]) for kind in KINDS]
)
def test_a_bf16_store_has_the_logits_of_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    values = write_quantized(tmp_path / "raw", made)
    config = MeshConfig(weights="bf16", resident=0.5)
    model = _load(tmp_path / "raw", config, torch.float32)
    assert len(list(patched_modules(model))) == 2
    logits = _logits(model)
    plain = _unquantized(tmp_path / "raw", values, tmp_path / "plain")
    assert torch.equal(logits, _logits(_load(plain, config, torch.float32)))
    _assert_close(model, _routed_logits(_load(plain, dtype=torch.float32)), 0.005)


def test_changed_and_missing_files_of_a_conversion_in_the_cache(tmp_path: Path, cache: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["fp8"]())
    config = MeshConfig(weights="int8", resident=0.5)
    expected = _logits(_load(tmp_path / "raw", config))
    [folder] = [path for path in (cache / "stores").iterdir() if path.is_dir()]
    [dense] = folder.glob("model*.safetensors")
    with dense.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        (last,) = stream.read()
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    with pytest.raises(StoreError, match=f"was changed since the conversion.*torch-mesh cache rm {folder.name}"):
        _load(tmp_path / "raw", config)
    dense.unlink()
    assert torch.equal(_logits(_load(tmp_path / "raw", config)), expected)


_dequantized = pytest.mark.skipif(
    not hasattr(compressed_tensors, "CompressedTensorsDequantize"),
    reason="this transformers leaves compressed-tensors' forward on what it has dequantized, which is refused",
)


@pytest.mark.parametrize(
    "kind",
    [
        *("fp8", "fp8_powers_of_two", "mxfp8"),
        *(pytest.param(kind, marks=_dequantized) for kind in ("ct_fp8_channel", "ct_int4")),
    ],
)
def test_transformers_dequantizes_to_the_same_values(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    write_quantized(tmp_path / "raw", made)
    own = OWN[made.config["quant_method"]](dequantize=True)
    read = torch_mesh.patch(_load(tmp_path / "raw", own), weights="bf16", resident=0.5)
    model = _load(tmp_path / "raw", MeshConfig(weights="bf16", resident=0.5))
    assert torch.equal(_logits(model), _logits(read))


@pytest.mark.parametrize(("write", "own"), [(write_gpt_oss, Mxfp4Config), (write_deepseek_v4, FineGrainedFP8Config)])
def test_families_with_their_own_quantized_names_are_read(
    write: Callable[[Path], object], own: Any, tmp_path: Path
) -> None:
    if write is write_deepseek_v4 and DEEPSEEK_V4_FAILS:
        pytest.skip(DEEPSEEK_V4_FAILS)
    write(tmp_path / "raw")
    read = _load(tmp_path / "raw", own(dequantize=True))
    expected = _routed_logits(torch_mesh.patch(read, weights="bf16", resident=0.5))
    model = _load(tmp_path / "raw", MeshConfig(weights="bf16", resident=0.5))
    assert torch.equal(_logits(model), expected[0])
    model = _load(tmp_path / "raw", MeshConfig(resident=0.5))
    assert model.config.quantization_config.weights == "mxfp4"
    # Products with codes round activations to bytes, as with int8. int8 also rounds the weights.
    rounded = _load(tmp_path / "raw", MeshConfig(weights="int8", group_size=32, resident=0.5))
    with given_routes(rounded, expected[1]):
        error = by_token(_logits(rounded), expected[0]).median()
    _assert_close(model, expected, 1.5 * error.item())


# The kinds differ in the format of attention, and in whether each expert or each layer of experts is a tensor.
@pytest.mark.parametrize(
    "kind", ["fp8_blocks", "mxfp8", "ct_fp8_channel", "ct_int4", "modelopt_nvfp4", "gptq", "gpt_oss"]
)
def test_experts_are_read_from_the_checkpoint_itself(kind: str, tmp_path: Path, cache: Path) -> None:
    raw = tmp_path / "raw"
    if kind == "gpt_oss":
        write_gpt_oss(raw)
    else:
        write_quantized(raw, KINDS[kind]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = _load(raw, MeshConfig(resident=0.5))
        named = _load(raw, MeshConfig(resident=0.5, weights=next(patched_modules(model))._mesh_pool.weights))
    for pool in (next(patched_modules(each))._mesh_pool for each in (model, named)):
        assert pool.store is None
    assert not list(cache.glob("stores/*/mesh_manifest.json"))
    # Only the weights that have to be dequantized were written.
    rest = {name for path in cache.glob("stores/*-rest-*/*.safetensors") for name in load_file(path)}
    assert not any(".experts." in name for name in rest) and bool(rest) == (kind != "gpt_oss")
    stored = _load(raw, MeshConfig(resident=0.5, store=str(tmp_path / "store")))
    assert next(patched_modules(stored))._mesh_pool.store is not None
    expected = _routed_logits(model)
    logits = expected[0]
    assert torch.equal(logits, _logits(stored))
    assert torch.equal(
        logits, _logits(_load(raw, MeshConfig(resident=0.5)))
    )  # this finds the rest of the model in the cache
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits, _logits(_load(tmp_path / "saved", MeshConfig(resident=0.25))))
    torch_mesh.unpatch(model, lossy=True)
    _assert_close(model, expected, 0.03)


def _experts_of(model: PreTrainedModel) -> Tensors:
    """The experts of an unpatched model, under the names of a checkpoint."""
    values: Tensors = {}
    for number, layer in enumerate(model.model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.double().chunk(2, dim=1)
        down = layer.mlp.experts.down_proj.double()
        for expert in range(len(down)):
            stem = f"model.layers.{number}.mlp.experts.{expert}"
            named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            values |= {f"{stem}.{name}.weight": stack[expert] for name, stack in named.items()}
    return values


@pytest.mark.parametrize("kind", [kind for kind, make in MIXED.items() if make().kept or make().scales_rounded])
def test_layers_that_differ_are_read_from_the_checkpoint_itself(kind: str, tmp_path: Path, cache: Path) -> None:
    made = MIXED[kind]()
    write_quantized(tmp_path, made)
    with contextlib.nullcontext() if made.kept else pytest.warns(UserWarning, match="with scales rounded to bf16"):
        model = _load(tmp_path, MeshConfig(resident=0.5), torch.float32)
    assert next(patched_modules(model))._mesh_pool.store is None and not list(cache.glob("stores/*/mesh_manifest.json"))
    exact = exact_values(tmp_path)
    for name, found in _experts_of(torch_mesh.unpatch(model, lossy=True)).items():
        most = 2.0**-22 if made.kept else 2.0**-8
        assert ((found - exact[name]).abs() <= most * exact[name].abs()).all(), name


def test_damaged_codes_fail_the_forward_that_needs_them(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["ct_mxfp4"]())
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    rewrite(tmp_path / "raw", lambda tensors: tensors.update({name: torch.full_like(tensors[name], 255)}))
    model = _load(tmp_path / "raw", MeshConfig(resident=0.5))
    with pytest.raises(
        ValueError, match="cannot pack expert 2 of layer 1: mxfp4 cannot hold a scale that is not a finite"
    ):
        model(input_ids=torch.arange(90)[None])


def test_a_passthrough_format_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["awq"]())
    with pytest.raises(
        ValueError, match="weights='mxfp4' holds the codes of a checkpoint unchanged, .* has AWQ experts"
    ):
        _load(tmp_path / "raw", MeshConfig(weights="mxfp4", resident=0.5))
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="weights='fp8' .* nothing is rounded to it: give one of 'bf16', 'bf12'"):
        _load(tmp_path / "plain", MeshConfig(weights="fp8", resident=0.5))
    with pytest.raises(ValueError, match="nothing is rounded to it"):
        torch_mesh.patch(tiny_model("qwen3_moe"), weights="nvfp4")


@pytest.mark.parametrize("kind", ["fp8", "awq"])
def test_auto_takes_the_nearest_format(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    values = write_quantized(tmp_path / "raw", made)
    with pytest.warns(UserWarning, match=f"to {made.nearest[0]} in groups of {made.nearest[1]}"):
        model = _load(tmp_path / "raw", MeshConfig(resident=0.5))
    quantization = model.config.quantization_config
    assert (quantization.weights, quantization.group_size) == made.nearest
    plain = _load(_unquantized(tmp_path / "raw", values, tmp_path / "plain"))
    _assert_close(model, _routed_logits(plain), 0.03)


def test_a_converted_checkpoint_has_the_same_logits(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["gptq"]())
    config = MeshConfig(weights="int8", resident=0.5)
    direct = _load(tmp_path / "raw", config)
    convert(tmp_path / "raw", tmp_path / "store", "int8")
    stored = _load(tmp_path / "store")
    assert torch.equal(_logits(direct), _logits(stored))


def test_a_saved_model_has_the_same_logits(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["fp8"]())
    model = _load(tmp_path / "raw", MeshConfig(weights="int8", resident=0.5))
    logits = _logits(model)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["quant_method"] == "mesh"
    again = _load(tmp_path / "saved")
    assert torch.equal(_logits(again), logits)
    torch_mesh.unpatch(model, lossy=True)
    assert not hasattr(model.config, "quantization_config")


def test_a_damaged_file_in_the_cache_is_an_error(tmp_path: Path, cache: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["fp8"]())
    config = MeshConfig(weights="int8", resident=0.5)
    _load(tmp_path / "raw", config)
    (rest,) = cache.glob("stores/*/model*.safetensors")
    damaged = bytearray(rest.read_bytes())
    damaged[-5] ^= 1
    rest.write_bytes(damaged)
    with pytest.raises(StoreError, match="changed since"):
        _load(tmp_path / "raw", config)


@pytest.mark.parametrize(
    "wrong", [{"weight_block_size": [0, 0]}, {"weight_block_size": 3}, {"quant_method": "gptq", "bits": 4.0}]
)
def test_a_malformed_quantization_config_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_quantized(tmp_path / "raw", KINDS["fp8"]())
    change_config(tmp_path / "raw", quantization_config={"quant_method": "fp8"} | wrong)
    with pytest.raises(MeshError, match="is quantized already"):
        _load(tmp_path / "raw", MeshConfig(weights="int8", resident=0.5))


def test_fallback_experts_come_from_the_same_checkpoint(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["ct_int4"]())
    config = MeshConfig(weights="int8", resident=0.5, lossy={"fallback": "int4"})
    model = _load(tmp_path / "raw", config)
    assert torch.isfinite(_logits(model)).all()
    write_quantized(tmp_path / "int8", KINDS["ct_int8"]())
    model = _load(tmp_path / "int8", MeshConfig(resident=0.5, lossy={"fallback": "lut4"}))
    pool = next(patched_modules(model))._mesh_pool
    # The group size that "auto" chooses holds for the fallback pool, too.
    assert pool.group_size == pool.fallback.group_size == model.config.quantization_config.group_size == 64
    write_quantized(tmp_path / "fp8", KINDS["mxfp8"]())
    model = _load(tmp_path / "fp8", MeshConfig(resident=0.5, lossy={"fallback": "int4"}))
    assert torch.isfinite(_logits(model)).all()


@pytest.mark.parametrize("kind", ["fp8_blocks", "gpt_oss"])
def test_fewer_layers_than_the_checkpoint_has(kind: str, tmp_path: Path, cache: Path) -> None:
    """The experts of the other layers are not dequantized with the rest."""
    raw = tmp_path / "raw"
    if kind == "gpt_oss":
        write_gpt_oss(raw)
    else:
        write_quantized(raw, KINDS[kind]())
    config = MeshConfig(resident=0.5)
    model = AutoModelForCausalLM.from_pretrained(raw, num_hidden_layers=1, quantization_config=config)
    assert len(model.model.layers) == 1 and _logits(model).isfinite().all()
    rest = {name for path in cache.glob("stores/*-rest-*/*.safetensors") for name in load_file(path)}
    assert not any(".experts." in name for name in rest) and bool(rest) == (kind != "gpt_oss")


def test_a_checkpoint_without_a_dtype_opens(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", KINDS["fp8"]())
    change_config(tmp_path / "raw", dtype=None, torch_dtype=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "raw", quantization_config=MeshConfig(weights="int8"))
    assert torch.isfinite(_logits(model)).all()
