"""Copies of a model's files on other drives, which are read beside the originals."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch_mesh.errors import StoreError

_SAMPLES = 16  # places of a file that are compared
_SAMPLE_BYTES = 64 << 10


def check_folders(folders: Sequence[str]) -> None:
    """Raises ``StoreError`` for a folder that does not exist."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise StoreError(
                f"mirrors: {folder} is not a folder. Copy the model's files into it, or leave it out of mirrors."
            )


def find_copies(files: Sequence[tuple[str, int]], folders: Sequence[str]) -> list[list[str]]:
    """The paths of the copies of ``files`` (paths, and sizes in bytes) in ``folders``: for each file one path a
    folder, empty where the folder lacks it. Copies have the originals' names.

    Warns about a folder on the same drive. Raises ``StoreError`` for a folder without any of the files, and for a copy
    that differs in size or in one of a few samples.
    """
    check_folders(folders)
    copies = [[_copy_of(Path(path), size, Path(folder)) for folder in folders] for path, size in files]
    for index, folder in enumerate(folders):
        own = [(path, each[index]) for (path, _), each in zip(files, copies, strict=True) if each[index]]
        if not own:
            names = ", ".join(Path(path).name for path, _ in files[:3])
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            raise StoreError(
                f"mirrors: {folder} has none of the files that hold the experts ({names}{more} in "
                f"{Path(files[0][0]).parent}). Copy them into it, or leave it out of mirrors."
            )
        if any(os.stat(path).st_dev == os.stat(copy).st_dev for path, copy in own):
            warnings.warn(
                f"mirrors: {folder} is on the same drive as the original files, so it makes nothing faster.",
                stacklevel=2,
            )
    return copies


def _copy_of(path: Path, size: int, folder: Path) -> str:
    copy = folder / path.name
    if not copy.exists():
        return ""
    copied = copy.stat().st_size
    if copied != size:
        raise StoreError(
            f"mirrors: {copy} has {copied} bytes, and {path} has {size}. Copy the file again, or remove the copy."
        )
    with path.open("rb") as original, copy.open("rb") as other:
        for sample in range(_SAMPLES):
            at = (size - min(size, _SAMPLE_BYTES)) * sample // (_SAMPLES - 1)
            original.seek(at)
            other.seek(at)
            if original.read(_SAMPLE_BYTES) != other.read(_SAMPLE_BYTES):
                raise StoreError(
                    f"mirrors: {copy} differs from {path} near byte {at}. Copy the file again, or remove the copy."
                )
    return str(copy)
