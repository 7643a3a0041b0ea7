"""torch-mesh routing simulate: golden miss counts, and properties of its rows."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_mesh import _C
from torch_mesh.cli import main
from torch_mesh.routing.cluster_simulation import Cluster, Network, simulate_nodes
from torch_mesh.routing.simulation import Hardware, simulate
from torch_mesh.routing.traces import Trace, load_trace, save_trace

TRACE = Path(__file__).parents[1] / "data" / "mesh_tiny_routing.npz"


def rows(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "out.json"
    assert main(["routing", "simulate", str(TRACE), *arguments, "--json", str(out)]) == 0
    return json.loads(out.read_text())["rows"]


# Misses of 221,160 accesses with 10, 25 and 50 % of the experts. A policy that changes on purpose changes its line.
GOLDEN = {
    "lru": [221160, 98712, 27182],
    "lfu": [146249, 72794, 19912],
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
    ahead, *_ = rows(tmp_path, "--resident", "0.25", "--policy", "auto", "--prefetch", "simulated", "--recall", "0.9")
    assert ahead["wait_rate"] < 0.5 * plain["wait_rate"]
    assert ahead["reads_per_token"] < 1.5 * plain["reads_per_token"]
    assert 0 < ahead["stall_fraction"] < 0.5 * plain["stall_fraction"]
    assert ahead["recall"] == pytest.approx(0.9, abs=0.01)
    assert ahead["prefetch_used"] + ahead["prefetch_unused"] == ahead["prefetched"] > 0
    assert plain["prefetched"] == 0 and plain["recall"] is None


@pytest.mark.parametrize("given", [[], ["--policy", "all"]])
def test_the_bound_is_left_out_with_prefetch(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = a_trace(0), tmp_path / "out.json"
    save_trace(made, tmp_path / "made.npz")
    command = ["routing", "simulate", str(tmp_path / "made.npz"), "--resident", "0.5", "--json", str(out), *given]
    policies = {}
    for prefetch in ("off", "lookahead"):
        assert main([*command, "--prefetch", prefetch]) == 0
        policies[prefetch] = [row["policy"] for row in json.loads(out.read_text())["rows"]]
    assert policies["lookahead"][0] == "auto" and policies["off"] == [*policies["lookahead"], "belady"]
    capsys.readouterr()
    assert main([*command, "--prefetch", "lookahead", "--policy", "lru,belady"]) == 2
    error = capsys.readouterr().err
    assert "--policy" in error and "--prefetch" in error


def test_an_output_without_a_folder_is_refused_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch_mesh.cli.routing.simulate.simulate", lambda *_, **__: pytest.fail("replayed"))
    assert main(["routing", "simulate", str(TRACE), "--json", str(tmp_path / "missing" / "out.json")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_a_trace_is_not_replaced_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [tmp_path / "a.npz", tmp_path / "b.npz"]  # as a shell completes *.npz
    for trace in traces:
        trace.write_bytes(TRACE.read_bytes())
    assert main(["routing", "simulate", "--json", *map(str, traces)]) == 2
    assert "a.npz exists and is no earlier output of this kind" in capsys.readouterr().err
    assert traces[0].read_bytes() == TRACE.read_bytes()
    for _ in range(2):
        assert main(["routing", "simulate", str(traces[0]), "--json", str(tmp_path / "rows.json")]) == 0


def test_rows_are_printed_before_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_trace(a_trace(0), tmp_path / "made.npz")
    monkeypatch.setattr("json.dumps", full)
    command = ["routing", "simulate", str(tmp_path / "made.npz"), "--json", str(tmp_path / "out.json")]
    for more in ([], NODES):
        assert main([*command, *more]) == 1
        printed = capsys.readouterr()
        assert "belady" in printed.out and "out.json: no space left" in printed.err


def test_tokens_per_second_follow_the_disk(tmp_path: Path) -> None:
    machine = ["--resident", "0.25", "--policy", "lru", "--expert-bytes", "1MB", "--memory-speed", "1000GB"]
    slow, *_ = rows(tmp_path, *machine, "--disk-speed", "1GB")
    fast, *_ = rows(tmp_path, *machine, "--disk-speed", "2GB")
    assert fast["tokens_per_second"] == pytest.approx(2 * slow["tokens_per_second"], rel=0.05)
    assert slow["tokens_per_second"] == pytest.approx(1e9 / slow["bytes_per_token"], rel=0.05)
    assert fast["bytes_per_token"] == slow["bytes_per_token"] == pytest.approx(slow["reads_per_token"] * 1e6)


MACHINE = Hardware(expert_bytes=1e6, disk_speed=1e9, memory_speed=2e10, other_seconds=1e-3)
NETWORK = Network.parse("10Gbit/s,0.2ms")


def a_trace(seed: int, tokens: int = 60, layers: int = 3, experts: int = 8, top_k: int = 3) -> Trace:
    """A random trace of two sequences with prompts and steps, whose lookahead scores are always right."""
    random = np.random.default_rng(seed)
    lookahead = random.random((tokens, layers, experts)).astype(np.float32)
    ids = np.argsort(-lookahead, axis=2)[..., :top_k].astype(np.int32)
    forwards = np.array([0, *range(20, 31), *range(50, tokens)])
    return Trace("made-up", ids, np.array([0, 30, tokens]), experts, lookahead=lookahead, forwards=forwards)


def test_prefetch_of_several_nodes_from_one_disk_is_refused(seed: int) -> None:
    trace, cluster = a_trace(seed), Cluster(2, 64, MACHINE, NETWORK, one_disk=True)
    with pytest.raises(ValueError, match="leave prefetch off"):
        simulate_nodes(trace, "lru", 0.5, cluster, lookahead=True)
    assert simulate_nodes(trace, "lru", 0.5, cluster).hit_rate > 0


@pytest.mark.parametrize("ahead", ["off", "lookahead"])
def test_one_node_equals_one_process(seed: int, ahead: str) -> None:
    trace = a_trace(seed)
    for policy in ("auto", "lru"):
        alone = simulate(trace, policy, 0.4, predictor=ahead, hardware=MACHINE)
        cluster = Cluster(1, 64, MACHINE, NETWORK)
        row = simulate_nodes(trace, policy, 0.4, cluster, lookahead=ahead == "lookahead")
        assert alone.tokens_per_second is not None
        assert (row.slots, row.hit_rate, row.busiest) == (alone.slots, alone.hit_rate, 3)
        assert row.tokens_per_second == pytest.approx(alone.tokens_per_second)
        assert row.read_bytes_per_token == pytest.approx(alone.bytes_per_token)
        assert row.stall_fraction == pytest.approx(alone.stall_fraction)
        assert row.sent_bytes_per_token == row.network_fraction == 0


def test_bytes_and_waits_of_two_nodes_are_those_computed_by_hand() -> None:
    # Two tokens of a forward, one each; both experts of the first on node 0, one of the second on each.
    trace = Trace("two", np.array([[[0, 1]], [[2, 0]]], np.int32), np.array([0, 2]), 4, forwards=np.array([0]))
    network = Network(bandwidth=1e3, latency=5)
    row_bytes = 2 * 10

    def of(dispatch: str) -> Any:
        cluster = Cluster(2, 10, Hardware(1, 1, 1, other_seconds=3), network, dispatch=dispatch)
        return simulate_nodes(trace, "lru", 1, cluster)

    reduced = of("all_reduce")
    assert reduced.busiest == 1.5
    assert reduced.sent_bytes_per_token == 2 * 2 * row_bytes / 2
    exchanged = 2 * (5 + 2 * row_bytes / 2 / 1e3)
    waited = 3 + 2  # the rest of the model, and two experts that node 0 reads one after the other
    assert reduced.tokens_per_second == pytest.approx(2 / (waited + exchanged))
    assert reduced.network_fraction == pytest.approx(exchanged / (waited + exchanged))

    sent = of("all_to_all")
    counts = 2 * 8  # one for each of the two experts of the other node
    # Token 1 is of node 1 and has one expert on node 0: a row there and back. Then each node sends the other a sum.
    assert sent.sent_bytes_per_token == (2 * counts + 2 * row_bytes + 2 * row_bytes) / 2
    exchanged = (5 + counts / 1e3) + 2 * (5 + row_bytes / 1e3) + (5 + row_bytes / 1e3)
    assert sent.tokens_per_second == pytest.approx(2 / (waited + exchanged))


def test_nodes_without_a_row_run_their_first_expert() -> None:
    # Both tokens have experts of node 0 alone: a prompt of two, or two steps.
    ids = np.array([[[0, 1]], [[1, 0]]], np.int32)
    for forwards, idle in ((np.array([0]), 1), (None, 2)):
        trace = Trace("one-sided", ids, np.array([0, 2]), 4, forwards=forwards)
        hits = {}
        for dispatch in ("all_reduce", "all_to_all"):
            row = simulate_nodes(trace, "lru", 1, Cluster(2, 10, MACHINE, NETWORK, dispatch=dispatch))
            hits[dispatch] = row.hit_rate, row.read_bytes_per_token
        uses = 2 if idle == 1 else 4
        assert hits["all_reduce"] == ((uses - 2) / uses, 2 * MACHINE.expert_bytes / 2)
        assert hits["all_to_all"] == ((uses - 2 + idle - 1) / (uses + idle), 3 * MACHINE.expert_bytes / 2)


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_divide_the_work_more_evenly_with_placement_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    machine = ["--expert-bytes", "1MB", "--disk-speed", "1GB", "--memory-speed", "20GB", "--hidden-size", "256"]
    found = rows(
        tmp_path,
        *machine,
        *("--nodes", f"1,{nodes}", "--network", "100Gbit/s,1us", "--placement", "contiguous,apart", "--prompts", "9:"),
        *("--resident", "0.25", "--policy", "lru"),
    )
    alone, contiguous, apart = found
    layers = load_trace(TRACE).layers
    assert contiguous["sent_bytes_per_token"] == apart["sent_bytes_per_token"] == 2 * (nodes - 1) * 2 * 256 * layers
    assert alone["busiest"] == 4 > contiguous["busiest"] > 1.05 * apart["busiest"] > 4 / nodes
    assert alone["tokens_per_second"] < contiguous["tokens_per_second"] < apart["tokens_per_second"]
    assert contiguous["hit_rate"] == pytest.approx(alone["hit_rate"], abs=0.05)
    assert "apart" in capsys.readouterr().out


def test_placement_does_not_change_reads_when_all_experts_fit(seed: int) -> None:
    trace = a_trace(seed)
    for placement in ("contiguous", "apart"):
        cluster = Cluster(2, 64, MACHINE, NETWORK, placement)
        row = simulate_nodes(trace, "lru", 1.0, cluster, prompts=slice(1, None))
        used = sum(len(np.unique(trace.ids[:, layer])) for layer in range(trace.layers))
        assert row.read_bytes_per_token == pytest.approx(used * MACHINE.expert_bytes / trace.tokens)


@pytest.mark.parametrize(
    "text",
    [
        "10Gbit/s",
        "10,0.2ms",
        "fast,0.2ms",
        "0Gbit/s,1ms",
        "1.2.3Gbit/s,1ms",
        "-1Gbit/s,1ms",
        "٣Gbit/s,1ms",
        f"{'9' * 400}Gbit/s,1ms",
    ],
)
def test_a_network_that_is_no_bandwidth_and_latency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 10Gbit/s,0.2ms"):
        Network.parse(text)


def test_a_network_is_given_in_bits_or_bytes() -> None:
    assert Network(1.25e9, pytest.approx(2e-4)) == NETWORK
    assert Network.parse("1.25 GB/s, 200us") == Network(1.25e9, pytest.approx(2e-4))


NODES = ["--nodes", "2", "--network", "1Gbit/s,1ms", "--hidden-size", "8", "--expert-bytes", "1MB"]
NODES += ["--disk-speed", "1GB", "--memory-speed", "1GB"]


def test_hit_rates_of_prompts_counted_separately_add_up() -> None:
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
        (["--other-seconds", "0"], "all three"),
        (["--other-bytes", "1GB"], "all three"),
        (["--fetch", "4"], "--fetch is for a predictor"),
        ([*NODES, "--fetch", "4"], "--fetch is for a predictor"),
        (["--recall", "0.9"], "--recall is of the simulated predictor"),
        (["--prefetch", "lookahead", "--recall", "0.75"], "--recall is of the simulated predictor"),
        (["--prefetch", "lookahead"], "lookahead scores"),
        (["--synthetic", "4,16"], "LAYERS,EXPERTS,TOP_K"),
        (["--nodes", "2"], "--network and --hidden-size"),
        (["--placement", "apart"], "with --nodes"),
        ([*NODES, "--nodes", "two"], "such as 1,2,4"),
        ([*NODES, "--nodes", "3"], "evenly"),
        ([*NODES, "--nodes", "0"], "evenly"),
        ([*NODES, "--placement", "hot"], "contiguous, apart"),
        ([*NODES, "--dispatch", "mesh"], "all_reduce, all_to_all"),
        ([*NODES, "--nodes", "1", "--placement", "hot"], "contiguous, apart"),
        ([*NODES, "--hidden-size", "0"], "1 or more; got 0"),
        (["--hidden-size", "0"], "with --nodes"),
        ([*NODES, "--placement", "apart"], "sequences before the counted ones"),
        ([*NODES, "--early-experts", "1,2"], "for one process"),
        ([*NODES, "--prefetch", "simulated"], "lookahead or off"),
        ([*NODES, "--prefetch", "lookahead"], "no lookahead scores"),
        ([*NODES, "--other-bytes", "1MB", "--other-seconds", "1"], "leave one out"),
        ([*NODES, "--other-seconds", "-1"], "0 or more"),
    ],
)
def test_wrong_usage_says_what_is_allowed(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routing", "simulate", str(TRACE), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.npz").write_text("no")
    assert main(["routing", "simulate", str(tmp_path / "t.npz")]) == 1
    assert "not a routing trace" in capsys.readouterr().err
