"""Write a store so that a killed process leaves nothing that looks complete, and a second run continues.

Everything goes to a hidden folder beside the destination. Its journal makes it resumable and lists each finished record
with its checksum. Files are synced, the manifest is written last, and the folder is renamed. Journal entries are
verified by reading the records back, since after a power loss the journal may be ahead of the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_mesh.errors import StoreError
from torch_mesh.store.disk_cache import unwritable
from torch_mesh.store.folders import (
    check_free_space,
    check_ours,
    existing_store,
    full_disk_as_store_error,
    is_finished,
    is_made_from,
    lock_of,
    lock_path,
    move_into_place,
    partial_path,
    real_folder,
    remains,
    remove_remains,
    remove_store,
)
from torch_mesh.store.header import store_error
from torch_mesh.store.manifest import MAX_FILE_BYTES, Store, open_store, plan_record_files
from torch_mesh.store.stages import Streaming
from torch_mesh.store.store_plan import NewFile, Pack, Progress, Scratch, StorePlan
from torch_mesh.store.unfinished import UnfinishedStore
from torch_mesh.system.atomic_files import locked
from torch_mesh.system.background import usable_processors

_THREADS_READING = 2  # beside the threads that pack: about this many wait for the disk


@dataclass(frozen=True)
class Written:
    """``existed``: the destination was this very store already, and nothing was written."""

    store: Store
    existed: bool


def write_store(
    folder: str | os.PathLike[str],
    plan: StorePlan,
    pack: Pack,
    files: Sequence[NewFile] = (),
    *,
    force: bool = False,
    private: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    check_source: Callable[[], None] = lambda: None,
    scratch: Scratch | None = None,
    streaming: Streaming | None = None,
) -> Written:
    """Write the store of ``plan`` to ``folder``, or continue an earlier run of the same plan.

    ``pack`` makes the record of a layer and an expert; it runs on ``workers`` threads (default: two more than the
    usable CPUs), a few at a time. ``force`` replaces an existing store.
    ``private``: no other process knows ``folder``, so that no lock is needed, which some file systems lack.
    ``check_source`` is called when everything is read, and raises if the source changed: then no store is made.
    ``scratch`` is prepared before the first record, if one is still to be made. With ``streaming`` what the records and
    files read is fetched in turn.

    Links are followed. An existing store of this plan is only checked.

    Raises ``StoreError`` if ``folder`` holds something else or cannot be written, or the disk is too small or fills up.
    After any error, a kill or Ctrl-C, the same call continues.
    """
    folder = real_folder(folder)
    partial = partial_path(folder)
    # Look without the lock, whose file needs a writable folder. Another plan's store may be replaced at this moment.
    problem: StoreError | None = None
    try:
        existing = existing_store(folder, plan, force)
    except StoreError as error:
        existing, problem = None, error
    except OSError as error:
        raise unwritable(folder, error) from error
    if existing is not None:
        with contextlib.suppress(OSError):  # in another user's folder, or while another process writes
            if remains(folder) or lock_path(folder).exists():
                with locked(lock_path(folder)):
                    remove_remains(folder)
        return Written(existing, existed=True)
    if os.path.ismount(folder):
        raise problem or store_error(
            folder,
            "is a mount point, but a store is moved into place by renaming: name a folder in it",
        )
    with contextlib.nullcontext() if private else lock_of(folder, problem):
        existing = existing_store(folder, plan, force)
        if existing is None:
            check_ours(partial)
            remove_remains(folder)
            if not is_finished(partial, plan):
                _check_space(partial, plan, files, max_file_bytes, scratch, streaming)
                with (
                    full_disk_as_store_error(
                        partial, "What is finished stays there: free some room and run the same command again"
                    ),
                    contextlib.closing(UnfinishedStore(partial, plan, max_file_bytes)) as conversion,
                ):
                    conversion.run(
                        pack,
                        files,
                        workers or usable_processors() + _THREADS_READING,
                        progress,
                        check_source,
                        scratch,
                        streaming,
                    )
            move_into_place(partial, folder)
    return Written(existing or open_store(folder), existed=existing is not None)


def _check_space(
    partial: Path,
    plan: StorePlan,
    files: Sequence[NewFile],
    max_file_bytes: int,
    scratch: Scratch | None,
    streaming: Streaming | None,
) -> None:
    """Raises ``StoreError`` unless the disk has room for the remaining records and files."""
    record_files = plan_record_files(plan.shape, plan.modules, plan.record_bytes, bytes(16), max_file_bytes)
    total = sum(file.size for file in files) + sum(file.bytes for file, _ in record_files)
    total += 0 if scratch is None else scratch.bytes
    present = sum(path.stat().st_blocks * 512 for path in partial.iterdir()) if partial.is_dir() else 0
    if streaming is not None:
        total += streaming.peak_bytes(plan.shape.records(), files)
        present += streaming.shards.present_bytes()
    check_free_space(partial.parent, total, present, " or smaller weights")


def write_folder(
    folder: Path,
    files: Sequence[NewFile],
    progress: Progress | None = None,
    check_source: Callable[[], None] = lambda: None,
) -> None:
    """Write files to a folder of the cache, all or none, unless an earlier call has. ``check_source`` as in
    ``write_store``.

    Raises ``StoreError`` for a full disk and a read-only cache.
    """
    if _has_all(folder, files):
        return
    with lock_of(folder, None):
        if _has_all(folder, files):  # another process has written them meanwhile
            return
        partial = partial_path(folder)
        try:
            for left in (partial, folder):
                shutil.rmtree(left, ignore_errors=True)
            total, done = sum(file.size for file in files), 0
            check_free_space(folder.parent, total)
            partial.mkdir()
            with full_disk_as_store_error(folder.parent, "Free some room and open the model again"):
                for file in files:
                    with (partial / file.name).open("wb") as stream:
                        for chunk in file.chunks():
                            stream.write(chunk)
                            done += len(chunk)
                            if progress is not None:
                                progress(done, total)
                        stream.flush()
                        os.fsync(stream.fileno())
            check_source()
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _has_all(folder: Path, files: Sequence[NewFile]) -> bool:
    try:
        return all((folder / file.name).stat().st_size == file.size for file in files)
    except OSError:
        return False


def remove_made_from(folder: str | os.PathLike[str], fingerprint: str) -> None:
    """Remove the store in ``folder``, finished or not, if its source has this fingerprint.

    Raises ``OSError`` or ``StoreError`` if it cannot be removed.
    """
    folder = real_folder(folder)
    found = [partial_path(folder), folder]
    if not any(is_made_from(path, fingerprint) for path in found):
        return
    with lock_of(folder, None):
        for path in found:
            if is_made_from(path, fingerprint):
                remove_store(path)
