"""Models of the hub that are converted during the download, one weight file after the other."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError
from loopback_hub import MODEL, LoopbackHub, loopback_hub
from quantized import KINDS, write_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_model
from transformers.core_model_loading import dot_natural_key

import torch_mesh
from torch_mesh import HubError, StoreError
from torch_mesh.cli import main
from torch_mesh.store import gguf as gguf_module
from torch_mesh.store import hub as hub_module
from torch_mesh.store import journal
from torch_mesh.store.convert import convert, streamed_bytes
from torch_mesh.store.hub import HEADER_BYTES, outline_folder
from torch_mesh.store.manifest import MANIFEST_NAME, open_store
from torch_mesh.store.verify import verify

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 3}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LoopbackHub]]:
    # The client would sleep for a second before it continues a broken connection.
    fast = types.SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.file_download.time", fast)
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        yield hub


@pytest.fixture
def source(tmp_path: Path, hub: type[LoopbackHub]) -> Path:
    """A checkpoint whose files split layers and experts. The hub has it too."""
    folder = tmp_path / "source"
    tiny_model("qwen3_moe", **SIZES).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # Expert by expert, as in most checkpoints.
    names = sorted(tensors, key=dot_natural_key)
    ends = itertools.accumulate(tensors[name].nbytes for name in names)
    divide(folder, {name: end // 500_000 for name, end in zip(names, ends, strict=True)}.__getitem__)
    (folder / "README.md").write_text("a model")
    serve(hub, folder)
    return folder


def serve(hub: type[LoopbackHub], folder: Path) -> None:
    hub.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def shards(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(found) > 3
    return found


def sent_shards(hub: type[LoopbackHub]) -> Counter[str]:
    """Return the bytes of weight files sent since the last call, without the headers that are read first."""
    headers = {name: min(len(data), HEADER_BYTES) for name, data in hub.files.items() if name.endswith(".safetensors")}
    found = Counter({name: hub.sent[name] - size for name, size in headers.items() if hub.sent[name] > size})
    hub.sent.clear()
    return found


def assert_equal_stores(one: Path, other: Path) -> None:
    """Compare stores byte by byte, without the sources' name and identity in the manifests."""
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in one.iterdir():
        if path.name != MANIFEST_NAME:
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name
    tables = [json.loads((folder / MANIFEST_NAME).read_text()) for folder in (one, other)]
    for table in tables:
        del table["source_name"], table["source_fingerprint"], table["digest"]
    assert tables[0] == tables[1]


@pytest.fixture
def one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all stores the same id, since it is part of every checksum."""
    monkeypatch.setattr(journal.secrets, "token_bytes", bytes)


def others(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}."))


def test_further_chat_templates_are_fetched(tmp_path: Path, hub: type[LoopbackHub], source: Path) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    hub.files |= {name: b"a template", "original/notes.json": b"{}"}
    folder = convert(MODEL, tmp_path / "store", "int4").store.folder
    assert (folder / name).read_bytes() == b"a template" and not (folder / "original").exists()


@pytest.mark.usefixtures("one_id")
@pytest.mark.parametrize("keep_original", [False, True])
def test_broken_connections_give_the_store_of_the_local_folder(
    tmp_path: Path, hub: type[LoopbackHub], source: Path, keep_original: bool
) -> None:
    convert(source, tmp_path / "expected", "int4")
    hub.breaks_after = 200_000
    for path in (tmp_path / "cache", tmp_path / "streamed"):
        assert not path.exists()
    written = torch_mesh.convert(MODEL, tmp_path / "streamed", "int4", keep_original=keep_original)
    assert written.store.manifest.source_name == MODEL
    assert_equal_stores(tmp_path / "expected", tmp_path / "streamed")
    assert others(tmp_path / "streamed") == []
    kept = [path.name for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert sorted(kept) == (shards(source) if keep_original else [])
    for name, count in sent_shards(hub).items():
        assert count <= 1.5 * len(hub.files[name]), "each try has to continue the one before"
    hub.sent.clear()
    assert torch_mesh.convert(MODEL, tmp_path / "streamed", "int4").existed
    assert not sent_shards(hub)


@pytest.mark.usefixtures("one_id")
@pytest.mark.parametrize("method", ["fp8", "gptq", "bnb_nf4"])
def test_quantized_checkpoints_give_the_store_of_the_local_folder(
    tmp_path: Path, hub: type[LoopbackHub], method: str
) -> None:
    write_quantized(tmp_path / "source", KINDS[method]())
    divide(tmp_path / "source", lambda name: sum(name.encode()) % 3)
    serve(hub, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "expected", "int8")
    convert(MODEL, tmp_path / "streamed", "int8")
    assert_equal_stores(tmp_path / "expected", tmp_path / "streamed")


@pytest.fixture
def gguf_source(tmp_path: Path, hub: type[LoopbackHub], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF model whose files split layers, with a tensor that the config depends on, and small headers."""
    pytest.importorskip("gguf")
    import gguf_files

    monkeypatch.setattr(hub_module, "_RANGE_BYTES", 1 << 14)
    monkeypatch.setattr(gguf_module, "_CHUNK_BYTES", 1 << 12)
    (tmp_path / "source").mkdir()
    divisors = {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}
    sizes = {"num_local_experts": 8, "intermediate_size": 1024, "num_hidden_layers": 4}
    made = gguf_files.write(
        tmp_path / "source" / "m.gguf", "llama", {"_exps": "Q8_0", "attn": "Q8_0"}, parts=12, extra=divisors, **sizes
    )
    serve(hub, tmp_path / "source")
    assert len(hub.files) > 8
    return made.path


@pytest.mark.usefixtures("one_id")
@pytest.mark.parametrize(("keep_original", "folder"), [(False, ""), (False, "UD-Q8/"), (True, "UD-Q8/")])
def test_gguf_files_give_the_store_of_the_local_file(
    tmp_path: Path, hub: type[LoopbackHub], gguf_source: Path, keep_original: bool, folder: str
) -> None:
    convert(gguf_source, tmp_path / "expected", "auto")
    hub.files = {f"{folder}{name}": data for name, data in hub.files.items()}
    name = f"{MODEL}/{folder}{gguf_source.name}"
    hub.breaks_after = 200_000
    peak = Peak(hub, tmp_path / "streamed")
    written = convert(name, tmp_path / "streamed", "auto", keep_original=keep_original)
    assert written.store.manifest.source_name == name
    assert_equal_stores(tmp_path / "expected", tmp_path / "streamed")
    assert list(verify(written.store)) == [] and others(tmp_path / "streamed") == []
    files = {name: len(data) for name, data in hub.files.items()}
    kept = [f"{folder}{path.name}" for path in (tmp_path / "cache").rglob("*.gguf")]
    assert sorted(kept) == (sorted(files) if keep_original else [])
    for file, size in files.items():
        assert hub.sent[file] <= 2 * size, "each try has to continue the one before"
    if not keep_original:
        assert 0.5 * max(files.values()) < peak.weights < 1.8 * max(files.values()) < 0.7 * sum(files.values())
    hub.sent.clear()
    assert convert(name, tmp_path / "streamed", "auto").existed
    assert hub.sent.total() < sum(files.values()) / 4  # headers only


def test_missing_and_damaged_parts_of_a_gguf_file_on_the_hub(
    tmp_path: Path, hub: type[LoopbackHub], gguf_source: Path
) -> None:
    name = f"{MODEL}/{gguf_source.name}"
    third = sorted(hub.files)[2]
    hub.damaged = {third}
    with pytest.raises(HubError, match=f"{third} has the hash .* run the same command again"):
        convert(name, tmp_path / "store", "auto")
    hub.damaged = set()
    assert list(verify(convert(name, tmp_path / "store", "auto").store)) == []
    data = hub.files.pop(third)
    with pytest.raises(HubError, match=f"lacks {third}, part of the named file"):
        convert(name, tmp_path / "other", "auto")
    hub.files[third] = data[: len(data) // 2]
    with pytest.raises(StoreError, match="truncated"):
        convert(name, tmp_path / "other", "auto")
    with pytest.raises(StoreError, match=r"is part 2 of \d+ of a model: name the first"):
        convert(f"{MODEL}/{sorted(hub.files)[1]}", tmp_path / "other", "auto")
    assert others(tmp_path / "other") == [] and not (tmp_path / "other").exists()


def divide(folder: Path, file_of: Callable[[str], int]) -> None:
    """Divide the weights of a checkpoint among files by their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{file_of(name):02d}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def blocks(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


class Peak:
    """The peak disk usage besides the destination while the hub sends: of all files, and of weight files."""

    def __init__(self, hub: type[LoopbackHub], destination: Path) -> None:
        self.all = self.weights = 0
        self._destination = destination
        hub.on_chunk = self.look  # type: ignore[method-assign]

    def look(self, _: str) -> None:
        parts = [self._destination.with_name(f".{self._destination.name}.{kind}") for kind in ("partial", "download")]
        found = [blocks(part) if part.exists() else 0 for part in parts]
        self.all, self.weights = max(self.all, sum(found)), max(self.weights, found[1])


def test_the_disk_holds_one_weight_file_and_the_experts_it_divides(
    tmp_path: Path, hub: type[LoopbackHub], source: Path
) -> None:
    peak = Peak(hub, tmp_path / "store")
    written = convert(MODEL, tmp_path / "store", "int8")
    files = [(source / name).stat().st_size for name in shards(source)]
    with outline_folder(MODEL) as (outline, _):
        store, beside = streamed_bytes(outline, "int8")
    assert store == pytest.approx(sum(path.stat().st_size for path in (tmp_path / "store").iterdir()), rel=0.1)
    expert = 3 * 128 * 128 * 2
    small = 300_000  # config, the headers' blocks, and the client's metadata
    assert max(files) < beside <= max(files) + 2 * expert
    assert 0.5 * max(files) < peak.weights <= beside + small < sum(files) / 2
    assert peak.all <= store + beside + small
    assert list(verify(written.store)) == []


def test_files_in_an_unfortunate_order_are_kept_in_part(
    tmp_path: Path, hub: type[LoopbackHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    tiny_model("qwen3_moe", **SIZES).save_pretrained(source)
    divide(source, lambda name: 0 if "gate_proj" in name else 1 if "up_proj" in name else 2)
    serve(hub, source)
    peak = Peak(hub, tmp_path / "store")
    written = convert(MODEL, tmp_path / "store", "int8")
    assert list(verify(written.store)) == []
    stacks = 3 * 12 * 128 * 128 * 2
    with outline_folder(MODEL) as (outline, _):
        beside = streamed_bytes(outline, "int8")[1]
    assert 3 * stacks <= beside <= 3.5 * stacks
    assert peak.weights <= beside + 300_000


@pytest.mark.usefixtures("one_id")
def test_weights_without_room_in_bf12_are_fetched_again(tmp_path: Path, hub: type[LoopbackHub], source: Path) -> None:
    last = source / shards(source)[-1]
    tensors = load_file(last)
    name = next(name for name in tensors if ".experts." in name)
    tensors[name] *= 2.0 ** torch.randint(-90, 90, tensors[name].shape)
    save_file(tensors, last, {"format": "pt"})
    serve(hub, source)
    convert(source, tmp_path / "expected", "bf16")
    with pytest.warns(UserWarning, match=f"{name.partition('.experts.')[0]}.experts, expert .* a store in bf16"):
        convert(MODEL, tmp_path / "streamed", "auto")
    assert_equal_stores(tmp_path / "expected", tmp_path / "streamed")
    assert others(tmp_path / "streamed") == []


KILLED = """
import os, sys
from torch_mesh.store.convert import convert
convert(sys.argv[1], sys.argv[2], "int8")
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("one_id")
def test_a_killed_conversion_continues_with_the_file_it_was_at(
    tmp_path: Path, hub: type[LoopbackHub], source: Path
) -> None:
    convert(source, tmp_path / "expected", "int8")
    names = shards(source)
    process: list[subprocess.Popen[bytes]] = []

    def kill(name: str) -> None:
        # The header was sent before, so this is the request for the whole file.
        if name == names[-2] and hub.sent[name] > len(hub.files[name]):
            process[0].send_signal(signal.SIGKILL)

    hub.on_chunk = kill  # type: ignore[method-assign]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", KILLED, MODEL, str(tmp_path / "store")]
    process.append(subprocess.Popen(command, env=environment))
    assert process[0].wait(60) == -signal.SIGKILL
    hub.on_chunk = lambda _: None  # type: ignore[method-assign]
    assert {".store.download", ".store.partial"} <= set(others(tmp_path / "store"))
    hub.sent.clear()
    convert(MODEL, tmp_path / "store", "int8")
    again = sent_shards(hub)
    # Perhaps also the file before, if one of its experts was incomplete.
    assert {names[-2], names[-1]} <= set(again) <= set(names[-3:])
    assert list(verify(open_store(tmp_path / "store"))) == []
    assert others(tmp_path / "store") == []


def test_a_file_with_another_hash_is_refused_and_fetched_again(
    tmp_path: Path, hub: type[LoopbackHub], source: Path
) -> None:
    bad = shards(source)[2]
    hub.damaged = {bad}
    with pytest.raises(HubError, match=bad):
        convert(MODEL, tmp_path / "store", "int8")
    assert not (tmp_path / "store").exists()
    hub.damaged = set()
    hub.sent.clear()
    written = convert(MODEL, tmp_path / "store", "int8")
    assert list(verify(written.store)) == []
    assert set(sent_shards(hub)) <= set(shards(source)[1:])


def test_cached_files_are_used_and_kept(tmp_path: Path, hub: type[LoopbackHub], source: Path) -> None:
    first, second = shards(source)[:2]
    cached = [Path(hf_hub_download(MODEL, name)) for name in (first, second)]
    hub.sent.clear()
    assert list(verify(convert(MODEL, tmp_path / "store", "int8").store)) == []
    assert not hub.sent.keys() & {first, second}
    assert all(path.is_file() for path in cached)
    cached[0].resolve().write_bytes(bytes(8))
    with pytest.raises((HubError, StoreError), match=first):
        convert(MODEL, tmp_path / "other", "int8")
    data = hub.files[second]
    cached[0].resolve().write_bytes(hub.files[first])
    cached[1].resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(HubError, match=f"damaged file: remove {cached[1].resolve()}"):
        convert(MODEL, tmp_path / "other", "int8")


def test_files_that_cannot_be_fetched_are_errors_with_a_reason(
    tmp_path: Path, hub: type[LoopbackHub], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = shards(source)[1]
    data = hub.files.pop(missing)
    with pytest.raises(HubError, match=missing):
        convert(MODEL, tmp_path / "store", "int8")
    index = hub.files.pop(INDEX)
    with pytest.raises(HubError, match=f"neither model.safetensors nor {INDEX}"):
        convert(MODEL, tmp_path / "store", "int8")
    hub.files |= {missing: data, INDEX: index}
    hub.gated = True
    with pytest.raises(HubError, match=f"is gated: ask for access at {hub.url}/{MODEL}"):
        convert(MODEL, tmp_path / "store", "int8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        convert(MODEL, tmp_path / "store", "int8")
    assert others(tmp_path / "store") == []


def test_a_full_disk_keeps_what_is_written(
    tmp_path: Path, hub: type[LoopbackHub], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = shards(source)[-1]

    full_at = "config.json"

    def full(model: str, name: str, **options: object) -> str:
        if name == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return hf_hub_download(model, name, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", full)
        with pytest.raises(OSError, match="choose as destination a folder on another disk"):
            convert(MODEL, tmp_path / "store", "int8")
        full_at = last
        with pytest.raises(StoreError, match="the disk is full. What is finished stays"):
            convert(MODEL, tmp_path / "store", "int8")
    hub.sent.clear()
    convert(MODEL, tmp_path / "store", "int8")
    assert set(sent_shards(hub)) <= set(shards(source)[-2:])


def test_a_connection_that_is_reset_is_tried_again(
    tmp_path: Path, hub: type[LoopbackHub], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = sys.modules[HTTPError.__module__.partition(".")[0]]
    failures = iter([http.ReadError("reset"), http.ReadError("reset")])

    def reset(model: str, name: str, **options: object) -> str:
        if name == shards(source)[1] and (failure := next(failures, None)):
            raise failure
        return hf_hub_download(model, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", reset)
    assert list(verify(convert(MODEL, tmp_path / "store", "int8").store)) == []
    assert next(failures, None) is None
    failures = itertools.repeat(http.ReadError("reset"))
    with pytest.raises(HubError, match="check the network"):
        convert(MODEL, tmp_path / "other", "int8")


def test_options_of_the_hub_are_refused_for_local_folders(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="keep_original is for models of the hub"):
        convert(source, tmp_path / "store", "int8", keep_original=True)


def test_an_unrelated_folder_in_the_place_of_the_download_stays(
    tmp_path: Path, hub: type[LoopbackHub], source: Path
) -> None:
    (tmp_path / ".store.download").mkdir()
    (tmp_path / ".store.download" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="is in the way of a download"):
        convert(MODEL, tmp_path / "store", "int8")
    assert (tmp_path / ".store.download" / "thesis.tex").read_text() == "years of work"


@pytest.mark.usefixtures("source")
def test_the_command_line_streams_and_plan_states_the_disk_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planning = ["plan", MODEL, "--weights", "int8", "--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
    assert main([*planning, "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["conversion_disk"]
    assert main(planning) == 0
    assert "of weight files beside it" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", MODEL, str(tmp_path / "store"), "--weights", "int8"]) == 0
    assert "now holds 3 x 12 experts" in capsys.readouterr().out
    written = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert disk["store_bytes"] == pytest.approx(written, rel=0.1)
    assert main([*planning, "--json"]) == 0
    assert main(["plan", str(tmp_path / "store"), *planning[4:], "--json"]) == 0
    assert "conversion_disk" not in json.loads(capsys.readouterr().out.splitlines()[-1])
