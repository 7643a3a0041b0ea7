"""Models of the Hugging Face hub: download their files, or only headers and configs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, validate_repo_id

from torch_mesh.errors import HubError, StoreError
from torch_mesh.store.dense_codes import is_codes_file
from torch_mesh.store.gguf import MAX_FREQUENCIES, ROPE_DIVISORS, is_gguf, parse_gguf, part_names
from torch_mesh.store.header import MAX_HEADER_BYTES, store_error
from torch_mesh.store.hub_errors import hub_errors
from torch_mesh.store.manifest import MANIFEST_NAME, is_store, read_manifest
from torch_mesh.store.sources import QUANTISATION_FILES, own_quantization
from torch_mesh.store.table_files import is_table_file
from torch_mesh.store.weight_files import (
    INDEX_NAME,
    SINGLE_NAME,
    check_folder,
    is_index,
    named_in_config,
    only_variant,
    read_index,
    weight_files,
)

# Minimum bytes of each request for a header.
_RANGE_BYTES = 1 << 20
HEADER_BYTES = 1 << 17
TRIES = 3  # for requests that the client does not retry itself
_WEIGHTS = [f"*.{kind}" for kind in ["safetensors", "bin", "pt", "pth", "gguf", "GGUF", "h5", "msgpack", "onnx", "ot"]]


def local_folder(source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> Path:
    """``source`` if it is a folder or a GGUF file; else download the files of that model id on the Hugging Face hub. Of
    its weight files, these are the ones that ``weight_files`` names, and a store's.

    ``maker/model/file.gguf`` is a GGUF file of a model, with its further parts. ``revision`` and ``token`` are the
    hub's. Raises ValueError for a revision of a local path, and as ``hub_errors``.
    """
    if revision is not None and Path(source).exists():
        raise ValueError(
            f"{source} is on this machine and has no revision {revision!r}: leave revision out, which is for models "
            "of the hub"
        )
    if _is_local(source):
        return Path(source)
    model, names = hub_names(source)

    def download(revision: str | None, **patterns: Any) -> Path:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, token=token, **patterns))

    with _to_cache(source):
        if names:
            return download(revision, allow_patterns=names) / names[0]
        folder = download(revision, ignore_patterns=_WEIGHTS)
        try:
            listed = {file.rfilename for file in listing(model, folder.name, token).siblings}
        except (HTTPError, OfflineModeIsEnabled):
            weights = _cached_weights(folder)
            if not weights:
                raise
        else:
            weights = weight_names(model, folder, listed, folder.joinpath)
        if is_store(folder):
            weights += _own_files(folder)
        return download(folder.name, allow_patterns=weights)  # of the same commit


def _cached_weights(folder: Path) -> list[str]:
    """The weight files of a model in the cache; empty if they are not there."""
    with contextlib.suppress(StoreError):
        return [path.relative_to(folder).as_posix() for path in weight_files(folder)]
    return []


def check_model(model: str, *, revision: str | None = None) -> None:
    """Raises as ``local_folder`` does for a model that is not on the hub, or is neither in the cache nor available.

    Without this check, transformers asks for one file after the other, and waits minutes between its tries if there is
    no network.
    """
    with _to_cache(model):
        huggingface_hub.snapshot_download(model, revision=revision, allow_patterns="config.json")


def _is_local(source: str | os.PathLike[str]) -> bool:
    return Path(source).is_dir() or (is_gguf(source) and Path(source).exists())


@contextlib.contextmanager
def outline_folder(source: str | os.PathLike[str]) -> Iterator[tuple[Path, bool]]:
    """A folder with the headers, config and manifest of ``source``, and whether it has the weights too.

    That is ``source`` if it is a folder or a GGUF file, or the hub's cache if complete. Else it is a temporary folder
    with the model's name, or a GGUF file in one, in which files of weights are sparse behind their headers.
    """
    if _is_local(source):
        yield Path(source), True
        return
    model, names = hub_names(source)
    present = _cached_gguf(model, names) if names else _cached_folder(model)
    if present is not None:
        yield present, True
        return
    with contextlib.ExitStack() as stack:
        with hub_errors(source, tempfile.gettempdir(), "TMPDIR"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_mesh-outline-")), model)
            if names:
                sizes = {file.rfilename: file.size for file in listing(model).siblings}
                for name in existing(model, names, sizes):
                    write_gguf_header(huggingface_hub.hf_hub_url(model, name), folder / name, sizes[name])
            else:
                _write_outline(model, folder)
        yield folder / names[0] if names else folder, False


def hub_names(source: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """The hub's model id in ``source`` and, for a GGUF file, the names of all its parts in order. Raises ``StoreError``
    for a missing local path, before the hub complains about the form of model ids, and for a part other than the
    first."""
    if not is_gguf(source):
        if not _is_model_id(os.fspath(source)) or os.path.lexists(source):
            check_folder(source)
        return os.fspath(source), []
    maker, _, rest = os.fspath(source).partition("/")
    model, _, name = rest.partition("/")
    if not name or not _is_model_id(f"{maker}/{model}"):
        raise store_error(source, "there is no such file; name one of the hub as maker/model/file.gguf")
    try:
        return f"{maker}/{model}", part_names(name)
    except ValueError as problem:
        raise store_error(source, str(problem)) from None


def _is_model_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _cached_gguf(model: str, names: list[str]) -> Path | None:
    found = [huggingface_hub.try_to_load_from_cache(model, name) for name in names]
    return Path(str(found[0])) if all(isinstance(path, str) for path in found) else None


class _Prefix:
    """A file of the hub. Ranges are fetched into a local file from ``begin`` on, as far as they are read."""

    def __init__(
        self, url: str, local: BinaryIO, size: int, min_request: int, token: str | None = None, begin: int = 0
    ) -> None:
        self._url = url
        self._local = local
        self._size = size  # of the file; a request behind its end is an error
        self._min_request = min_request  # minimum bytes of a request
        self._headers = build_hf_headers(token=token)
        self._at = self._fetched = begin

    def read(self, size: int) -> bytes:
        if min(self._at + size, self._size) > self._fetched:
            self._fetch(min(max(self._at + size, self._fetched + self._min_request), self._size))
        self._local.seek(self._at)
        data = self._local.read(size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._at if whence == os.SEEK_CUR else 0)
        return self._at

    def _fetch(self, end: int) -> None:
        failed = 0  # consecutive failures without a byte received
        while True:
            begin = self._fetched
            try:
                self._receive(end)
            except HTTPError as problem:
                failed = failed + 1 if self._fetched == begin else 0
                if isinstance(problem, HfHubHTTPError) or failed == TRIES:
                    raise
            else:
                return

    def _receive(self, end: int) -> None:
        headers = {**self._headers, "Range": f"bytes={self._fetched}-{end - 1}"}
        timeout = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        session = huggingface_hub.get_session()
        with session.stream("GET", self._url, headers=headers, follow_redirects=True, timeout=timeout) as answer:
            hf_raise_for_status(answer)
            if answer.status_code != 206:
                raise HubError(
                    f"{self._url}: the hub sends no parts of files (status {answer.status_code}): download it, and "
                    "name the file."
                )
            self._local.seek(self._fetched)
            for chunk in answer.iter_bytes():
                self._fetched += self._local.write(chunk)


def write_header(url: str, path: Path, size: int, token: str | None = None) -> None:
    """Write the header of the safetensors file at ``url``; the rest of the ``size`` bytes is sparse."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as local:
        remote = _Prefix(url, local, size, HEADER_BYTES, token)
        end = 8 + int.from_bytes(remote.read(8), "little")
        if end <= min(size, MAX_HEADER_BYTES):  # else reading the file raises the error
            remote.read(end - 8)
            local.truncate(end)
        local.truncate(size)


def write_gguf_header(url: str, path: Path, size: int, token: str | None = None) -> None:
    """Write the header of the GGUF file at ``url`` and the tensor that the config needs; the rest of the ``size`` bytes
    is sparse. Raises as ``read_gguf`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as local:
        remote = _Prefix(url, local, size, _RANGE_BYTES, token)
        header = parse_gguf(path, remote, size).header
        remote.seek(header.data_start - 1)
        remote.read(1)
        divisors = header.tensors.get(ROPE_DIVISORS)
        if divisors is not None and divisors.bytes <= 4 * MAX_FREQUENCIES:  # else reading the config raises the error
            _Prefix(url, local, size, 0, token, divisors.offset).read(divisors.bytes)
        local.truncate(size)


def _to_cache(source: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    return hub_errors(source, huggingface_hub.constants.HF_HUB_CACHE, "HF_HOME")


def _cached_folder(model: str) -> Path | None:
    try:
        with _to_cache(model):
            folder = Path(huggingface_hub.snapshot_download(model, local_files_only=True, ignore_patterns=_WEIGHTS))
        files = weight_files(folder)
        if is_store(folder):  # transformers does not download record files
            files += [folder / name for name in _own_files(folder)]
        return folder if all(file.is_file() for file in files) else None
    except (HubError, StoreError):
        return None


def _write_outline(model: str, folder: Path) -> None:
    def fetch(name: str) -> Path:
        return Path(huggingface_hub.HfApi().hf_hub_download(model, name, local_dir=folder))

    sizes = {file.rfilename: file.size for file in listing(model).siblings}  # asks once; fetch would retry for long
    fetch("config.json")
    names = weight_names(model, folder, sizes, fetch)
    for name in QUANTISATION_FILES if own_quantization(folder) is None else ():
        if name in sizes:
            fetch(name)
    if MANIFEST_NAME in sizes:
        fetch(MANIFEST_NAME)
        names += existing(model, _own_files(folder), sizes)
    for name in names:
        write_header(huggingface_hub.hf_hub_url(model, name), folder / name, sizes[name])


def _own_files(store: Path) -> list[str]:
    """The weight files of a store that are not a checkpoint's."""
    manifest = read_manifest(store)
    others = [file.name for file in manifest.other_files if is_table_file(file.name) or is_codes_file(file.name)]
    return [*(file.name for file in manifest.record_files), *others]


def listing(model: str, revision: str | None = None, token: str | None = None) -> Any:
    """The commit, and the files with their sizes and hashes."""
    return huggingface_hub.HfApi().model_info(model, revision=revision, files_metadata=True, token=token)


def weight_names(model: str, folder: Path, there: Collection[str], fetch: Callable[[str], Path]) -> list[str]:
    """The weight files of a model with the files ``there``, whose config.json is in ``folder``."""
    name = (
        named_in_config(folder)
        or next((usual for usual in (SINGLE_NAME, INDEX_NAME) if usual in there), None)
        or only_variant(model, (name for name in there if "/" not in name))
    )
    if name is None:
        raise HubError(
            f"{model}: the hub's model has neither {SINGLE_NAME} nor {INDEX_NAME}, and torch_mesh reads safetensors: "
            "name another model, or maker/model/file.gguf."
        )
    return existing(model, sorted(set(read_index(fetch(name)).values())) if is_index(name) else [name], there)


def existing(model: str, names: Iterable[str], there: Collection[str]) -> list[str]:
    """``names``. Raises ``HubError`` for one that is not ``there``."""
    for each in (names := list(names)):
        if each not in there:
            whose = "part of the named file" if is_gguf(each) else "a weight file that it names itself"
            raise HubError(
                f"{model}: the hub's model lacks {each}, {whose}: name another --revision, or another model."
            )
    return names
