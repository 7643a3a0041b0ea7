"""Concurrent writes: records by several threads, one other file at a time, and syncs of finished data."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_mesh.errors import StoreError
from torch_mesh.store import unfinished
from torch_mesh.store.manifest import Shape, Store
from torch_mesh.store.store_plan import NewFile, StorePlan
from torch_mesh.store.verify import verify
from torch_mesh.store.writer import write_store
from torch_mesh.system.background import Flag

EXPERTS = 8
_SHAPE = Shape(
    layers=1, experts=EXPERTS, top_k=1, hidden=64, intermediate=32, gated=True, bias=False, activation="silu"
)
_PLAN = StorePlan(_SHAPE, ("layers.0.experts",), "int8", 64, source_name="none", source_fingerprint="none")
PATIENCE = 60.0


def _record(expert: int) -> torch.Tensor:
    return torch.full((_PLAN.record_bytes,), expert, dtype=torch.uint8)


def _write(folder: Path, files: list[NewFile], **makers: Callable[[], torch.Tensor]) -> Store:
    def pack(layer: int, expert: int) -> torch.Tensor:
        return makers.get(f"expert_{expert}", partial(_record, expert))()

    return write_store(folder, _PLAN, pack, files, workers=3).store


def _file(name: str, chunk: bytes, count: int) -> NewFile:
    return NewFile(name, len(chunk) * count, lambda: [chunk] * count)


@pytest.mark.parametrize("failing", [2, EXPERTS])  # a sync in the middle, and the last one
def test_a_disk_that_fills_up_during_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    calls = 0

    def sync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(unfinished, "_SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(StoreError) as caught:
        _write(tmp_path / "store", [])
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not (tmp_path / "store").exists() and calls == failing
    assert list(verify(_write(tmp_path / "store", []))) == []


def test_a_record_that_is_refused_does_not_wait_for_a_file(tmp_path: Path) -> None:
    refused, taken = threading.Event(), 0

    def chunks() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(20):
            assert refused.wait(PATIENCE)
            taken += 1
            yield bytes(32 << 20)  # larger than a checksum block of a file

    def refuse() -> torch.Tensor:
        refused.set()
        raise StoreError("this one is not to be had")

    with pytest.raises(StoreError, match="not to be had"):
        _write(tmp_path / "store", [NewFile("large", 20 * (32 << 20), chunks)], expert_1=refuse)
    assert taken < 20


def test_files_are_written_one_at_a_time(tmp_path: Path) -> None:
    under_way, peak = 0, 0

    def chunks(name: str) -> Iterator[bytes]:
        nonlocal under_way, peak
        under_way += 1
        peak = max(peak, under_way)
        for _ in range(4):
            yield name.encode() * (1 << 18)
        under_way -= 1

    files = [NewFile(name, 1 << 20, partial(chunks, name)) for name in "abcdefghijkl"]  # more files than records
    store = _write(tmp_path / "store", files)
    assert peak == 1 and list(verify(store)) == []
    assert [(store.folder / name).read_bytes() for name in "al"] == [b"a" * (1 << 20), b"l" * (1 << 20)]


def test_finished_files_are_listed_once(tmp_path: Path) -> None:
    def refuse() -> torch.Tensor:
        raise StoreError("this one is not to be had")

    files = [_file("large", b"x" * (1 << 20), 3)]
    for _ in range(3):
        with pytest.raises(StoreError, match="not to be had"):
            _write(tmp_path / "store", files, expert_7=refuse)
    journal = (tmp_path / ".store.partial" / "journal.jsonl").read_text()
    assert journal.count('"large"') <= 1
    assert list(verify(_write(tmp_path / "store", files))) == []


def test_a_third_ctrl_c_leaves_no_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the wait for running packs. Their descriptors' numbers may be those of other files by then."""
    packing, released, ended = threading.Event(), threading.Event(), threading.Event()

    def pack(layer: int, expert: int) -> torch.Tensor:
        if expert == 0:
            packing.set()
            assert released.wait(PATIENCE)
        return _record(expert)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def progress(done: int, total: int) -> None:
        if done:
            assert packing.wait(PATIENCE)
            monkeypatch.setattr(Flag, "wait", interrupt)  # the second and third: both waits for the running pack
            interrupt()

    store = unfinished.UnfinishedStore(tmp_path / "store", _PLAN, 1 << 30)
    write_record = store._write_record

    def watched(*arguments: Any) -> tuple[int, int, int]:
        try:
            return write_record(*arguments)
        finally:
            if arguments[-1] == 0:
                ended.set()

    monkeypatch.setattr(store, "_write_record", watched)
    with pytest.raises(KeyboardInterrupt), contextlib.closing(store):
        store.run(pack, [], 2, progress, lambda: None, None, None)
    monkeypatch.undo()
    other = tmp_path / "other"
    other.write_bytes(b"")
    with other.open("r+b") as stream:
        numbers = [os.dup2(stream.fileno(), number) for number in store._descriptors]
        released.set()
        assert ended.wait(PATIENCE)
        for number in numbers:
            os.close(number)
    assert numbers and other.read_bytes() == b""
