"""Existing content at a store's destination: another store, links, other users' folders, a changing source."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import small_stores
import warm
from limited_processes import small_disk, without_privileges
from pairs import first_quick
from tiny_checkpoints import save_tiny

from torch_mesh.errors import StoreError
from torch_mesh.store import writer
from torch_mesh.store.convert import convert, convert_model
from torch_mesh.store.manifest import MANIFEST_NAME, open_store
from torch_mesh.store.verify import verify
from torch_mesh.system.atomic_files import exchange


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of some hundred KB."""
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_hidden_layers": 2, "vocab_size": 32}
    return save_tiny(tmp_path_factory.mktemp("raw") / "source", "qwen3_moe", **sizes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an int8 store, and the finished int4 store that is about to replace it."""
    folder = tmp_path_factory.mktemp("finished")
    small_stores.write(folder / "store", "int8")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "move_into_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        small_stores.write(folder / "store", "int4", force=True)
    return folder


def held(folder: Path) -> str:
    """Return the weight format of a store, after checking that it is complete."""
    store = open_store(folder)
    assert list(verify(store)) == []
    return store.manifest.weights


def tree(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def with_tests() -> dict[str, str]:
    """The environment of a process that imports what these tests import."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


# Forks a child for each line of its input, so that each can be killed without importing torch again. The child counts
# its file operations after the new store is written, and is killed right before the one with the given number.
KILLED = """
import os, signal, sys
import small_stores
from torch_mesh.store import folders, writer

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}

def kill_before(number, root):
    steps = 0
    def hook(event, arguments):
        nonlocal steps
        if event in EVENTS and isinstance(arguments[0], (str, bytes, os.PathLike)):
            if os.fsdecode(arguments[0]).startswith(root):
                steps += 1
                if steps == number:
                    os.kill(os.getpid(), signal.SIGKILL)
    move = writer.move_into_place
    def moving(*arguments):
        sys.addaudithook(hook)
        move(*arguments)
    writer.move_into_place = moving

for line in sys.stdin:
    number, can_exchange, folder = line.split()
    child = os.fork()
    if child == 0:
        kill_before(int(number), os.path.realpath(folder))
        if can_exchange == "no":
            folders.exchange = lambda *_: False
        small_stores.write(folder + "/store", "int4", force=True)
        os._exit(0)
    os.write(1, f"{os.waitpid(child, 0)[1]}\\n".encode())
"""


class KilledReplacements:
    """Replaces stores by finished ones, in another process."""

    def __init__(self) -> None:
        self._process = warm.start(KILLED)

    def run(self, number: int, can_exchange: bool, folder: Path) -> bool:
        """Return whether the replacement was killed before its end."""
        self._process.stdin.write(f"{number} {'yes' if can_exchange else 'no'} {folder}\n")
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.parametrize("can_exchange", first_quick(True, False))
def test_killed_at_each_step_a_replacement_is_one_store_or_the_other(
    tmp_path: Path, finished: Path, can_exchange: bool
) -> None:
    seen = set()
    with contextlib.closing(KilledReplacements()) as replacements:
        for number in range(1, 200):
            folder = tmp_path / str(number)
            shutil.copytree(finished, folder)
            killed = replacements.run(number, can_exchange, folder)
            weights = held(folder / "store") if can_exchange or (folder / "store").exists() else "absent"
            seen.add(weights)
            # If the new store is there already, looking at it is enough to clean up.
            small_stores.write(folder / "store", "int4", force=weights != "int4")
            assert held(folder / "store") == "int4"
            assert os.listdir(folder) == ["store"], f"killed at step {number}"
            assert not (folder / "store" / "journal.jsonl").exists()
            shutil.rmtree(folder)
            if not killed:
                break
    assert not killed and number > 5
    assert seen == ({"int8", "int4"} if can_exchange else {"int8", "absent", "int4"})


def test_exchange_is_one_step_or_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of-{name}").touch()
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["of-b"] and os.listdir(tmp_path / "b") == ["of-a"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "absent")
    assert os.listdir(tmp_path / "a") == ["of-b"]


def test_without_exchange_a_store_is_replaced_in_two_steps(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "folder")
    monkeypatch.setattr("torch_mesh.system.atomic_files.ctypes.get_errno", lambda: errno.EINVAL)
    monkeypatch.setattr(
        "torch_mesh.system.atomic_files._RENAME_EXCHANGE", 1 << 30
    )  # a flag that no file system supports
    small_stores.write(tmp_path / "folder" / "store", "int4", force=True)
    assert held(tmp_path / "folder" / "store") == "int4" and os.listdir(tmp_path / "folder") == ["store"]


def test_only_replaced_stores_are_cleaned_up(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "store", "int8")
    theirs = {
        ".store.replaced-0123abcd": "not a store",
        ".store.replaced-01234567": "a link",
        ".store.replaced-mine": "a store of another name",
        ".storehouse.replaced-01234567": "another store's",
    }
    for name in theirs:
        shutil.copytree(tmp_path / "store", tmp_path / name)
    (tmp_path / ".store.replaced-0123abcd" / MANIFEST_NAME).write_text("{}")
    shutil.move(tmp_path / ".store.replaced-01234567", tmp_path / "elsewhere")
    (tmp_path / ".store.replaced-01234567").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / ".store.replaced-76543210")
    convert(source, tmp_path / "store", "int8")
    assert tree(tmp_path) == before
    convert(source, tmp_path / "store", "int4", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "elsewhere", *theirs}


def test_a_users_journal_in_a_store_goes_only_with_the_store(tmp_path: Path) -> None:
    journal = small_stores.write(tmp_path / "store", "int8").folder / "journal.jsonl"
    journal.write_text('{"loss": 2.5}\n')
    small_stores.write(tmp_path / "store", "int8")
    assert journal.read_text() == '{"loss": 2.5}\n'
    small_stores.write(tmp_path / "store", "int4", force=True)
    assert held(tmp_path / "store") == "int4" and os.listdir(tmp_path) == ["store"] and not journal.exists()


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, source: Path) -> None:
    (tmp_path / "disk").mkdir()
    convert(source, tmp_path / "disk" / "store", "int8")
    (tmp_path / "link").symlink_to("disk/store")
    assert convert(source, tmp_path / "link", "int4", force=True).store.manifest.weights == "int4"
    assert os.readlink(tmp_path / "link") == "disk/store"
    assert held(tmp_path / "disk" / "store") == "int4"
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"] and os.listdir(tmp_path / "disk") == ["store"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("target", ["absent", "not/there/either", "link"])
def test_a_dangling_link_is_refused_before_converting(
    tmp_path: Path, source: Path, target: str, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.UnfinishedStore, "run", lambda *_: pytest.fail("it was converted"))
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(StoreError, match="is a link to .*, which does not exist"):
        convert(source, tmp_path / "link", "int4", force=force)
    assert os.listdir(tmp_path) == ["link"]


def test_a_mount_point_is_refused_before_converting(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.UnfinishedStore, "run", lambda *_: pytest.fail("it was converted"))
    with small_disk(tmp_path / "disk", 40 << 20) as disk:
        with pytest.raises(StoreError, match="name a folder in it"):
            convert(source, disk, "int4")
        assert list(disk.iterdir()) == [] and os.listdir(tmp_path) == ["disk"]
        monkeypatch.undo()
        store = small_stores.write(tmp_path / "elsewhere", "int4")
        shutil.copytree(store.folder, disk, dirs_exist_ok=True)
        assert small_stores.write(disk, "int4").manifest.store_id == store.manifest.store_id
        with pytest.raises(StoreError, match="name a folder in it"):
            small_stores.write(disk, "int8", force=True)
        assert held(disk) == "int4"


@pytest.mark.parametrize("kind", ["link", "folder", "file", "other-journal", "linked-journal", "other-manifest"])
def test_files_that_are_not_from_a_conversion_are_never_touched(tmp_path: Path, source: Path, kind: str) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("years of work")
    partial = tmp_path / ".store.partial"
    if kind == "link":
        partial.symlink_to("thesis")
    elif kind == "file":
        partial.write_text("years of work")
    else:
        shutil.copytree(thesis, partial)
    if kind == "other-journal":
        (partial / "journal.jsonl").write_text('{"day": 1}\n')
    elif kind == "linked-journal":
        (thesis / "theirs").write_text('{"plan":{"format_version":1}}\n')
        (partial / "journal.jsonl").symlink_to(thesis / "theirs")
    elif kind == "other-manifest":
        (partial / MANIFEST_NAME).write_text("{}")
    before = tree(tmp_path)
    for force in (False, True):
        with pytest.raises(StoreError, match=r"\.store\.partial: is in the way"):
            convert(source, tmp_path / "store", "int4", force=force)
    assert tree(tmp_path) == before


def test_a_link_or_a_folder_within_an_unfinished_store_is_not_followed(tmp_path: Path, source: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(source, tmp_path / "store", "int8")
    partial, names = tmp_path / ".store.partial", os.listdir(tmp_path / ".store.partial")
    for name in names:
        if name != "journal.jsonl":
            (tmp_path / f"of-others-{name}").write_text("years of work")
            (partial / name).unlink()
            (partial / name).symlink_to(tmp_path / f"of-others-{name}")
    (partial / "thesis").mkdir()
    with pytest.raises(StoreError, match="thesis: is in the way"):
        convert(source, tmp_path / "store", "int8")
    (partial / "thesis").rmdir()
    convert(source, tmp_path / "store", "int8")
    assert held(tmp_path / "store") == "int8"
    assert {path.read_text() for path in tmp_path.glob("of-others-*")} == {"years of work"}


@pytest.mark.parametrize("start", [None, b"", b'{"plan":{"for'])
def test_a_conversion_killed_at_its_very_beginning_continues(tmp_path: Path, source: Path, start: bytes | None) -> None:
    (tmp_path / ".store.partial").mkdir()
    if start is not None:
        (tmp_path / ".store.partial" / "journal.jsonl").write_bytes(start)
    convert(source, tmp_path / "store", "int8")
    assert held(tmp_path / "store") == "int8" and os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize(
    "line",
    [
        {"record": [99, 0], "checksum": "00"},
        {"record": [0, -1], "checksum": "00"},
        {"record": [0, 3], "checksum": "00"},
        {"record": [0.5, 0], "checksum": "00"},
        {"record": [[0], 0], "checksum": "00"},
        {"record": [0, 0], "checksum": "0" * 17},
        {"record": 3},
        {"name": ["notes.txt"], "bytes": 4, "digest": ""},
        {"name": "notes.txt", "bytes": "4", "digest": 3, "checksums": 3},
        [],
        3,
    ],
)
def test_invalid_lines_of_a_journal_are_ignored(tmp_path: Path, line: object) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        small_stores.write(tmp_path / "store", "int8")
    with (tmp_path / ".store.partial" / "journal.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    small_stores.write(tmp_path / "store", "int8")
    assert held(tmp_path / "store") == "int8"


@pytest.mark.parametrize("store_id", ["00", "0" * 34, "", 3])
def test_a_journal_with_an_invalid_store_id_is_not_continued(tmp_path: Path, store_id: object) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.UnfinishedStore, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        small_stores.write(tmp_path / "store", "int8")
    journal = tmp_path / ".store.partial" / "journal.jsonl"
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text(
        json.dumps(json.loads(first) | {"store_id": store_id}, separators=(",", ":")) + "\n" + "".join(rest)
    )
    small_stores.write(tmp_path / "store", "int8")
    assert held(tmp_path / "store") == "int8"


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / ".store.lock").symlink_to("absent")
    with pytest.raises(StoreError, match=r"cannot be written \(.*\.store\.lock"):
        convert(source, tmp_path / "store", "int8")
    assert os.listdir(tmp_path) == [".store.lock"]


def test_a_source_within_the_store_that_is_replaced_is_refused(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "store", "int8")
    shutil.copytree(source, tmp_path / "store" / "original")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="cannot replace its source"):
        convert(tmp_path / "store" / "original", tmp_path / "store", "int4", force=True)
    assert tree(tmp_path) == before


def _overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        stream.write(os.urandom(1000))


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    _overwrite(path.with_name("new"))
    os.replace(path.with_name("new"), path)


def _remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [_overwrite, _replace, _remove])
def test_a_source_that_changes_during_conversion_makes_no_store(tmp_path: Path, source: Path, change) -> None:
    shutil.copytree(source, tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    records: list[int] = []

    def progress(done: int, total: int) -> None:
        records.append(done)
        if done == total and weights.exists():
            os.utime(weights, ns=(0, 0))  # otherwise the change could have the timestamp of the original
            change(weights)

    with pytest.raises(StoreError, match="was changed while it was read"):
        convert(tmp_path / "source", tmp_path / "store", "int4", progress=progress)
    assert not (tmp_path / "store").exists()
    shutil.copy(source / "model.safetensors", weights)
    again = convert(tmp_path / "source", tmp_path / "store", "int4").store
    assert held(again.folder) == "int4"
    assert (again.manifest.checksums != convert(source, tmp_path / "other", "int4").store.manifest.checksums).all()


WRITE = """
import sys
import small_stores
small_stores.write(sys.argv[1] + "/store", "int4")
print("there already")
small_stores.write(sys.argv[1] + "/other", "int4")
"""


def test_a_store_in_a_read_only_folder_can_be_used(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    small_stores.write(sealed / "store", "int4")
    sealed.chmod(0o555)
    ended = without_privileges([sys.executable, "-c", WRITE, str(sealed)], with_tests())
    sealed.chmod(0o755)
    assert ended.stdout == "there already\n", ended.stderr
    assert ended.returncode and "other: cannot be written (Permission denied" in ended.stderr.splitlines()[-1]


def test_a_finished_store_is_not_waited_for(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "store", "int4")
    with writer.locked(tmp_path / ".store.lock"):
        assert convert(source, tmp_path / "store", "int4").existed


def test_an_impossible_destination_is_an_error(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written \(.*\. Choose another folder"):
        convert(source, tmp_path / "file" / "store", "int4")


def test_records_of_a_loaded_model_follow_a_link_too(tmp_path: Path, source: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    convert_model(AutoModelForCausalLM.from_pretrained(source), tmp_path / "link", "int8")
    assert held(tmp_path / "disk") == "int8" and (tmp_path / "link").is_symlink()
