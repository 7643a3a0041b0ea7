"""Sizes and numbers that are too large for any machine or model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_mesh
from torch_mesh.cli import main
from torch_mesh.validators import parse_size


@pytest.mark.parametrize("value", [2**70, 2**63, str(2**70), "9999999TiB", "1048577 TiB", "9" * 20])
@pytest.mark.parametrize("field", ["workspace", "resident"])
def test_a_size_beyond_any_machine_is_a_value_error(field: str, value: str | int) -> None:
    with pytest.raises(ValueError, match=rf"{field}=.* is more than any machine has: give at most \d+ bytes"):
        torch_mesh.MeshConfig(**{field: value})


@pytest.mark.parametrize(
    "value",
    ["9" * 400, "9" * 400 + "GB", "1." + "9" * 400, "٣GiB", b"8GiB", 1.5, "256.9", "256.5 B", -(2**70), None, []],
)
def test_a_malformed_size_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="workspace=.* is not a size"):
        torch_mesh.MeshConfig(workspace=value)


@pytest.mark.parametrize(
    ("group", "field"),
    [("lossy", "deferred_experts"), ("gpu", "experts"), ("residency", "early_experts")],
)
@pytest.mark.parametrize("value", [2**31, 2**70, "9" * 400])
def test_a_number_beyond_any_model_is_a_value_error(group: str, field: str, value: str | int) -> None:
    with pytest.raises(ValueError, match=f"{group}.{field}"):
        torch_mesh.MeshConfig(**{group: {field: value}})


def test_numbers_of_numpy_are_numbers() -> None:
    config = torch_mesh.MeshConfig(workspace=np.int64(1 << 20), resident=np.float32(0.5), gpu={"experts": np.int32(2)})
    assert (config.workspace, config.resident, config.gpu.experts) == (1 << 20, 0.5, 2)
    assert type(config.workspace) is type(config.gpu.experts) is int
    assert torch_mesh.MeshConfig(resident=np.uint64(1 << 30)).resident == parse_size(np.int64(1 << 30), "x") == 1 << 30


def test_the_largest_workspace_size_works() -> None:
    assert parse_size("1048576TiB", "x") == parse_size(1 << 60, "x") == 1 << 60
    gate_up, down = torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    hidden, ids, weights = torch.randn(5, 64).bfloat16(), torch.randint(4, (5, 1)), torch.rand(5, 1)
    outputs = []
    for workspace in (1 << 60, 1 << 24):
        layer = torch_mesh.Experts(gate_up.clone(), down.clone(), workspace=workspace)
        outputs.append(layer(hidden, ids, weights))
        assert layer(hidden.repeat(40, 1), ids.repeat(40, 1), weights.repeat(40, 1)).isfinite().all()
    assert torch.equal(*outputs)


def test_a_size_option_beyond_any_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "anything", "--memory", str(2**70)])
    assert caught.value.code == 2 and "is more than any machine has" in capsys.readouterr().err
