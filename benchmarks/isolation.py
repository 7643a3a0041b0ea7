"""Run a program under a memory limit with its files evicted from the page cache.

The kernel charges a page of the page cache to the group that first touches it. So a limit bounds the pages of a mapped
file. Libraries stay in the cache: they are charged to the first program that used them, and are not measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group with a memory limit and no swap, under version 1 or 2 of the memory controller."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    def set_limit(self, limit: int) -> None:
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self.version == 1 else ("memory.max",)
        for name in names:
            # Without swap accounting, a kernel option, these files are missing.
            if "memsw" not in name or (self.path / name).exists():
                (self.path / name).write_text(str(limit))
        if self.version == 2 and (self.path / "memory.swap.max").exists():
            (self.path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Move the calling process into the group. Call it in the child between fork and exec."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """Peak bytes charged to the group, page cache included."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.path / name).read_text())

    def killed(self) -> bool:
        """Whether the kernel killed a process of the group because of the limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(fields["oom_kill"]) > 0


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A new group with a limit in bytes, removed at the end. Needs root."""
    version = cgroup_version()
    parent = CGROUP_ROOT / "memory" if version == 1 else delegate_memory(CGROUP_ROOT)
    try:
        path = Path(tempfile.mkdtemp(prefix="torch-mesh-bench-", dir=parent))
    except OSError as error:
        raise SystemExit(f"cannot make a control group below {parent} ({error}); run this benchmark as root") from error
    try:
        group = MemoryGroup(path, version)
        group.set_limit(limit)
        yield group
    finally:
        remove_group(path)


def cgroup_version() -> int:
    if (CGROUP_ROOT / "memory" / "memory.limit_in_bytes").exists():
        return 1
    controllers = CGROUP_ROOT / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return 2
    raise SystemExit(f"no memory controller below {CGROUP_ROOT}: a benchmark under a memory limit cannot run here")


def delegate_memory(group: Path) -> Path:
    """Makes the memory controller available to the children of a version 2 group."""
    control = group / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        try:
            control.write_text("+memory")
        except OSError as error:
            raise SystemExit(f"cannot enable the memory controller in {control} ({error}); run as root") from error
    return group


def remove_group(path: Path) -> None:
    """Remove a group. This fails until the kernel has cleaned up its last process."""
    for _ in range(100):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    path.rmdir()


def run_limited(command: Sequence[str], limit: int, time_limit: float) -> int:
    """Runs a command in a memory group and returns the group's peak. A failure shows the command's errors."""
    with memory_group(limit) as group:
        done = subprocess.run(
            command, preexec_fn=group.enter, capture_output=True, text=True, timeout=time_limit, check=False
        )
        if done.returncode != 0:
            cause = (
                f"was killed at its limit of {limit / 1e6:.0f} MB"
                if group.killed()
                else f"exited with {done.returncode}"
            )
            raise RuntimeError(f"{' '.join(command)} {cause}:\n{done.stderr[-4000:]}")
        return group.peak()


def evict(paths: Sequence[Path]) -> None:
    """Evict files from the page cache, and check that they are evicted. A folder means all files in it."""
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            evict_file(file)


def evict_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = cached_bytes(path)
    # Another process's read-ahead may be reading a few pages.
    if cached > max(1 << 20, path.stat().st_size // 100):
        raise RuntimeError(f"{path} has {cached} bytes in the page cache: another process has it open")


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view,
    ):
        pages = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), f"mincore on {path}")
    return sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE
