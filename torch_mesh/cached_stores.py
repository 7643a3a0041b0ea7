"""The stores that torch_mesh has made in its cache folder: what is there, how large it is, when it was used, and how it goes."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torch_mesh.cache import cache_folder
from torch_mesh.errors import MeshError, StoreError
from torch_mesh.files import locked
from torch_mesh.store.manifest import is_store, read_manifest
from torch_mesh.store.writer import lock_path

_REST = "-rest-"  # of a quantised checkpoint, beside its experts: loading.py


@dataclass(frozen=True)
class CachedStore:
    """A folder of the cache. ``leftover``: why it is of no use any more; empty where it is of use."""

    folder: Path
    about: str
    bytes: int
    used: float  # seconds since the epoch
    leftover: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def days(self) -> float:
        return (time.time() - self.used) / 86400


def cached_stores() -> list[CachedStore]:
    """Those of the cache folder, the one that was used last first. Raises MeshError where there can be no such folder."""
    folder = cache_folder() / "stores"
    found = [_describe(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda each: -each.used)


def remove(store: CachedStore) -> None:
    """Whoever has it open goes on. Raises MeshError where a process is writing it."""
    try:
        with locked(lock_path(_finished(store.folder))):
            gone = store.folder.with_name(f".{store.name.strip('.')}.removed")
            if store.folder != gone:
                shutil.rmtree(gone, ignore_errors=True)
                store.folder.rename(gone)  # in one step, so that nobody opens half of it
            shutil.rmtree(gone)
    except BlockingIOError as error:
        raise MeshError(f"{store.name} is being written by another process; it stays.") from error


def _finished(folder: Path) -> Path:
    """The folder that this one is, or is to become."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".partial").removesuffix(".removed"))


def _describe(folder: Path) -> CachedStore:
    # Blocks, as the file of a conversion that has not ended is as long as it will be.
    size = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
    about, leftover = _about(folder)
    return CachedStore(folder, about, size, folder.stat().st_mtime, leftover)


def _about(folder: Path) -> tuple[str, str]:
    if folder.name.startswith("."):
        what = "removed" if folder.name.endswith(".removed") else "a conversion that has not ended"
        return what, what
    if _REST in folder.name:
        return "what a quantised checkpoint has beside its experts", ""
    if not is_store(folder):
        return "no store", "no store"
    try:
        manifest = read_manifest(folder)
    except StoreError as error:
        return "damaged", str(error)
    shape = manifest.shape
    groups = f", groups of {manifest.group_size}" if manifest.group_size else ""
    return f"{shape.layers} x {shape.experts} experts of {manifest.source_name} in {manifest.weights}{groups}", ""
