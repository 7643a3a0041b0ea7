"""torch-mesh doctor: its findings on this machine and on simulated ones."""

from __future__ import annotations

import argparse
import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from packaging.requirements import Requirement

import torch_mesh
from torch_mesh.cli import doctor, doctor_checks, main
from torch_mesh.system.timing import memory_speed

FEATURES = {
    "isa": "avx512",
    "isas": "scalar avx2 avx512",
    "uring": "",
    "numa_nodes": "1",
    "numa_compute_nodes": "1",
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stub of torch_mesh._C on a machine that has everything."""
    fake = SimpleNamespace(
        torch_version="2.13.0",
        features=lambda: dict(FEATURES),
        direct_io_alignment=lambda path: 512,
        cuda_driver=lambda: "CUDA driver 12.8",
    )
    monkeypatch.setattr(torch_mesh, "_unusable", None)
    monkeypatch.setattr(torch_mesh, "_C", fake, raising=False)
    return fake


@pytest.fixture
def kernel_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Contents of files under /proc and /sys that doctor reads in place of this machine's, by path."""
    files: dict[str, str | None] = {}
    read = doctor_checks._read
    monkeypatch.setattr(doctor_checks, "_read", lambda path: files[path] if path in files else read(path))
    return files


@pytest.fixture(autouse=True)
def memory_reads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Records the numbers of threads that doctor measures memory with. Nothing is measured, for that takes a while."""
    asked: list[int | None] = []
    monkeypatch.setattr(doctor_checks, "memory_speed", lambda threads=None: asked.append(threads) or 12e9)
    return asked


def finding(folder: Path, name: str) -> doctor_checks.Finding:
    (found,) = (each for each in doctor_checks.report(folder) if each.name.startswith(name))
    return found


def run(folder: Path, *, as_json: bool) -> int:
    return doctor.run(argparse.Namespace(folder=folder, json=as_json))


@pytest.mark.parametrize(("threads", "asked"), [(1, [1]), (4, [1, None])])
def test_memory_is_read_by_one_thread_and_by_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_reads: list[int | None],
    threads: int,
    asked: list[int | None],
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    found = finding(tmp_path, "best read of memory").found
    assert memory_reads == asked and found.startswith("12.0 GB/s read by one thread")
    assert ("12.0 by 4" in found) == (threads == 4)


def test_memory_speed_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    assert 1e8 < memory_speed(1) < 1e12 and torch.get_num_threads() == before


def test_doctor_reports_all_findings_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = run(tmp_path, as_json=True)
    output = json.loads(capsys.readouterr().out)
    assert output["usable"] and exit_code == 0
    names = [each["name"] for each in output["findings"]]
    assert len(set(names)) == len(names) and {"io_uring", "instruction sets", "NUMA", "memory"} <= set(names)
    assert {each["status"] for each in output["findings"]} <= {"ok", "limited", "missing"}
    assert all(each["found"] for each in output["findings"])


def test_a_folder_that_may_not_be_looked_at_does_not_end_the_report(
    tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may look into every folder, so that the name is too long instead: the same system call fails."""
    names = [each.name for each in doctor_checks.report(tmp_path)]
    assert [each.name for each in doctor_checks.report(tmp_path / ("x" * 300) / "store")] == names


def test_table_shows_every_finding(
    tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(tmp_path, as_json=False) == 0
    printed = capsys.readouterr().out
    for each in doctor_checks.report(tmp_path):
        assert each.name in printed and each.status in printed


def test_advice_is_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    advice = "start the container with a seccomp profile that allows io_uring_setup, _enter and _register " * 2
    findings = [
        doctor_checks.Finding(f"thing [{number}]", "limited", "x " * 60, f"[{number}] {advice}") for number in range(2)
    ]
    monkeypatch.setattr(
        doctor_checks, "report", lambda folder: [*findings, doctor_checks.Finding("fine", "ok", "works")]
    )
    for columns in ("40", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(Path(), as_json=False) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [f"  {each.name}: {each.advice}" for each in findings] == lines[-2:]
    monkeypatch.setattr(doctor_checks, "report", lambda folder: [doctor_checks.Finding("fine", "ok", "works")])
    assert run(Path(), as_json=False) == 0
    assert "What to change" not in capsys.readouterr().out


def test_a_folder_that_does_not_exist_is_not_created(
    engine: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    arguments = parser.parse_args(["--json", "--folder", str(tmp_path / "not" / "yet")])
    assert arguments.run(arguments) == 0
    assert f"disk space in {tmp_path}" in capsys.readouterr().out
    assert not (tmp_path / "not").exists()


def test_without_a_home_folder_the_rest_is_still_reported(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["doctor", "--json"]) == 0
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "XDG_CACHE_HOME" in findings["cache folder"]["found"] and "memory" in findings
    assert not any(name.startswith(("direct I/O", "disk space")) for name in findings)


def test_without_the_extension_the_rest_is_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_mesh, "_unusable", ImportError("built against torch 1.0, but torch 2.0 is loaded"))
    extension = finding(tmp_path, "extension")
    assert extension.fatal and "torch 1.0" in extension.found and "make build" in extension.advice
    assert finding(tmp_path, "memory").found
    assert run(tmp_path, as_json=False) == 1
    assert "cannot work" in capsys.readouterr().out


def test_an_instruction_set_that_the_processor_lacks_is_fatal(
    tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError("TORCH_MESH_ISA is 'avx1024'; allowed: scalar")

    monkeypatch.setenv("TORCH_MESH_ISA", "avx1024")
    engine.features = refuse
    found = finding(tmp_path, "instruction sets")
    assert found.fatal and "avx1024" in found.advice


@pytest.mark.parametrize(
    ("isa", "isas", "status", "advice"),
    [
        ("avx512", "scalar avx2 avx512", "ok", ""),
        ("avx2", "scalar avx2 avx512", "limited", "TORCH_MESH_ISA"),
        ("scalar", "scalar", "limited", "AVX2"),
    ],
)
def test_instruction_sets(
    tmp_path: Path, engine: SimpleNamespace, isa: str, isas: str, status: str, advice: str
) -> None:
    engine.features = lambda: FEATURES | {"isa": isa, "isas": isas}
    found = finding(tmp_path, "instruction sets")
    assert found.status == status and advice in found.advice and bool(found.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("obstacle", "disabled", "seccomp", "advice"),
    [
        ("built without liburing", "0", "0", "liburing-dev"),
        ("io_uring_setup is forbidden", "2", "0", "kernel.io_uring_disabled=0"),
        ("io_uring_setup is forbidden", "0", "2", "seccomp"),
        ("this kernel has no io_uring", "0", "0", "kernel"),
        ("no memory for a ring (Cannot allocate memory): raise the memlock limit", "0", "2", "ulimit -l unlimited"),
    ],
)
def test_advice_follows_why_io_uring_does_not_work(
    tmp_path: Path,
    engine: SimpleNamespace,
    kernel_files: dict[str, str | None],
    obstacle: str,
    disabled: str,
    seccomp: str,
    advice: str,
) -> None:
    kernel_files["/proc/sys/kernel/io_uring_disabled"] = f"{disabled}\n"
    kernel_files["/proc/self/status"] = f"CapEff:\t0000000000000000\nSeccomp:\t{seccomp}\n"
    engine.features = lambda: FEATURES | {"uring": obstacle}
    found = finding(tmp_path, "io_uring")
    assert found.status == "limited" and obstacle in found.found and advice in found.advice


@pytest.mark.parametrize(("alignment", "status"), [(512, "ok"), (4096, "ok"), (0, "limited"), (-1, "limited")])
def test_direct_io(tmp_path: Path, engine: SimpleNamespace, alignment: int, status: str) -> None:
    engine.direct_io_alignment = lambda path: alignment
    found = finding(tmp_path / "later", "direct I/O")
    assert found.status == status and str(tmp_path) in found.name
    assert not list(tmp_path.iterdir()), "the probe file was left behind"


def test_a_file_as_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--folder", str(tmp_path / "file")]) == 1
    assert "is a file: name a folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_reported(engine: SimpleNamespace) -> None:
    assert "no file can be written" in finding(Path("/proc"), "files in").found


@pytest.mark.parametrize(
    ("nodes", "compute_nodes", "found"),
    [("1", "1", "one node"), ("2", "1", "interleaved"), ("4", "2", "one of 2 nodes")],
)
def test_numa(tmp_path: Path, engine: SimpleNamespace, nodes: str, compute_nodes: str, found: str) -> None:
    engine.features = lambda: FEATURES | {"numa_nodes": nodes, "numa_compute_nodes": compute_nodes}
    assert found in finding(tmp_path, "NUMA").found


@pytest.mark.parametrize(
    ("setting", "status"),
    [("[always] madvise never\n", "ok"), ("always madvise [never]\n", "limited"), (None, "missing")],
)
def test_huge_pages(
    tmp_path: Path, engine: SimpleNamespace, kernel_files: dict[str, str | None], setting: str | None, status: str
) -> None:
    kernel_files["/sys/kernel/mm/transparent_hugepage/enabled"] = setting
    assert finding(tmp_path, "huge pages").status == status


@pytest.mark.parametrize(
    ("limit", "capabilities", "uid_map", "status"),
    [
        (8 << 20, 0, "0 0 4294967295", "limited"),
        (resource.RLIM_INFINITY, 0, "0 0 4294967295", "ok"),
        (8 << 20, 1 << 14, "0 0 4294967295", "ok"),
        (8 << 20, 1 << 14, "0 100000 65536", "limited"),  # root of a user namespace only
        (0, 0, "0 0 4294967295", "limited"),
    ],
)
def test_locked_memory(
    tmp_path: Path,
    engine: SimpleNamespace,
    kernel_files: dict[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    capabilities: int,
    uid_map: str,
    status: str,
) -> None:
    kernel_files["/proc/self/status"] = f"CapEff:\t{capabilities:016x}\n"
    kernel_files["/proc/self/uid_map"] = uid_map
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found = finding(tmp_path, "locked memory")
    assert found.status == status
    assert ("none may be locked" in found.found) == (limit == 0)


def test_a_memory_cgroup_is_named(tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory().available
    monkeypatch.setattr(doctor_checks, "available_bytes", lambda: free // 4)
    found = finding(tmp_path, "memory")
    assert found.status == "limited" and "cgroup" in found.found and found.advice


def test_little_memory_is_named(tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=16 * 10**9, available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(doctor_checks, "available_bytes", lambda: machine.available)
    found = finding(tmp_path, "memory")
    assert found.status == "limited" and found.found == "1.0 GB of 16.0 GB can be taken" and found.advice


def test_a_full_disk_is_named(tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    found = finding(tmp_path, "disk space")
    assert found.status == "limited" and "1.0 GB" in found.found


def test_a_package_that_is_too_old_is_fatal(
    tmp_path: Path, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = [Requirement("torch>=99"), Requirement("surely-not-installed"), Requirement("rich")]
    monkeypatch.setattr(doctor_checks, "_stated_requirements", lambda: stated)
    found = finding(tmp_path, "packages")
    assert found.fatal and "torch>=99" in found.advice and "surely-not-installed" in found.advice
    assert "rich" not in found.advice


@pytest.mark.parametrize(
    ("driver", "cuda", "available", "triton", "capability", "status", "text"),
    [
        (
            "no CUDA driver: libcuda.so.1: cannot open",
            None,
            False,
            "3.9.0",
            (9, 0),
            "missing",
            "^no CUDA driver: libcuda.*CPU",
        ),
        (
            "libcuda.so.1 has no cuLaunchHostFunc",
            "13.0",
            True,
            "3.9.0",
            (9, 0),
            "missing",
            "no cuLaunchHostFunc; everything",
        ),
        (
            "CUDA driver 12.4",
            None,
            False,
            "3.9.0",
            (9, 0),
            "missing",
            "CUDA driver 12.4, but torch .* is built without CUDA",
        ),
        ("CUDA driver 11.4", "13.0", False, "3.9.0", (9, 0), "missing", r"torch .* \(CUDA 13.0\) finds no device"),
        ("CUDA driver 13.0", "13.0", True, None, (9, 0), "limited", "no Triton"),
        ("CUDA driver 13.0", "13.0", True, "3.9.0", (7, 5), "limited", "gpu.experts needs compute capability 8.0"),
        (
            "CUDA driver 13.0",
            "13.0",
            True,
            "3.9.0",
            (8, 9),
            "ok",
            r"Card \(8.9, 24.0 GB\); CUDA driver 13.0, Triton 3.9.0",
        ),
    ],
)
def test_gpu(
    tmp_path: Path,
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    cuda: str | None,
    available: bool,
    triton: str | None,
    capability: tuple[int, int],
    status: str,
    text: str,
) -> None:
    card = SimpleNamespace(name="Card", major=capability[0], minor=capability[1], total_memory=24 * 10**9)
    version = doctor_checks._installed_version
    monkeypatch.setattr(doctor_checks, "_installed_version", lambda name: triton if name == "triton" else version(name))
    engine.cuda_driver = lambda: driver
    monkeypatch.setattr("torch.version.cuda", cuda)
    for name, value in (
        ("is_available", available),
        ("device_count", 1),
        ("get_device_capability", capability),
        ("get_device_properties", card),
    ):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    found = finding(tmp_path, "GPU")
    assert found.status == status and re.search(text, found.found)
    assert not found.fatal and bool(found.advice) == (
        (status == "missing" and driver.startswith("CUDA")) or "no Triton" in text
    )
