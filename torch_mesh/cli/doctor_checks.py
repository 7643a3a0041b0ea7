"""The checks of ``torch-mesh doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement
from rich.filesize import decimal as format_bytes

import torch_mesh
from torch_mesh.config_fields import MIN_CAPABILITY
from torch_mesh.errors import MeshError
from torch_mesh.store.disk_cache import cache_folder
from torch_mesh.store.sources import METHODS
from torch_mesh.system.memory import available_bytes
from torch_mesh.system.timing import memory_speed

Status = Literal["ok", "limited", "missing"]

# For the int4 store of a model of 30 billion parameters.
_COMFORTABLE_DISK_BYTES = 20 * 10**9
# A useful pool beside the rest of a model.
_COMFORTABLE_MEMORY_BYTES = 2 * 10**9
_CAP_IPC_LOCK = 14  # linux/capability.h
_RAISE_MEMLOCK = "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check. ``advice`` is empty if nothing needs to change.

    ``required`` features that are ``missing`` make torch_mesh unusable; others only cost speed or a feature.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    required: bool = False

    @property
    def fatal(self) -> bool:
        return self.required and self.status == "missing"


def report(folder: Path | None) -> list[Finding]:
    """Run all checks. ``folder`` holds the stores, None for the cache folder; it need not exist.

    Never raises for what the machine lacks. Without the extension, checks that need it are left out.
    """
    extension, engine = _extension()
    findings = [_requirements(), extension, _quantized_checkpoints()]
    without_folder: list[Finding] = []
    if folder is None:
        try:
            folder = cache_folder()
        except MeshError as error:
            without_folder = [
                Finding("cache folder", "limited", str(error), "name one with --folder to have its disk looked at")
            ]
    if engine is not None:
        findings += _engine_features(engine, folder)
    findings += [_huge_pages(), _memlock(), _memory(), _memory_speed()]
    return findings + (without_folder if folder is None else [_disk(folder)])


def _requirements() -> Finding:
    try:
        requirements = _stated_requirements()
    except importlib.metadata.PackageNotFoundError:
        found = "torch_mesh runs from its sources without being installed, so what it needs is not on record"
        return Finding("packages", "limited", found, "make build")
    installed = {requirement: _installed_version(requirement.name) for requirement in requirements}
    unmet = [
        requirement
        for requirement, version in installed.items()
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]
    if unmet:
        found = "; ".join(f"{requirement} needed, {installed[requirement] or 'none'} found" for requirement in unmet)
        advice = "pip install " + " ".join(f"'{requirement}'" for requirement in unmet)
        return Finding("packages", "missing", found, advice, required=True)
    found = ", ".join(f"{requirement.name} {version}" for requirement, version in installed.items())
    return Finding("packages", "ok", found)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stated_requirements() -> list[Requirement]:
    stated = map(Requirement, importlib.metadata.requires("torch_mesh") or [])
    return [requirement for requirement in stated if requirement.marker is None or requirement.marker.evaluate()]


def _quantized_checkpoints() -> Finding:
    version = _installed_version("gguf")
    gguf = "not GGUF files: pip install torch_mesh[gguf]" if version is None else f"and GGUF files, with gguf {version}"
    return Finding("quantized checkpoints", "ok", f"{', '.join(METHODS)} are read, without other packages; {gguf}")


def _extension() -> tuple[Finding, ModuleType | None]:
    if torch_mesh._unusable is not None:
        found = f"{torch_mesh._unusable} (io_uring, direct I/O, instruction sets, NUMA and GPUs were not looked at)"
        return Finding("extension", "missing", found, "make build", required=True), None
    from torch_mesh import _C

    return Finding("extension", "ok", f"built against torch {_C.torch_version}"), _C


def _engine_features(engine: ModuleType, folder: Path | None) -> list[Finding]:
    try:
        features = engine.features()
    except ValueError as error:  # an unknown or unsupported instruction set
        advice = f"unset TORCH_MESH_ISA, which is {os.environ.get('TORCH_MESH_ISA', '')!r}"
        return [Finding("instruction sets", "missing", str(error), advice, required=True)]
    return [
        _uring(features["uring"]),
        *([] if folder is None else [_direct_io(engine.direct_io_alignment, folder)]),
        _instruction_sets(features["isa"], features["isas"].split()),
        _bf16_products(),
        _numa(int(features["numa_nodes"]), int(features["numa_compute_nodes"])),
        _gpu(engine.cuda_driver()),
    ]


def _uring(obstacle: str) -> Finding:
    if not obstacle:
        return Finding("io_uring", "ok", "works")
    return Finding("io_uring", "limited", f"{obstacle}; reads go through a pool of threads", _uring_advice(obstacle))


def _uring_advice(obstacle: str) -> str:
    if "liburing" in obstacle:
        return "install liburing's headers (Debian: liburing-dev) and build again"
    if "memlock" in obstacle:
        return _RAISE_MEMLOCK
    if (_read("/proc/sys/kernel/io_uring_disabled") or "0").strip() != "0":
        return "sysctl -w kernel.io_uring_disabled=0 on the host"
    if "Seccomp:\t2" in (_read("/proc/self/status") or ""):
        return "start the container with a seccomp profile that allows io_uring_setup, _enter and _register"
    return "nothing, or a kernel with io_uring"


def _direct_io(alignment_of: Callable[[str], int], folder: Path) -> Finding:
    base = _existing_ancestor(folder)
    name = f"direct I/O in {base}"
    try:
        with tempfile.NamedTemporaryFile(dir=base, prefix=".torch-mesh-doctor-") as probe:
            probe.write(bytes(4096))
            probe.flush()
            alignment = alignment_of(probe.name)
    except OSError as error:
        found = f"no file can be written there, so no store can be made: {error}"
        return Finding(f"files in {base}", "limited", found, "make it writable, or name another with --folder")
    file_system = _file_system(base)
    if alignment < 0:
        found = f"{file_system} refuses it, or wants it aligned to more than 4 KiB; reads go through the page cache"
        return Finding(name, "limited", found, "keep stores on a local ext4 or XFS file system")
    if alignment == 0:
        found = f"{file_system} states no alignment; 4 KiB is used, and the kernel may buffer the reads"
        return Finding(name, "limited", found, "keep stores on a local ext4 or XFS file system")
    return Finding(name, "ok", f"{file_system}, aligned to {alignment} bytes")


def _file_system(path: Path) -> str:
    """Type of the file system of ``path``, by the longest mount point above it."""
    resolved = path.resolve()
    try:
        partitions = psutil.disk_partitions(all=True)
    except OSError:  # a sandbox without /proc
        return "unknown file system"
    mounts = [part for part in partitions if resolved.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"


def _instruction_sets(chosen: str, available: list[str]) -> Finding:
    name, found = "instruction sets", f"{chosen} (this processor runs {', '.join(available)})"
    best = available[-1]
    if chosen != best:
        return Finding(name, "limited", found, f"unset TORCH_MESH_ISA, which chose {chosen}, to have {best}")
    if best == "scalar":
        return Finding(name, "limited", found, "a processor with AVX2 or AVX512 is many times faster")
    return Finding(name, "ok", found)


def _bf16_products() -> Finding:
    """The criterion of ``dense="auto"``; imported here, since the extension may be missing."""
    from torch_mesh.formats import FORMATS
    from torch_mesh.modules.dense import multiplies_any_rows

    less = (
        'MeshConfig(dense="int8") halves what attention, shared experts and the head read for each token, with weights '
        f'off by {FORMATS["int8"].errors[64]:.1%}; "int4" quarters it, off by {FORMATS["int4"].errors[64]:.0%}'
    )
    if multiplies_any_rows():
        found = (
            "none or slow ones in this processor, so torch_mesh's kernels compute the rest of a model, too "
            f'(dense="auto"); {less}'
        )
        return Finding("bf16 products", "ok", found)
    found = f"the processor's own: torch's for prompts, torch_mesh's kernels for decode steps (dense=\"auto\"); {less}"
    return Finding("bf16 products", "ok", found)


def _numa(nodes: int, compute_nodes: int) -> Finding:
    if nodes <= 1:
        return Finding("NUMA", "ok", "one node")
    if compute_nodes <= 1:
        return Finding("NUMA", "ok", f"{nodes} nodes, one with processors for this process; experts are interleaved")
    return Finding("NUMA", "ok", f"each resident expert lies on one of {compute_nodes} nodes and is computed there")


def _huge_pages() -> Finding:
    name, switch = "huge pages", "/sys/kernel/mm/transparent_hugepage/enabled"
    setting = _read(switch)
    if setting is None:
        return Finding(name, "missing", "this kernel has no transparent huge pages")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen == "never":
        found = "switched off; reading resident experts takes more TLB misses"
        return Finding(name, "limited", found, f"echo madvise > {switch} on the host")
    return Finding(name, "ok", chosen)


def _memlock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _locks_without_limit():
        return Finding("locked memory", "ok", "no limit")
    return Finding(
        "locked memory",
        "limited",
        f"{format_bytes(limit)}; io_uring cannot register a larger pool, and plain reads cost more processor time"
        if limit
        else "none may be locked; some kernels then allow no io_uring at all, others register no pool with it",
        _RAISE_MEMLOCK,
    )


def _locks_without_limit() -> bool:
    """Whether the process has CAP_IPC_LOCK in the initial user namespace, the only one in which it lifts the limit."""
    status = _read("/proc/self/status") or ""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    all_users = (_read("/proc/self/uid_map") or "").split() == ["0", "0", str(2**32 - 1)]
    return all_users and bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def _gpu(driver: str) -> Finding:
    """Check the requirements of gpu.experts: a driver, a CUDA build of torch, a GPU of compute capability 8.0, Triton.

    ``driver`` is the engine's description of it.
    """
    if not re.match(r"CUDA driver \d", driver):
        return Finding("GPU", "missing", f"{driver}; everything runs on the CPU")
    if torch.version.cuda is None:
        found = f"{driver}, but torch {torch.__version__} is built without CUDA; everything runs on the CPU"
        return Finding("GPU", "missing", found, "install a CUDA build of torch, and make build")
    if not torch.cuda.is_available():
        found = f"{driver}; torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device with it"
        return Finding(
            "GPU", "missing", found, "look at nvidia-smi; a driver that is older than torch's CUDA has to be updated"
        )
    found = f"{', '.join(map(_describe_card, range(torch.cuda.device_count())))}; {driver}"
    triton = _installed_version("triton")
    if triton is None:
        return Finding(
            "GPU", "limited", f"{found}; no Triton, so experts are computed on the CPU", "pip install triton"
        )
    found += f", Triton {triton}"
    if min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) < MIN_CAPABILITY:
        minimum = ".".join(map(str, MIN_CAPABILITY))
        return Finding("GPU", "limited", f"{found}; gpu.experts needs compute capability {minimum}")
    return Finding("GPU", "ok", f"{found}; MeshConfig.gpu.experts places experts there")


def _describe_card(index: int) -> str:
    card = torch.cuda.get_device_properties(index)
    return f"{card.name} ({card.major}.{card.minor}, {format_bytes(card.total_memory)})"


def _memory() -> Finding:
    try:
        machine, available = psutil.virtual_memory(), available_bytes()
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        return Finding("memory", "limited", found, "let the sandbox read it, or name a MeshConfig(resident=...)")
    found = f"{format_bytes(available)} of {format_bytes(machine.total)} can be taken"
    # Free memory varies a little between two reads.
    if available < 0.9 * machine.available:
        found += f"; a memory cgroup holds back {format_bytes(machine.available - available)} that the machine has free"
        return Finding(
            "memory", "limited", found, "raise the container's limit (MemoryMax in systemd, --memory in Docker)"
        )
    if available < _COMFORTABLE_MEMORY_BYTES:
        return Finding("memory", "limited", found, "end what else runs, or name a small MeshConfig(resident=...)")
    return Finding("memory", "ok", found)


def _memory_speed() -> Finding:
    threads = torch.get_num_threads()
    found = f"{memory_speed(1) / 1e9:.1f} GB/s read by one thread"
    if threads > 1:
        found += f", {memory_speed() / 1e9:.1f} by {threads}"
    return Finding("best read of memory", "ok", f"{found}: a token cannot be faster than its weights are read")


def _disk(folder: Path) -> Finding:
    base = _existing_ancestor(folder)
    free = shutil.disk_usage(base).free
    name, found = f"disk space in {base}", f"{format_bytes(free)} free"
    if free < _COMFORTABLE_DISK_BYTES:
        advice = "an int4 store of a 30 B model takes 17 GB; name a larger disk with MeshConfig(store=...)"
        return Finding(name, "limited", found, advice)
    return Finding(name, "ok", found)


def _existing_ancestor(folder: Path) -> Path:
    # Path.is_dir() raises for a folder that may not be looked at, up to Python 3.13.
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
