"""Reasons why a model of the hub is not available: each has its own exception and message with advice."""

from __future__ import annotations

import errno
import itertools
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf_files
import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors
from loopback_hub import MODEL, LoopbackHub, loopback_hub
from tiny_checkpoints import tiny_model

from torch_mesh import HubError, StoreError
from torch_mesh.cli import main
from torch_mesh.store import gguf as gguf_module
from torch_mesh.store import hub as hub_module
from torch_mesh.store.convert import convert
from torch_mesh.store.gguf import read_parts
from torch_mesh.store.header import read_header
from torch_mesh.store.hub import local_folder, outline_folder, write_header

HTTP: Any = sys.modules[errors.HTTPError.__module__.partition(".")[0]]  # httpx, under the name that this release has


def answer(status: int) -> Any:
    return HTTP.Response(status, request=HTTP.Request("GET", f"https://huggingface.co/{MODEL}"))


def local(*causes: BaseException) -> BaseException:
    """Return the exception of the hub's library after a failed request without a cached model."""
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
    """Makes every request and write fail with an error. The cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def fail_with(error: BaseException) -> None:
        def failing(*_: object, local_files_only: bool = False, **__: object) -> None:
            raise local() if local_files_only else error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
        monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", failing)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", failing)

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
        (errno.ENOTDIR, "a part of that path is a file"),
        (errno.ENAMETOOLONG, "a folder with a shorter path"),
    ],
)
def test_errors_of_the_disk_or_the_system_keep_their_class(
    hub: Callable[[BaseException], None], tmp_path: Path, fetch: Fetch, number: int, advice: str
) -> None:
    # The library may wrap the error, as its HTTP client does if no socket can be opened.
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
def test_requests_that_fail_are_hub_errors(
    hub: Callable[[BaseException], None], fetch: Fetch, error: BaseException, advice: str
) -> None:
    hub(error)
    with pytest.raises(HubError, match=f"^{MODEL}: .*{advice}") as caught:
        fetch(MODEL)
    assert caught.value.__cause__ is error


@FETCHING
def test_offline_errors_name_the_variable_that_the_user_set(
    hub: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch, fetch: Fetch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for error in (local(), local(errors.OfflineModeIsEnabled("offline")), errors.OfflineModeIsEnabled("offline")):
        hub(error)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids to ask the hub: unset it"):
            fetch(MODEL)


def test_the_command_line_prints_the_same_errors(
    hub: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(tempfile.gettempdir(), "x")
    hub(PermissionError(errno.EACCES, "Permission denied", str(place)))
    assert main(["inspect", MODEL]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"torch-mesh: {place}: permission denied") and "TMPDIR" in message
    hub(local(HTTP.ConnectError("no name")))
    assert main(["inspect", MODEL]) == 1
    assert capsys.readouterr().err.startswith(f"torch-mesh: {MODEL}: there is no such folder, and the hub")


@pytest.mark.parametrize("command", ["bench", "chat", "convert", "inspect", "plan", "run", "serve"])
def test_a_missing_network_is_reported_without_retries(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loopback_hub(str(tmp_path / "cache"), monkeypatch):
        pass  # from here on nothing listens on its port
    # The client would sleep before a retry.
    waiting = types.SimpleNamespace(**vars(time) | {"sleep": lambda _: pytest.fail("waited for the network")})
    monkeypatch.setattr("huggingface_hub.utils._http.time", waiting)
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "a"}\n')
    more = {
        "convert": [str(tmp_path / "to"), "--weights", "int8"],
        "run": [str(requests), str(tmp_path / "answers.jsonl")],
    }
    for model in (MODEL, "NOWHERE"):
        assert main([command, model, *more.get(command, [])]) == 1
        assert f"{model}: there is no such folder, and the hub cannot be reached" in capsys.readouterr().err


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LoopbackHub]]:
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize("kind", ["one file", "shards", "store"])
def test_only_the_weight_files_of_the_model_are_downloaded(
    kind: str, served: type[LoopbackHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's repository may have it once more, for other programs."""
    folder = tmp_path / "source"
    tiny_model("qwen3_moe").save_pretrained(folder, max_shard_size="200KB" if kind == "shards" else "1GB")
    if kind == "store":
        folder = convert(folder, tmp_path / "store", "int4").store.folder
    served.files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    others = {"original/model.safetensors", "consolidated.safetensors", "model.fp32.safetensors", "model.bin"}
    weights = {name for name in served.files if name.endswith(".safetensors")}
    assert (len(weights) > 1) == (kind != "one file")
    served.files |= dict.fromkeys(others, b"others")
    found = local_folder(MODEL)
    assert not others & served.sent.keys() and {path.name for path in found.glob("*.safetensors")} == weights
    served.sent.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert local_folder(MODEL) == found == outline(MODEL) and not served.sent


@pytest.mark.parametrize(("status", "code"), [(401, "GatedRepo"), (404, "RepoNotFound"), (403, "Forbidden")])
def test_a_cached_model_opens_while_the_hub_refuses_it(
    status: int, code: str, served: type[LoopbackHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    tiny_model("qwen3_moe").save_pretrained(folder)
    served.files |= {path.name: path.read_bytes() for path in folder.iterdir()}
    found = local_folder(MODEL)
    monkeypatch.setattr(served, "_answer", lambda self, head: self._refuse(status, code))
    assert local_folder(MODEL) == found
    next(found.glob("*.safetensors")).unlink()
    with pytest.raises(HubError, match=MODEL):
        local_folder(MODEL)


@pytest.mark.parametrize("parts", [1, 3])
def test_only_the_header_of_a_gguf_file_is_fetched(
    parts: int, served: type[LoopbackHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_RANGE_BYTES", 1 << 14)
    monkeypatch.setattr(gguf_module, "_CHUNK_BYTES", 1 << 12)
    sizes = {"num_experts": 16, "moe_intermediate_size": 512, "vocab_size": 512}
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q8_0"}, parts=parts, **sizes)
    files = sorted(tmp_path.glob("*.gguf"))
    served.files |= {file.name: file.read_bytes() for file in files}
    expected = [part.header.tensors for part in read_parts(made.path)]
    with outline_folder(f"{MODEL}/{made.path.name}") as (path, present):
        assert not present
        assert [part.header.tensors for part in read_parts(path)] == expected
        assert [file.stat().st_size for file in sorted(path.parent.iterdir())] == [f.stat().st_size for f in files]
    assert served.sent.total() < sum(file.stat().st_size for file in files) / 10
    assert main(["plan", f"{MODEL}/{made.path.name}", "--resident", "0.5", "--disk-speed", "1GB"]) == 0
    with pytest.raises(HubError, match="lacks another.gguf, part of the named file"):
        outline(f"{MODEL}/another.gguf")


def test_a_gguf_file_smaller_than_one_request_is_read(served: type[LoopbackHub], tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q8_0"})
    served.files["m.gguf"] = data = made.path.read_bytes()
    assert len(data) < hub_module._RANGE_BYTES
    with outline_folder(f"{MODEL}/m.gguf") as (path, present):
        assert not present and read_parts(path)[0].header.tensors == read_parts(made.path)[0].header.tensors
    assert served.sent["m.gguf"] == len(data)


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0"])
def test_a_weight_file_without_a_header_is_a_store_error(
    served: type[LoopbackHub], tmp_path: Path, data: bytes
) -> None:
    served.files["model.safetensors"] = data
    write_header(huggingface_hub.hf_hub_url(MODEL, "model.safetensors"), tmp_path / "x.safetensors", len(data))
    with pytest.raises(StoreError, match=f"ends after {len(data)} bytes"):
        read_header(tmp_path / "x.safetensors")


def test_a_damaged_header_on_the_hub_is_a_store_error(served: type[LoopbackHub], tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q8_0"})
    data = made.path.read_bytes()
    served.files["m.gguf"] = data[:8] + b"\xff" * 8 + data[16:]
    with pytest.raises(StoreError, match="m.gguf: says that"):
        outline(f"{MODEL}/m.gguf")
