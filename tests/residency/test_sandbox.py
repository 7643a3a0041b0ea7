"""Sandboxes: no new threads, no information about processors, hidden files of the kernel."""

from __future__ import annotations

import _thread
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.cli import doctor_checks, main
from torch_mesh.models import expert_range
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.machine import disk_speed
from torch_mesh.pool.expert_pool import pool_slots, record_bytes
from torch_mesh.pool.memory_guard import MemoryGuard
from torch_mesh.store.convert import convert
from torch_mesh.store.verify import check_other_files
from torch_mesh.system.background import BackgroundThread, usable_processors
from torch_mesh.system.memory import anonymous_bytes, available_bytes, resident_slots, shortage

Hide = Callable[..., None]

# libgomp would end the process with "Thread creation failed".
FEW_THREADS = """
import os, resource, sys
import torch
from torch_mesh import _testing
torch.set_num_threads(len(os.sched_getaffinity(0)))
try:
    os.setuid(100_000 + os.getpid())  # a user without other processes, to whom the limit applies
except OSError as error:
    print(f"no other user: {error}", flush=True)
    os._exit(0)
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
for room in (*range(8), 64):
    resource.setrlimit(resource.RLIMIT_NPROC, (len(os.listdir("/proc/self/task")) + room, most))
    slept = _testing.openmp_sleeps()
    assert slept or room < 64
    assert room or not slept
print("survived", flush=True)
os._exit(0)
"""


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(_thread, "start_new_thread", refuse)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Hides files of the kernel, as a sandbox does."""
    read = Path.read_text

    def hide(*names: str) -> None:
        def read_others(self: Path, *given: Any, **named: Any) -> str:
            if str(self) in names:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return read(self, *given, **named)

        monkeypatch.setattr(Path, "read_text", read_others)

    return hide


def test_a_thread_that_cannot_start_is_an_error_that_names_the_limit(
    mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    store = convert(mesh_tiny, tmp_path / "store", "int4").store
    guard = MemoryGuard()
    request.getfixturevalue("no_threads")
    engine: Any = object()
    calls: list[Callable[[], object]] = [
        lambda: check_other_files(store, "first"),
        lambda: convert(mesh_tiny, tmp_path / "other", "int4"),
        lambda: disk_speed([mesh_tiny / "model.safetensors"], 4096),
        lambda: BackgroundThread(lambda: None, "test"),
        lambda: guard.add(engine),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(MemoryError, match=r"raise the process limit \(ulimit -u"):
            call()
            raise AssertionError(f"call {number} was not refused")
    monkeypatch.undo()
    assert guard.remove(engine) is None, "what has no thread is not guarded"
    convert(mesh_tiny, tmp_path / "other", "int4")


def test_openmp_is_given_no_thread_that_the_system_may_refuse() -> None:
    if os.geteuid() != 0:
        pytest.skip("a user without other processes needs root")
    done = warm.run(FEW_THREADS, timeout=300)
    if "no other user" in done.stdout:
        pytest.skip(done.stdout)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


@pytest.mark.parametrize("options", [{"residency": {"guard": "on"}}, {"stats": {"file": "stats.jsonl"}}])
def test_a_pool_that_gets_no_thread_is_closed(
    mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuse(*_: object) -> None:
        raise MemoryError("no thread can be started")

    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    monkeypatch.setattr(BackgroundThread, "__init__", refuse)
    with pytest.raises(MemoryError, match="no thread"):
        torch_mesh.patch(model, resident=0.5, **options)
    assert next(patched_modules(model), None) is None
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


def test_processors_are_counted_without_an_affinity_mask(
    mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert usable_processors() == (os.cpu_count() or 1)
    check_other_files(convert(mesh_tiny, tmp_path / "store", "int4").store, "first")


def test_hidden_memory_is_an_error_that_asks_for_a_size(tmp_path: Path) -> None:
    for read in (available_bytes, anonymous_bytes):
        with pytest.raises(FileNotFoundError, match="not known") as caught:
            read(tmp_path)
        assert caught.value.filename.startswith(str(tmp_path))
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="no line MemAvailable.*resident='8GiB'.*--memory"):
        available_bytes(tmp_path)


def test_a_given_size_is_accepted_where_memory_is_hidden(hide: Hide) -> None:
    hide("/proc/meminfo")
    sizes = {"layers": 10, "experts": 10, "top_k": 4, "record_bytes": 1 << 40}
    assert resident_slots(0.5, **sizes) == resident_slots("50TiB", **sizes) == 50
    assert resident_slots(0.5, **sizes, sharing=2) == 50
    assert shortage(1 << 60) is None
    with pytest.raises(PermissionError, match="resident='8GiB'"):
        resident_slots("auto", **sizes)


@pytest.mark.parametrize("hidden_from", ["this rank", "another rank"])
def test_ranks_take_a_given_size_where_memory_is_hidden_from_one(
    mesh_tiny: Path, hide: Hide, monkeypatch: pytest.MonkeyPatch, hidden_from: str
) -> None:
    if hidden_from == "this rank":
        hide("/proc/meminfo")
    other = None if hidden_from == "another rank" else 1 << 40
    monkeypatch.setattr(expert_range, "gathered", lambda value, where: [value, (value[0], other)])
    layers = find_experts(AutoModelForCausalLM.from_pretrained(mesh_tiny))
    count = layers[0].num_experts
    own = [
        replace(layer, num_experts=count // 2, expert_range=expert_range.ExpertRange(0, 2, count, 2))
        for layer in layers
    ]

    def slots(resident: str) -> int:
        return pool_slots(own, MeshConfig(resident=resident), stored_layers=len(own), weights="int8", group_size=32)

    assert slots("1MiB") == (1 << 20) // record_bytes(own, "int8", 32)
    if hidden_from == "this rank":
        with pytest.raises(PermissionError, match="resident='8GiB'"):
            slots("auto")


def test_a_model_runs_where_the_kernel_hides_its_files(
    mesh_tiny: Path, hide: Hide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide("/proc/meminfo", "/proc/self/status", "/proc/self/maps", "/proc/self/cgroup")
    config = MeshConfig(resident=0.25, dense="int8")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    torch_mesh.unpatch(model, lossy=True)
    with pytest.raises(PermissionError, match="name a size"):
        AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig())
    hide("/proc/meminfo")
    capsys.readouterr()
    given = [str(mesh_tiny), "--disk-speed", "1GB/s", "--memory-speed", "20GB/s"]
    assert main(["plan", *given]) == 1
    message = capsys.readouterr().err
    assert message.startswith("torch-mesh: /proc/meminfo: permission denied, so how much memory is free is not known")
    assert "--memory" in message
    assert main(["plan", *given, "--memory", "8GiB"]) == 0


def test_doctor_reports_on_a_machine_that_hides_its_memory(
    hide: Hide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/proc/meminfo")

    hide("/proc/meminfo")
    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    monkeypatch.setattr(doctor_checks, "memory_speed", lambda threads=None: 12e9)
    found = {each.name: each for each in doctor_checks.report(tmp_path)}
    assert found["memory"].status == "limited" and "resident" in found["memory"].advice
