"""max_error=: loading takes the format that torch-mesh plan chooses for the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantized import KINDS, write_quantized
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import _C, MeshConfig, MeshError
from torch_mesh.formats import ROUNDED_FORMATS
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.plan import plan
from torch_mesh.planning.token_time import Speeds
from torch_mesh.store.convert import convert

SLOW_DISK = Speeds(disk=1e7, experts=1e10, dense=1e10, layer_seconds=1e-6, measured=())
EQUALLY_FAST = dict.fromkeys(ROUNDED_FORMATS, 1e10)
MEMORY = 12 * _C.record_bytes("bf16", 0, 192, 64, True, False)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch_mesh.planning.choosing.measure_speeds", lambda *_: SLOW_DISK)
    monkeypatch.setattr("torch_mesh.planning.choosing.measure_formats", lambda *_: EQUALLY_FAST)


def load(folder: Path, **fields: Any) -> Any:
    config = MeshConfig(**{"io": "threads"} | fields)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0.15, "tcq3"),
        pytest.param(0, "bf12", marks=pytest.mark.thorough),
        pytest.param("10%", "lut4", marks=pytest.mark.thorough),
        pytest.param("30%", "tcq2+tcq3", marks=pytest.mark.thorough),
    ],
)
def test_loading_takes_the_format_that_plan_chooses(mesh_tiny: Path, limit: Any, expected: str) -> None:
    config = MeshConfig(resident=MEMORY, max_error=limit)
    model = load(mesh_tiny, resident=MEMORY, max_error=limit)
    pool = next(patched_modules(model))._mesh_pool
    named = plan(mesh_tiny, config, speeds=SLOW_DISK, format_speeds=EQUALLY_FAST)
    (choice,) = (choice for choice in named.format_choices if choice.chosen)
    assert (pool.weights, pool.group_size, pool.slots) == (expected, choice.group_size or 0, choice.slots)
    assert choice.weights == expected
    shown = str(model)
    assert "chosen as fastest of 8 formats" in shown and f"error of weights {choice.weight_error:.1%}" in shown
    # The model's config has the format that was chosen, and not max_error.
    assert model.config.quantization_config.weights == expected
    assert model.config.quantization_config.max_error is None
    assert "chosen" not in str(load(mesh_tiny, weights=expected, resident=MEMORY))


@pytest.mark.parametrize(
    ("kind", "own"), [("fp8_blocks", "fp8"), ("ct_mxfp4", "mxfp4"), ("ct_int4", "int4"), ("awq", "")]
)
def test_a_quantized_checkpoint_keeps_its_codes_or_takes_fewer_bits(
    kind: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "source", KINDS[kind]()
    write_quantized(folder, made)
    speeds = dict.fromkeys([own] if own else [], 1e10) | EQUALLY_FAST
    monkeypatch.setattr("torch_mesh.planning.choosing.measure_formats", lambda *_: speeds)
    memory = 4 * _C.record_bytes(*made.nearest, 128, 64, True, False)
    chosen = {}
    for limit in (0, 0.3):
        if not own and limit == 0:  # every format rounds a checkpoint with zero points
            with pytest.raises(ValueError, match="no format with an error of at most 0.0% fits"):
                load(folder, resident=memory, max_error=limit)
            continue
        pool = next(patched_modules(load(folder, resident=memory, max_error=limit)))._mesh_pool
        chosen[limit] = (pool.weights, pool.group_size)
    assert chosen.pop(0, None) == (made.nearest if own else None)
    assert chosen[0.3][0].startswith("tcq")
    large = 8 * _C.record_bytes("bf16", 0, 128, 64, True, False)
    planned = plan(folder, MeshConfig(resident=large, max_error=0.3), speeds=SLOW_DISK, format_speeds=speeds)
    errors = {choice.weights: choice.weight_error for choice in planned.format_choices}
    assert set(errors) == set(speeds) and (not own or errors[own] == 0)
    assert (errors["bf16"] == 0) == (kind == "ct_mxfp4")  # 4-bit codes times powers of two are exact in bf16


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "give resident="),
        ({"resident": 0.5}, "give it as a size"),
        ({"resident": "8GiB", "weights": "int4"}, "leave one of them out"),
        ({"resident": "8GiB", "store": "here"}, "leave store out"),
        ({"resident": "8GiB", "lossy": {"fallback": "int4"}}, "two formats"),
        ({"resident": "1B"}, "fit in no format"),
        ({"resident": "100KB", "max_error": "1%"}, "no format with an error of at most 1.0% fits"),
    ],
)
def test_max_error_is_refused_with_the_reason(mesh_tiny: Path, fields: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(mesh_tiny, **{"max_error": 0.1} | fields)


def test_fields_about_files_are_refused_for_stores_and_loaded_models(mesh_tiny: Path, tmp_path: Path) -> None:
    store = convert(mesh_tiny, tmp_path / "int8", "int8").store.folder
    with pytest.raises(ValueError, match="leave max_error out"):
        load(store, resident="8GiB", max_error=0.1)
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    with pytest.raises(ValueError, match="give it to from_pretrained"):
        torch_mesh.patch(model, resident="8GiB", max_error=0.1)
    for tables in ("1GiB", "embed_tokens"):
        with pytest.raises(ValueError, match=f"tables=.*{tables}.*: give it to from_pretrained"):
            torch_mesh.patch(model, tables=tables)
    with pytest.raises(MeshError):
        torch_mesh.unpatch(model)


@pytest.mark.parametrize("limit", ["", "much", "-1%", "101%", "15", "nan%", "nan", -0.1, 1.5, float("nan"), [0.1]])
def test_wrong_values_of_max_error_are_refused(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_error="):
        MeshConfig(max_error=limit)
    if limit:
        monkeypatch.setenv("TORCH_MESH_MAX_ERROR", str(limit))
        with pytest.raises(ValueError, match="TORCH_MESH_MAX_ERROR="):
            MeshConfig()


def test_the_former_syntax_names_the_new_field() -> None:
    with pytest.raises(ValueError, match="max_error="):
        MeshConfig(weights="auto:8GiB:15%")


def test_a_checkpoint_cannot_set_max_error() -> None:
    with pytest.warns(UserWarning, match="only you choose"):
        config = MeshConfig.of_checkpoint({"max_error": 0.5, "group_size": 32})
    assert (config.max_error, config.group_size) == (None, 32)
