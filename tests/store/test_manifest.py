import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from tiny_checkpoints import save_tiny

from torch_mesh.errors import StoreError
from torch_mesh.formats import FORMATS
from torch_mesh.store import manifest as manifest_module
from torch_mesh.store.convert import convert
from torch_mesh.store.header import read_header
from torch_mesh.store.manifest import MANIFEST_NAME, Store, open_store, plan_record_files
from torch_mesh.store.verify import verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of 24 records in several files, some hundred KB in all."""
    folder = tmp_path_factory.mktemp("pristine")
    sizes = {"num_experts": 6, "num_local_experts": 6, "num_hidden_layers": 4, "vocab_size": 32}
    save_tiny(folder / "source", "qwen3_moe", **sizes)
    return convert(folder / "source", folder / "store", "int4", max_file_bytes=100_000).store


@pytest.fixture
def store(pristine: Store, tmp_path: Path) -> Store:
    return open_store(shutil.copytree(pristine.folder, tmp_path / "store"))


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and recompute its digest, as an attacker would."""
    path = folder / MANIFEST_NAME
    table = json.loads(path.read_text())
    change(table)
    table["digest"] = manifest_module._digest(table)
    path.write_text(json.dumps(table))


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "version-unknown": lambda t: t.update(format_version=99),
    "version-missing": lambda t: t.pop("format_version"),
    "key-missing": lambda t: t.pop("shape"),
    "key-unknown": lambda t: t.update(extra=1),
    "weights-unknown": lambda t: t.update(weights="int2"),
    "weights-of-more-layers": lambda t: t.update(weights="q4_k|q6_k:01010", format_version=1, group_size=32),
    "weights-of-other-sizes": lambda t: t.update(weights="q4_k", format_version=1, group_size=32),
    "weights-list": lambda t: t.update(weights=["int4"]),
    "group-size-unknown": lambda t: t.update(group_size=48),
    "group-size-of-bf16": lambda t: t.update(weights="bf16"),
    "record-bytes-wrong": lambda t: t.update(record_bytes=t["record_bytes"] + 4096),
    "record-bytes-boolean": lambda t: t.update(record_bytes=True),
    "record-bytes-zero": lambda t: t.update(record_bytes=0),
    "store-id-short": lambda t: t.update(store_id="00"),
    "store-id-not-hex": lambda t: t.update(store_id="g" * 32),
    "store-id-another": lambda t: t.update(store_id="0" * 32),
    "layers-huge": lambda t: t["shape"].update(layers=1 << 40),
    "experts-negative": lambda t: t["shape"].update(experts=-6),
    "experts-times-layers-huge": lambda t: t["shape"].update(layers=1 << 19, experts=1 << 19),
    "top-k-above-experts": lambda t: t["shape"].update(top_k=1000),
    "hidden-of-another-record": lambda t: t["shape"].update(hidden=4096),
    "gated-number": lambda t: t["shape"].update(gated=1),
    "shape-list": lambda t: t.update(shape=[]),
    "activation-number": lambda t: t["shape"].update(activation=3),
    "modules-missing": lambda t: t["modules"].pop(),
    "modules-twice": lambda t: t["modules"].__setitem__(0, t["modules"][1]),
    "modules-other": lambda t: t["modules"].__setitem__(0, "model.layers.9.mlp.experts"),
    "modules-long": lambda t: t["modules"].__setitem__(0, "m" * 100_000),
    "modules-surrogate": lambda t: t["modules"].__setitem__(0, "\udc80"),
    "checksums-short": lambda t: t["checksums"].pop(),
    "checksums-not-hex": lambda t: t["checksums"].__setitem__(0, "x" * len(t["checksums"][0])),
    "checksums-numbers": lambda t: t["checksums"].__setitem__(0, 3),
    "files-none": lambda t: t.update(record_files=[]),
    "files-not-list": lambda t: t.update(record_files=3),
    "file-outside": lambda t: t["record_files"][0].update(name="../x.safetensors"),
    "file-absolute": lambda t: t["record_files"][0].update(name="/etc/passwd"),
    "file-absent": lambda t: t["record_files"][0].update(name="absent.safetensors"),
    "file-twice": lambda t: t["record_files"][0].update(name=t["record_files"][1]["name"]),
    "file-is-weights": lambda t: t["record_files"][0].update(name=t["other_files"][-1]["name"]),
    "file-start-unaligned": lambda t: t["record_files"][0].update(data_start=4097),
    "file-start-elsewhere": lambda t: t["record_files"][0].update(
        data_start=8192, bytes=t["record_files"][0]["bytes"] - t["record_files"][0]["data_start"] + 8192
    ),
    "file-bytes-wrong": lambda t: t["record_files"][0].update(bytes=t["record_files"][0]["bytes"] + 1),
    "file-records-wrong": lambda t: t["record_files"][0].update(records=1),
    "files-swapped": lambda t: t["record_files"].reverse(),
    "other-file-outside": lambda t: t["other_files"][0].update(name="../config.json"),
    "other-file-digest": lambda t: t["other_files"][0].update(digest=3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_is_refused(store: Store, name: str) -> None:
    rewrite_manifest(store.folder, HOSTILE[name])
    with pytest.raises(StoreError) as caught:
        open_store(store.folder)
    assert str(store.folder) in str(caught.value)


def test_int8_records_with_weight_sums_are_refused_with_advice(store: Store) -> None:
    rewrite_manifest(store.folder, lambda table: table.update(weights="int8", format_version=1))
    with pytest.raises(
        StoreError, match="int8 records of format version 1; this release reads version 2.*convert.*again"
    ):
        open_store(store.folder)


def _record(weights: str) -> bytes:
    def matrix(rows: int, columns: int, shift: int) -> torch.Tensor:
        values = (torch.arange(rows * columns) * 7919 + shift) % 2017 - 1008
        return (values.float() ** 3 / 2**34).to(torch.bfloat16).reshape(rows, columns)

    gate, up, down = matrix(72, 200, 0), matrix(72, 200, 1), matrix(200, 72, 2)
    group_size = 0 if weights == "bf16" else 32
    return torch.ops.torch_mesh.pack(gate, up, down, None, None, None, weights, group_size).numpy().tobytes()


# Digests for fixed weights: a release packs the same bytes on every processor. Another may choose other codes.
RECORDS = {
    "bf16": "682071ec4f5ac8651f8c8c6f39acbd3d",
    "int8": "4db208b6ba1a81410257c44c8ef9c6fe",
    "int4": "6b2491ce47f555b93ad922f4bad772a7",
    "lut4": "9b42000cce6d5582b0725fb5c86b0197",
    "tcq2": "fc4852a6d4f468017604d93b52709342",
    "tcq2+tcq3": "68e983999fa265b3052bd297a585b05f",
    "tcq3": "68be2a11f185e6445d049978842dd59b",
}


@pytest.mark.parametrize("weights", RECORDS)
def test_packing_gives_the_same_bytes_everywhere(weights: str) -> None:
    assert hashlib.sha256(_record(weights)).hexdigest()[:32] == RECORDS[weights]


# Digests of the values of fixed bytes. Stores outlive a release, so a change needs a new format version.
MEANINGS = {
    ("bf16", 1): "ad96b3767d46edbb33bd93f67cb2afcd",
    ("int8", 2): "c1fed9e6a5e18009605fcd85e75ebef4",
    ("int4", 1): "cd24088728c678823b88f500d858263c",
    ("lut4", 1): "56241d2ed54b41e85e6122fec9a6ed9a",
    ("tcq2", 1): "9b3d5e5c69ef3610304f2ba48e98a2a9",
    ("tcq2+tcq3", 1): "cbc1d3fbe3678c87d56f197a9a7a313c",
    ("tcq3", 1): "15898fd5b8dc3a352758742bf3ea8016",
}


def _meaning(weights: str) -> str:
    """Return a digest of the values of made-up bytes. The many non-finite values count as zeros."""
    record = (torch.arange(len(_record(weights)), dtype=torch.int64) * 2654435761 % 2**32 // 2**24).to(torch.uint8)
    meant = torch.ops.torch_mesh.unpack(record, weights, 0 if weights == "bf16" else 32, 200, 72, True, False)
    values = b"".join(torch.where(part.isfinite(), part, 0.0).numpy().tobytes() for part in meant)
    return hashlib.sha256(values).hexdigest()[:32]


@pytest.mark.parametrize(("weights", "version"), MEANINGS)
def test_the_values_of_bytes_are_fixed_by_the_format_version(weights: str, version: int) -> None:
    assert FORMATS[weights].version == version
    assert _meaning(weights) == MEANINGS[weights, version]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b"\xff", b'{"format_version":1,"format_version":1}', b"[" * 100_000]
)
def test_invalid_manifests_are_refused(store: Store, content: bytes) -> None:
    (store.folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(StoreError):
        open_store(store.folder)


def test_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        open_store(tmp_path)


def test_truncated_and_missing_record_files_are_refused(store: Store) -> None:
    path = store.folder / store.manifest.record_files[1].name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match="truncated"):
        open_store(store.folder)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(store.folder)


def test_record_files_of_another_store_are_refused(store: Store, pristine: Store, tmp_path: Path) -> None:
    other = convert(pristine.folder.parent / "source", tmp_path / "other", "int4", max_file_bytes=100_000).store
    name = store.manifest.record_files[0].name
    shutil.copy(other.folder / name, store.folder / name)
    with pytest.raises(StoreError, match="another store"):
        open_store(store.folder)


def test_two_swapped_records_are_found(store: Store) -> None:
    size = store.manifest.record_bytes
    path = store.folder / store.manifest.record_files[0].name
    start = store.manifest.record_files[0].data_start
    content = bytearray(path.read_bytes())
    first, second = content[start : start + size], content[start + size : start + 2 * size]
    content[start : start + 2 * size] = second + first
    path.write_bytes(content)
    assert [(d.layer, d.expert) for d in verify(open_store(store.folder))] == [(0, 0), (0, 1)]


@hypothesis.given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 200_000))
def test_record_files_hold_every_record_once(experts: int, layers: int, max_file_bytes: int) -> None:
    shape = manifest_module.Shape(layers, experts, 1, 64, 64, True, False, None)
    modules = tuple(f"layers.{i}.experts" for i in range(layers))
    plan = plan_record_files(shape, modules, 8192, bytes(16), max_file_bytes)
    assert sum(file.records for file, _ in plan) == layers * experts
    for file, header in plan:
        assert len(header) == file.data_start and file.data_start % 4096 == 0
        assert file.records == 1 or file.records * 8192 <= max_file_bytes
        assert file.bytes == file.data_start + 8192 * file.records


def found_damage(folder: Path) -> bool:
    try:
        return any(True for _ in verify(open_store(folder)))
    except StoreError:
        return True


def check_flips(store: Store, path: Path, places: list[int], rng: np.random.Generator) -> None:
    """Flips one bit at each place in turn; each must be found."""
    for place in places:
        bit = 1 << int(rng.integers(8))
        with path.open("r+b") as stream:
            stream.seek(place)
            (before,) = stream.read(1)
            stream.seek(place)
            stream.write(bytes([before ^ bit]))
        assert found_damage(store.folder), f"{path.name}: bit {bit} of byte {place} was flipped unseen"
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([before]))


def test_a_flipped_bit_anywhere_is_found(store: Store, rng: np.random.Generator) -> None:
    for path in sorted(store.folder.iterdir()):
        size = path.stat().st_size
        check_flips(store, path, [0, size - 1, *map(int, rng.integers(0, size, 20))], rng)
    assert not found_damage(store.folder)


def test_a_flipped_bit_anywhere_in_a_header_is_found(store: Store, rng: np.random.Generator) -> None:
    path = store.folder / store.manifest.record_files[0].name
    start = read_header(path).data_start
    check_flips(store, path, list(map(int, rng.integers(0, start, 150))), rng)


@pytest.mark.slow
def test_flipped_bits_all_over_a_store_are_found(store: Store, rng: np.random.Generator) -> None:
    for path in sorted(store.folder.iterdir()):
        check_flips(store, path, list(range(0, path.stat().st_size, 61)), rng)
