"""Where torch_mesh keeps what it can make again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import MeshError, StoreError
from ..system.atomic_files import scratch_folder
from .header import store_error


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/torch_mesh``, or ``~/.cache/torch_mesh``. May not exist yet. MeshError where nobody says where home is."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "torch_mesh"
    try:
        return Path.home() / ".cache" / "torch_mesh"
    except RuntimeError as error:
        raise MeshError(
            "There is no home folder in which converted experts could be kept: set XDG_CACHE_HOME or HOME, or name a folder with store=."
        ) from error


def note_use(folder: Path) -> None:
    """So that `torch-mesh cache prune` knows what is wanted: times of access are off on many file systems."""
    with contextlib.suppress(OSError):  # another's cache, or one that cannot be written to
        os.utime(folder)


@contextlib.contextmanager
def unnamed_folder() -> Iterator[Path]:
    """A folder in the cache, for as long as the block. What killed processes left there goes."""
    with contextlib.ExitStack() as stack:
        parent = cache_folder()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch_folder(parent, "unnamed-"))
        except OSError as error:
            raise unwritable(parent, error) from error
        yield folder


def unwritable(folder: Path, error: OSError) -> StoreError:
    """That there can be no store in ``folder``, and what to do."""
    where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
    return store_error(
        folder,
        f"cannot be written ({error.strerror}{where}). Choose a folder that can; experts for which store= names none go to "
        "$XDG_CACHE_HOME, or to ~/.cache",
    )
