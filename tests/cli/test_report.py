"""torch-mesh report: its sums are right over resets and restarts; damaged and foreign files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh import MeshConfig, MeshError
from torch_mesh.cli import main
from torch_mesh.statistics.counters import SIZES, Counters, LayerCounters, Stats
from torch_mesh.statistics.report import read_report

LAYERS = 3


def line(at: float, forward: int, hits: list[int], misses: int = 0) -> dict[str, Any]:
    """Statistics with ``hits`` for each layer, all of them of decoding, and ``misses`` in every layer."""
    layers = []
    for count in hits:
        counts = {"forwards": forward, "accesses": count + misses, "hits": count, "cold_misses": misses}
        counts |= {"bytes_read": 1000 * misses, "stall_seconds": 0.25 * misses}
        layers.append(LayerCounters(**counts, decode=Counters(**counts)))
    whole = {
        name: sum(getattr(layer, name) for layer in layers)
        for name in ("accesses", "hits", "cold_misses", "bytes_read", "stall_seconds")
    }
    stats = Stats(**whole, forwards=forward, decode=Counters(**whole, forwards=forward), per_layer=layers, slots=7)
    return {"time": at, "forward": forward} | stats.to_dict(experts=False)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def test_counts_add_up_over_resets_and_a_new_process_is_a_new_run(tmp_path: Path) -> None:
    file = write(
        tmp_path / "s.jsonl",
        line(100, 10, [4, 5, 6], 2),
        line(102, 20, [14, 15, 16], 4),
        line(104, 30, [1, 1, 1], 1),  # after a reset
        line(108, 40, [9, 9, 9], 5),
        line(200, 10, [1, 2, 3]),  # another process
    )
    first, second = read_report(file).runs
    assert (first.lines, first.forwards, first.begin, first.end) == (4, 40, 100, 108)
    assert [layer.hits for layer in first.total.per_layer] == [14 + 9, 15 + 9, 16 + 9]
    assert first.total.hits == 45 + 27 and first.total.decode.cold_misses == 3 * (4 + 5)
    assert [(part.begin, part.end, part.stats.hits) for part in first.stretches] == [(100, 102, 30), (104, 108, 24)]
    assert first.stretches[1].stats.per_layer[2].bytes_read == 4000
    assert (second.lines, second.total.hits, second.stretches) == (1, 6, ())


def test_a_reset_is_noticed_even_if_all_counts_are_larger_after_it(tmp_path: Path) -> None:
    before = [line(100, 10, [4, 5, 6], 2), line(102, 20, [6, 7, 8], 3)]
    after = [line(104, 30, [7, 8, 9], 4), line(108, 40, [9, 9, 9], 5)]
    file = write(tmp_path / "s.jsonl", *(each | {"resets": 1} for each in before), *(e | {"resets": 2} for e in after))
    (run,) = read_report(file).runs
    assert run.total.hits == 21 + 27 and run.total.per_layer[0].cold_misses == 3 + 5
    assert [(part.begin, part.end, part.stats.hits) for part in run.stretches] == [(100, 102, 6), (104, 108, 3)]


def test_without_a_reset_counter_a_falling_count_is_a_reset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(100, 10, [4, 5, 6], 2), line(102, 20, [14, 4, 16], 4), line(104, 30, [16, 6, 18], 5)]
    for each in lines:
        del each["resets"]
    file = write(tmp_path / "s.jsonl", *lines)
    (run,) = read_report(file).runs
    assert [(part.begin, part.stats.hits) for part in run.stretches] == [(102, 6)]
    assert run.total.hits == 15 + 40
    assert main(["report", str(file)]) == 0
    assert "100.0%" not in capsys.readouterr().out


def test_runs_are_told_apart_by_their_names(tmp_path: Path) -> None:
    """Run b begins with more forwards than run a has had, and the lines of run c are between those of b."""
    lines = [
        line(100, 10, [1, 1, 1]) | {"run": "a"},
        line(200, 40, [9, 9, 9]) | {"run": "b"},
        line(201, 10, [2, 2, 2]) | {"run": "c"},
        line(202, 50, [10, 10, 10]) | {"run": "b"},
        line(203, 20, [4, 4, 4]) | {"run": "c"},
    ]
    runs = read_report(write(tmp_path / "s.jsonl", *lines)).runs
    assert [(run.lines, run.forwards, run.total.hits) for run in runs] == [(1, 10, 3), (2, 50, 30), (2, 20, 12)]
    assert [part.stats.hits for run in runs for part in run.stretches] == [3, 6]


@pytest.mark.parametrize(("name", "wrong"), [("run", 3), ("run", None), ("resets", -1), ("resets", "2")])
def test_a_wrong_run_name_or_reset_count_is_refused(tmp_path: Path, name: str, wrong: Any) -> None:
    with pytest.raises(MeshError, match=f"line 1: .* its .*{wrong!r}"):
        read_report(write(tmp_path / "s.jsonl", line(1, 10, [1, 1, 1]) | {name: wrong}))


@pytest.mark.parametrize("stretches", [1, 2, 5, 200])
def test_stretches_cover_all_lines(tmp_path: Path, rng: np.random.Generator, stretches: int) -> None:
    count = int(rng.integers(2, 60))
    hits = np.cumsum(rng.integers(0, 9, (count, LAYERS)), axis=0).tolist()
    file = write(tmp_path / "s.jsonl", *(line(index, index + 1, row) for index, row in enumerate(hits)))
    (run,) = read_report(file, stretches).runs
    assert 1 <= len(run.stretches) <= stretches
    assert run.stretches[0].begin == 0 and run.stretches[-1].end == count - 1
    assert all(a.end == b.begin for a, b in zip(run.stretches, run.stretches[1:], strict=False))
    assert sum(part.stats.hits for part in run.stretches) == sum(hits[-1]) - sum(hits[0])


def test_lines_that_are_cut_short_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.dumps(line(3, 30, [7, 7, 7]))
    lines = [line(1, 10, [1, 1, 1]), whole[:50], "", line(2, 20, [2, 2, 2]), whole[:-1]]
    file = write(tmp_path / "s.jsonl", *lines)
    file.write_text(file.read_text().rstrip("\n"))
    report = read_report(file)
    assert report.damaged == (2, 5) and report.runs[0].total.hits == 6
    assert main(["report", str(file)]) == 0
    assert "2 lines are cut short and left out: 2, 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no line of statistics"),
        ("\n\n", "has no line of statistics"),
        ("hello\n", "line 1: not JSON"),
        ("\x00\xff" * 100, "line 1: not JSON"),
        ("[1]\n", "line 1: not a line of statistics, but a JSON list"),
        ('{"a": 1}\n', "its time is None"),
        ('{"time": 1, "forward": -1}\n', "its forward is -1"),
        ('{"time": 1, "forward": 1}\n', "it has no per_layer"),
        ('{"time": 1, "forward": 1, "per_layer": [3]}\n', "layer 0 is no object"),
        ('{"time": 1, "forward": 1, "per_layer": []}\n', "counts no accesses"),
        ("[" * 100000 + "\n", "not JSON"),
        ('{"time": NaN, "forward": 1, "per_layer": []}\n', "its time is nan"),
    ],
)
def test_files_without_statistics_are_refused(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.jsonl").write_text(content, encoding="latin-1")
    assert main(["report", str(tmp_path / "s.jsonl")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [-1, "3", None, True, float("inf"), [1], 10**400, 1 << 63])
def test_a_count_that_is_no_number_is_refused(tmp_path: Path, wrong: Any) -> None:
    spoilt = line(2, 20, [2, 2, 2])
    spoilt["per_layer"][1]["decode"]["hits"] = wrong
    with pytest.raises(MeshError, match="line 2: .* hits of decode of layer 1 is .* and no count"):
        read_report(write(tmp_path / "s.jsonl", line(1, 10, [1, 1, 1]), spoilt))


@pytest.mark.parametrize("wrong", [-1, 10**400, 1.5, None, "3"])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, wrong: Any) -> None:
    spoilt = line(1, 10, [1, 1, 1]) | {SIZES[0]: wrong}
    with pytest.raises(MeshError, match="line 1: .* its sizes are"):
        read_report(write(tmp_path / "s.jsonl", spoilt))


def test_lines_with_more_or_fewer_counters_are_read(tmp_path: Path) -> None:
    other = line(1, 10, [1, 1, 1])
    other["new"] = {"thing": 1}
    other["decode"]["entropy"] = 0.5
    del other["grows"], other["per_layer"][0]["evicted"]
    assert read_report(write(tmp_path / "s.jsonl", other)).runs[0].total.hits == 3


def test_no_rates_are_given_where_the_clock_goes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "s.jsonl", line(100, 10, [1, 1, 1]), line(90, 20, [2, 2, 2]))
    assert main(["report", str(file), "--stretches", "3"]) == 0
    assert "over time" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["report", str(file), "--png", str(tmp_path / "out.png")]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_the_report_of_a_model_has_its_statistics(
    mesh_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stats.jsonl"
    monkeypatch.chdir(tmp_path)
    config = MeshConfig(resident=0.25, io="threads", prefetch="off", stats={"file": file.name, "every": 2})
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")  # a relative path stays that of the folder in which the model was opened
    with torch.no_grad():
        for rows in (40, 1, 1, 1, 1, 1):
            model(input_ids=torch.randint(0, 200, (1, rows)), use_cache=False)
            time.sleep(0.02)
    counted = torch_mesh.stats(model)
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text().count('"forward": 6')) and time.monotonic() < deadline:
        time.sleep(0.01)
    (run,) = read_report(file).runs
    for name in ("accesses", "hits", "bytes_read", "cold_misses"):
        assert getattr(run.total, name) == getattr(counted, name)
        assert getattr(run.total.per_layer[5].decode, name) == getattr(counted.per_layer[5].decode, name)
    html, png = tmp_path / "out.html", tmp_path / "out.svg"  # a PNG under any name
    drawn = ["--png", str(png)] if pytest.importorskip("matplotlib") else []
    assert main(["report", str(file), str(file), "--html", str(html), *drawn]) == 0
    printed = capsys.readouterr().out
    assert printed.count("up to forward 6") == 2 and "decode" in printed and "prefill" in printed
    assert "up to forward 6" in html.read_text() and png.read_bytes().startswith(b"\x89PNG")
