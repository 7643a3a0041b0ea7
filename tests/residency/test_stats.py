"""torch_mesh.stats, its file and its live view: correct counts without effect on forwards."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import _C, MeshConfig
from torch_mesh.statistics import snapshot
from torch_mesh.statistics.counters import Stats, counted_since, percent, summed, was_reset
from torch_mesh.statistics.report import read_report


@pytest.fixture
def open_model(int8_store: Path) -> Iterator[Callable[..., PreTrainedModel]]:
    def open_it(**fields: Any) -> PreTrainedModel:
        config = MeshConfig(**{"resident": 0.25, "io": "threads"} | fields)
        return AutoModelForCausalLM.from_pretrained(int8_store, quantization_config=config)

    yield open_it


def _run(model: PreTrainedModel, rows: int, times: int = 1) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(times):
            logits = model(input_ids=torch.randint(0, 200, (1, rows)), use_cache=False).logits
    return logits


def test_phases_are_decided_by_the_number_of_rows(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    _run(model, _C.MAX_DECODE_ROWS, 3)
    _run(model, _C.MAX_DECODE_ROWS + 1)
    stats = torch_mesh.stats(model)
    assert (stats.forwards, stats.decode.forwards, stats.prefill.forwards) == (4, 3, 1)
    for counters in (stats, *stats.per_layer):
        assert counters.accesses == counters.decode.accesses + counters.prefill.accesses > 0
        assert counters.accesses == counters.hits + counters.cold_misses + counters.inflight_misses
        assert counters.bytes_read == counters.decode.bytes_read + counters.prefill.bytes_read
        assert counters.decision_seconds > 0
    assert stats.evicted == sum(layer.evicted for layer in stats.per_layer) > 0


def test_the_time_of_a_step_is_broken_down(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    _run(model, 1)
    torch_mesh.reset_stats(model)  # time before the next step is not counted
    begin = time.perf_counter()
    _run(model, 1, 10)
    seconds = time.perf_counter() - begin
    stats = torch_mesh.stats(model)
    counts = stats.decode
    assert 0 <= counts.prefetch_stall_seconds <= counts.stall_seconds < counts.expert_seconds
    assert counts.outside_seconds > 0
    times = counts.time_per_forward()
    assert times is not None and stats.prefill.time_per_forward() is None
    assert 0 < 10 * sum(times.values()) <= 1e3 * seconds
    assert "a decode step: " in str(stats) and "a prefill prompt" not in str(stats)


def test_experts_add_up_to_their_layer(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(prefetch="off")
    _run(model, 4, 5)
    for layer in torch_mesh.stats(model).per_layer:
        for name, counts in vars(layer.experts).items():
            assert (len(counts), sum(counts)) == (32, getattr(layer, name))
        assert max(layer.experts.accesses) <= layer.forwards


def test_prefetches_are_used_unused_or_pending(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    _run(model, 1, 30)
    stats = torch_mesh.stats(model)
    assert stats.prefetches > 0
    assert stats.prefetches - stats.prefetches_used - stats.prefetches_unused in range(49)  # there are 48 slots
    assert stats.prefetch_accuracy is not None and 0 < stats.prefetch_accuracy <= 1
    assert stats.unused_prefetch_bytes % 4096 == 0
    assert stats.prefetch_error is None


def _lines(file: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        if len(lines) >= count and lines[-1].endswith("\n"):
            return [json.loads(line) for line in lines]
        time.sleep(0.01)
    raise AssertionError(f"{file} has not got {count} lines")


def test_the_file_gets_a_line_every_n_forwards(open_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    model = open_model(stats={"file": file, "every": 3})
    _run(model, 2, 2)
    for lines in (1, 2):
        _run(model, 2, 1 if lines == 1 else 3)
        written = _lines(file, lines)
        assert [line["forward"] for line in written] == [3, 6][:lines]
        torch_mesh.reset_stats(model)
    assert [line["forwards"] for line in written] == [3, 3]  # since the reset
    assert written[1]["decode"]["accesses"] > 0 and len(written[1]["per_layer"]) == 6
    assert abs(written[1]["time"] - time.time()) < 60


def test_a_line_has_residency_and_memory(open_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    model = open_model(stats={"file": file, "every": 2}, prefetch="off")
    _run(model, 2, 2)
    [line] = _lines(file, 1)
    pool = model.model.layers[0].mlp.experts._mesh_pool
    states = torch.stack([torch.ops.torch_mesh.residency(pool.handle(layer)) for layer in range(6)]) == 2
    bits = [[bit == "1" for bit in f"{int(each, 16):0{len(each) * 4}b}"] for each in line["resident"]]
    assert line["experts"] == 32 and bits == states.tolist()
    assert 0 < int(states.sum()) <= line["slots"]
    memory = line["memory"]
    assert memory["pool"] == memory["budget"] == line["slots"] * pool.engine.describe_size()["record_bytes"]
    assert memory["process"] > 2**20 and memory["left"] > 0


def test_a_line_is_written_where_memory_cannot_be_read(
    open_model: Callable[..., PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise OSError("no such device")

    file = tmp_path / "stats.jsonl"
    model = open_model(stats={"file": file, "every": 2})
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "anonymous_bytes", fail)
        _run(model, 2, 2)
        [line] = _lines(file, 1)
    assert line["memory"] is None and line["experts"] == 32
    _run(model, 2, 2)
    assert _lines(file, 2)[1]["memory"]["process"] > 0
    assert len(read_report(file).runs) == 1


def test_a_failed_write_warns_once(open_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    file = tmp_path / "not there" / "stats.jsonl"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = open_model(stats={"file": file, "every": 1})
        expected = torch_mesh.stats(model).forwards
        for _ in range(5):
            _run(model, 2)
            expected += 1
            time.sleep(0.05)
        messages = [
            str(warning.message) for warning in caught if "Statistics cannot be written" in str(warning.message)
        ]
        assert len(messages) == 1 and str(file) in messages[0]
        assert torch_mesh.stats(model).forwards == expected
        file.parent.mkdir()
        _run(model, 2)
        assert _lines(file, 1)[0]["forward"] == expected + 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_fail_forwards(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(stats={"file": "/dev/full", "every": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(model, 2, 3)
        time.sleep(0.5)
    assert [str(warning.message)[:48] for warning in caught] == ["Statistics cannot be written to /dev/full: [Errn"]


def test_a_checkpoint_cannot_name_a_file_to_write(tmp_path: Path) -> None:
    config = MeshConfig(stats={"file": tmp_path / "a", "every": 7})
    assert "stats_file" not in config.to_dict() and "stats_every" not in config.to_dict()
    assert config.replace(resident=0.5).stats.file == str(tmp_path / "a")
    with pytest.warns(UserWarning, match="sets resident, stats_file, which is ignored"):
        stored = MeshConfig.of_checkpoint({"quant_method": "mesh", "resident": 0.5, "stats_file": "/etc/passwd"})
    assert (stored.resident, stored.stats) == ("auto", MeshConfig().stats)
    with pytest.raises(ValueError, match="stats.every=0 is not a number of forwards"):
        MeshConfig(stats={"every": 0})
    with pytest.raises(ValueError, match="stats.file=3 is not a file"):
        MeshConfig(stats={"file": 3})


def test_a_process_exits_cleanly_while_it_writes(int8_store: Path, tmp_path: Path) -> None:
    program = f"""
import torch, torch_mesh
from transformers import AutoModelForCausalLM
config = torch_mesh.MeshConfig(resident=0.5, stats={{"file": {str(tmp_path / "stats.jsonl")!r}, "every": 1}})
model = AutoModelForCausalLM.from_pretrained({str(int8_store)!r}, quantization_config=config)
for _ in range(5):
    model(input_ids=torch.tensor([[1, 2, 3]]))
print("ended")
"""
    done = warm.run(program)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def _console(**kind: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=140, **kind), out


def test_watch_without_a_terminal_prints_one_table_at_the_end(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    console, out = _console()
    with torch_mesh.watch(model, console=console):
        _run(model, 1, 4)
        assert out.getvalue() == ""
    shown = out.getvalue()
    assert "\x1b" not in shown and shown.count("decode") == 1
    prefill = next(line for line in shown.splitlines() if "prefill" in line)
    assert "%" not in prefill and prefill.count("-") >= 7


def test_watch_in_a_terminal_leaves_a_table_of_the_whole_time(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    console, out = _console(force_terminal=True)
    with torch_mesh.watch(model, interval=0.1, console=console):
        _run(model, 1, 4)
        time.sleep(0.5)
    counted = torch_mesh.stats(model)
    [*_, every] = [line for line in out.getvalue().splitlines() if " all " in line]
    assert percent(counted.hit_rate) in every


def test_watch_in_a_terminal_survives_the_model(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model()
    console, out = _console(force_terminal=True)
    with torch_mesh.watch(model, interval=0.02, console=console):
        _run(model, 20)
        _run(model, 1, 3)
        time.sleep(0.2)
        torch_mesh.reset_stats(model)
        _run(model, 1, 3)
        torch_mesh.unpatch(model, lossy=True)
        time.sleep(0.2)
    assert "hit rate by layer" in out.getvalue() and "MB/s" in out.getvalue()
    with pytest.raises(torch_mesh.MeshError), torch_mesh.watch(model):
        pass


def test_watch_counts_from_a_reset_even_if_counts_are_higher_after_it(
    open_model: Callable[..., PreTrainedModel],
) -> None:
    model = open_model(prefetch="off")
    _run(model, 1, 4)
    console, out = _console()
    with torch_mesh.watch(model, console=console):
        torch_mesh.reset_stats(model)
        _run(model, 1, 9)
    counted = torch_mesh.stats(model)
    shown = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines()]
    [every] = [cells for cells in shown if len(cells) > 2 and cells[1] == "all"]
    assert every[2] == "9" and every[4:7] == [percent(counted.hit_rate), percent(0.0), percent(0.0)]
    assert len(out.getvalue().splitlines()[-1].split()[-1]) == len(counted.per_layer)


def _assert_same(found: Stats, expected: Stats) -> None:
    """Compare the counts, in total and by layer."""
    for mine, other in zip((found, *found.per_layer), (expected, *expected.per_layer), strict=True):
        for name in ("forwards", "accesses", "hits", "cold_misses", "bytes_read", "promoted", "evicted"):
            assert getattr(mine, name) == getattr(other, name), name
            assert getattr(mine.decode, name) == getattr(other.decode, name), name


def test_counted_since_begins_at_a_reset(open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(prefetch="off")
    _run(model, 1, 3)
    first = torch_mesh.stats(model)
    _run(model, 1, 2)
    second = torch_mesh.stats(model)
    _assert_same(summed(first, counted_since(first, second)), second)
    assert counted_since(first, second).decode.forwards == 2 and not was_reset(first, second)
    torch_mesh.reset_stats(model)
    _run(model, 1, 7)
    third = torch_mesh.stats(model)
    assert third.resets == second.resets + 1 == third.to_dict()["resets"]
    assert third.forwards > second.forwards and was_reset(second, third)
    _assert_same(counted_since(second, third), third)


def test_counted_since_of_a_new_pool_counts_from_its_beginning(
    open_model: Callable[..., PreTrainedModel],
) -> None:
    model = open_model(prefetch="off")
    _run(model, 1, 2)
    before = torch_mesh.stats(model)
    torch_mesh.patch(torch_mesh.unpatch(model, lossy=True), resident=0.25, prefetch="off")
    _run(model, 1, 5)
    now = torch_mesh.stats(model)
    assert now.resets == before.resets and now.accesses > before.accesses
    _assert_same(counted_since(before, now), now)


def test_each_of_several_pools_counts_from_its_own_reset(open_model: Callable[..., PreTrainedModel]) -> None:
    models = [open_model(prefetch="off"), open_model(prefetch="off")]
    both = torch.nn.ModuleList(models)
    for model in models:
        _run(model, 1, 2)
    before = torch_mesh.stats(both)
    torch_mesh.reset_stats(models[0])
    for model in models:
        _run(model, 1, 4)
    counted = counted_since(before, torch_mesh.stats(both))
    layers = len(counted.per_layer) // 2
    assert [layer.decode.forwards for layer in counted.per_layer] == [4] * 2 * layers
    assert counted.accesses == sum(layer.accesses for layer in counted.per_layer)


def test_a_report_notices_a_reset_even_if_counts_are_higher_after_it(
    open_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    file = tmp_path / "stats.jsonl"
    model = open_model(stats={"file": file, "every": 4}, prefetch="off")
    _run(model, 1, 4)
    _lines(file, 1)
    first = torch_mesh.stats(model)
    torch_mesh.reset_stats(model)
    _run(model, 1, 4)
    _run(model, 20, 4)
    last, run = _lines(file, 3)[-1], read_report(file).runs[0]
    assert last["accesses"] > first.accesses and len({line["run"] for line in _lines(file, 3)}) == 1
    _assert_same(run.total, summed(first, torch_mesh.stats(model)))
    assert all(0 <= stretch.stats.hit_rate <= 1 for stretch in run.stretches)


def test_watch_refuses_an_interval_of_zero(open_model: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="interval=0"), torch_mesh.watch(open_model(), interval=0):
        pass


def test_an_empty_stats_has_no_rates() -> None:
    assert Stats().hit_rate is None and Stats().prefetch_accuracy is None
