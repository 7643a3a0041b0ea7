"""torch-mesh simulate: golden miss counts, and laws of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import _C
from torch_mesh.cli import main
from torch_mesh.foresight.simulation import simulate
from torch_mesh.foresight.traces import load_trace

TRACE = Path(__file__).parents[1] / "data" / "mesh_tiny_routing.npz"


def rows(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "out.json"
    assert main(["simulate", str(TRACE), *arguments, "--json", str(out)]) == 0
    return json.loads(out.read_text())["rows"]


# Misses of 221,160 accesses with 10, 25 and 50 % of the experts. A policy that changes on purpose changes its line.
GOLDEN = {
    "lru": [221160, 98712, 27182],
    "lfu": [146249, 72794, 19912],
    "slru": [221160, 91197, 25306],
    "2q": [196784, 92880, 28812],
    "sieve": [221160, 97908, 26825],
    "s3fifo": [160164, 86148, 22750],
    "wtinylfu": [221160, 86210, 23040],
    "heat": [141717, 69937, 19790],
    "belady": [112881, 45978, 10224],
}


def test_golden_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(tmp_path, "--policy", "all", "--resident", "0.1,0.25,0.5")
    misses: dict[str, list[int]] = {}
    for row in found:
        misses.setdefault(row["policy"], []).append(round((1 - row["hit_rate"]) * 9215 * 6 * 4))
    assert set(misses) == {*_C.policy_names(), "belady"}
    assert misses.pop("auto") == misses["heat"]
    for policy, expected in GOLDEN.items():
        # The heat is in floats, whose last bit is the compiler's choice.
        assert misses[policy] == (pytest.approx(expected, rel=2e-3) if policy == "heat" else expected), policy
    assert set(GOLDEN) == set(misses)
    for index in range(3):
        assert all(misses[policy][index] >= misses["belady"][index] for policy in misses)
    assert "belady" in capsys.readouterr().out


def test_prefetch_halves_the_waits_of_a_good_predictor(tmp_path: Path) -> None:
    plain, *_ = rows(tmp_path, "--resident", "0.25", "--policy", "auto")
    ahead, *_ = rows(tmp_path, "--resident", "0.25", "--policy", "auto", "--prefetch", "standin", "--recall", "0.9")
    assert ahead["wait_rate"] < 0.5 * plain["wait_rate"]
    assert ahead["reads_per_token"] < 1.5 * plain["reads_per_token"]
    assert 0 < ahead["stall_share"] < 0.5 * plain["stall_share"]
    assert ahead["recall"] == pytest.approx(0.9, abs=0.01)
    assert ahead["prefetch_used"] + ahead["prefetch_wasted"] == ahead["prefetched"] > 0
    assert plain["prefetched"] == 0 and plain["recall"] is None


def test_tokens_per_second_follow_the_disk(tmp_path: Path) -> None:
    machine = ["--resident", "0.25", "--policy", "lru", "--expert-bytes", "1MB", "--memory-speed", "1000GB"]
    slow, *_ = rows(tmp_path, *machine, "--disk-speed", "1GB")
    fast, *_ = rows(tmp_path, *machine, "--disk-speed", "2GB")
    assert fast["tokens_per_second"] == pytest.approx(2 * slow["tokens_per_second"], rel=0.05)
    assert slow["tokens_per_second"] == pytest.approx(1e9 / slow["bytes_per_token"], rel=0.05)
    assert fast["bytes_per_token"] == slow["bytes_per_token"] == pytest.approx(slow["reads_per_token"] * 1e6)


def test_prompts_count_apart_add_up() -> None:
    trace = load_trace(TRACE)
    whole = simulate(trace, "lru", 0.5)
    parts = [simulate(trace, "lru", 0.5, prompts=part) for part in (slice(0, 7), slice(7, None))]
    share = trace.offsets[7] / trace.tokens
    assert whole.hit_rate == pytest.approx(parts[0].hit_rate * share + parts[1].hit_rate * (1 - share))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "mru"], "mru"),
        (["--resident", "0"], "(0, 1]"),
        (["--resident", "half"], "fractions"),
        (["--prompts", "3"], "FIRST:END"),
        (["--prompts", "30:40"], "18"),
        (["--disk-speed", "1GB"], "all three"),
        (["--prefetch", "lookahead"], "lookahead scores"),
        (["--synthetic", "4,16"], "LAYERS,EXPERTS,TOP_K"),
    ],
)
def test_wrong_usage_says_what_is_allowed(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(TRACE), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.npz").write_text("no")
    assert main(["simulate", str(tmp_path / "t.npz")]) == 1
    assert "no routing trace" in capsys.readouterr().err
