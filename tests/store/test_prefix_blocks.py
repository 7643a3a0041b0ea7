"""Files of tensors that may be removed at any time: reads return what was written, or nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from limited_processes import small_disk

from torch_mesh.store.prefix_blocks import PrefixBlocks

PLENTY = 1 << 30
WRITE = """
import sys, torch
from pathlib import Path
from torch_mesh.store.prefix_blocks import PrefixBlocks
blocks = PrefixBlocks(Path(sys.argv[1]), 1 << 40)
for number in range(10**6):
    blocks.write(f"{number}", {"x": torch.full((1 << 18,), number)})
    print(number, flush=True)
"""


@pytest.fixture
def blocks(tmp_path: Path) -> PrefixBlocks:
    return PrefixBlocks(tmp_path / "model", PLENTY)


def _some(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    shape = rng.integers(1, 7, 3).tolist()
    return {
        "0.keys": torch.randn(1, 2, 9, 16).bfloat16()[..., 3:7, :],  # a view
        "0.values": torch.randn(shape),
        "3.conv_states.0": torch.randn(5, dtype=torch.float16),
        "bytes": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "none": torch.empty(0, 4),
    }


def _same(read: object, written: dict[str, torch.Tensor]) -> bool:
    assert isinstance(read, tuple)
    tensors: dict[str, torch.Tensor] = read[0]
    return list(tensors) == list(written) and all(
        tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in written.items()
    )


def test_tensors_read_back_as_written(blocks: PrefixBlocks, rng: np.random.Generator) -> None:
    assert not blocks.has("a") and blocks.read("a") is None
    written = _some(rng)
    nbytes = blocks.write("a", written)
    assert blocks.has("a") and _same(blocks.read("a"), written)
    assert nbytes == (blocks.folder / "a").stat().st_size
    assert blocks.folder.stat().st_mode & 0o777 == 0o700  # prompts can be guessed from keys


@pytest.mark.parametrize("damage", ["byte", "short", "long", "empty", "zeros", "renamed", "moved"])
def test_damaged_and_foreign_files_read_as_none_and_are_removed(
    blocks: PrefixBlocks, damage: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    for turn in range(20):
        written = _some(rng)
        blocks.write("a", written)
        path = blocks.folder / "a"
        data = bytearray(path.read_bytes())
        at = int(rng.integers(len(data)))
        if damage == "byte":
            data[at] ^= int(rng.integers(1, 256))
        elif damage == "short":
            del data[at:]
        elif damage == "long":
            data += bytes(at + 1)
        elif damage == "empty":
            data.clear()
        elif damage == "zeros":
            data = bytearray(len(data))
        name = "b" if damage == "renamed" else "a"
        if damage == "moved":
            blocks = PrefixBlocks(tmp_path / f"other-{turn}", PLENTY)
            blocks.folder.mkdir(exist_ok=True)
        (blocks.folder / name).write_bytes(data)
        assert blocks.read(name) is None
        assert not blocks.has(name) and not (blocks.folder / name).exists()
        blocks.write(name, written)
        assert _same(blocks.read(name), written)


def test_the_limit_holds_for_all_models_and_evicts_the_least_recently_used(tmp_path: Path) -> None:
    one = {"x": torch.zeros(1000, dtype=torch.uint8)}
    size = PrefixBlocks(tmp_path / "probe" / "model", PLENTY).write("a", one)
    limit = 10 * size
    folder = tmp_path / "prefixes"
    first, second = (PrefixBlocks(folder / name, limit) for name in ("first", "second"))
    for number in range(6):
        assert first.write(f"{number}", one) == size
        first.touch([f"{number}"])
    first.touch(["0"])
    for number in range(30):
        assert second.write(f"{number}", one) == size
        assert sum(path.stat().st_size for path in folder.glob("*/*")) <= limit
        second.touch([f"{number}"])
        if number == 4:
            assert first.has("0") and not first.has("1")
    assert not first.has("0") and second.has("29") and not second.has("0")
    assert second.write("large", {"x": torch.zeros(limit, dtype=torch.uint8)}) == 0
    assert second.has("29")


def test_two_processes_that_start_with_an_empty_folder_exceed_the_limit_by_a_tenth_at_most(tmp_path: Path) -> None:
    one = {"x": torch.zeros(1000, dtype=torch.uint8)}
    size = PrefixBlocks(tmp_path / "probe" / "model", PLENTY).write("a", one)
    limit = 40 * size
    folder = tmp_path / "prefixes"
    both = [PrefixBlocks(folder / name, limit) for name in ("first", "second")]
    held = []
    for number in range(100):
        for blocks in both:
            assert blocks.write(f"{number}", one) == size
            held.append(sum(path.stat().st_size for path in folder.glob("*/*")))
    assert 0.8 * limit < held[-1] and max(held) <= 1.1 * limit


def test_the_first_blocks_of_a_chain_are_evicted_last(tmp_path: Path) -> None:
    one = {"x": torch.zeros(1000, dtype=torch.uint8)}
    blocks = PrefixBlocks(tmp_path / "prefixes" / "model", PLENTY)
    size = 0
    for number in range(8):
        size = blocks.write(f"{number}", one)
    blocks.touch([f"{number}" for number in range(8)])
    small = PrefixBlocks(blocks.folder, 8 * size)
    small.write("new", one)
    left = [number for number in range(8) if small.has(f"{number}")]
    assert left == list(range(len(left))) and 0 < len(left) < 8


def test_finished_blocks_of_a_killed_writer_are_readable(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes" / "model"
    with warm.start(WRITE, folder) as writing:
        for _ in range(3):
            writing.stdout.readline()
        writing.kill()
    assert writing.returncode == -signal.SIGKILL
    blocks = PrefixBlocks(folder, PLENTY)
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    assert len(names) >= 3
    for name in names:
        assert _same(blocks.read(name), {"x": torch.full((1 << 18,), int(name))})


def test_partial_files_of_a_killed_writer_are_removed_later(blocks: PrefixBlocks) -> None:
    blocks.folder.mkdir()
    old, new = blocks.folder / ".a.00112233", blocks.folder / ".b.00112233"
    for path in (old, new):
        path.write_bytes(bytes(1000))
    os.utime(old, (time.time() - 3600,) * 2)
    blocks.write("c", {"x": torch.zeros(3)})
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("when", ["written", "read"])
def test_a_removed_folder_is_created_again(blocks: PrefixBlocks, when: str) -> None:
    blocks.write("a", {"x": torch.zeros(3)})
    (blocks.folder / "a").unlink()
    blocks.folder.rmdir()
    if when == "read":
        assert blocks.read("a") is None
        blocks.touch(["a"])
    assert blocks.write("b", {"x": torch.zeros(3)})
    assert blocks.has("b")


def test_a_full_disk_raises_and_leaves_the_rest(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        blocks = PrefixBlocks(disk / "model", PLENTY)
        blocks.write("a", {"x": torch.zeros(1 << 18)})
        with pytest.raises(OSError, match="No space"):
            blocks.write("b", {"x": torch.zeros(1 << 20)})
        assert not blocks.has("b") and [path.name for path in blocks.folder.iterdir()] == ["a"]
        assert blocks.read("a") is not None
        (blocks.folder / "a").unlink()
        assert blocks.write("c", {"x": torch.zeros(1 << 18)})
