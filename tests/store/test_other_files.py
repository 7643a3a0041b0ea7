"""Damage and changes of the files besides the records, detected when a model is opened."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_mesh import MeshConfig
from torch_mesh.errors import StoreError
from torch_mesh.store import manifest as manifest_module
from torch_mesh.store import unfinished
from torch_mesh.store import verify as verify_module
from torch_mesh.store.convert import convert
from torch_mesh.store.dense_weights import rest_of_store
from torch_mesh.store.manifest import MANIFEST_NAME, Store, open_store
from torch_mesh.store.verify import check_other_files, read_record, verify

BLOCK = 10_000  # small, so that files of a tiny model have several blocks
DENSE = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("pristine")
    sizes = {"num_experts": 6, "num_local_experts": 6, "num_hidden_layers": 2, "vocab_size": 128}
    source = save_tiny(folder / "source", "qwen3_moe", **sizes)
    (source / "tokenizer.json").write_text('{"model": {}}')
    (source / "README.md").write_text("# A model")
    with small_blocks():
        return convert(source, folder / "store", "int4", max_file_bytes=60_000).store


@contextlib.contextmanager
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest_module, unfinished, verify_module):
            patch.setattr(module, "BLOCK_BYTES", BLOCK)
        yield


@pytest.fixture
def store(pristine: Store, tmp_path: Path):
    with small_blocks():
        yield open_store(shutil.copytree(pristine.folder, tmp_path / "store"))


def flip(path: Path, place: int, bit: int = 3) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


def opened(folder: Path, **fields: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=1.0, **fields))


def besides_quantization(path: Path) -> object:
    """Return a config.json without the quantization config; its bytes if it is no JSON or of another method."""
    try:
        table = json.loads(path.read_bytes())
        return table if table.pop("quantization_config")["quant_method"] == "mesh" else path.read_bytes()
    except (ValueError, KeyError, TypeError, AttributeError):
        return path.read_bytes()


def as_an_earlier_build_wrote_it(store: Store) -> Store:
    path = store.folder / MANIFEST_NAME
    table = json.loads(path.read_text())
    for file in table["other_files"]:
        del file["checksums"]
    table["digest"] = manifest_module._digest(table)
    path.write_text(json.dumps(table))
    return open_store(store.folder)


def test_an_undamaged_store_opens_without_warnings(store: Store) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_other_files(store, "first")
    opened(store.folder)


@pytest.mark.parametrize("earlier", [False, True])
def test_every_flipped_bit_is_found(store: Store, pristine: Store, rng: np.random.Generator, earlier: bool) -> None:
    if earlier:
        store = as_an_earlier_build_wrote_it(store)
    names = [file.name for file in store.manifest.other_files if file.name.endswith(".safetensors")] + ["config.json"]
    assert {*names} > {"config.json", DENSE}
    for _ in range(60):
        path = store.folder / names[rng.integers(len(names))]
        place, bit = int(rng.integers(path.stat().st_size)), int(rng.integers(8))
        flip(path, place, bit)
        if path.name == "config.json" and besides_quantization(path) == besides_quantization(
            pristine.folder / path.name
        ):
            check_other_files(store, "first")  # the user may change these fields, and MeshConfig checks them
            flip(path, place, bit)
            continue
        with pytest.raises(StoreError, match="was changed since the conversion") as caught:
            check_other_files(store, "first")
        assert caught.value.file == str(path)
        if not earlier and path.suffix == ".safetensors":
            begin, end = place // BLOCK * BLOCK, min(path.stat().st_size, (place // BLOCK + 1) * BLOCK)
            assert f"between bytes {begin} and {end}" in str(caught.value)
        flip(path, place, bit)
    check_other_files(store, "first")


@pytest.mark.parametrize("verify_mode", ["first", "always"])
def test_a_model_does_not_open_with_a_damaged_tensor(store: Store, rng: np.random.Generator, verify_mode: str) -> None:
    path = store.folder / DENSE
    flip(path, int(rng.integers(path.stat().st_size // 2, path.stat().st_size)))
    with pytest.raises(StoreError, match=rf"{DENSE}: was changed.*verify='never' the model opens as it is"):
        opened(store.folder, verify=verify_mode)
    opened(store.folder, verify="never")


def test_missing_truncated_and_reordered_files_are_found(store: Store) -> None:
    path = store.folder / DENSE
    whole = path.read_bytes()
    blocks = [whole[i : i + BLOCK] for i in range(0, len(whole), BLOCK)]
    assert len(blocks) > 4
    for content, message in (
        (whole[:-1], f"has {len(whole) - 1} bytes, not {len(whole)}"),
        (b"".join([blocks[0], blocks[2], blocks[1], *blocks[3:]]), f"between bytes {BLOCK} and {2 * BLOCK}"),
    ):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=message):
            check_other_files(store, "first")
    path.unlink()
    with pytest.raises(StoreError, match=f"{DENSE}: is missing"):
        check_other_files(store, "first")


@pytest.mark.parametrize("name", ["model.safetensors", "model.other.safetensors"])
def test_weights_that_are_not_the_stores_are_refused(store: Store, name: str) -> None:
    """transformers prefers the first to the store's index, and loads the second with ``variant="other"``."""
    path = store.folder / name
    save_file({"x": torch.zeros(3)}, path, metadata={"format": "pt"})
    variant = None if name == "model.safetensors" else "other"
    with pytest.raises(StoreError, match=f"{name}: is no file of this store") as caught:
        AutoModelForCausalLM.from_pretrained(
            store.folder, variant=variant, quantization_config=MeshConfig(resident=1.0)
        )
    assert caught.value.file == str(path)
    found = [str(damage) for damage in verify(store)]
    assert len(found) == (variant is None) and all(name in each for each in found)


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads(path.read_text())
    how(table)
    path.write_text(json.dumps(table))


def test_the_user_may_change_the_mesh_config_in_config_json(store: Store) -> None:
    change(store.folder / "config.json", lambda table: table["quantization_config"].update(policy="lru"))
    assert opened(store.folder).hf_quantizer.quantization_config.policy == "lru"
    change(store.folder / "config.json", lambda table: table.update(rms_norm_eps=0.5))
    with pytest.raises(StoreError, match=r"config\.json: .*changes of the config to from_pretrained"):
        opened(store.folder)


def test_the_user_may_change_a_nested_mesh_config_too(store: Store) -> None:
    """As in a model whose text model transformers can open separately."""
    path = store.folder / "config.json"
    table = json.loads(path.read_text())
    table["text_config"] = {"layers": 3, "quantization_config": dict(table["quantization_config"])}
    text = manifest_module.config_text(table)
    path.write_text(text)
    digest = verify_module.file_digest(path)
    checksum = manifest_module.block_checksum(store.manifest.store_id, "config.json", 0, text.encode())

    def rewrite(manifest: dict[str, Any]) -> None:
        for file in manifest["other_files"]:
            if file["name"] == "config.json":
                file.update(bytes=len(text), digest=digest, checksums=checksum)
        manifest["digest"] = manifest_module._digest(manifest)

    change(store.folder / MANIFEST_NAME, rewrite)
    store = open_store(store.folder)
    check_other_files(store, "first")
    change(path, lambda table: table["text_config"]["quantization_config"].update(policy="lru"))
    check_other_files(store, "first")
    change(path, lambda table: table["text_config"].update(layers=4))
    with pytest.raises(StoreError, match=r"config\.json"):
        check_other_files(store, "first")


def test_a_changed_tokenizer_warns_and_a_changed_readme_does_not(store: Store) -> None:
    (store.folder / "README.md").write_text("# Another")
    (store.folder / "generation_config.json").unlink()  # transformers does not fetch files that it does not need
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_other_files(store, "first")
    (store.folder / "tokenizer.json").write_text('{"model": []}')
    with pytest.warns(UserWarning, match=r"tokenizer\.json was changed since the conversion"):
        opened(store.folder)
    damaged = {os.path.basename(damage.file) for damage in verify(store)}
    assert damaged == {"README.md", "generation_config.json", "tokenizer.json"}


def test_further_chat_templates_are_copied(tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shutil.copytree(mesh_tiny, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "TOOL {{ messages[0].content }}"}
    tokenizer.save_pretrained(source)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unfinished.UnfinishedStore, "_write_manifest", interrupt)
        for weights in ("int4", "int8"):  # the second continues nothing
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "store", weights)
    store = convert(source, tmp_path / "store", "int8").store
    assert AutoTokenizer.from_pretrained(store.folder).chat_template == tokenizer.chat_template
    copied = {file.name: b"".join(file.chunks()) for file in rest_of_store(store).others}
    template = store.folder / "additional_chat_templates" / "tool_use.jinja"
    assert copied["additional_chat_templates/tool_use.jinja"] == template.read_bytes()
    assert list(verify(store)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_other_files(store, "first")
    template.write_text("another")
    with pytest.warns(UserWarning, match=r"additional_chat_templates/tool_use\.jinja (has|was changed)"):
        check_other_files(store, "first")
    (source / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert not (convert(source, tmp_path / "store", "int8", force=True).store.folder / template.parent.name).exists()


def test_a_file_with_a_name_that_the_system_refuses_warns(store: Store) -> None:
    name = "x" * 300 + ".json"  # such as from a file system with longer names

    def rename(manifest: dict[str, Any]) -> None:
        file = next(file for file in manifest["other_files"] if file["name"] == "generation_config.json")
        file["name"] = name
        manifest["digest"] = manifest_module._digest(manifest)

    change(store.folder / MANIFEST_NAME, rename)
    with pytest.warns(UserWarning, match="x.json cannot be read: File name too long"):
        check_other_files(open_store(store.folder), "first")


def test_every_damage_is_named_beside_unreadable_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = (store.folder / file.name for file in store.manifest.record_files)
    flip(second, second.stat().st_size - 1)
    (store.folder / "README.md").unlink()
    unreadable = {store.folder / DENSE, first}
    opened_path = Path.open

    def opening(path: Path, *arguments: Any, **named: Any) -> Any:
        if path in unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened_path(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", opening)
    found = {(Path(damage.file).name, damage.problem) for damage in verify(store)}
    error = "cannot be read: Input/output error"
    expected = {(DENSE, error), ("README.md", "is missing"), (first.name, error)}
    assert found == expected | {(second.name, "its checksum is another")}
    with pytest.raises(StoreError, match=f"{DENSE}: {error}"):
        check_other_files(store, "first")
    with pytest.raises(StoreError, match=f"layer 0, expert 0: {error}"):
        read_record(store, 0, 0)


@pytest.mark.parametrize(
    "checksums", [3, "", "0" * 15, "g" * 16, ["0" * 16], "0" * 16 + "  " + "0" * 16, " ".join(["0" * 16] * 999)]
)
def test_hostile_checksums_are_refused(store: Store, checksums: object) -> None:
    def rewrite(manifest: dict[str, Any]) -> None:
        file = next(file for file in manifest["other_files"] if file["name"] == DENSE)
        file["checksums"] = checksums
        manifest["digest"] = manifest_module._digest(manifest)

    change(store.folder / MANIFEST_NAME, rewrite)
    with pytest.raises(StoreError, match="checksums"):
        open_store(store.folder)
