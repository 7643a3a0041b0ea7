"""A model of the Hugging Face hub whose weight files are fetched one at a time, and removed when they have been used.

A folder beside the destination of a conversion has two parts. The conversion reads ``outline`` as a checkpoint, or as a
GGUF file: config, index and tokenizer, and weight files with their headers alone. ``original`` has the weight files
that were fetched, to which ``outline`` then has links. After a kill the next run uses these files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from torch_mesh.errors import HubError
from torch_mesh.store.checkpoint import find_quantization, fingerprint_of_files
from torch_mesh.store.dense_weights import is_weight_file
from torch_mesh.store.folders import is_folder, lock_of, real_folder
from torch_mesh.store.gguf import is_gguf, read_gguf
from torch_mesh.store.header import read_header, read_range, store_error
from torch_mesh.store.hub import (
    TRIES,
    existing,
    hub_names,
    listing,
    local_folder,
    weight_names,
    write_gguf_header,
    write_header,
)
from torch_mesh.store.hub_errors import hub_errors
from torch_mesh.store.sources import method_of, own_quantization
from torch_mesh.store.stages import Shards
from torch_mesh.store.store_plan import TEMPLATES_FOLDER, Piece

_OUTLINE, _ORIGINAL = "outline", "original"
_COPY_BYTES = 8 << 20
# The client writes chunks of this size, and loses an incomplete chunk when the connection breaks. With its default of
# 10 MiB, downloads over frequently broken connections would never finish.
_CHUNK_BYTES = 1 << 16


@contextlib.contextmanager
def streamed_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    keep_original: bool = False,
) -> Iterator[tuple[Path, HubShards | None]]:
    """The outline of a model of the hub, or of a GGUF file of it, and the weight files, which are fetched on request.

    If the hub cannot be reached, a folder of its cache, and None. The same for weights whose shapes are not in the
    headers (bitsandbytes); they are downloaded to the cache. ``keep_original`` fetches weight files to the cache.

    Raises ``StoreError`` for a missing local path, and as ``hub_errors``.
    """
    model, parts = hub_names(source)
    folder = real_folder(destination)
    staging = folder.with_name(f".{folder.name}.download")
    with hub_errors(model, staging, None):
        listed = _listing(model, revision, token)
    if listed is None:
        yield local_folder(source, revision=revision, token=token), None
        return
    with lock_of(staging, None):
        _check_ours(staging)
        try:
            shards = HubShards(model, listed, staging, revision, token, keep_original, parts)
            quantization = None if parts else own_quantization(shards.folder)
            if quantization is not None and method_of(quantization) == "bitsandbytes":
                yield local_folder(source, revision=revision, token=token), None
            else:
                yield shards.checkpoint, shards
        except BaseException:
            shutil.rmtree(staging / _OUTLINE, ignore_errors=True)
            if not any(_fetched_files(staging)):
                shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _listing(model: str, revision: str | None, token: str | None) -> Any:
    """The hub's listing; None if the hub cannot be reached."""
    try:
        return listing(model, revision, token)
    except HfHubHTTPError as problem:
        if problem.response.status_code < 500:
            raise
    except (HTTPError, OfflineModeIsEnabled):
        pass
    return None


class HubShards(Shards):
    """The weight files of one commit. The constructor fetches their headers and all other files; for a GGUF model with
    ``parts``, only the headers of these."""

    def __init__(
        self,
        model: str,
        listed: Any,
        staging: Path,
        revision: str | None,
        token: str | None,
        keep_original: bool,
        parts: Sequence[str] = (),
    ) -> None:
        self.folder = staging / _OUTLINE
        self._model = model
        self._commit = listed.sha
        self._revisions = (listed.sha, revision or "main")
        self._files = {file.rfilename: file for file in listed.siblings}
        self._staging = staging
        self._token = token
        self._keep_original = keep_original
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with hub_errors(model, staging, None):
            for name in () if parts else sorted(self._files):
                is_beside = name.rpartition("/")[0] in ("", TEMPLATES_FOLDER)
                if is_beside and not name.startswith(".") and not is_weight_file(name):
                    self._fetch_small(name)
            self._names = (
                existing(model, parts, self._files)
                if parts
                else weight_names(model, self.folder, self._files, self._fetch_small)
            )
            for name in self._names:
                self._outline(name)
        self._remove_leftovers()

    @property
    def checkpoint(self) -> Path:
        """The path that a conversion reads: a folder, or the first file of a GGUF model."""
        first = self.folder / self._names[0]
        return first if is_gguf(first) else self.folder

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes by file. Files that are, or will be, in the hub's cache count 0, since they take nothing beside the
        destination."""
        return {self.folder / name: 0 if self._in_cache(name) else self._files[name].size for name in self._names}

    def present_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in _fetched_files(self._staging))

    def fingerprint(self, key_mapping: Mapping[str, str] | None) -> str:
        """As ``checkpoint_fingerprint``, from the hub's hashes."""
        identities = (f"{name}\0{self._files[name].size}\0{self._stated_hash(name)}\0".encode() for name in self._names)
        return fingerprint_of_files(identities, find_quantization(self.checkpoint), key_mapping)

    def fetch(self, path: Path) -> None:
        """Raises ``HubError`` for a file with another hash than the hub states."""
        name = path.relative_to(self.folder).as_posix()
        if path.is_symlink():
            self._check_hash(name, path)
            return
        with hub_errors(self._model, self._staging, None):
            fetched = self._original(name)
            if not fetched.is_file():
                fetched = self._download(name)
        self._check_hash(name, fetched)
        self._check_header(name, path, fetched)
        path.unlink()
        path.symlink_to(fetched.absolute())

    def keep(self, path: Path, pieces: Sequence[Piece]) -> None:
        name = path.relative_to(self.folder).as_posix()
        if self._in_cache(name):
            return
        if pieces:
            rest = path.with_name(f"{path.name}.rest")
            _copy_pieces(path, rest, pieces)
            rest.replace(path)
        else:
            path.unlink()
        self._original(name).unlink(missing_ok=True)

    def _original(self, name: str) -> Path:
        return self._staging / _ORIGINAL / name

    def _in_cache(self, name: str) -> bool:
        return self._keep_original or self._cached(name) is not None

    def _cached(self, name: str) -> Path | None:
        """The file in the hub's cache, from this commit, or from another with the same hash."""
        for revision in self._revisions:
            found = huggingface_hub.try_to_load_from_cache(self._model, name, revision=revision)
            if isinstance(found, str) and (
                revision == self._commit or Path(found).resolve().name == self._stated_hash(name)
            ):
                return Path(found)
        return None

    def _fetch_small(self, name: str) -> Path:
        path = huggingface_hub.hf_hub_download(
            self._model, name, revision=self._commit, token=self._token, local_dir=self.folder
        )
        self._check_hash(name, Path(path))
        return Path(path)

    def _outline(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cached = self._cached(name)
        if cached is not None:
            path.symlink_to(cached.absolute())
            return
        url = huggingface_hub.hf_hub_url(self._model, name, revision=self._commit)
        write = write_gguf_header if is_gguf(name) else write_header
        write(url, path, self._files[name].size, self._token)

    def _download(self, name: str) -> Path:
        folder = None if self._keep_original else self._staging / _ORIGINAL
        # The client itself continues a connection that ends, but not one that is reset.
        for left in reversed(range(TRIES)):
            try:
                with _small_chunks():
                    return Path(
                        huggingface_hub.hf_hub_download(
                            self._model, name, revision=self._commit, token=self._token, local_dir=folder
                        )
                    )
            except HTTPError as problem:
                if isinstance(problem, HfHubHTTPError) or not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _stated_hash(self, name: str) -> str | None:
        file = self._files[name]
        stated: str | None = file.blob_id if file.lfs is None else file.lfs.sha256
        return stated

    def _check_hash(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            found = git_hash(file.read()) if self._files[name].lfs is None else sha_fileobj(file).hex()
        if found == self._stated_hash(name):
            return
        where = path.resolve()
        if where.is_relative_to(self._staging.resolve()):
            path.unlink()
            advice = "it was damaged on its way, and is removed: run the same command again"
        else:
            advice = f"the hub's cache has a damaged file: remove {where}, and run the same command again"
        raise HubError(
            f"{self._model}: {name} has the hash {found}, and the hub states {self._stated_hash(name)}; {advice}."
        )

    def _check_header(self, name: str, outline: Path, fetched: Path) -> None:
        """Raises ``HubError`` if the header that the conversion uses differs from the file's."""
        size = (read_gguf(outline).header if is_gguf(name) else read_header(outline)).data_start
        if read_range(outline, 0, size).tobytes() != read_range(fetched, 0, size).tobytes():
            raise HubError(f"{self._model}: the header of {name} was damaged on its way: run the same command again.")

    def _remove_leftovers(self) -> None:
        """Remove files of an earlier run that are incomplete or not needed now."""
        shutil.rmtree(self._staging / _ORIGINAL / ".cache", ignore_errors=True)
        wanted = {self._original(name): self._files[name].size for name in self._names if not self._in_cache(name)}
        for path in _fetched_files(self._staging):
            if path.stat().st_size != wanted.get(path):
                path.unlink()


def _fetched_files(staging: Path) -> list[Path]:
    return [path for path in (staging / _ORIGINAL).rglob("*") if path.is_file() and is_weight_file(path.name)]


def _check_ours(staging: Path) -> None:
    if os.path.lexists(staging) and not (
        is_folder(staging) and {path.name for path in staging.iterdir()} <= {_OUTLINE, _ORIGINAL}
    ):
        raise store_error(
            staging, "is in the way of a download, but is none. Move it, or choose another folder for the store"
        )


@contextlib.contextmanager
def _small_chunks() -> Iterator[None]:
    constants = huggingface_hub.constants
    usual = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = min(usual, _CHUNK_BYTES)
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = usual


def _copy_pieces(path: Path, to: Path, pieces: Sequence[Piece]) -> None:
    """Copy only these ranges of ``path``, to a sparse file."""
    with to.open("wb") as target:
        for _, offset, size in pieces:
            for begin in range(offset, offset + size, _COPY_BYTES):
                part = read_range(path, begin, min(_COPY_BYTES, offset + size - begin))
                target.seek(begin)
                target.write(part.data)
        target.truncate(path.stat().st_size)
