"""Atomic files and folders, and locks between processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FILE_MODE = 0o666  # of new files, before the umask, as in open()
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # on file systems without locks, such as some network ones
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


@contextmanager
def new_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that takes the name ``path`` when the block ends; an error leaves nothing behind.

    An OSError of writing names ``path``. Links are followed. Permissions follow the umask. A device or a pipe is
    written to as the block runs.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, mode) as file:
                yield file
            return
        with _naming(path):
            real = Path(os.path.realpath(path))
            unfinished, descriptor = _unnamed_file(real.parent, f".{real.name}.")
        with open(descriptor, mode) as file:
            try:
                yield file
                file.flush()
                os.fsync(descriptor)
                os.replace(unfinished, real)
            except BaseException:
                os.unlink(unfinished)
                raise
    except OSError as error:
        if error.errno is not None and error.filename is None:  # of a write, as on a full disk
            error.filename = os.fspath(path)
        raise


def check_new_file(path: str | os.PathLike[str]) -> None:
    """Raise the OSError of ``new_file`` before the work whose results it would write."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file in it")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder")
    if path.is_file() or not path.exists():
        with _naming(path):
            new_file_mode(Path(os.path.realpath(path)).parent)


def check_results(*results: tuple[str | None, str]) -> None:
    """``check_new_file`` for the outputs of a command, each with the beginning that such a file has, or that it has
    behind the 8 bytes with which a safetensors file starts.

    Raises ValueError for a file that begins otherwise, since it may be an input that a shell's pattern matched, and for
    one file that is named twice.
    """
    named = set()
    for path, beginning in results:
        if not path:
            continue
        check_new_file(path)
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe
            continue
        real = os.path.realpath(path)
        if real in named:
            raise ValueError(f"{path} is named for two outputs: name a file for each")
        named.add(real)
        if os.path.isfile(path) and os.path.getsize(path):
            with open(path, "rb") as file:
                if beginning.encode() not in file.read(8 + len(beginning)):
                    raise ValueError(f"{path} exists and is no earlier output of this kind: name another file")


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name ``path`` in an OSError instead of the hidden file that could not be made."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def new_file_mode(folder: Path) -> int:
    """The permission bits of a new file in ``folder``."""
    path, descriptor = _unnamed_file(folder, ".torch_mesh-mode-")
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _unnamed_file(folder: Path, prefix: str) -> tuple[Path, int]:
    """A new file under a unique name, and its descriptor, for reading and writing."""
    while True:
        path = folder / f"{prefix}{secrets.token_hex(4)}"
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file between processes. The kernel releases it when the process dies.

    If another process holds it, calls ``on_wait`` and waits; without ``on_wait`` raises BlockingIOError. Raises OSError
    if the file cannot be made, for example if it is a link.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            _lock(descriptor, on_wait)
        except BaseException:
            os.close(descriptor)
            raise
        # The previous holder may have removed the file: then this locks a file that no other process sees.
        if _same_file(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, on_wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is None:
            raise
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that is removed when the block ends; a killed process's is removed by the next call.

    On a file system without locks such a folder stays, since no process can tell whether its owner is alive.
    """
    _sweep(parent, prefix)
    with contextlib.ExitStack() as stack:
        folder = _unused_name(parent, prefix, stack)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _unused_name(parent: Path, prefix: str, stack: contextlib.ExitStack) -> Path:
    """A new name below ``parent`` with ``prefix``. It is locked, if locks are supported, until ``stack`` is left."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        lock = folder.with_name(f"{folder.name}.lock")
        try:
            stack.enter_context(locked(lock))
        except BlockingIOError:  # another process's sweep took the lock first
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            lock.unlink(missing_ok=True)
        return folder


def _sweep(parent: Path, prefix: str) -> None:
    """Remove folders whose lock is free, since their owners have ended."""
    for lock in parent.glob(f"{prefix}*.lock"):
        # The folder is in use, or belongs to another user.
        with contextlib.suppress(OSError), locked(lock):
            folder = lock.with_suffix("")
            if os.path.lexists(folder):
                shutil.rmtree(folder)


def exchange(first: Path, second: Path) -> bool:
    """Swap the names of two folders atomically. False, with nothing done, if the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))
