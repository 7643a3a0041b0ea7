"""The destination folder of a store: locking it, moving the store into place, removing leftovers.

Nothing is removed from a folder without a journal or a manifest. The journal is removed last, so that a hidden folder
with a manifest and no journal is one that was replaced.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch_mesh.errors import StoreError
from torch_mesh.store.disk_cache import unwritable
from torch_mesh.store.header import parse_json, store_error, utf8_path
from torch_mesh.store.journal import JOURNAL_NAME, JOURNAL_START
from torch_mesh.store.manifest import MANIFEST_NAME, Store, check_sizes, is_store, open_store, read_manifest
from torch_mesh.store.store_plan import StorePlan
from torch_mesh.system.atomic_files import exchange, locked

_LOG = logging.getLogger(__name__)
_SPARE_BYTES = 16 << 20  # for the manifest, the journal and the file system


class OtherStoreError(StoreError):
    """The destination has another store, or one that cannot be used."""


def real_folder(folder: str | os.PathLike[str]) -> Path:
    """``folder`` with links resolved. Raises ``StoreError`` for a dangling link."""
    real = Path(os.path.realpath(folder))
    if os.path.islink(folder) and not real.exists():
        raise store_error(folder, f"is a link to {real}, which does not exist: make that folder, or remove the link")
    return real


def lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def partial_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


@contextlib.contextmanager
def lock_of(folder: Path, problem: StoreError | None) -> Iterator[None]:
    """Keep other processes from writing the same store. ``problem``: the error to raise if no lock can be had."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            waiting = partial(_LOG.warning, "Another process is writing %s; waiting for it.", folder)
            stack.enter_context(locked(lock_path(folder), waiting))
        except OSError as error:
            raise problem or unwritable(folder, error) from error
        yield


def existing_store(folder: Path, plan: StorePlan, force: bool) -> Store | None:
    """The store of this plan if ``folder`` has it; None if the folder may be written.

    Raises ``OtherStoreError`` for another store, and for one that is damaged by its headers or sizes.
    """
    utf8_path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not is_store(folder):
        raise store_error(folder, "exists and is not a store: choose another folder")
    if force:
        return None
    try:
        store = open_store(folder)
        check_sizes(folder, store.manifest)
    except StoreError as problem:
        raise store_error(
            folder,
            f"has a store that cannot be used ({problem}): choose another folder, or remove this one",
            kind=OtherStoreError,
        ) from problem
    if plan.is_plan_of(store.manifest):
        return store
    held = store.manifest
    about = [held.weights, f"group size {held.group_size}"]
    if held.calibration is not None:
        about.append(f"calibrated on {held.calibration.tokens:,} tokens of a text")
    if held.tables:
        about.append(f"tables in {held.tables}")
    raise store_error(
        folder,
        f"has another store ({', '.join(about)}, made from {held.source_name}, or from another version of it): choose "
        "another folder, or remove this one",
        kind=OtherStoreError,
    )


def check_free_space(folder: Path, total: int, present: int = 0, advice: str = "") -> None:
    """Raises ``StoreError`` unless ``total`` bytes, of which ``present`` exist, fit on the disk of ``folder``."""
    left = max(0, total - present)
    free = shutil.disk_usage(folder).free
    if free < left + _SPARE_BYTES:
        raise store_error(
            folder,
            f"the disk has {_megabytes(free)} free, but {_megabytes(left)} of {_megabytes(total)} are still to be "
            f"written, with {_megabytes(_SPARE_BYTES)} to spare. Free some, or choose another folder{advice}",
        )


def check_ours(partial: Path) -> None:
    """Raises ``StoreError`` if the path of the unfinished folder is occupied by something else."""
    if os.path.lexists(partial) and not _is_ours(partial):
        raise store_error(
            partial,
            "is in the way of an unfinished conversion, but is none. Move it, or choose another folder for the store",
        )


def _is_ours(folder: Path) -> bool:
    """Whether a conversion made this folder: it has a journal or a manifest, or is empty."""
    if not is_folder(folder):
        return False
    names, start = os.listdir(folder), _journal_start(folder)
    # A conversion that was killed while writing its first line leaves a part of that line, and nothing else.
    if start is not None and names == [JOURNAL_NAME] and JOURNAL_START.startswith(start):
        return True
    return not names or start == JOURNAL_START or _has_manifest(folder)


def _journal_start(folder: Path) -> bytes | None:
    """The first bytes of the file that is called like a journal; None without one."""
    path = folder / JOURNAL_NAME
    if not os.path.lexists(path) or not stat.S_ISREG(os.lstat(path).st_mode):
        return None
    with path.open("rb") as stream:
        return stream.read(len(JOURNAL_START))


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_manifest(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except StoreError:
        return False
    return True


def is_made_from(folder: Path, fingerprint: str) -> bool:
    if not is_folder(folder) or not _is_ours(folder):
        return False
    if is_store(folder):
        return read_manifest(folder).source_fingerprint == fingerprint
    planned = _planned(folder)
    return planned is not None and planned.get("source_fingerprint") == fingerprint


def is_begun(folder: Path, plan: StorePlan) -> bool:
    """Whether an earlier run began to write the store of ``plan`` to ``folder``."""
    partial = partial_path(folder)
    return is_folder(partial) and _is_ours(partial) and _planned(partial) == plan.identity()


def _planned(folder: Path) -> dict[str, Any] | None:
    """The plan in an unfinished folder's journal; None if it is empty, or its first line is truncated."""
    try:
        with (folder / JOURNAL_NAME).open("rb") as stream:
            planned = parse_json(stream.readline())["plan"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return planned if isinstance(planned, dict) else None


def is_finished(folder: Path, plan: StorePlan) -> bool:
    """Whether ``folder`` has the store of ``plan``. For the folder of a run: it was killed before its rename."""
    if not is_store(folder):
        return False
    try:
        return plan.is_plan_of(open_store(folder).manifest)
    except StoreError:
        return False


def move_into_place(partial: Path, folder: Path) -> None:
    for path in (partial, *filter(is_folder, partial.iterdir())):
        _sync_folder(path)
    if is_store(folder):
        replaced = folder.with_name(f".{folder.name}.replaced-{secrets.token_hex(4)}")
        if exchange(partial, folder):
            partial.rename(replaced)
        else:  # after a kill between these no store has the name; the next run moves the new one there
            folder.rename(replaced)
            partial.rename(folder)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)
    remove_remains(folder)


def remains(folder: Path) -> list[Path]:
    """The remains of a killed replacement: the old store, and the journal of the new one."""
    pattern = re.compile(re.escape(f".{folder.name}.replaced-") + "[0-9a-f]{8}")
    replaced = [path for path in folder.parent.iterdir() if pattern.fullmatch(path.name)]
    partial = partial_path(folder)
    if is_store(partial) and _journal_start(partial) != JOURNAL_START:
        replaced.append(partial)
    has_journal = is_store(folder) and _journal_start(folder) == JOURNAL_START  # else it is the user's file
    return [*filter(_is_ours, replaced), *([folder / JOURNAL_NAME] if has_journal else [])]


def remove_remains(folder: Path) -> None:
    for path in remains(folder):
        try:
            remove_store(path) if path.is_dir() else path.unlink()
        except OSError as error:
            _LOG.warning("%s was replaced, and what is left of it in %s cannot be removed: %s", folder, path, error)


def remove_store(folder: Path) -> None:
    """Remove a store, its manifest and journal last, so that the next run recognizes the remains."""
    marks = (MANIFEST_NAME, JOURNAL_NAME)
    for path in folder.iterdir():
        if path.name not in marks:
            shutil.rmtree(path) if is_folder(path) else path.unlink()
    for name in marks:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_as_store_error(folder: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise store_error(
                folder,
                "a file would be larger than ulimit -f or the file system allows: raise the limit, or choose a folder "
                "on another disk",
            ) from problem
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise store_error(folder, f"the disk is full. {advice}") from problem


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
