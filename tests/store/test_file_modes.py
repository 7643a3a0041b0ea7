"""Permissions of the files that torch_mesh writes: they follow the umask, like any other file's."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store
from torch_mesh.system.atomic_files import check_new_file, new_file, new_file_mode


@pytest.fixture(params=[0o077, 0o022, 0o002], ids="{:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))}


def _expected(folder: Path, umask: int) -> dict[str, int]:
    paths = {str(path.relative_to(folder)): path.is_dir() for path in sorted(folder.rglob("*"))}
    return {name: (0o777 if is_folder else 0o666) & ~umask for name, is_folder in paths.items()}


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path, umask: int) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "replaced").touch(0o600)
    for name in ("new", "replaced"):
        with new_file(tmp_path / name) as file:
            file.write(b"words")
        assert (tmp_path / name).read_bytes() == b"words"
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "failed"):
        raise ZeroDivisionError
    assert _modes(tmp_path) == dict.fromkeys(("new", "other", "replaced"), 0o666 & ~umask)
    assert new_file_mode(tmp_path) == 0o666 & ~umask


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError) as failed, new_file(path):
        pass
    assert failed.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as failed:
        check_new_file("/proc/out")
    assert failed.value.filename == "/proc/out"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for path in (tmp_path / "file", Path("/dev/full")):
        with pytest.raises(OSError, match="No space left") as failed, new_file(path) as file:
            file.write(b"words")
        assert failed.value.filename == str(path)
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError) as failed, new_file(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    assert failed.value.filename == str(tmp_path / "other")


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_files_that_a_model_writes_follow_the_umask(mesh_tiny: Path, tmp_path: Path, umask: int, weights: str) -> None:
    stats = {"file": str(tmp_path / "stats.jsonl"), "every": 1}
    store = None if weights == "bf16" else str(tmp_path / "store")
    config = MeshConfig(resident=0.5, weights=weights, store=store, stats=stats)
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    with torch_mesh.record_trace(model, tmp_path / "trace.npz"), torch.no_grad():
        model(torch.arange(3)[None])
    model.save_pretrained(tmp_path / "saved")
    torch_mesh.save_profile(model, tmp_path / "profile.json")
    deadline = time.monotonic() + 60
    while not (tmp_path / "stats.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {"profile.json", "saved", "saved/config.json", "stats.jsonl", "trace.npz"} <= _modes(tmp_path).keys()
    assert _modes(tmp_path) == _expected(tmp_path, umask)


def test_files_of_a_conversion_follow_the_umask(mesh_tiny: Path, tmp_path: Path, umask: int) -> None:
    convert(mesh_tiny, tmp_path / "store", "int4")
    assert _modes(tmp_path) == _expected(tmp_path, umask)


@pytest.mark.parametrize(
    ("of_store", "linked"), [(0o600, False), (0o640, False), (0o666, False), (0o644, True), (0o444, True)]
)
def test_saved_records_are_hard_links_only_if_the_modes_fit(
    mesh_tiny: Path, tmp_path: Path, of_store: int, linked: bool
) -> None:
    convert(mesh_tiny, tmp_path / "store", "int8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "store", quantization_config=MeshConfig(resident=0.5))
    names = [file.name for file in open_store(tmp_path / "store").manifest.record_files]
    for name in names:
        (tmp_path / "store" / name).chmod(of_store)
    before = os.umask(0o022)
    try:
        model.save_pretrained(tmp_path / "saved")
    finally:
        os.umask(before)
    for name in names:
        saved, kept = tmp_path / "saved" / name, tmp_path / "store" / name
        assert os.path.samefile(saved, kept) == linked
        assert stat.S_IMODE(kept.stat().st_mode) == of_store
        assert stat.S_IMODE(saved.stat().st_mode) == (of_store if linked else 0o644)
