"""The cache folder: leftovers of killed processes, and machines without a usable cache folder."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import stat
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import warm
from limited_processes import without_privileges
from tiny_checkpoints import tiny_model

import torch_mesh
from torch_mesh.config_fields import FIELDS
from torch_mesh.errors import MeshError, StoreError
from torch_mesh.store.disk_cache import cache_folder, unnamed_folder
from torch_mesh.system.atomic_files import locked, new_file, scratch_folder

PATCH = """
import os, signal, sys
import torch_mesh
from tiny_checkpoints import tiny_model
from torch_mesh.store import writer
writer.UnfinishedStore._write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
torch_mesh.patch(tiny_model("qwen3_moe"), resident=0.5)
"""


def with_tests(**variables: str) -> dict[str, str]:
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


@pytest.mark.thorough
def test_the_next_patch_removes_the_leftovers_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = warm.run(PATCH, env=with_tests(XDG_CACHE_HOME=str(tmp_path)))
    assert killed.returncode == -signal.SIGKILL
    (left,) = [path for path in (tmp_path / "torch_mesh").glob("unnamed-*") if path.is_dir()]
    assert any((left / ".experts.partial").glob("mesh-*.safetensors"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch_mesh.patch(tiny_model("qwen3_moe"), resident=0.5)
    assert list((tmp_path / "torch_mesh").iterdir()) == []


def _kill_before(number: int, parent: Path) -> int:
    """Make a scratch folder in a forked process that is killed right before its ``number``-th file operation."""
    child = os.fork()
    if child == 0:
        steps = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal steps
            if event in ("open", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                steps += 1
                if steps == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        with scratch_folder(parent, "unnamed-") as folder:
            (folder / "experts").mkdir()
            (folder / "experts" / "file").write_text("records")
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_scratch_folders_of_killed_processes_are_removed_later(tmp_path: Path) -> None:
    left = 0
    for number in range(1, 100):
        status = _kill_before(number, tmp_path)
        left += any(path.is_dir() for path in tmp_path.iterdir())
        with scratch_folder(tmp_path, "unnamed-") as folder:
            assert sorted(os.listdir(tmp_path)) == [folder.name, f"{folder.name}.lock"], f"killed at step {number}"
        assert os.listdir(tmp_path) == []
        if status == 0:
            break
    assert status == 0 and number > 5 and left > 2


def test_scratch_folders_in_use_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "unnamed-thesis").mkdir()  # without a lock file its owner may still be there
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "unnamed-link").symlink_to("elsewhere")
    (tmp_path / "unnamed-link.lock").touch()
    with scratch_folder(tmp_path, "unnamed-") as first:
        (first / "file").touch()
        with scratch_folder(tmp_path, "unnamed-"):
            assert (first / "file").exists()
            with (tmp_path / f"{first.name}.lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert {"unnamed-thesis", "elsewhere", "unnamed-link"} <= set(os.listdir(tmp_path))
    assert (tmp_path / "elsewhere" / "file").exists()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_scratch_folders(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder(tmp_path, "unnamed-") as first, scratch_folder(tmp_path, "unnamed-") as second:
        (first / "file").touch()
        assert sorted(os.listdir(tmp_path)) == sorted(
            [first.name, second.name]
        )  # without locks abandoned folders cannot be recognized
    assert os.listdir(tmp_path) == []


def test_a_scratch_folder_takes_another_name_if_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["swept", "free"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    with locked(tmp_path / "unnamed-swept.lock"), scratch_folder(tmp_path, "unnamed-") as folder:
        assert folder == tmp_path / "unnamed-free" and folder.is_dir()
    assert os.listdir(tmp_path) == []


NO_HOME = """
import os
import torch_mesh
from torch_mesh.store.disk_cache import unnamed_folder
from torch_mesh.cli import main
main(["doctor"])  # imports the modules that it needs, which the other user may not be allowed to read
os.chdir("/")  # nor may it read the metadata of packages, which a checkout as current folder would ask for
os.setuid(54321)
os.environ.pop("XDG_CACHE_HOME", None)
for home in (None, "/"):
    os.environ.pop("HOME", None)
    if home:
        os.environ["HOME"] = home
    assert main(["doctor"]) == 0
    try:
        unnamed_folder().__enter__()
    except torch_mesh.MeshError as error:
        print(f"HOME={home}: {error}")
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="to be an unknown user needs root")
def test_without_a_home_folder_an_error_names_the_variables_to_set() -> None:
    ended = without_privileges([sys.executable, "-c", NO_HOME])
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("HOME=")]
    assert lines[0].startswith("HOME=None: There is no home folder") and "set XDG_CACHE_HOME or HOME" in lines[0]
    assert lines[1].startswith("HOME=/: /.cache/torch_mesh: cannot be written (Permission denied: /.cache")
    assert "XDG_CACHE_HOME" in lines[1]


def test_a_tilde_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("store", "profile", "prefetch", "stats_file"):
        with pytest.raises(ValueError, match=f"{FIELDS[field].name}='~nobody-of-this-name/x': there is no home folder"):
            torch_mesh.MeshConfig.from_dict({field: "~nobody-of-this-name/x"})
        assert attrgetter(FIELDS[field].name)(torch_mesh.MeshConfig.from_dict({field: "./~x"})) == "./~x"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/torch_mesh")


def test_a_cache_that_cannot_be_made_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"file/torch_mesh: cannot be written \(Not a directory.*XDG_CACHE_HOME"):
        torch_mesh.patch(tiny_model("qwen3_moe", torch.bfloat16), resident=0.5)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(MeshError, match="There is no home folder.*set XDG_CACHE_HOME or HOME"), unnamed_folder():
        pass


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "profile.json").write_text("old")
    (tmp_path / "link.json").symlink_to("disk/profile.json")
    with new_file(tmp_path / "link.json", "w") as file:
        file.write("new")
    assert os.readlink(tmp_path / "link.json") == "disk/profile.json"
    assert (tmp_path / "disk" / "profile.json").read_text() == "new"
    assert os.listdir(tmp_path / "disk") == ["profile.json"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with new_file(pipe) as file:
            file.write(b"words")
        assert stat.S_ISFIFO(pipe.stat().st_mode) and os.read(reading, 64) == b"words"
    finally:
        os.close(reading)
    with pytest.raises(IsADirectoryError), new_file(tmp_path):
        pytest.fail("a folder takes no bytes")
    assert os.listdir(tmp_path) == ["pipe"]
