import json
from pathlib import Path

import pytest

from torch_mesh import _C
from torch_mesh.cli import main
from torch_mesh.store.convert import convert

SHAPE = {
    "layers": 6,
    "experts": 32,
    "top_k": 4,
    "hidden": 192,
    "intermediate": 64,
    "gated": True,
    "bias": False,
    "activation": "silu",
}


def inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["inspect", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("weights", "group_size"), [("int4", 64), ("bf12", None)])
def test_inspect_describes_a_store(
    tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str], weights: str, group_size: int | None
) -> None:
    store = convert(mesh_tiny, tmp_path / "store", weights).store
    held = inspect(store.folder, capsys)
    of_store = {"kind": "store", "source": "mesh-tiny", "weights": weights, "group_size": group_size}
    assert held.items() >= (SHAPE | of_store).items()
    assert held["expert_bytes"] == _C.record_bytes(weights, group_size or 0, 192, 64, True, False)
    assert held["reads_per_expert"] == 1


def test_inspect_describes_a_checkpoint(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = inspect(mesh_tiny, capsys)
    assert held.items() >= {**SHAPE, "kind": "checkpoint", "weights": "bf16", "group_size": None}.items()
    assert held["expert_bytes"] == 3 * 192 * 64 * 2
    size = (mesh_tiny / "model.safetensors").stat().st_size
    assert 0 < size - held["all_experts_bytes"] - held["other_bytes"] < 100_000  # the size of the header


def test_the_table_shows_the_same_figures(tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(mesh_tiny, tmp_path / "store", "int8")
    assert main(["inspect", str(tmp_path / "store")]) == 0
    table = capsys.readouterr().out
    for words in ("int8, groups of 64", "32, 4 of them per token", "hidden 192, intermediate 64", "mesh-tiny"):
        assert words in table


def test_a_folder_that_is_neither_store_nor_checkpoint_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "has neither" in capsys.readouterr().err
