"""The contents of torch_mesh's cache folder, stores and keys of prompts: list and remove them."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torch_mesh.errors import MeshError, StoreError
from torch_mesh.store.disk_cache import cache_folder, prefix_folder
from torch_mesh.store.folders import lock_path
from torch_mesh.store.manifest import check_sizes, is_of_another_release, is_store, read_manifest
from torch_mesh.system.atomic_files import locked

_REST = re.compile(r"-rest-[0-9a-f]{16}$")  # dense weights of a quantized checkpoint: patching/checkpoint_source.py
_REMOVED = re.compile(r"(\.removed)+$")
_HIDDEN = re.compile(r"(\.partial|\.replaced-[0-9a-f]{8})$")  # made by store/folders.py: incomplete, or replaced


@dataclass(frozen=True)
class CachedStore:
    """A folder of the cache. ``leftover``: why it can be removed; empty if it is usable."""

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
    """All cached stores and prefix caches, most recently used first. Raises MeshError if there is no cache folder."""
    folders = [folder for folder in (cache_folder() / "stores", prefix_folder()) if folder.is_dir()]
    paths = [path for folder in folders for path in folder.iterdir() if path.is_dir()]
    found = [described for path in paths if (described := _describe(path)) is not None]
    return sorted(found, key=lambda each: -each.used)


def remove(store: CachedStore) -> None:
    """Remove a store; processes that have it open can go on. Raises MeshError while a process writes it."""
    try:
        with locked(lock_path(_finished(store.folder))):
            removed = store.folder.with_name(f".{_REMOVED.sub('', store.name).removeprefix('.')}.removed")
            if store.folder != removed:
                if os.path.lexists(removed):
                    _delete(removed)
                store.folder.rename(removed)  # atomically, so that no process opens half of it
            _delete(removed)
    except BlockingIOError as error:
        raise MeshError(f"{store.name} is being written by another process and stays: try again later.") from error


def _finished(folder: Path) -> Path:
    """The folder itself, or the one that it will become."""
    return folder.with_name(_HIDDEN.sub("", _REMOVED.sub("", folder.name)).removeprefix("."))


def _delete(folder: Path) -> None:
    """A link is removed without its target."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _describe(folder: Path) -> CachedStore | None:
    """Describe a folder; None if it has been removed meanwhile."""
    try:
        used = folder.stat().st_mtime
        try:
            # Blocks, since the file of an unfinished conversion is sparse.
            size = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
            about, leftover = _about(folder)
        except PermissionError as error:
            return CachedStore(folder, f"cannot be read: {error.strerror}", 0, used)
    except FileNotFoundError:
        return _describe(folder) if folder.exists() else None  # some or all files have been removed
    return CachedStore(folder, about, size, used, leftover)


def _about(folder: Path) -> tuple[str, str]:
    if folder.name.startswith("."):
        if folder.name.endswith(".removed"):
            what = "removed"
        else:
            what = "replaced" if ".replaced-" in folder.name else "a conversion that has not ended"
        return what, what
    if folder.parent == prefix_folder():
        return "keys of prompts (prefix cache)", ""
    if _REST.search(folder.name):
        return "dense weights of a quantized checkpoint", ""
    if not is_store(folder):
        return "no store", ""  # perhaps a user's: removed by age or by name only
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except StoreError as error:
        if is_of_another_release(folder):
            return "a store of another release of torch_mesh", ""
        return "damaged", str(error)
    shape = manifest.shape
    groups = f", groups of {manifest.group_size}" if manifest.group_size else ""
    return f"{shape.layers} x {shape.experts} experts of {manifest.source_name} in {manifest.weights}{groups}", ""
