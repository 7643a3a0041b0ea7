"""The cache folder for conversions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torch_mesh.errors import MeshError, StoreError
from torch_mesh.store.header import store_error
from torch_mesh.system.atomic_files import scratch_folder


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/torch_mesh``, or ``~/.cache/torch_mesh``, which may not exist yet. Raises MeshError without a
    home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "torch_mesh"
    try:
        return Path.home() / ".cache" / "torch_mesh"
    except RuntimeError as error:
        raise MeshError(
            "There is no home folder for converted experts: set XDG_CACHE_HOME or HOME, or name a folder with store=."
        ) from error


def prefix_folder() -> Path:
    """The folder with the prefix caches of all models. Raises MeshError without a home folder."""
    return cache_folder() / "prefixes"


def note_use(folder: Path) -> None:
    """Record the use for `torch-mesh cache prune`: access times are off on many file systems."""
    with contextlib.suppress(OSError):  # another user's cache, or a read-only one
        os.utime(folder)


@contextlib.contextmanager
def unnamed_folder() -> Iterator[Path]:
    """A folder in the cache that is removed when the block ends. Also removes folders of killed processes."""
    with contextlib.ExitStack() as stack:
        parent = cache_folder()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch_folder(parent, "unnamed-"))
        except OSError as error:
            raise unwritable(parent, error) from error
        yield folder


def unwritable(folder: Path, error: OSError) -> StoreError:
    """An error for a ``folder`` that cannot be written, with advice."""
    where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
    return store_error(
        folder,
        f"cannot be written ({error.strerror}{where}). Choose another folder; experts for which store= names none go "
        "to $XDG_CACHE_HOME, or to ~/.cache",
    )
