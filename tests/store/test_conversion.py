import contextlib
import errno
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import warm
from limited_processes import small_disk
from pairs import each_once_quick
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_checkpoints import save_tiny, tiny_model

from torch_mesh import _C
from torch_mesh.errors import MeshError, StoreError, UnsupportedModelError
from torch_mesh.formats import CALIBRATED_FORMATS
from torch_mesh.models.families import find_experts
from torch_mesh.store import writer
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert, convert_model, pack_expert
from torch_mesh.store.dense_weights import WITHOUT_TORCH_MESH, written
from torch_mesh.store.manifest import MANIFEST_NAME, Store, open_store
from torch_mesh.store.verify import verify

WEIGHTS = ("bf16", "int8", "int4", "lut4", "tcq3", "tcq2+tcq3", "tcq2")


def read_record(store: Store, layer: int, expert: int) -> bytes:
    file, offset = store.manifest.locate(layer, expert)
    with (store.folder / store.manifest.record_files[file].name).open("rb") as stream:
        stream.seek(offset)
        return stream.read(store.manifest.record_bytes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}."))


@pytest.mark.parametrize(("weights", "family"), each_once_quick(WEIGHTS, ["qwen3_moe", "gpt_oss", "nemotron_h"]))
def test_records_are_the_packed_experts_of_the_model(tmp_path: Path, family: str, weights: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "source")
    group_size = 32 if weights in CALIBRATED_FORMATS else None
    store = convert(tmp_path / "source", tmp_path / "store", weights, group_size).store
    manifest = store.manifest
    for number, layer in enumerate(find_experts(model)):
        for expert in range(layer.num_experts):
            record = read_record(store, number, expert)
            assert record == pack_expert(layer.expert(expert), weights, manifest.group_size).numpy().tobytes()
            checksum = _C.record_checksum(manifest.store_id, number, expert, record)
            assert checksum == int(manifest.checksums[number, expert])
            assert manifest.locate(number, expert)[1] % 4096 == 0
    assert list(verify(store)) == []
    assert leftovers(store.folder) == []


def test_store_is_a_complete_checkpoint_for_any_safetensors_tool(tmp_path: Path, mesh_tiny: Path) -> None:
    store = convert(mesh_tiny, tmp_path / "store", "int8", max_file_bytes=1 << 20).store
    source = load_file(mesh_tiny / "model.safetensors")
    weight_map = json.loads((store.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == {name for name in source if ".mlp.experts." not in name}
    for name, file in weight_map.items():
        with safe_open(store.folder / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), source[name])
    records = 0
    assert len(store.manifest.record_files) > 1
    for file in store.manifest.record_files:
        with safe_open(store.folder / file.name, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                module, _, expert = name.rpartition(".")
                tensor = opened.get_tensor(name)
                expected = read_record(store, store.manifest.modules.index(module), int(expert))
                assert tensor.dtype == torch.uint8 and tensor.numpy().tobytes() == expected
                records += 1
    assert records == 6 * 32
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (store.folder / name).read_bytes() == (mesh_tiny / name).read_bytes()
    config = json.loads((store.folder / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "mesh", "weights": "int8", "group_size": 64}
    assert config.pop("transformers_weights") == WITHOUT_TORCH_MESH
    assert config == json.loads((mesh_tiny / "config.json").read_text())


def test_a_file_whose_name_no_manifest_may_have_stays_behind(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    (source / "notes.txt").write_text("notes")
    (source / r"a\b.txt").write_text("of another system")
    store = convert(source, tmp_path / "store", "int8").store
    assert (store.folder / "notes.txt").is_file() and not list(store.folder.glob("a*"))
    assert convert(source, tmp_path / "store", "int8").existed
    copy = convert(source, tmp_path / "copy", "int8", force=True).store
    assert list(verify(copy)) == []


def test_a_file_called_like_the_journal_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    (source / "journal.jsonl").write_text('{"loss": 2.5}\n')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(source, tmp_path / "store", "int8")
    store = convert(source, tmp_path / "store", "int8").store
    assert not (store.folder / "journal.jsonl").exists() and list(verify(store)) == []


def test_source_arguments_describe_both_kinds(tmp_path: Path, mesh_tiny: Path) -> None:
    store = convert(mesh_tiny, tmp_path / "store", "int4", max_file_bytes=1 << 20).store
    raw = find_checkpoint_experts(mesh_tiny, meta_model(read_config(mesh_tiny)))
    _C.Source(**store.source_arguments())
    _C.Source(**raw.source_arguments())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rounding_to_bf16_is_warned_of_once(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny(tmp_path / "source", "qwen3_moe", dtype)
    with pytest.warns(UserWarning, match="rounded to bf16") as warned:
        convert(tmp_path / "source", tmp_path / "store", "bf16")
    assert len([w for w in warned if "rounded" in str(w.message)]) == 1


def test_a_loaded_model_becomes_a_store_of_records(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    store = convert_model(model, tmp_path / "store", "int8", 64).store
    layer = find_experts(model)[2]
    assert read_record(store, 2, 5) == pack_expert(layer.expert(5), "int8", 64).numpy().tobytes()
    assert not (store.folder / "config.json").exists()
    assert list(verify(store)) == []


def test_same_conversion_is_not_repeated(tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not convert(mesh_tiny, tmp_path / "store", "int8").existed
    before = contents(tmp_path / "store")
    monkeypatch.setattr(writer, "UnfinishedStore", lambda *_: pytest.fail("it was converted again"))
    assert convert(mesh_tiny, tmp_path / "store", "int8").existed
    assert contents(tmp_path / "store") == before


def test_another_conversion_needs_force(tmp_path: Path, mesh_tiny: Path) -> None:
    convert(mesh_tiny, tmp_path / "store", "int8")
    with pytest.raises(StoreError, match="remove this one"):
        convert(mesh_tiny, tmp_path / "store", "int4")
    assert open_store(tmp_path / "store").manifest.weights == "int8"
    assert convert(mesh_tiny, tmp_path / "store", "int4", force=True).store.manifest.weights == "int4"
    assert leftovers(tmp_path / "store") == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_store_is_never_replaced(tmp_path: Path, mesh_tiny: Path, force: bool) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="is not a store"):
        convert(mesh_tiny, tmp_path / "store", "int8", force=force)
    assert contents(tmp_path / "store") == {"thesis.tex": b"years of work"}


def test_the_source_is_never_replaced(tmp_path: Path, mesh_tiny: Path) -> None:
    shutil.copytree(mesh_tiny, tmp_path / "source")
    with pytest.raises(ValueError, match="cannot replace its source"):
        convert(tmp_path / "source", tmp_path / "source" / ".." / "source", "int8", force=True)


def test_a_model_of_the_hub_is_no_folder_in_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Exception) as caught:
        convert("owner/absent", "owner", "int8")
    assert "owner/absent" in str(caught.value) and "cannot replace" not in str(caught.value)


def test_a_store_is_not_converted_again(tmp_path: Path, mesh_tiny: Path) -> None:
    convert(mesh_tiny, tmp_path / "store", "int8")
    with pytest.raises(UnsupportedModelError, match="converted store already"):
        convert(tmp_path / "store", tmp_path / "again", "int4")


@pytest.mark.parametrize(("weights", "group_size", "allowed"), [("int3", 64, "'int4'"), ("int8", 48, "32, 64, 128")])
def test_unknown_formats_say_what_is_allowed(
    tmp_path: Path, mesh_tiny: Path, weights: str, group_size: int, allowed: str
) -> None:
    with pytest.raises(ValueError, match=allowed):
        convert(mesh_tiny, tmp_path / "store", weights, group_size)


def test_an_error_in_the_middle_leaves_a_resumable_state(
    tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[int, int]] = []
    fail_at = 60

    def pack(original, experts, layer, expert, weights, group_size):
        packed.append((layer, expert))
        if len(packed) == fail_at:
            raise KeyboardInterrupt
        return original(experts, layer, expert, weights, group_size)

    from torch_mesh.store import convert as module

    original = module.pack_from_checkpoint
    monkeypatch.setattr(module, "pack_from_checkpoint", functools.partial(pack, original))
    with pytest.raises(KeyboardInterrupt):
        convert(mesh_tiny, tmp_path / "store", "int8", workers=1)
    assert not (tmp_path / "store").exists()
    assert leftovers(tmp_path / "store") == [".store.partial"]
    first = set(packed)
    packed.clear()
    fail_at = 0
    store = convert(mesh_tiny, tmp_path / "store", "int8", workers=1).store
    assert len(set(packed) & first) <= 3, "finished records were packed again"
    assert list(verify(store)) == []


def test_a_damaged_partial_record_is_made_again(
    tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(mesh_tiny, tmp_path / "store", "int8")
    partial = tmp_path / ".store.partial"
    records = next(partial.glob("mesh-*.safetensors"))
    with records.open("r+b") as stream:  # as after a power failure, if the journal reached the disk before the data
        stream.seek(records.stat().st_size // 2)
        stream.write(bytes(100_000))
    dense = next(partial.glob("model-*.safetensors"))
    dense.write_bytes(dense.read_bytes()[:-1] + b"?")
    with (partial / "journal.jsonl").open("ab") as stream:
        stream.write(b'{"record":[5,')
    assert list(verify(convert(mesh_tiny, tmp_path / "store", "int8").store)) == []


def test_a_changed_source_does_not_resume(tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(mesh_tiny, tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "source", tmp_path / "store", "int8")
    os.utime(tmp_path / "source" / "model.safetensors")
    made: list[int] = []
    original = writer.UnfinishedStore._write_record
    monkeypatch.setattr(
        writer.UnfinishedStore, "_write_record", lambda self, *place: made.append(1) or original(self, *place)
    )
    convert(tmp_path / "source", tmp_path / "store", "int8")
    assert len(made) == 6 * 32


def test_two_conversions_at_once_write_one_store(tmp_path: Path, mesh_tiny: Path) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(convert(mesh_tiny, tmp_path / "store", "int8").existed))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True, True]
    assert leftovers(tmp_path / "store") == []


# Forks a child for each conversion, so that each can be killed without importing everything again. A line is a single
# write, which a kill cannot split.
CONVERTER = """
import os, sys
from torch_mesh.store.convert import convert

def say(what):
    os.write(1, f"{what}\\n".encode())

for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        say(os.getpid())
        convert(sys.argv[1], sys.argv[2], "int8", workers=1, max_file_bytes=100_000, progress=lambda *done: say(done))
        os._exit(0)
    os.waitpid(child, 0)
    say("ended")
"""


class KilledConversions:
    """Runs conversions in another process."""

    def __init__(self, source: Path, destination: Path) -> None:
        self._process = warm.start(CONVERTER, source, destination)

    def run(self, kill_at: int | None = None, delay: float = 0) -> int:
        """Kill a conversion ``delay`` seconds after line ``kill_at`` of its progress; return the number of lines."""
        self._process.stdin.write("\n")
        child = int(self._process.stdout.readline())
        lines = 0
        while (line := self._process.stdout.readline()) != "ended\n":
            assert line, "the converter died"
            lines += 1
            if lines == kill_at:
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):  # the conversion may have ended
                    os.kill(child, signal.SIGKILL)
        return lines

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_store_is_complete_or_absent(tmp_path: Path, kills: int, seed: int) -> None:
    random_moment = random.Random(seed)
    source, destination = save_tiny(tmp_path / "source", "qwen3_moe"), tmp_path / "store"
    reference = convert(source, tmp_path / "reference", "int8").store
    complete = 0
    with contextlib.closing(KilledConversions(source, destination)) as conversions:
        lines = conversions.run()
        shutil.rmtree(destination)
        for kill in range(kills):
            if kill % 4 == 0:  # otherwise it continues the killed one
                shutil.rmtree(tmp_path / ".store.partial", ignore_errors=True)
            # The first is killed at its first line, so at least one conversion is killed before its end.
            line = random_moment.randrange(1, lines + 1) if kill else 1
            conversions.run(line, random_moment.random() * 0.01 * (kill > 0))
            if destination.exists():
                assert list(verify(open_store(destination))) == []
                shutil.rmtree(destination)
                complete += 1
    assert complete < kills, "no conversion was killed before its end"
    store = convert(source, destination, "int8", max_file_bytes=100_000).store
    assert list(verify(store)) == []
    for layer, expert in store.records():
        assert read_record(store, layer, expert) == read_record(reference, layer, expert)
    assert leftovers(destination) == []


def test_killed_between_manifest_and_rename(tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writer, "move_into_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(mesh_tiny, tmp_path / "store", "int8")
    assert not (tmp_path / "store").exists()
    assert (tmp_path / ".store.partial" / MANIFEST_NAME).exists()
    assert list(verify(convert(mesh_tiny, tmp_path / "store", "int8").store)) == []
    assert leftovers(tmp_path / "store") == []


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path: Path, mesh_tiny: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        message = r"the disk has (\d+) MB free, but (\d+) MB of (\d+) MB are still to be written, with 17 MB to spare"
        with pytest.raises(StoreError, match=message) as caught:
            convert(mesh_tiny, disk / "store", "bf16")
        free, left, total = map(int, re.search(message, str(caught.value)).groups())
        assert free <= 5 and left == total, "nothing is written yet, and the reserve is no part of the store"
        assert list(disk.iterdir()) == []


def test_a_limit_on_file_sizes_leaves_a_resumable_state(tmp_path: Path, mesh_tiny: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StoreError, match="store.*ulimit -f.*another disk"):
            convert(mesh_tiny, tmp_path / "store", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(verify(convert(mesh_tiny, tmp_path / "store", "int8").store)) == []


def test_a_disk_that_fills_up_leaves_a_resumable_state(
    tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 40 << 20) as disk:
        monkeypatch.setattr(writer, "check_free_space", lambda *_: None)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(30 << 20))
        with pytest.raises(StoreError) as caught:
            convert(mesh_tiny, disk / "store", "bf16")
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        assert not (disk / "store").exists()
        ballast.unlink()
        assert list(verify(convert(mesh_tiny, disk / "store", "bf16").store)) == []
        assert [path.name for path in disk.iterdir()] == ["store"]


PEAK = """
import sys, threading
from torch_mesh.store.convert import convert
from torch_mesh.system.memory import anonymous_bytes
convert(sys.argv[1], sys.argv[2] + "-first", "int8", workers=2)  # what is allocated once, for whatever size
before, done = anonymous_bytes(), threading.Event()
peak = [before]
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())
threading.Thread(target=watch, daemon=True).start()
convert(sys.argv[1], sys.argv[2], "int8", workers=2)
done.set()
print(peak[0] - before)
"""


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("granitemoe", marks=pytest.mark.thorough)])  # fused
def test_memory_is_bounded_by_a_few_experts(tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    save_tiny(tmp_path / "source", family, **sizes, num_experts=24, num_local_experts=24)
    expert_bytes = 3 * 512 * 512 * 2
    done = warm.run(PEAK, tmp_path / "source", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    rise = int(done.stdout)
    assert rise < 20 * expert_bytes, f"{rise / expert_bytes:.1f} experts of 48"


@pytest.mark.parametrize("made", [torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.bfloat16)])
def test_a_tensor_that_is_not_as_announced_is_not_written(made: torch.Tensor) -> None:
    promised = written("norm.weight", torch.float32, (4, 3), lambda: made)
    with pytest.raises(MeshError, match=r"norm.weight is .* header has \(4, 3\), torch.float32"):
        promised.read()
