"""Measure how much memory this process may still take, and how many experts fit in it."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath

from torch_mesh.validators import parse_size

# Memory that "auto" leaves to the rest of the process: activations, KV cache, page cache.
_MARGIN_BYTES = 512 << 20
_MARGIN_DIVISOR = 8  # the fraction 1 / 8
_SMALL_MARGIN_DIVISOR = 4  # 1 / 4, if that is less than _MARGIN_BYTES: for small containers

_NOT_KNOWN = (
    "so how much memory is free is not known: name a size, as with resident='8GiB' or --resident 8GiB, and --memory of "
    "torch-mesh plan"
)


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes that can be taken without swapping or being killed, by the machine and every memory cgroup above this
    process. Droppable page cache counts as free."""
    return max(0, left_bytes(proc))


def left_bytes(proc: Path = Path("/proc")) -> int:
    """Like ``available_bytes``, but negative if a soft limit is exceeded."""
    return min([_machine_available(proc), *_cgroups_available(proc)])


def shortage(needed: int) -> int | None:
    """Free bytes, if fewer than ``needed``; None if that fits, or if free memory is unknown."""
    try:
        free = available_bytes()
    except OSError:
        return None
    return free if free < needed else None


def anonymous_bytes(proc: Path = Path("/proc")) -> int:
    """Anonymous memory of this process, without mapped files and page cache."""
    return _kilobytes(proc / "self/status", "RssAnon:", "so what this process takes is not known") * 1024


def trim_heap() -> None:
    """Return the free pages of malloc's heaps to the operating system. Needs glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def auto_budget(available: int, reserved: int) -> int:
    """Bytes of experts that ``resident="auto"`` keeps with ``available`` bytes free and ``reserved`` of those set
    aside; negative if there is no memory for experts."""
    free = available - reserved
    return free - auto_margin(free)


def auto_margin(free: int) -> int:
    """The margin that ``resident="auto"`` leaves of ``free`` bytes: an eighth, and at least 512 MiB or, below 2 GiB, a
    quarter."""
    return max(_min_margin(free), free // _MARGIN_DIVISOR)


def _min_margin(free: int) -> int:
    return max(0, min(_MARGIN_BYTES, free // _SMALL_MARGIN_DIVISOR))


def resident_slots(
    resident: str | float,
    *,
    layers: int,
    experts: int,
    top_k: int,
    record_bytes: int,
    reserved: int = 0,
    freed: int = 0,
    regained: int = 0,
    available: int | None = None,
    sharing: int = 1,
) -> int:
    """How many experts a pool holds, between ``top_k`` and layers * experts.

    ``resident`` is as in MeshConfig; "auto" takes the free memory less ``reserved`` bytes and a margin. ``freed`` bytes
    are released only after the pool is allocated, so it has to fit beside them; ``regained`` bytes are released before.
    ``available``: free bytes; None: as of now. ``sharing``: the number of processes, this one included, that take the
    same from it.

    Raises ValueError for a size below ``top_k`` records of ``record_bytes``, MemoryError for more than is free, and
    OSError for "auto" if the kernel's files are unreadable; a size or fraction is not checked then.
    """
    every = layers * experts
    if available is None:
        try:
            available = available_bytes()
        except OSError:
            if resident == "auto":
                raise
            available = every * record_bytes * sharing  # unknown: trust the given size
    free = available + regained * sharing
    if isinstance(resident, float):
        # The decimal as written, not its binary neighbor: 0.29 of 100 is 29.
        slots = max(top_k, math.floor(Fraction(str(resident)) * every))
        return _affordable(slots, resident, record_bytes, free, sharing)
    if resident == "auto":
        reserved *= sharing
        beside_freed = free - reserved - _min_margin(free - reserved)
        budget = min(auto_budget(free + freed * sharing, reserved), beside_freed) // sharing
        return min(every, max(top_k, budget // record_bytes))
    slots = parse_size(resident, "resident") // record_bytes
    if slots < top_k:
        unit = " A number without a unit is of bytes." if str(resident).strip().isdigit() else ""
        raise ValueError(
            f"resident={resident!r} holds {slots} experts of {record_bytes:,} bytes, but every token needs {top_k}: "
            f"give at least {top_k * record_bytes:,} bytes.{unit}"
        )
    slots = min(every, slots)
    return _affordable(slots, resident, record_bytes, free, sharing)


def _affordable(slots: int, resident: str | float, record_bytes: int, free: int, sharing: int) -> int:
    if slots * record_bytes * sharing > free:
        each = f" for each of the {sharing} ranks on this machine" if sharing > 1 else ""
        raise MemoryError(
            f"resident={resident!r} needs {slots * record_bytes:,} bytes for {slots} experts{each}, but the machine "
            f"and its memory cgroups have {free:,} left: give less, or 'auto'."
        )
    return slots


def _machine_available(proc: Path) -> int:
    return _kilobytes(proc / "meminfo", "MemAvailable:", _NOT_KNOWN) * 1024


def _kilobytes(file: Path, name: str, consequence: str) -> int:
    """The value of a line of a kernel file. Raises OSError with advice if a sandbox hides it."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, {consequence}", os.fspath(file)) from error
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1])
    raise OSError(errno.ENODATA, f"it has no line {name}, {consequence}", os.fspath(file))


def _cgroups_available(proc: Path) -> Iterator[int]:
    for version, folder, mount in _memory_cgroups(proc):
        while True:
            left = _cgroup_left(version, folder)
            if left is not None:
                yield left
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _memory_cgroups(proc: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, folder of this process's cgroup, mount point) for each hierarchy that controls memory."""
    own: dict[int, PurePosixPath] = {}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            own[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            own[1] = PurePosixPath(path)
    for line in _lines(proc / "self/mountinfo"):
        mounted, filesystem = (part.split(" ") for part in line.split(" - ", 1))
        version = _memory_cgroup_version(kind=filesystem[0], options=filesystem[-1].split(","))
        if version in own:
            root, mount = _unescaped(mounted[3]), Path(_unescaped(mounted[4]))
            # A container may see its own cgroup mounted as the root of the hierarchy.
            inside = own[version].relative_to(root) if own[version].is_relative_to(root) else ""
            yield version, mount / inside, mount


def _memory_cgroup_version(kind: str, options: list[str]) -> int:
    """0: this mount does not control memory."""
    if kind == "cgroup2":
        return 2
    return 1 if kind == "cgroup" and "memory" in options else 0


def _cgroup_left(version: int, folder: Path) -> int | None:
    """Bytes up to this cgroup's limit; None without a limit, or if the files are unreadable."""
    if version == 2:
        limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
        usage, prefix = _number(folder / "memory.current"), ""
    else:
        # Above the soft limit a cgroup is reclaimed first, as above v2's memory.high.
        limits = [_number(folder / "memory.limit_in_bytes"), _number(folder / "memory.soft_limit_in_bytes")]
        usage, prefix = _number(folder / "memory.usage_in_bytes"), "total_"
    known = [limit for limit in limits if limit is not None]
    if not known or usage is None:
        return None
    droppable = (f"{prefix}inactive_file", f"{prefix}active_file")
    statistics = (line.split() for line in _lines(folder / "memory.stat"))
    return min(known) - usage + sum(int(value) for name, value in statistics if name in droppable)


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        text = os.fsdecode(file.read_bytes())  # names of mount points need not be UTF-8
    except OSError:
        return []
    return text.removesuffix("\n").split("\n") if text else []


def _unescaped(name: str) -> str:
    """A name of /proc/self/mountinfo, in which blanks are octal: ``a\\040b``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
