"""``torch-mesh cache``: the stores that it lists, removes and leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.store.folders import lock_path
from torch_mesh.system.atomic_files import locked


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "torch_mesh" / "stores"


@pytest.fixture
def two(stores: Path, mesh_tiny: Path) -> list[str]:
    """Names of two stores of one model: int8, and int4, which was last used ten days ago."""
    names = []
    for weights in ("int8", "int4"):
        before = set(stores.iterdir()) if stores.exists() else set()
        AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(weights=weights, resident=0.2))
        (made,) = {path for path in stores.iterdir() if path.is_dir()} - before
        names.append(made.name)
    _age(stores / names[1], 10)
    return names


def _age(folder: Path, days: float) -> None:
    os.utime(folder, (time.time() - days * 86400,) * 2)


def _listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["cache", "ls", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["stores"]


def test_stores_are_listed_with_their_size_and_last_use(
    two: list[str], stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = _listed(capsys)
    assert [each["name"] for each in listed] == two
    for each, weights in zip(listed, ("int8", "int4"), strict=True):
        held = sum(path.stat().st_blocks * 512 for path in (stores / each["name"]).iterdir())
        assert each["bytes"] == held > 1e6
        assert "6 x 32 experts of mesh-tiny" in each["about"] and weights in each["about"]
    assert 9.9 < (time.time() - listed[1]["used"]) / 86400 < 10.1
    monkeypatch.setenv("COLUMNS", "40")  # names are never cut, for a user types them
    assert main(["cache", "ls"]) == 0
    output = capsys.readouterr().out
    assert "2 stores" in output and all(name in output for name in two)


def test_an_empty_cache_is_no_error(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _listed(capsys) == []
    assert main(["cache", "prune"]) == 0
    assert "0 bytes are free" in capsys.readouterr().out


def test_rm_removes_all_named_stores_or_none(
    two: list[str], stores: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "rm", two[0], "another"]) == 2
    assert "another: there is no such store" in capsys.readouterr().err
    assert main(["cache", "rm", two[0][:-1]]) == 2
    assert f"did you mean {two[0]}" in capsys.readouterr().err
    assert main(["cache", "rm", f"../stores/{two[0]}"]) == 2
    assert {path.name for path in stores.iterdir()} == set(two)
    assert main(["cache", "rm", two[0], two[0]]) == 0
    assert [path.name for path in stores.iterdir()] == [two[1]]
    AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(weights="int8", resident=0.2))
    assert {path.name for path in stores.iterdir()} == set(two)


@pytest.mark.parametrize(("days", "goes"), [("9", True), ("11", False)])
def test_prune_removes_old_stores_leftovers_and_damaged_stores(
    days: str, goes: bool, two: list[str], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for leftover in (".begun-int4-0123.partial", ".gone-int4-4567.removed"):
        (stores / leftover).mkdir()
        (stores / leftover / "mesh-00001.safetensors").write_bytes(bytes(10000))
    damaged = stores / "my-rest-moe-int8-89ab"  # the name of a folder of dense weights ends in -rest-DIGEST
    damaged.mkdir()
    (damaged / "mesh_manifest.json").write_text("{")
    there = {path.name for path in stores.iterdir()}
    assert main(["cache", "prune", "--days", days, "--dry-run"]) == 0
    assert f"would remove {damaged.name}" in capsys.readouterr().out
    assert {path.name for path in stores.iterdir()} == there
    assert main(["cache", "prune", "--days", days]) == 0
    assert {path.name for path in stores.iterdir()} == set(two[: 1 if goes else 2])


@pytest.mark.parametrize("hidden", [False, True])
def test_prune_leaves_the_conversion_of_a_model_whose_name_starts_with_a_dot(
    hidden: bool, stores: Path, tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dot at the start of a folder in the cache marks what has not ended."""
    (tmp_path / ".hidden").symlink_to(mesh_tiny)
    monkeypatch.chdir(mesh_tiny)
    config = MeshConfig(weights="int4", resident=0.2)
    AutoModelForCausalLM.from_pretrained(tmp_path / ".hidden" if hidden else ".", quantization_config=config)
    assert main(["cache", "prune"]) == 0
    [kept] = [path.name for path in stores.iterdir() if path.is_dir()]
    assert kept.startswith("hidden-int4-" if hidden else "mesh-tiny-int4-")


@pytest.mark.parametrize("damaged", ["mesh-0*.safetensors", "model-*.safetensors"])
def test_prune_removes_a_store_with_a_file_of_another_size(
    damaged: str, two: list[str], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (stores / two[0]).glob(damaged)
    os.truncate(path, path.stat().st_size - 1)
    assert {each["name"]: each["about"] for each in _listed(capsys)}[two[0]] == "damaged"
    assert main(["cache", "prune"]) == 0
    assert [each["name"] for each in _listed(capsys)] == [two[1]]


def test_prune_removes_foreign_folders_by_age_alone(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder that is no store, and of a store in a later format version, only the age counts."""
    other, later = stores / "notes", stores / "later-int8-89ab"
    for folder in (other, later):
        folder.mkdir(parents=True)
    (later / "mesh_manifest.json").write_text('{"format_version": 99, "weights": "int8"}')
    assert main(["cache", "prune"]) == 0
    assert other.exists() and later.exists()
    assert {each["name"]: each["about"] for each in _listed(capsys)}["notes"] == "no store"
    for folder in (other, later):
        _age(folder, 31)
    assert main(["cache", "prune"]) == 0
    assert not any(stores.iterdir())


def test_a_link_is_removed_and_its_target_stays(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    for _ in range(2):
        (stores / "linked").parent.mkdir(parents=True, exist_ok=True)
        (stores / "linked").symlink_to(elsewhere)
        assert main(["cache", "rm", "linked"]) == 0
    (stores / ".left.removed").symlink_to(elsewhere)
    assert main(["cache", "prune"]) == 0
    assert not any(stores.iterdir()) and (elsewhere / "mine").exists()


def test_a_store_that_cannot_be_removed_does_not_stop_the_others(
    stores: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        (stores / name).mkdir(parents=True)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "first":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert main(["cache", "rm", "first", "second"]) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert [path.name for path in stores.iterdir()] == ["first"]


@pytest.mark.parametrize(
    "name", [".x-int4.removed", ".x-int4.partial", ".x-int4.partial.removed", ".x-int4.replaced-1234abcd"]
)
def test_leftovers_of_a_store_are_removed_under_its_lock(
    name: str, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stores / name).mkdir(parents=True)
    with locked(lock_path(stores / "x-int4")):
        assert main(["cache", "prune"]) == 1
        assert "being written" in capsys.readouterr().err and [*stores.glob(".x*[!k]")] == [stores / name]
    assert main(["cache", "prune"]) == 0 and not any(stores.iterdir())


def test_prune_leaves_a_store_that_is_being_written(
    two: list[str], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = stores / ".begun-int4-0123.partial"
    partial.mkdir()
    with locked(lock_path(stores / "begun-int4-0123")):
        assert main(["cache", "prune", "--days", "1"]) == 1
        captured = capsys.readouterr()
        assert "being written by another process" in captured.err and f"removed {two[1]}" in captured.out
        assert partial.exists() and not (stores / two[1]).exists()
    assert main(["cache", "prune"]) == 0 and not partial.exists()


def test_opening_a_store_renews_its_last_use(
    two: list[str], mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(weights="int4", resident=0.2))
    assert [each["name"] for each in _listed(capsys)] == two[::-1]


def test_an_open_model_works_after_its_store_is_removed(
    stores: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        mesh_tiny, quantization_config=MeshConfig(weights="int8", resident=0.2)
    )
    expected = model.generate(max_new_tokens=8, do_sample=False)
    assert main(["cache", "rm", *(each["name"] for each in _listed(capsys))]) == 0
    assert not any(stores.iterdir())
    assert model.generate(max_new_tokens=8, do_sample=False).tolist() == expected.tolist()


def test_a_prefix_cache_is_listed_and_removed_like_a_store(
    stores: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(resident=0.2))
    tokens = torch.randint(3, 4000, (1, 100))
    options: dict[str, Any] = {"max_new_tokens": 2, "attention_mask": torch.ones_like(tokens), "do_sample": False}
    with torch_mesh.cache_prefixes(model, "1GiB") as prefixes:
        expected = model.generate(tokens, **options)
        prefixes.flush()
        (listed,) = _listed(capsys)
        assert "prefix cache" in listed["about"] and listed["name"].startswith("mesh-tiny-") and listed["bytes"] > 1e4
        assert main(["cache", "prune"]) == 0
        assert _listed(capsys) == [listed]
        folder = stores.parent / "prefixes" / listed["name"]
        _age(folder, 40)
        assert main(["cache", "prune"]) == 0
        assert _listed(capsys) == [] and not folder.exists()
        assert torch.equal(model.generate(tokens, **options), expected)  # while a program has it open
        prefixes.flush()
        assert main(["cache", "rm", listed["name"]]) == 0
    assert _listed(capsys) == []
