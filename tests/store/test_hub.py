"""What a model of the hub cannot be had for: each cause has its own class and words, and says what to do."""

from __future__ import annotations

import errno
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors

from torch_mesh import HubError
from torch_mesh.cli import main
from torch_mesh.store.hub import local_folder, outline_folder

HTTP: Any = sys.modules[errors.HTTPError.__module__.partition(".")[0]]  # httpx, under the name that this release has
MODEL = "some/model"


def answer(status: int) -> Any:
    return HTTP.Response(status, request=HTTP.Request("GET", f"https://huggingface.co/{MODEL}"))


def local(*causes: BaseException) -> BaseException:
    """What the hub's library raises where it has tried in vain, and nothing of the model is in its cache."""
    chain = (errors.LocalEntryNotFoundError("not in the cache"), *causes)
    for above, below in itertools.pairwise(chain):
        above.__cause__ = below
    return chain[0]


def outline(model: str) -> Path:
    with outline_folder(model) as (folder, _):
        return folder


FETCHING = pytest.mark.parametrize("fetch", [local_folder, outline])
Fetch = Callable[[str], Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes every request and write end with an error. There is nothing in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def fail_with(error: BaseException) -> None:
        def failing(*_: object, local_files_only: bool = False, **__: object) -> None:
            raise local() if local_files_only else error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
        monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", failing)

    return fail_with


@FETCHING
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some room"),
        (errno.EDQUOT, "free some room"),
        (errno.EACCES, "let this user"),
        (errno.EROFS, "let this user"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EIO, "dmesg"),
    ],
)
def test_what_the_disk_or_the_system_refuses_keeps_its_class(
    hub: Callable[[BaseException], None], tmp_path: Path, fetch: Fetch, number: int, advice: str
) -> None:
    # The library may wrap it, as its HTTP client does where no socket can be opened.
    for error in (OSError(number, "refused", str(tmp_path / "x")), local(HTTP.ConnectError("x"), OSError(number, "x"))):
        hub(error)
        with pytest.raises(OSError, match=advice) as caught:
            fetch(MODEL)
        assert type(caught.value) is type(OSError(number, "")) and caught.value.errno == number
        assert caught.value.filename and "no such folder" not in str(caught.value)


@pytest.mark.parametrize(("fetch", "variable"), [(local_folder, "HF_HOME"), (outline, "TMPDIR")])
def test_a_full_disk_names_the_variable_that_moves_the_files(
    hub: Callable[[BaseException], None], fetch: Fetch, variable: str
) -> None:
    hub(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=f"set {variable} to") as caught:
        fetch(MODEL)
    place = huggingface_hub.constants.HF_HUB_CACHE if variable == "HF_HOME" else tempfile.gettempdir()
    assert caught.value.filename == place
    hub(PermissionError(errno.EACCES, "Permission denied", "/elsewhere/token"))
    with pytest.raises(PermissionError, match="set HF_HOME to"):
        fetch(MODEL)


@FETCHING
@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.GatedRepoError("restricted", response=answer(403)), f"at https://huggingface.co/{MODEL}, then run"),
        (errors.RepositoryNotFoundError("404", response=answer(404)), "check the name"),
        (errors.RevisionNotFoundError("404", response=answer(404)), "name a branch"),
        (errors.RemoteEntryNotFoundError("no config.json", response=answer(404)), "lacks a file.*no config.json"),
        (errors.HfHubHTTPError("401", response=answer(401)), "HF_TOKEN"),
        (errors.HfHubHTTPError("429", response=answer(429)), "wait"),
        (errors.HfHubHTTPError("503", response=answer(503)), "Try again later"),
        (local(errors.HfHubHTTPError("503", response=answer(503))), "Try again later"),
        (ConnectionError("unreachable"), r"cannot be reached \(unreachable\): check the network"),
        (HTTP.ReadTimeout("slow"), "check the network"),
        (local(HTTP.ConnectError("no name")), r"cannot be reached \(no name\)"),
        (errors.SafetensorsParsingError("too large"), "too large"),
    ],
)
def test_what_the_hub_refuses_is_a_hub_error(
    hub: Callable[[BaseException], None], fetch: Fetch, error: BaseException, advice: str
) -> None:
    hub(error)
    with pytest.raises(HubError, match=f"^{MODEL}: .*{advice}") as caught:
        fetch(MODEL)
    assert caught.value.__cause__ is error


@FETCHING
def test_offline_is_said_to_be_the_users_choice(
    hub: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch, fetch: Fetch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for error in (local(), local(errors.OfflineModeIsEnabled("offline")), errors.OfflineModeIsEnabled("offline")):
        hub(error)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids to ask the hub: unset it"):
            fetch(MODEL)


def test_the_command_line_says_the_same(
    hub: Callable[[BaseException], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "cache" / "x")))
    assert main(["inspect", MODEL]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"torch-mesh: {tmp_path / 'cache' / 'x'}: permission denied") and "HF_HOME" in said
    hub(local(HTTP.ConnectError("no name")))
    assert main(["inspect", MODEL]) == 1
    assert capsys.readouterr().err.startswith(f"torch-mesh: {MODEL}: there is no such folder, and the hub")
