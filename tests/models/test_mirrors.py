"""mirrors=: copies of the files of experts, which are read beside the originals."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS, logits_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import _C, MeshConfig, StoreError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.patching import checkpoint_source, quantizer
from torch_mesh.planning import machine
from torch_mesh.planning.plan import plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.pool.shared_pool import SharedPool
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store
from torch_mesh.store.mirrors import find_copies

# The folders of these tests are on one drive.
pytestmark = pytest.mark.filterwarnings("ignore:mirrors. .* is on the same drive")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirrors") / "raw"
    TINY_MODELS["Qwen3MoeExperts"].build().to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.fixture
def copies(raw: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies that engines are given. Skips where they would be refused."""
    if _C.direct_io_alignment(str(raw / "config.json")) < 0:
        pytest.skip("the temporary folder has no direct I/O")
    given: list[str] = []
    source = _C.Source

    def spy(**arguments: Any) -> Any:
        given.extend(copy for of_file in arguments.get("copies", ()) for copy in of_file if copy)
        return source(**arguments)

    monkeypatch.setattr(_C, "Source", spy)
    return given


@pytest.fixture
def mirror(raw: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(raw, tmp_path / "mirror"))


def _open(folder: Path, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(**fields))


def _shards(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_output_is_equal_with_whole_and_partial_mirrors(
    raw: Path, mirror: Path, tmp_path: Path, ids: torch.Tensor, copies: list[str]
) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    for shard in _shards(raw)[1:]:
        shutil.copy(shard, partial)
    expected = logits_of(_open(raw, resident=1.0), ids)
    every, some = (
        {str(folder / shard.name) for shard in _shards(raw)[first:]} for folder, first in ((mirror, 0), (partial, 1))
    )
    assert not copies
    for mirrors, named in ((mirror, every), (f"{mirror},{partial}", every | some), ([str(partial)], some)):
        model = _open(raw, resident=0.5, mirrors=mirrors)
        assert torch.equal(logits_of(model, ids), expected)
        assert "copies in" in repr(model) and set(copies) == named
        copies.clear()
        torch_mesh.unpatch(model)


def test_a_store_is_read_from_both(raw: Path, tmp_path: Path, ids: torch.Tensor, copies: list[str]) -> None:
    store = convert(raw, tmp_path / "store", "int4").store
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    expected = logits_of(_open(store.folder, resident=1.0), ids)
    assert torch.equal(logits_of(_open(store.folder, resident=0.5, mirrors=copy), ids), expected)
    assert sorted(copies) == [str(copy / file.name) for file in store.manifest.record_files]


@pytest.mark.usefixtures("copies")
def test_a_damaged_copy_is_named_and_replaced_by_the_original(raw: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    store = convert(raw, tmp_path / "store", "int4").store
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    expected = logits_of(_open(store.folder, resident=1.0), ids)
    model = _open(store.folder, resident=0.3, mirrors=copy)
    next(patched_modules(model))._mesh_pool.engine.drain()
    for record_file in store.manifest.record_files:  # after it was compared with the original
        path = copy / record_file.name
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    named = rf"in {re.escape(str(copy))}/\S+ .* were read again from {re.escape(str(store.folder))}/.* are right"

    def read_from_the_copy() -> None:
        for _ in range(20):  # a copy that seemed slow is read again after some hundred chunks
            assert torch.equal(logits_of(model, ids), expected)
            if torch_mesh.stats(model).second_reads > 0:
                return

    with pytest.warns(RuntimeWarning, match=named):
        read_from_the_copy()
    counters = torch_mesh.stats(model)
    assert counters.second_reads > 0 and counters.failed == 0
    assert f"{counters.second_reads} reads were repeated after a wrong checksum" in str(counters).splitlines()


def test_a_shared_pool_reads_from_both(raw: Path, tmp_path: Path, ids: torch.Tensor, copies: list[str]) -> None:
    store = convert(raw, tmp_path / "store", "int4").store
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    pool = SharedPool(open_store(store.folder), tmp_path / "socket", 1.0, workers=1, mirrors=[str(copy)])
    assert sorted(copies) == [str(copy / file.name) for file in store.manifest.record_files]
    try:
        expected = logits_of(_open(store.folder, resident=1.0), ids)
        assert torch.equal(logits_of(_open(store.folder, shared=str(tmp_path / "socket")), ids), expected)
    finally:
        pool.close()
    with pytest.raises(ValueError, match="torch-mesh share --mirrors"):
        _open(store.folder, shared=str(tmp_path / "socket"), mirrors=str(copy))


def test_copies_in_subfolders_are_told_apart(tmp_path: Path) -> None:
    files = []
    for name in ("one/model.safetensors", "two/model.safetensors"):
        for folder in ("raw", "mirror"):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True)
            path.write_text(name)
        files.append((str(tmp_path / "raw" / name), len(name)))
    copies = find_copies(files, [str(tmp_path / "mirror")])
    assert copies == [[path.replace("/raw/", "/mirror/")] for path, _ in files]


def test_all_files_may_be_in_one_subfolder(tmp_path: Path) -> None:
    path, copy = (tmp_path / folder / "Q4" / "model.gguf" for folder in ("raw", "mirror"))
    for each in (path, copy):
        each.parent.mkdir(parents=True)
        each.write_text("model")
    for folder in (copy.parent, copy.parent.parent):
        assert find_copies([(str(path), 5)], [str(folder)]) == [[str(copy)]]


def test_a_conversion_is_not_begun_for_mirrors(raw: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "convert", lambda *_, **__: pytest.fail("converts"))
    with pytest.raises(ValueError, match="would be converted now: convert first"):
        _open(raw, weights="int4", mirrors=str(mirror))


@pytest.mark.parametrize("weights", ["int8", "bf12"])
def test_a_plan_refuses_mirrors_of_experts_that_would_be_converted(
    weights: str, raw: Path, mirror: Path, tmp_path: Path
) -> None:
    config = MeshConfig(weights=weights, mirrors=str(mirror), store=str(tmp_path / "store"))
    for refused in (config, config.replace(store=None)):
        with pytest.raises(ValueError, match=f"the experts of {raw} would be converted now: convert first"):
            find_sizes(raw, refused)
    convert(raw, tmp_path / "store", weights)
    assert find_sizes(raw, config).weights == weights
    _open(raw, weights=weights)  # a conversion in the cache
    assert find_sizes(raw, config.replace(store=None)).weights == weights


@pytest.mark.usefixtures("copies")
def test_the_second_pool_has_no_copies(raw: Path, tmp_path: Path) -> None:
    store = convert(raw, tmp_path / "store", "int8").store
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    model = _open(store.folder, resident=0.75, mirrors=copy, lossy={"fallback": "int4"})
    pool = next(patched_modules(model))._mesh_pool
    assert pool.fallback is not None and "copies in" in pool.describe()
    assert "copies in" not in pool.fallback.describe()


def test_a_plan_counts_the_files_that_a_mirror_has(
    raw: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "disk_speed", lambda files, block: 1e9 if files else None)
    for shard in _shards(mirror)[1:]:
        shard.unlink()
    config = MeshConfig(mirrors=str(mirror))
    sizes = find_sizes(raw, config)
    speeds = machine.measure_speeds(sizes, config, memory=1e9)
    fraction = _shards(raw)[0].stat().st_size / sum(shard.stat().st_size for shard in _shards(raw))
    assert speeds is not None and speeds.disk == pytest.approx(1e9 * min(1 / (1 - fraction), 2))
    shutil.copytree(raw, mirror, dirs_exist_ok=True)
    speeds = machine.measure_speeds(sizes, config, memory=1e9)
    assert speeds is not None and speeds.disk == pytest.approx(2e9)
    _shards(mirror)[1].write_bytes(b"")
    with pytest.raises(StoreError, match="has 0 bytes, and"):
        machine.measure_speeds(sizes, config, disk=1e9, memory=1e9)
    with pytest.raises(StoreError, match="elsewhere is not a folder"):
        plan(raw, MeshConfig(mirrors=str(tmp_path / "elsewhere")))
    with pytest.raises(ValueError, match="exclude each other"):
        plan(raw, MeshConfig(mirrors=str(mirror), io="buffered"))


def test_the_same_drive_is_a_warning(raw: Path, mirror: Path) -> None:
    files = [(str(shard), shard.stat().st_size) for shard in _shards(raw)]
    with pytest.warns(UserWarning, match=f"{mirror} is on the same drive as {raw},"):
        copies = find_copies(files, [str(mirror)])
    assert copies == [[str(mirror / Path(path).name)] for path, _ in files]


def test_two_mirrors_on_one_drive_are_a_warning(raw: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(str(shard), shard.stat().st_size) for shard in _shards(raw)]
    stat = Path.stat

    def on_two_drives(path: Path, **options: Any) -> os.stat_result:
        fields = list(stat(path, **options))
        fields[2] = int(path.is_relative_to(mirror.parent))  # st_dev
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", on_two_drives)
    second = shutil.copytree(raw, mirror.parent / "second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_copies(files, [str(mirror)])
    with pytest.warns(UserWarning, match=f"{second} is on the same drive as {mirror},"):
        find_copies(files, [str(mirror), str(second)])


def test_a_missing_folder_is_an_error(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="elsewhere is not a folder"):
        _open(raw, mirrors=str(tmp_path / "elsewhere"))


def test_a_folder_of_something_else_is_an_error(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has none of the files that hold the experts \(model-00001-of"):
        _open(raw, mirrors=str(tmp_path))


def test_a_copy_of_another_size_is_an_error(raw: Path, mirror: Path) -> None:
    shard = _shards(mirror)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"{shard.name} has .* bytes, and"):
        _open(raw, mirrors=str(mirror))


def test_a_copy_of_another_model_is_an_error_before_weights_are_packed(
    raw: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer, "assemble", lambda *_: pytest.fail("patched"))
    shard = _shards(mirror)[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match=f"{shard.name} differs from"):
        _open(raw, mirrors=str(mirror))


def test_a_loaded_model_has_no_files(raw: Path, mirror: Path) -> None:
    with pytest.raises(ValueError, match="give it to from_pretrained"):
        torch_mesh.patch(AutoModelForCausalLM.from_pretrained(raw), mirrors=str(mirror))


def test_buffered_reads_exclude_mirrors(raw: Path, mirror: Path) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        _open(raw, io="buffered", mirrors=str(mirror))


@pytest.mark.parametrize("given", [3, [3], [None], [""], "/a,,/b"])
def test_what_is_no_list_of_folders_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="mirrors=.* is not a list of folders: give paths, or a string"):
        MeshConfig(mirrors=given)
