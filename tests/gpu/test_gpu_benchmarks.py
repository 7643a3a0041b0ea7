"""The GPU benchmarks, at tiny sizes. Without a card they run on the CPU. No test here checks a time."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from device_layers import DEVICE

pytest.importorskip("triton")

import card
import figure
import gpu_decode
import gpu_layer
import gpu_streaming
import harness
import quick_interpreter  # noqa: F401
import synthetic
from harness import Report

from torch_mesh.gpu import choosing, placement

pytestmark = pytest.mark.device

REPOSITORY = Path(__file__).parents[2]

SHAPE = synthetic.Shape(
    layers=2,
    hidden=64,
    intermediate=32,
    experts=4,
    experts_per_token=2,
    heads=2,
    key_value_heads=1,
    head_dim=32,
    vocab=64,
)


def _rows(report: Report) -> dict[str, list[harness.Row]]:
    """The rows of a report by name, with a check that all figures are finite."""
    rows: dict[str, list[harness.Row]] = {}
    for row in report.rows:
        assert math.isfinite(row.value) and (row.reference is None or row.reference > 0), row
        rows.setdefault(row.name, []).append(row)
    return rows


def test_the_layer_benchmark_reports_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layer, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_layer, "FEW", (1, 2))
    monkeypatch.setattr(gpu_layer, "MANY", 6)
    report = gpu_layer.measure(DEVICE, SHAPE, rounds=1)
    rows = _rows(report)
    for tokens in ("1 token", "2 tokens", "6 tokens"):
        references = ["device copy" if tokens[0] in "12" else "torch matmul", "grouped_mm", "batched_mm", "int4"]
        assert [row.reference_name for row in rows[f"bf16, {tokens}"]] == references, report.notes
        assert {f"int8, {tokens}", f"int4, {tokens}"} < set(rows)
    assert sum(row.holds is not None for row in report.rows) == 3 + 3 * 2 + 2
    assert gpu_layer.Routing.of(1, SHAPE, torch.Generator(), DEVICE).distinct == 2


def test_all_implementations_of_a_layer_agree() -> None:
    comparison = gpu_layer.Comparison(SHAPE, DEVICE, rounds=1)
    routing = gpu_layer.Routing.of(3, SHAPE, comparison.generator, DEVICE)
    inputs = routing.x[0], routing.ids[0], routing.weights
    grouped = gpu_layer.ALL_EXPERTS_FUNCTIONS["grouped_mm"](comparison.module, *inputs).float()
    for weights, least in (("bf16", 0.999), ("int8", 0.999), ("int4", 0.95)):
        out = gpu_layer.on_card(comparison.layers[weights])(*inputs).float()
        assert torch.nn.functional.cosine_similarity(out, grouped).min() > least


def test_the_streaming_benchmark_reports_all_rows() -> None:
    report = gpu_streaming.measure(DEVICE, SHAPE, rounds=1, threads=1, tokens=9)
    names = [f"{weights}, {what}" for weights in gpu_streaming.FORMATS for what in ("a prompt", "records alone")]
    assert list(_rows(report)) == names
    assert [row.at_least for row in report.rows] == [0.85, None] * 3


def test_a_cold_layer_is_copied_to_the_device_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MAX_BATCH", 3)
    cold = gpu_streaming.ColdLayer("int4", SHAPE, DEVICE, threads=1, tokens=9)
    out = cold.forward()
    inputs = [each.cpu() for each in cold.inputs]
    assert torch.nn.functional.cosine_similarity(out.cpu().float(), cold.pooled(*inputs).float()).min() > 0.99
    needed = inputs[1].unique().numel() * cold.bytes
    counts = cold.shared.stats()
    assert counts["bytes_streamed"] == needed and counts["all_on_device"] == counts["calls"] == 1
    cold.bring()
    assert cold.shared.stats()["bytes_streamed"] == needed + SHAPE.experts * cold.bytes
    cold.copy()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(cold.buffers[1, 0].cpu(), cold.plain[3].cpu())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "WEIGHT_STD", 0.15)  # otherwise such small experts would hardly change the logits
        return synthetic.store(tmp_path_factory.mktemp("synthetic"), SHAPE, "int4")


@pytest.fixture
def holds_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(choosing, "_holds_experts", lambda device: True)
        monkeypatch.setattr(choosing, "_device_memory", lambda device: (1 << 30, 2 << 30))


@pytest.mark.slow
@pytest.mark.usefixtures("holds_experts")
def test_the_decode_benchmark_reports_all_rows(store: Path, tmp_path: Path) -> None:
    report = gpu_decode.measure(DEVICE, SHAPE, store, tokens=2, rounds=1, traces=tmp_path)
    rows = _rows(report)
    [claim] = [row for row in report.rows if row.holds is not None]
    assert claim.name == gpu_decode.HALF and claim.at_least == 1.5
    speeds = {name: values[0] for name, values in report.details["tokens per second"].items()}
    assert set(speeds) == {gpu_decode.HALF, gpu_decode.HALF_EAGER, *gpu_decode.OTHERS}
    assert claim.reference_name == max(gpu_decode.OTHERS, key=lambda name: speeds[name])
    for name in set(speeds) - {gpu_decode.HALF}:
        assert rows[f"cosine of logits, {name}"][0].value > 0.9, "all compute the same model"
    assert rows["read from disk meanwhile"][0].value == 0
    for name in (gpu_decode.HALF, gpu_decode.HALF_EAGER):
        assert rows[f"host nodes, a step, {name}"][0].value > 0
    traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(tmp_path.glob("*.trace.json"))]
    assert len(traces) == 2
    assert all(any(event.get("name") == "decode step" for event in events) for events in traces)
    assert ("timeline" in report.details) == (DEVICE.type == "cuda"), "only a card has kernels to draw"


def _event(category: str, begin: float, end: float, name: str = "x") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    _event("cpu_op", 0, 30),
    _event("kernel", 10, 20),
    _event("gpu_memcpy", 15, 18, "Memcpy DtoH (Device -> Pinned)"),
    _event("gpu_memcpy", 18, 19, "Memcpy DtoH (Device -> Pinned)"),
    _event("kernel", 19, 22),
    _event("gpu_memcpy", 40, 41, "Memcpy HtoD (Pinned -> Device)"),
    _event("gpu_memcpy", 42, 43, "Memcpy HtoD (Pageable -> Device)"),
    _event("gpu_memcpy", 44, 45, "Memcpy DtoD (Device -> Device)"),
    _event("cuda_runtime", 29, 90),
    _event("kernel", 50, 60),
]


def test_a_trace_is_divided_into_lanes() -> None:
    events = random.sample(EVENTS, len(EVENTS))
    lanes = gpu_decode.lanes(events)
    assert lanes[gpu_decode.KERNELS] == [(0, 12), (34, 35), (40, 50)]
    assert lanes[gpu_decode.COPIES] == [(5, 9), (30, 31), (32, 33)]
    assert lanes[gpu_decode.NODES] == [(9, 30)]
    assert lanes[gpu_decode.LAUNCHES] == [(0, 50)]
    assert gpu_decode.idle_fraction(lanes[gpu_decode.KERNELS]) == pytest.approx(1 - 23 / 50)
    assert gpu_decode.lanes(EVENTS[:2]) == {}


def test_the_figure_of_the_timeline_is_reproducible(tmp_path: Path) -> None:
    report = Report("Decode", details={"timeline": {name: gpu_decode.lanes(EVENTS) for name in ("one", "two")}})
    for target in (tmp_path / "first.svg", tmp_path / "second.svg"):
        figure.draw("gpu-timeline", harness.as_json(report), target)
    drawn = (tmp_path / "first.svg").read_text()
    assert drawn == (tmp_path / "second.svg").read_text() and "</svg>" in drawn


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a card")
@pytest.mark.parametrize("benchmark", [gpu_layer, gpu_streaming, gpu_decode], ids=lambda module: module.__name__)
def test_without_a_card_a_benchmark_says_that_nothing_was_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{benchmark.__name__}.py"
    monkeypatch.setattr(sys, "argv", [name])
    assert benchmark.main() == card.NO_CARD == 2
    message = f"benchmarks/{name} needs a CUDA device, and torch sees none: nothing was measured\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a card")
def test_without_a_card_run_all_says_that_nothing_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "run_all.py"), "--gpu", "--json-dir", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2 and done.stderr.count("nothing was measured") == 3
