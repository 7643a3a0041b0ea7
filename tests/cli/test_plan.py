"""torch-mesh plan: sizes that loading confirms, verdicts that say what to change, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_hub import MODEL, loopback_hub
from pairs import each_once_quick
from tiny_checkpoints import save_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import torch_mesh
from torch_mesh import _C, MeshConfig, PackedWeight
from torch_mesh.cli import main
from torch_mesh.formats import FORMATS, ROUNDED_FORMATS
from torch_mesh.planning import machine
from torch_mesh.planning import sizes as sizes_module
from torch_mesh.planning.hit_rates import expected_hit_rate, simulated_hit_rate
from torch_mesh.planning.machine import disk_speed, huge_pages, measure_formats, measure_speeds
from torch_mesh.planning.plan import Plan, plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.planning.token_time import Speeds, token_seconds
from torch_mesh.store.convert import convert
from torch_mesh.store.header import encode_header
from torch_mesh.system import timing
from torch_mesh.system.memory import anonymous_bytes

RECORD = _C.record_bytes("bf16", 0, 192, 64, True, False)
# With both speeds given, plan measures only the cost of small functions.
GIVEN = ["--disk-speed", "1GB/s", "--memory-speed", "20GB/s"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, *GIVEN, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def store(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(mesh_tiny, tmp_path_factory.mktemp("plan") / "int4", "int4").store.folder


def test_a_checkpoint_and_its_store_are_planned(
    mesh_tiny: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, weights, staging in ((mesh_tiny, "bf16", True), (store, "int4", False)):
        planned = run(capsys, str(folder), "--resident", "0.25")
        sizes = planned["sizes"]
        assert (planned["status"], planned["slots"], planned["recommended_slots"]) == ("ok", 48, 48)
        assert sizes["weights"] == weights
        assert sizes["expert_bytes"] == _C.record_bytes(weights, 64, 192, 64, True, False)
        assert planned["pool_bytes"] == 48 * sizes["expert_bytes"]
        assert planned["chunk_bytes"] == 192 * sizes["expert_bytes"]
        assert (sizes["staging_bytes"] > 0) == staging
        assert planned["tokens_per_second"] > 0
    # int4 from the original has the sizes that converting it would give.
    assert run(capsys, str(mesh_tiny), "--weights", "int4")["sizes"]["expert_bytes"] == sizes["expert_bytes"]


@pytest.mark.parametrize(("resident", "dense"), each_once_quick(["0.25", "1.0"], ["int8", "none"]))
def test_loading_takes_the_planned_bytes(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], dense: str, resident: str
) -> None:
    planned = run(capsys, str(mesh_tiny), "--resident", resident, "--dense", dense)
    config = MeshConfig(resident=resident, dense=dense, io="threads")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    module = next(module for module in model.modules() if hasattr(module, "_mesh_pool"))
    held = module._mesh_pool.engine.describe()
    assert held["slots"] == planned["slots"]
    assert held["pool_bytes"] == planned["pool_bytes"] + planned["sizes"]["staging_bytes"]
    packed = sum(module._mesh_packed.nbytes for module in model.modules() if hasattr(module, "_mesh_packed"))
    plain = sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, PackedWeight))
    assert planned["sizes"]["dense_bytes"] == packed + plain
    assert (packed > 0) == (dense != "none")


def test_tokens_per_chunk_are_those_of_the_engine(mesh_tiny: Path) -> None:
    config = MeshConfig(resident=0.25, workspace="1MiB", io="threads", prefetch="off")
    tokens = plan(mesh_tiny, config).tokens_per_chunk
    assert tokens is not None and 16 < tokens < 1000
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    # A chunk claims its experts anew: one token more than fits makes a second claim.
    for rows, claims in ((tokens, 1), (tokens + 1, 2)):
        torch_mesh.reset_stats(model)
        ids = torch.full((1, rows), 65)  # the same token in each row, so that most rows take the same experts
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        first = torch_mesh.stats(model).per_layer[0]
        assert (first.forwards, sum(count > 1 for count in first.experts.accesses) > 0) == (1, claims == 2)


def status_of(folder: Path, resident: str | float = "auto", memory: int | None = None, **fields: Any) -> Plan:
    return plan(folder, MeshConfig(resident=resident, **fields), memory=memory)


def test_each_status_says_what_to_change(mesh_tiny: Path, store: Path, tmp_path: Path) -> None:
    assert status_of(mesh_tiny, 0.25).status == "ok"
    assert status_of(mesh_tiny, 1.0).status == "nothing to do"
    assert status_of(mesh_tiny, "auto", 1 << 36).status == "nothing to do"
    below = status_of(mesh_tiny, 0.1)
    assert below.status == "below recommended"
    assert f"19 of 192 experts fit, 48 are recommended: give {48 * RECORD:,} bytes" in below.advice
    assert "bf12 or int8" in below.advice and "int4" not in status_of(store, 0.1).advice
    for resident, memory, advice in (
        ("auto", 1 << 20, "give more memory, or take weights in bf12 or int8"),
        (3 * RECORD, None, f"give at least {4 * RECORD:,} bytes"),
        (0.5, 1 << 20, "give less, or 'auto'"),
    ):
        small = status_of(mesh_tiny, resident, memory)
        assert (small.status, small.slots, small.peak_bytes, small.tokens_per_second) == ("too small", None, None, None)
        assert advice in small.advice
    records = tmp_path / "records"
    records.mkdir()
    for file in (*store.glob("mesh-*"), store / "mesh_manifest.json"):
        shutil.copy(file, records)
    unknown = status_of(records)
    assert (unknown.status, unknown.peak_bytes) == ("unknown", None) and "--resident" in unknown.advice
    assert status_of(records, 0.25).status == "ok"


def test_auto_is_bounded_by_the_memory_that_is_given(mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 400 << 20)
    sizes = find_sizes(mesh_tiny, MeshConfig())
    assert sizes.dense_bytes is not None
    rest = (400 << 20) + sizes.dense_bytes + sizes.staging_bytes + (256 << 20)
    for slots in (4, 32, 188, 192, 400):
        left = slots * RECORD * 4 // 3  # a quarter of it is the margin
        for spare in (0, RECORD):
            planned = status_of(mesh_tiny, "auto", rest + left + spare)
            assert planned.slots == min(slots, 192) and planned.margin_bytes == (left + spare) // 4
    assert status_of(mesh_tiny, "auto", rest + 4 * RECORD * 4 // 3 - 4).status == "too small"
    within = status_of(mesh_tiny, "auto", rest + 100 * RECORD * 4 // 3)
    assert within.peak_bytes == rest + 100 * RECORD
    assert status_of(mesh_tiny, 0.5, rest + (1 << 30)).margin_bytes is None


def test_a_peak_above_the_memory_is_named(mesh_tiny: Path) -> None:
    """A named size leaves the workspace out of account: prompts that fill it may need more than there is."""
    peak = status_of(mesh_tiny, 0.25, 1 << 36).peak_bytes
    assert peak is not None
    enough, short = (status_of(mesh_tiny, 0.25, peak + spare) for spare in (1 << 27, -(1 << 27)))
    assert (enough.status, short.status) == ("ok", "ok")
    assert "above the memory" not in enough.advice
    assert "bytes above the memory: give more memory, or a smaller resident or workspace" in short.advice


def test_a_peak_while_loading_is_no_matter_of_the_workspace(mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dataclasses.replace(find_sizes(mesh_tiny, MeshConfig()), dense_bytes_loading=1 << 34)
    monkeypatch.setattr("torch_mesh.planning.sizes.LocatedModel.sizes", lambda *_, **__: sizes)
    advice = status_of(mesh_tiny, 0.25, 1 << 33).advice
    assert "While the rest of the model is loaded" in advice and advice.endswith("above the memory: give more memory.")


def test_the_limit_of_the_readme_is_enough_for_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers of Qwen3-30B-A3B's experts in int4: 1.10 GB are enough, as the README says."""
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 310_000_000)
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 8192, "dtype": "bfloat16"}
    described = Qwen3MoeConfig(**sizes, **heads, **experts, architectures=["Qwen3MoeForCausalLM"])
    described.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(described).to(torch.bfloat16)
    shapes = {name: weight.shape for name, weight in model.state_dict().items() if ".experts." not in name}
    for layer, expert, name in itertools.product(range(4), range(128), ("gate", "up", "down")):
        shape = (2048, 768) if name == "down" else (768, 2048)
        shapes[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = torch.Size(shape)
    rows = [(name, "BF16", tuple(shape), 2 * shape.numel()) for name, shape in shapes.items()]
    header = encode_header(rows, {"format": "pt"})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size for *_, size in rows))  # a sparse file
    for resident, status in (("auto", "ok"), ("0.4", "ok"), ("0.7", "too small")):
        options = ["--weights", "int4", "--memory", "1.1GB", "--resident", resident]
        planned = run(capsys, str(tmp_path), *options, code=int(status == "too small"))
        assert planned["status"] == status
    planned = run(capsys, str(tmp_path), "--weights", "int4", "--memory", "0.8GB", code=1)
    for part in ("workspace", "stay free", "bytes are left for experts", "smaller workspace"):
        assert part in planned["advice"]
    assert main(["plan", str(tmp_path), "--weights", "int4", "--memory", "1.1GB", *GIVEN]) == 0
    assert "which resident=auto leaves free" in " ".join(capsys.readouterr().out.split())


def test_a_named_limit_counts_anonymous_memory_only(mesh_tiny: Path) -> None:
    """Mapped libraries lie in the page cache. A plan does not count them to the process, and bench does not either."""
    planned = status_of(mesh_tiny, 0.25, 8 << 30)
    assert planned.process_bytes == pytest.approx(anonymous_bytes(), rel=0.05)


def test_a_card_takes_the_rest_of_the_model_and_some_experts(
    mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 300 << 20)  # it grows with time
    monkeypatch.setattr("torch_mesh.gpu.planning._ALLOCATION", 1)
    cuda = 500_000_000
    alone = run(capsys, str(mesh_tiny), "--resident", "0.25")
    dense, every = alone["sizes"]["dense_bytes_loading"], 192
    gpu = {"gpu_experts": "4", "gpu_memory": str(cuda + dense + (64 << 20))}
    planned = run(capsys, str(mesh_tiny), "--resident", "0.25", *_options(gpu))
    layers = planned["sizes"]["shape"]["layers"]
    assert (alone["gpu"], planned["gpu"]["counts"], planned["gpu"]["status"]) == (
        None,
        [4] * layers,
        "ok",
    )
    assert planned["slots"] == 48 and planned["hit_rate"] is planned["tokens_per_second"] is None
    assert planned["peak_bytes"] == alone["peak_bytes"] - dense, "the rest of the model is on the card"

    card = _options({"gpu_memory": str(cuda + dense + (2 << 30) + 70 * RECORD)})  # beside the reserve
    auto = run(capsys, str(mesh_tiny), "--resident", "1.0", *card)
    on_card = sum(auto["gpu"]["counts"])
    assert (on_card, auto["gpu"]["buffers"], auto["gpu"]["spare"]) == (62, 8, 0)
    assert auto["slots"] == every - on_card and auto["status"] == auto["gpu"]["status"].replace("ok", "nothing to do")
    assert auto["chunk_bytes"] == 0

    low = _C.record_bytes("int4", 64, 192, 64, True, False)
    few = _options({"gpu_memory": str(cuda + dense + (2 << 30) + 20 * RECORD), "gpu_weights": "int4"})
    for placement, spare in (("static", 0), ("dynamic", 4)):
        int4 = run(capsys, str(mesh_tiny), "--resident", "0.25", *few, "--gpu-placement", placement)
        fit = (20 * RECORD - int4["gpu"]["buffers"] * RECORD) // low - spare
        assert (sum(int4["gpu"]["counts"]), int4["gpu"]["spare"], int4["gpu"]["buffers"]) == (fit, spare, 8)
        assert int4["peak_bytes"] == planned["peak_bytes"] + 8 * low, "through which they are read"

    assert main(["plan", str(mesh_tiny), *GIVEN, *card]) == 0
    assert "on the card" in " ".join(capsys.readouterr().out.split())
    for memory, message in ((dense, "give fewer"), (dense - 1, "alone needs 1 bytes more than the card has")):
        gpu = {"gpu_experts": "8", "gpu_memory": str(cuda + memory)}
        refused = run(capsys, str(mesh_tiny), *_options(gpu), code=1)
        assert refused["status"] == "too small" and message in refused["advice"] and refused["slots"] is None


def _options(fields: Mapping[str, str]) -> list[str]:
    return [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-experts", "99"], "gpu.experts=99, but a layer has"),
        (["--dense", "int8"], "dense='int8' is for the CPU"),
        (["--gpu-weights", "bf16"], "gpu.weights='bf16' has no fewer bits than the int4 of this converted"),
        (["--gpu-experts", "0"], "--gpu-memory is for experts on a GPU, and --gpu-experts is 0"),
        (["--hit-rate", "0.5"], "--hit-rate predicts hits, and none are predicted with experts on a GPU"),
        (
            ["--gpu-experts", "2", "--fallback", "lut4", "--weights", "int4"],
            "lossy fallback=lut4 and gpu.experts exclude each other",
        ),
    ],
)
def test_options_that_exclude_a_card_are_named(
    store: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(store), *GIVEN, "--gpu-memory", "24GiB", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_formats_without_kernels_stay_in_memory(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patching a model places none either, or refuses the number that was asked for."""
    monkeypatch.setitem(FORMATS, "bf12", dataclasses.replace(FORMATS["bf12"], gpu=False))
    card = "--weights", "bf12", "--gpu-memory", "24GiB"
    planned = run(capsys, str(mesh_tiny), "--resident", "0.25", *card)
    assert sum(planned["gpu"]["counts"]) == 0 and "no GPU kernels for bf12" in planned["gpu"]["advice"]
    assert planned["slots"] == 48
    assert main(["plan", str(mesh_tiny), *GIVEN, *card, "--gpu-experts", "2"]) != 0
    assert "no GPU kernels for bf12" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_gpu_memory_must_be_given(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(store), *GIVEN, "--gpu-experts", "auto"]) != 0
    assert "--gpu-memory 24GiB" in " ".join(capsys.readouterr().err.split())


def test_the_expected_hit_rate_rises_with_the_resident_fraction() -> None:
    shares = [index / 50 for index in range(51)]
    rates = [expected_hit_rate(share) for share in shares]
    assert all(rate.low <= rate.expected <= rate.high for rate in rates)
    assert all(a.expected < b.expected for a, b in itertools.pairwise(rates))
    assert (rates[0].expected, rates[-1].expected) == (0, 1)
    assert expected_hit_rate(0.25).expected == pytest.approx(0.535)


def test_time_is_bounded_by_the_disk_and_by_memory(mesh_tiny: Path) -> None:
    sizes = find_sizes(mesh_tiny, MeshConfig())
    used = 6 * 4 * sizes.expert_bytes
    assert sizes.dense_bytes_per_token is not None
    speeds = Speeds(disk=1e6, experts=1e9, dense=2e9, layer_seconds=1e-6, measured=())
    dense = sizes.dense_bytes_per_token / 2e9 + 6e-6
    assert token_seconds(sizes, speeds, 1.0, True) == pytest.approx(dense + used / 1e9)
    assert token_seconds(sizes, speeds, 0.5, False) == pytest.approx(dense + used / 1e9 + 0.5 * used / 1e6)
    for hits in (0.0, 0.5, 0.9):
        assert token_seconds(sizes, speeds, hits, True) >= (1 - hits) * used / 1e6


def test_a_known_hit_rate_replaces_the_expected(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = run(capsys, str(mesh_tiny), "--resident", "0.25", "--hit-rate", "0.9")
    assert planned["hit_rate"] == {"expected": 0.9, "low": 0.9, "high": 0.9}
    low, high = planned["tokens_per_second_range"]
    assert low == high == planned["tokens_per_second"]


def test_a_known_overlap_refines_the_expected_hit_rate(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = find_sizes(mesh_tiny, MeshConfig()).shape
    rates = [simulated_hit_rate(shape, 0.25, overlap) for overlap in (0.2, 0.4, 0.6)]
    assert all(rate.low <= rate.expected <= rate.high for rate in rates)
    assert all(a.expected < b.expected for a, b in itertools.pairwise(rates))
    assert simulated_hit_rate(shape, 0.5, 0.4).expected > rates[1].expected
    assert simulated_hit_rate(shape, 1.0, 0.4).expected == 1, "the first prompt has filled the pool, and does not count"
    planned = run(capsys, str(mesh_tiny), "--resident", "0.25", "--overlap", "0.4")
    share = planned["slots"] / 192
    assert planned["hit_rate"]["expected"] == simulated_hit_rate(shape, share, 0.4).expected
    for overlap, resident in ((0.05, 0.25), (0.99, 0.25), (2, 1.0)):
        with pytest.raises(ValueError, match=r"overlap must be between chance, 0\.125, and 0\.95"):
            plan(mesh_tiny, MeshConfig(resident=resident), overlap=overlap)


def test_alternatives_are_planned_from_one_located_model(mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    located = []
    find = sizes_module.find_checkpoint_experts
    monkeypatch.setattr(sizes_module, "find_checkpoint_experts", lambda *given: located.append(0) or find(*given))
    assert len(plan(mesh_tiny, MeshConfig(resident=0.5)).dense_choices) == 2
    assert len(located) == 1


def test_speeds_are_measured(store: Path) -> None:
    config = MeshConfig(dense="int4")
    sizes = find_sizes(store, config)
    speeds = measure_speeds(sizes, config)
    assert speeds is not None and speeds.measured == ("disk", "experts", "dense", "layer_seconds")
    for speed in (speeds.disk, speeds.experts, speeds.dense):
        assert 1e5 < speed < 1e13
    assert 0 < speeds.layer_seconds < 1
    assert disk_speed(sizes.files, 1 << 30) is None


@pytest.mark.parametrize(("hidden", "dense"), each_once_quick([8, 32, 96], ["auto", "bf16", "int8"]))
def test_a_narrow_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: int, dense: str) -> None:
    monkeypatch.setattr(machine, "seconds_per_call", lambda call, seconds=0.0: call() is not None or 1.0)
    save_tiny(tmp_path, "qwen3_moe", hidden_size=hidden, vocab_size=16, num_attention_heads=2, head_dim=16)
    sizes = find_sizes(tmp_path, MeshConfig())
    speeds = measure_speeds(sizes, MeshConfig(dense=dense), disk=1e9)
    assert speeds is not None and speeds.dense >= 64 * hidden and speeds.experts > 0
    planned = plan(tmp_path, MeshConfig(resident=0.5), speeds=speeds)
    assert planned.tokens_per_second is not None and planned.tokens_per_second > 0
    # Where the rest of the model has no layer that is large enough there is nothing to choose.
    assert bool(planned.dense_choices) == (hidden >= 32)


class _CpuOnly(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert all(each.is_cpu for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)), func
        return result


def test_speeds_are_the_cpus_whatever_the_default_device(mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "seconds_per_call", lambda call, seconds=0.0: call() is not None or 1.0)
    monkeypatch.setattr(timing, "SECONDS", 0)
    for module in (machine, timing):
        monkeypatch.setattr(module, "LARGE_BYTES", 1 << 20)
    sizes = find_sizes(mesh_tiny, MeshConfig())
    with torch.device("meta"), _CpuOnly():
        for dense in ("auto", "none", "int8"):
            measure_speeds(sizes, MeshConfig(dense=dense), disk=1e9)
        measure_formats(sizes, MeshConfig())
        machine.product_flops(sizes.shape)
        timing.memory_speed()


def test_the_table_shows_the_same_figures(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(mesh_tiny), "--resident", "0.1", *GIVEN]
    assert main(arguments) == 0
    table = " ".join(capsys.readouterr().out.split())
    for words in ("6 layers of 32, 4 per token, bf16", "19 experts, 9.9%", "48 experts, 25.0%", "below recommended"):
        assert words in table


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{none}"], 1, "there is no such folder"),
        (["{empty}"], 1, "has neither"),
        (["{dense}"], 1, "Supported families"),
        (["{model}", "--resident", "0"], 2, "resident=0.0 is not a fraction"),
        (["{model}", "--weights", "int4", "--group-size", "32", "--resident", "x"], 2, "resident='x' is not a size"),
        (["{model}", "--hit-rate", "2"], 2, "--hit-rate 2.0 must be in"),
        (["{model}", "--hit-rate", "0.5", "--overlap", "0.4"], 2, "--hit-rate and --overlap exclude each other"),
        (["{model}", "--overlap", "0.4", "--fallback", "int4"], 2, "--overlap predicts hits, and none are predicted"),
        (["{store}", "--weights", "int8"], 2, "are int4"),
    ],
)
def test_bad_input_is_named_in_the_error(
    mesh_tiny: Path,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folders = {"none": tmp_path / "none", "empty": tmp_path / "empty", "dense": tmp_path / "dense"}
    for name in ("empty", "dense"):
        folders[name].mkdir()
    shutil.copy(mesh_tiny / "model.safetensors", folders["dense"])
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
    (folders["dense"] / "config.json").write_text(json.dumps(config))
    filled = [argument.format(model=mesh_tiny, store=store, **folders) for argument in arguments]
    assert main(["plan", *filled, *GIVEN]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--memory", "0"], ["--memory", "much"], ["--disk-speed", "fast"], ["--disk-speed", "0"]]
)
def test_impossible_sizes_are_wrong_usage(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(mesh_tiny), *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_ranks_have_a_part_of_the_experts_each(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measure_speeds", lambda *_, **__: MADE_UP)
    whole = run(capsys, str(mesh_tiny), "--resident", "0.25")
    assert whole["ranks"] is None
    for ranks in (2, 8):
        planned = run(capsys, str(mesh_tiny), "--resident", "0.25", "--ranks", str(ranks))
        about = planned["ranks"]
        assert (about["ranks"], about["experts"], about["sum_bytes"]) == (ranks, 32 // ranks, 384)
        assert 4 / ranks < about["busiest"] < 4  # of four experts a token: spread evenly, or all on one rank
        assert planned["slots"] == 48 // ranks and planned["resident_fraction"] == whole["resident_fraction"]
        assert planned["sizes"]["all_experts_bytes"] * ranks == whole["sizes"]["all_experts_bytes"]
        assert planned["tokens_per_second"] > whole["tokens_per_second"]
        assert main(["plan", str(mesh_tiny), "--ranks", str(ranks), *GIVEN]) == 0
        assert "what follows is of one of them" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "the 32 experts of a layer cannot be divided evenly"),
        (["--ranks", "2", "--overlap", "0.4"], "overlap is of a whole model's routing"),
        (["--ranks", "2", "--fallback", "int4"], "excludes lossy modes and experts on a GPU"),
        (["--ranks", "2", "--train"], "leave --ranks out"),
    ],
)
def test_options_that_exclude_ranks_are_named(
    arguments: list[str], message: str, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(mesh_tiny), *arguments, *GIVEN]) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_a_failure_that_still_prints(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = run(capsys, str(mesh_tiny), "--memory", "1MiB", code=1)
    assert planned["status"] == "too small"
    assert "0 bytes are left for experts" in planned["advice"]


def test_a_model_of_the_hub_is_planned_without_its_weights(
    mesh_tiny: Path,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = [mesh_tiny, store]
    for name, file in {"parts": "parts/model.safetensors", "variant": "model.fp16.safetensors"}.items():
        folders.append(folder := tmp_path / name)
        (folder / file).parent.mkdir(parents=True)
        (folder / file).symlink_to(mesh_tiny / "model.safetensors")
        (folder / "config.json").symlink_to(mesh_tiny / "config.json")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "parts/model.safetensors"}}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        for folder in folders:
            found = [path for path in folder.rglob("*") if path.is_file()]
            hub.files = {str(path.relative_to(folder)): path.read_bytes() for path in found}
            hub.sent.clear()
            here, there = (run(capsys, model, "--resident", "0.25") for model in (str(folder), MODEL))
            assert there["folder"] == MODEL and there["sizes"].pop("files") == [] and here["sizes"].pop("files")
            assert there["sizes"] == here["sizes"]
            assert there["tokens_per_second"] > 0
            weights = {name: len(data) for name, data in hub.files.items() if name.endswith(".safetensors")}
            assert set(weights) <= set(hub.sent)
            assert hub.sent.total() < sum(weights.values()) / 5, (hub.sent, weights)
        assert main(["plan", "tiny/none"]) == 1
        assert "the hub has no such model" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


MADE_UP = Speeds(disk=1e8, experts=1e10, dense=1e10, layer_seconds=1e-6, measured=())
EQUALLY_FAST = dict.fromkeys(ROUNDED_FORMATS, 1e10)


def choices_of(
    folder: Path,
    resident: str | float,
    formats: Mapping[str, float] = EQUALLY_FAST,
    max_error: float | None = None,
    **given: Any,
) -> Any:
    config = MeshConfig(resident=resident, prefetch="off", max_error=max_error)
    planned = plan(folder, config, speeds=MADE_UP, format_speeds=formats, **given)
    return {choice.weights: choice for choice in planned.format_choices}


def chosen(folder: Path, resident: str, formats: Mapping[str, float] = EQUALLY_FAST, **given: Any) -> list[str]:
    return [name for name, choice in choices_of(folder, resident, formats, **given).items() if choice.chosen]


def test_formats_are_compared_in_the_same_memory(mesh_tiny: Path) -> None:
    memory = 48 * RECORD  # a quarter of the experts in bf16
    choices = choices_of(mesh_tiny, str(memory))
    assert list(choices) == list(EQUALLY_FAST)
    for weights, group in (("bf16", 0), ("int4", 64), ("tcq2", 64)):  # 128 would pad columns of 64 inputs
        choice, record = choices[weights], _C.record_bytes(weights, group, 192, 64, True, False)
        slots = min(192, memory // record)
        assert (choice.group_size or 0, choice.expert_bytes, choice.slots) == (group, record, slots)
        hits = expected_hit_rate(slots / 192).expected
        assert choice.bytes_per_token == pytest.approx((1 - hits) * 24 * record)
    # A quarter of bf16 hits .535, by docs/decisions/0013.
    assert choices["bf16"].hit_rate.expected == pytest.approx(0.535)
    sizes = find_sizes(mesh_tiny, MeshConfig())
    reading = 0.465 * 24 * RECORD / 1e8
    computing = (sizes.dense_bytes_per_token + 24 * RECORD) / 1e10 + 6e-6
    assert choices["bf16"].tokens_per_second == pytest.approx(1 / (computing + reading))


def test_the_fastest_format_within_the_error_is_chosen(mesh_tiny: Path) -> None:
    little = str(12 * RECORD)
    assert chosen(mesh_tiny, little) == ["lut4"]  # as many bytes as int4, and less error
    assert chosen(mesh_tiny, little, max_error=0.15) == ["tcq3"]
    assert chosen(mesh_tiny, little, max_error=0.24) == ["tcq2+tcq3"]
    # Records this small are filled up to the same size, and then the one with less error is taken.
    assert chosen(mesh_tiny, little, max_error=0.3) == ["tcq2+tcq3"]
    assert chosen(mesh_tiny, little, {"tcq3": 1e10, "tcq2": 1e10}, max_error=0.3) == ["tcq2"]
    assert chosen(mesh_tiny, little, max_error=0.01) == ["int8"]
    assert chosen(mesh_tiny, little, max_error=0) == ["bf12"]
    assert chosen(mesh_tiny, little, {"tcq3": 1e10, "tcq2": 1e10}) == []
    # Arithmetic slower than the disk decides as well.
    assert chosen(mesh_tiny, little, EQUALLY_FAST | {"tcq2": 1e6, "tcq2+tcq3": 1e6}, max_error=0.3) == ["tcq3"]
    # Where all experts fit, arithmetic alone counts. Formats within 5 % are equally fast: the least error decides.
    everything = str(192 * RECORD)
    least = {name: choice.expert_bytes * 1e3 for name, choice in choices_of(mesh_tiny, everything).items()}
    assert chosen(mesh_tiny, everything, least) == ["bf16"]
    assert chosen(mesh_tiny, everything, least | {"int8": 1.02 * least["int8"]}) == ["bf16"]
    assert chosen(mesh_tiny, everything, least | {"int8": 1.2 * least["int8"]}) == ["int8"]


def test_formats_are_not_compared_where_there_is_no_choice(mesh_tiny: Path, store: Path) -> None:
    assert choices_of(store, "auto") == {}
    assert choices_of(mesh_tiny, 0.25) == {}
    assert choices_of(mesh_tiny, "auto", hit_rate=0.5) == {}


def test_the_bf16_choice_reads_the_raw_checkpoint_whatever_format_was_asked_for(
    mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The buffers of raw records take memory from resident="auto". A store has no such buffers.
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 0)
    staging = find_sizes(mesh_tiny, MeshConfig()).staging_bytes
    assert staging > 0

    def slots(**fields: Any) -> int:
        config = MeshConfig(resident="auto", prefetch="off", **fields)
        left = config.workspace_bytes + (find_sizes(mesh_tiny, config).dense_bytes or 0)
        memory = left + staging + 100 * RECORD * 4 // 3
        planned = plan(mesh_tiny, config, memory=memory, speeds=MADE_UP, format_speeds=EQUALLY_FAST)
        return next(choice.slots for choice in planned.format_choices if choice.weights == "bf16")

    assert slots() == slots(weights="int4") == 100
    assert slots(store=str(tmp_path / "store")) == min(192, 100 + staging * 3 // 4 // RECORD)


def test_the_bf16_choice_rounds_fp16_and_fp32_checkpoints(mesh_tiny: Path, tmp_path: Path) -> None:
    little = str(12 * RECORD)
    assert choices_of(mesh_tiny, little)["bf16"].weight_error == 0
    for dtype in (torch.float16, torch.float32):
        folder = tmp_path / str(dtype)
        AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=dtype).save_pretrained(folder)
        choices = choices_of(folder, little)
        assert 0 < choices["bf16"].weight_error < choices["int8"].weight_error
        assert chosen(folder, little, max_error=0) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--resident", "0.25"], "give it as a size"),
        (["--resident", "1MiB", "--hit-rate", "0.5"], "hit rate holds for one format"),
        (["--ranks", "2"], "divided among ranks"),
        (["--fallback", "int4"], "has two formats"),
    ],
)
def test_the_plan_says_why_no_format_is_chosen(
    mesh_tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    reason: str,
) -> None:
    # Calling None would raise: the formats are not measured either.
    monkeypatch.setattr("torch_mesh.planning.machine.measure_formats", None)
    assert main(["plan", str(mesh_tiny), "--memory", "8GiB", "--max-error", "15%", *options, *GIVEN]) == 0
    assert reason in capsys.readouterr().out


def test_the_plan_says_that_no_format_fits_or_that_a_store_has_one(
    mesh_tiny: Path, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", str(mesh_tiny), "--memory", "1KiB", "--max-error", "15%", *GIVEN]) == 1
    assert "fit in no format" in capsys.readouterr().out
    monkeypatch.setattr("torch_mesh.planning.machine.measure_formats", None)
    assert main(["plan", str(store), "--memory", "8GiB", "--max-error", "15%", *GIVEN]) == 0
    assert "are int4 already" in capsys.readouterr().out


def test_the_command_shows_the_format_choices(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limited = [str(mesh_tiny), "--memory", "8GiB", "--max-error"]
    planned = run(capsys, *limited, "15%")
    assert [choice["weights"] for choice in planned["format_choices"]] == list(EQUALLY_FAST)
    assert sum(choice["chosen"] for choice in planned["format_choices"]) == 1
    assert main(["plan", *limited, "0.15", *GIVEN]) == 0
    assert "Fastest within --max-error: --weights" in capsys.readouterr().out
    assert run(capsys, str(mesh_tiny))["format_choices"] == []
    assert main(["plan", str(mesh_tiny), "--max-error", "15%", *GIVEN]) == 2
    assert "give --memory" in capsys.readouterr().err
    for wrong in ("15", "much", "-1%"):
        assert main(["plan", *limited[:-1], f"--max-error={wrong}"]) == 2
        assert capsys.readouterr().err.startswith(f"torch-mesh: --max-error={wrong!r} is not a fraction")


def test_the_disk_is_measured_into_memory_that_may_have_huge_pages() -> None:
    """Reads into small pages are half as fast, for the kernel splits them."""
    pages = huge_pages(8 << 20)
    address = pages.ctypes.data
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    bounds = ([int(bound, 16) for bound in mapping.split()[0].split("-")] for mapping in mappings)
    mapping = next(text for text, (low, high) in zip(mappings, bounds, strict=True) if low <= address < high)
    assert address % (2 << 20) == 0 and mapping.split()[1] == "rw-p"
    flags = re.search(r"VmFlags:(.*)", mapping)
    assert flags is None or "hg" in flags[1].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_experts_per_tok": 4.0}, "refuses its config: .*num_experts_per_tok"),
        ({"num_experts_per_tok": "four"}, "refuses its config: .*num_experts_per_tok"),
        ({"dtype": "bfloat17"}, "refuses its config: .*bfloat17"),
        ({"quantization_config": [1]}, "refuses its config: |is not a config: "),
        ({"num_experts_per_tok": 0}, "The config gives each token 0 of the 32 experts of model.layers.0.mlp.experts"),
        ({"num_experts_per_tok": 33}, "The config gives each token 33 of the 32 experts"),
        (None, "config.json: is not valid JSON: "),
    ],
)
def test_a_config_with_wrong_values_is_one_line(
    given: dict[str, Any] | None, message: str, mesh_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").symlink_to(mesh_tiny / "model.safetensors")
    config = json.loads((mesh_tiny / "config.json").read_text())
    text = "[" * 200_000 + "]" * 200_000 if given is None else json.dumps(config | given)
    (tmp_path / "config.json").write_text(text)
    for command in (["plan", *GIVEN], ["inspect"], ["convert", "--weights", "int8"]):
        name, *options = command
        destination = [str(tmp_path / "store")] if name == "convert" else []
        assert main([name, str(tmp_path), *destination, *options]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and re.search(message, error), error
