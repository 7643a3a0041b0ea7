"""torch-mesh bench: its figures agree with the model's statistics and with the plan of the same configuration."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import _C, MeshConfig
from torch_mesh.cli import main
from torch_mesh.formats import ROUNDED_FORMATS
from torch_mesh.hf.open_model import open_model
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.token_time import Speeds


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """Fixed speeds. Measuring takes seconds, and the tests of plan do it."""
    speeds = Speeds(disk=1e9, experts=2e10, dense=1e10, layer_seconds=1e-3, measured=())
    monkeypatch.setattr("torch_mesh.planning.bench.measure_speeds", lambda sizes, config: speeds)
    monkeypatch.setattr("torch_mesh.planning.bench.memory_speed", lambda: 3e10)
    return speeds


def bench(folder: Path, out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["bench", str(folder), "--io", "threads", *arguments, "--json", str(out / "bench.json")]) == 0
    return json.loads((out / "bench.json").read_text())


def test_bench_measures_the_tokens_and_slots_of_its_options(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--resident", "0.25", "--tokens", "12", "--prompt-tokens", "40", "--prefetch", "off"]
    measured = bench(mesh_tiny, tmp_path, *arguments)
    assert (measured["prompt_tokens"], measured["decoded_tokens"], len(measured["step_seconds"])) == (40, 12, 11)
    decode = measured["stats"]["decode"]
    assert decode["forwards"] == 11 and measured["stats"]["prefill"]["forwards"] == 1
    assert measured["hit_rate"] == decode["hit_rate"] == decode["hits"] / (11 * 6 * 4)
    assert measured["bytes_per_token"] == decode["bytes_read"] / 11
    assert measured["limits"]["disk"] == pytest.approx(1e9 / measured["bytes_per_token"])
    assert measured["stall_fraction"] == pytest.approx(decode["stall_seconds"] / sum(measured["step_seconds"]))
    assert 0 < measured["stall_fraction"] < 1 and 0 <= measured["prefill_stall_fraction"] < 1
    assert measured["tokens_per_second_p10"] <= measured["tokens_per_second"] <= measured["tokens_per_second_p90"]
    assert measured["prefill_tokens_per_second"] == pytest.approx(40 / measured["prefill_seconds"])
    planned = measured["plan"]
    assert (planned["slots"], planned["speeds"]["disk"]) == (48, 1e9)
    assert measured["ratio_to_plan"] == pytest.approx(measured["tokens_per_second"] / planned["tokens_per_second"])
    used = 6 * 4 * planned["sizes"]["expert_bytes"] + planned["sizes"]["dense_bytes_per_token"]
    assert measured["limits"]["memory"] == pytest.approx(3e10 / used)
    assert measured["peak_bytes"] > planned["pool_bytes"]
    table = " ".join(capsys.readouterr().out.split())
    for words in ("prompt of 40", "decoding 12", "plan", "the disk allows", "memory at the peak", "1.0 GB/s"):
        assert words in table


def test_a_timeline_has_the_misses_of_decode_steps(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = tmp_path / "timeline.csv"
    arguments = ["--resident", "0.25", "--tokens", "12", "--prompt-tokens", "40", "--prefetch", "off"]
    measured = bench(mesh_tiny, tmp_path, *arguments, "--timeline", str(timeline))
    header, *rows = csv.reader(timeline.open())
    assert header == ["layer", "expert", "claimed", "begun", "landed", "handed", "computed"]
    misses = [list(map(int, row)) for row in rows]
    assert len(misses) == measured["stats"]["decode"]["cold_misses"] > 0
    assert {row[0] for row in misses} <= set(range(6)) and {row[1] for row in misses} <= set(range(32))
    assert all(row[2:] == sorted(row[2:]) for row in misses)  # the times are in order
    assert min(row[2] for row in misses) == 0
    output = capsys.readouterr().out
    for words in ("a cold expert: queued", "being read", "ready, not taken", "being computed"):
        assert words in output


def test_a_timeline_has_no_misses_where_all_experts_are_resident(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds
) -> None:
    timeline = tmp_path / "timeline.csv"
    arguments = ["--resident", "1.0", "--tokens", "3", "--prompt-tokens", "40", "--prefetch", "off"]
    measured = bench(mesh_tiny, tmp_path, *arguments, "--timeline", str(timeline))
    misses = list(csv.reader(timeline.open()))[1:]
    assert len(misses) == measured["stats"]["decode"]["cold_misses"]


def test_the_memory_option_decides_how_many_experts_are_resident(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds
) -> None:
    measured = bench(mesh_tiny, tmp_path, "--tokens", "3", "--prompt-tokens", "17", "--memory", "64GiB")
    assert measured["stats"]["prefill"]["forwards"] == 1 and measured["stats"]["decode"]["forwards"] == 2
    assert measured["plan"]["memory_bytes"] == 64 << 30
    assert measured["plan"]["slots"] == measured["stats"]["slots"] == 192
    assert main(["bench", str(mesh_tiny), "--memory", "1MiB"]) == 1


def test_max_error_plans_for_the_format_that_is_opened(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk = dataclasses.replace(speeds, disk=1e7)
    monkeypatch.setattr("torch_mesh.planning.choosing.measure_speeds", lambda *_: slow_disk)
    monkeypatch.setattr("torch_mesh.planning.choosing.measure_formats", lambda *_: dict.fromkeys(ROUNDED_FORMATS, 1e10))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pools = []

    def noted(folder: Path, config: MeshConfig) -> Any:
        model = open_model(folder, config)
        pools.append(next(patched_modules(model))._mesh_pool)
        return model

    monkeypatch.setattr("torch_mesh.hf.open_model.open_model", noted)
    memory = 12 * _C.record_bytes("bf16", 0, 192, 64, True, False)
    options = ["--resident", str(memory), "--max-error", "0.15", "--tokens", "2", "--prompt-tokens", "17"]
    planned = bench(mesh_tiny, tmp_path, *options)["plan"]
    sizes = planned["sizes"]
    assert (sizes["weights"], sizes["group_size"]) == (pools[0].weights, pools[0].group_size)
    assert sizes["weights"] == "tcq3" and planned["slots"] == pools[0].slots


def test_the_prompt_may_come_from_a_text_file(mesh_tiny: Path, tmp_path: Path, speeds: Speeds) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 4)
    measured = bench(
        mesh_tiny, tmp_path, "--resident", "0.5", "--tokens", "2", "--prompt-tokens", "20", "--text", str(text)
    )
    assert len(measured["step_seconds"]) == 1
    assert measured["tokens_per_second_p10"] == measured["tokens_per_second_p90"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tokens", "1"], 2, "at least 2"),
        (["--prompt-tokens", "16"], 2, "--prompt-tokens is 16: give at least 17"),
        (["--resident", "0"], 2, "resident=0.0 is not a fraction"),
        (["--policy", "mru"], 2, "policy='mru' is unknown"),
        (["--prompt-tokens", "1000", "--text", "{text}"], 2, "give a longer --text"),
        (["--text", "none"], 1, "no such file"),
        (["--memory", "1MiB"], 1, "give more memory"),
    ],
)
def test_bad_input_is_named_in_the_error(
    mesh_tiny: Path,
    tmp_path: Path,
    speeds: Speeds,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "text.txt").write_text("And it came to pass")
    filled = [argument.format(text=tmp_path / "text.txt") for argument in arguments]
    assert main(["bench", str(mesh_tiny), *filled]) == code
    assert message in capsys.readouterr().err


def test_only_earlier_outputs_are_replaced(
    mesh_tiny: Path, tmp_path: Path, speeds: Speeds, capsys: pytest.CaptureFixture[str]
) -> None:
    other, table, new = tmp_path / "text.txt", tmp_path / "timeline.csv", tmp_path / "new"
    other.write_text("And it came to pass")
    arguments = ["--tokens", "2", "--prompt-tokens", "17"]
    for _ in range(2):
        bench(mesh_tiny, tmp_path, *arguments, "--timeline", str(table))
    for wrong in (["--json", other], ["--timeline", other], ["--json", table], ["--json", new, "--timeline", new]):
        assert main(["bench", str(mesh_tiny), *arguments, *map(str, wrong)]) == 2
        assert "name another file" in (error := capsys.readouterr().err) or "name a file for each" in error
    assert other.read_text() == "And it came to pass" and not new.exists()


@pytest.mark.parametrize("wrong", [["--tokens", "0"], ["--prompt-tokens", "x"], ["--memory", "much"]])
def test_impossible_numbers_are_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "model", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
