"""Copies of a model's files on other drives, which are read beside the originals."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch_mesh.errors import StoreError

_SAMPLES = 16  # places of a file that are compared
_SAMPLE_BYTES = 64 << 10


def check_mirrors(folders: Sequence[str], io: str) -> None:
    """Raises ``StoreError`` for a folder that does not exist, and ``ValueError`` for reads through the page cache."""
    if folders and io == "buffered":
        raise ValueError(
            "io='buffered' and mirrors exclude each other, since the page cache would hold each copy separately: leave "
            "one of them out."
        )
    for folder in folders:
        if not Path(folder).is_dir():
            raise StoreError(
                f"mirrors: {folder} is not a folder. Copy the model's files into it, or leave it out of mirrors."
            )


def find_copies(files: Sequence[tuple[str, int]], folders: Sequence[str]) -> list[list[str]]:
    """The paths of the copies of ``files`` (paths, and sizes in bytes) in ``folders``: for each file one path a
    folder, empty where the folder lacks it.

    Warns about a folder on the same drive as the originals or another folder. Raises ``StoreError`` for a folder
    without any of the files, and for a copy that differs in size or in one of a few samples.
    """
    if not files or not folders:
        return [[] for _ in files]
    paths = [Path(path) for path, _ in files]
    common = _common_folder(paths)
    columns = []
    drives = [{path.stat().st_dev: str(common)} for path in paths]  # of each file, and a folder on each
    for folder in folders:
        copies = _copies_in(folder, paths)
        same = None  # an earlier folder with one of the files on the same drive
        for copy, (path, size), of_file in zip(copies, files, drives, strict=True):
            if copy is not None:
                _compare(copy, Path(path), size)
                drive = copy.stat().st_dev
                same = same or of_file.get(drive)
                of_file.setdefault(drive, folder)
        if not any(copies):
            names = ", ".join(str(path.relative_to(common)) for path in paths[:3])
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            raise StoreError(
                f"mirrors: {folder} has none of the files that hold the experts ({names}{more} in {common}). Copy them "
                "into it, or leave it out of mirrors."
            )
        if same is not None:
            warnings.warn(
                f"mirrors: {folder} is on the same drive as {same}, so it makes nothing faster.", stacklevel=2
            )
        columns.append(["" if copy is None else str(copy) for copy in copies])
    return [[column[index] for column in columns] for index in range(len(files))]


def _copies_in(folder: str, files: Sequence[Path]) -> list[Path | None]:
    """The copy of each file in ``folder``, None where the folder lacks it.

    A copy's path in ``folder`` is the original's in the innermost folder that has all of ``files``; if there is none at
    these paths, in the parent of that: all files may be in one subfolder of what was copied, as in GGUF repositories.
    """
    common = _common_folder(files)
    found: list[Path | None] = []
    for base in (common, common.parent):
        copies = [Path(folder) / path.relative_to(base) for path in files]
        found = [copy if copy.is_file() else None for copy in copies]
        if any(found):
            break
    return found


def _common_folder(files: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([path.parent for path in files]))


def _compare(copy: Path, path: Path, size: int) -> None:
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
