"""Profiles: untrusted files, warm starts and early experts, none of which changes the output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, MeshError
from torch_mesh.cli import main
from torch_mesh.modules.experts import pools_of
from torch_mesh.routing.profiles import Profile, load_profile, pool_profile, write_profile

GOOD: dict[str, Any] = {
    "format": "torch_mesh profile",
    "version": 1,
    "layers": 2,
    "experts": 3,
    "top_k": 2,
    "tokens": [4, 0],
    "uses": [[4, 3, 1], [0, 0, 0]],
}


Open = Callable[..., PreTrainedModel]


@pytest.fixture
def open_model(int8_store: Path) -> Open:
    def open_it(folder: Path = int8_store, **fields: Any) -> PreTrainedModel:
        config = MeshConfig(**{"resident": 0.25, "io": "threads"} | fields)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)

    return open_it


def _decode(model: PreTrainedModel, steps: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 4096, (1, 24), generator=generator)
    options: dict[str, Any] = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    with torch.no_grad():
        made = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(made.logits)


@pytest.fixture(scope="module")
def saved(int8_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a model that has run."""
    model = AutoModelForCausalLM.from_pretrained(
        int8_store, quantization_config=MeshConfig(resident=0.25, io="threads")
    )
    _decode(model)
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    torch_mesh.save_profile(model, path)
    return path


def _written(path: Path, fields: Any) -> Path:
    path.write_text(json.dumps(fields))
    return path


def test_a_profile_round_trips_through_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 2**40, 5)
    uses = rng.integers(0, tokens[:, None] + 1, (5, 7))
    write_profile(Profile(tokens, uses, 3), tmp_path / "p.json")
    read = load_profile(tmp_path / "p.json")
    assert (read.tokens == tokens).all() and (read.uses == uses).all()
    assert (read.layers, read.experts, read.top_k) == (5, 7, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": "something"}, "'format' must be 'torch_mesh profile'"),
        ({"version": 2}, "'version' is 2; this torch_mesh reads 1"),
        ({"version": None}, "'version' is None"),
        ({"layers": 0}, "'layers' must be an integer from 1 to 65536; it is 0"),
        ({"layers": 1 << 40}, "'layers' must be an integer"),
        ({"experts": True}, "'experts' must be an integer"),
        ({"top_k": 4}, "'top_k' is 4; allowed: 1 to 3"),
        ({"top_k": "2"}, "'top_k' must be an integer"),
        ({"layers": 3}, "'tokens' must be 3 integers"),
        ({"tokens": [4, -1]}, "'tokens' must be 2 integers"),
        ({"tokens": [4, float("nan")]}, "'tokens' must be 2 integers"),
        ({"tokens": [2**70, 0]}, "'tokens' must be 2 integers"),
        ({"uses": [[4, 3, 1]]}, "'uses' must be 2 lists of 3"),
        ({"uses": [[4, 3, 1], [0, 0]]}, "'uses' must be 2 lists of 3"),
        ({"uses": [[4, 3, 1], [0, 0, 0.5]]}, "'uses' must be 2 lists of 3"),
        ({"uses": [[4, 3, 1], [0, 0, float("inf")]]}, "'uses' must be 2 lists of 3"),
        ({"uses": [[4, 5, 1], [0, 0, 0]]}, "'uses' has 5 for expert 1 of layer 0; allowed: 0 to 4"),
        ({"uses": "many"}, "'uses' must be"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    load_profile(_written(tmp_path / "good.json", GOOD))
    with pytest.raises(MeshError, match=message) as raised:
        load_profile(_written(tmp_path / "wrong.json", GOOD | wrong))
    assert "wrong.json" in str(raised.value)


def test_damaged_files_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = json.dumps(GOOD).encode()
    path = tmp_path / "d.json"
    for text in (b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, whole[:-1]):
        path.write_bytes(text)
        with pytest.raises(MeshError, match=r"d\.json"):
            load_profile(path)
    for _ in range(200):
        damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for _ in range(3):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(MeshError):
            load_profile(path)
    with pytest.raises(FileNotFoundError):
        load_profile(tmp_path / "none.json")


def test_a_missing_file_is_an_error_that_names_save_profile(mesh_tiny: Path, tmp_path: Path) -> None:
    for profile in (tmp_path / "nope.json", tmp_path / "profile" / "nope.json"):
        with pytest.raises(FileNotFoundError, match="torch_mesh.save_profile.*leave profile out") as caught:
            AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(profile=profile))
        assert caught.value.filename == str(profile)


def test_saved_uses_of_a_model_add_up(open_model: Open, saved: Path, tmp_path: Path) -> None:
    profile = load_profile(saved)
    assert (profile.layers, profile.experts, profile.top_k) == (6, 32, 4)
    assert (profile.tokens == 24 + 11).all()  # the prompt, and all but the last token of the answer
    assert (profile.uses.sum(axis=1) == 4 * profile.tokens).all()
    model = open_model(profile=saved)
    _decode(model)
    torch_mesh.reset_stats(model)
    torch_mesh.save_profile(model, tmp_path / "again.json")
    again = load_profile(tmp_path / "again.json")
    assert (again.tokens == 2 * profile.tokens).all() and (again.uses == 2 * profile.uses).all()


def test_nothing_to_save_is_an_error_and_leaves_no_file(open_model: Open, tmp_path: Path) -> None:
    model = open_model()
    with pytest.raises(MeshError, match="computed nothing yet"):
        torch_mesh.save_profile(model, tmp_path / "p.json")
    with pytest.raises(MeshError):
        torch_mesh.save_profile(torch.nn.Linear(2, 2), tmp_path / "p.json")
    _decode(model, 1)
    with pytest.raises(OSError):
        torch_mesh.save_profile(model, tmp_path / "nowhere" / "p.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        torch_mesh.save_profile(model, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("raw", [False, True])
def test_a_warm_start_reads_the_hottest_experts_before_any_forward(
    open_model: Open, mesh_tiny: Path, saved: Path, raw: bool
) -> None:
    model = open_model(mesh_tiny, profile=saved) if raw else open_model(profile=saved)
    [engine] = [pool.engine for pool in pools_of(model)]
    engine.drain()
    engine.validate()
    stats = torch_mesh.stats(model)
    assert (stats.promoted, stats.prefetches, stats.accesses) == (48, 48, 0)
    uses = load_profile(saved).uses
    promoted = np.array([layer.experts.promoted for layer in stats.per_layer], dtype=bool)
    assert uses[promoted].min() >= uses[~promoted].max()
    _decode(model, 2)
    assert torch_mesh.stats(model).prefetches_used > 20


@pytest.mark.parametrize("policy", ["heat", "lru"])
def test_the_output_is_the_same_to_the_bit(open_model: Open, saved: Path, policy: str) -> None:
    expected = _decode(open_model(policy=policy))
    choices: list[dict[str, Any]] = [
        {"profile": saved},
        {"residency": {"early_experts": (2, 8)}},
        {
            "profile": saved,
            "residency": {"early_experts": (1, 12)},
            "resident": 0.1,
            "prefill": "window",
        },
    ]
    for fields in choices:
        model = open_model(policy=policy, **fields)
        assert torch.equal(_decode(model), expected), fields
        [engine] = [pool.engine for pool in pools_of(model)]
        engine.validate()
        stats = torch_mesh.stats(model)
        kept = "residency" in fields
        assert bool(stats.early_accesses) == kept
        assert ("early experts are soft-pinned" in str(stats)) == kept
        assert 2 * stats.early <= stats.slots and bool(stats.early) == kept
        if kept:
            assert stats.early_hits <= stats.early_accesses <= stats.accesses
            assert stats.to_dict()["early_hit_rate"] == stats.early_hits / stats.early_accesses


def test_early_experts_shrink_with_the_pool(open_model: Open) -> None:
    model = open_model(residency={"early_experts": (2, 12), "guard": "off"}, policy="lru")
    [engine] = [pool.engine for pool in pools_of(model)]
    _decode(model)
    for slots in (12, 47, 48):
        engine.resize(slots)
        _decode(model)
        engine.validate()
        assert 0 < torch_mesh.stats(model).early <= slots // 2


def test_patch_takes_a_profile_too(mesh_tiny: Path, saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    torch_mesh.patch(model, resident=0.25, weights="int8", io="threads", profile=saved)
    [engine] = [pool.engine for pool in pools_of(model)]
    engine.drain()
    assert torch_mesh.stats(model).promoted == 48
    torch_mesh.unpatch(model, lossy=True)


def test_the_profile_of_another_model_is_refused_before_anything_is_converted(mesh_tiny: Path, tmp_path: Path) -> None:
    other = _written(tmp_path / "other.json", GOOD)
    for path, error, message in (
        (other, MeshError, "another model: it has 2 layers of 3"),
        (tmp_path / "x", OSError, "x"),
    ):
        with pytest.raises(error, match=message):
            AutoModelForCausalLM.from_pretrained(
                mesh_tiny, quantization_config=MeshConfig(weights="int4", store=tmp_path / "store", profile=path)
            )
        model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
        with pytest.raises(error, match=message):
            torch_mesh.patch(model, resident=0.5, store=tmp_path / "store", profile=path)
    assert not (tmp_path / "store").exists()


def test_a_profile_of_other_layers_is_refused_before_anything_is_converted(
    mesh_tiny: Path, int8_store: Path, tmp_path: Path
) -> None:
    """A checkpoint may have more layers than the model that is opened. Of a store and a loaded model all are known."""
    profiles = {layers: tmp_path / f"{layers}.json" for layers in (1, 7)}
    for layers, path in profiles.items():
        write_profile(Profile(np.ones(layers, np.int64), np.ones((layers, 32), np.int64), 4), path)

    def opened(folder: Path, layers: int, **fields: Any) -> None:
        config = MeshConfig(profile=profiles[layers], **fields)
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    with pytest.raises(MeshError, match="it has 1 layers of 32.* this model has 6"):
        opened(mesh_tiny, 1, weights="int4", store=tmp_path / "store")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    for layers, path in profiles.items():
        with pytest.raises(MeshError, match="this model has 6"):
            torch_mesh.patch(model, resident=0.5, store=tmp_path / "store", profile=path)
        with pytest.raises(MeshError, match="this model has 6"):
            opened(int8_store, layers)
    assert not (tmp_path / "store").exists()


def test_a_single_layer_of_a_store_warms_only_itself(int8_store: Path, saved: Path) -> None:
    layer = torch_mesh.Experts.from_store(int8_store, 2, resident=0.5, io="threads", profile=saved)
    [engine] = [pool.engine for pool in pools_of(layer)]
    engine.drain()
    promoted = [sum(each.experts.promoted) for each in torch_mesh.stats(layer).per_layer]
    assert promoted[2] == min(16, np.count_nonzero(load_profile(saved).uses[2])) and sum(promoted) == promoted[2]


def test_profiles_are_not_saved_in_or_read_from_a_config(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    config = MeshConfig(profile=saved, residency={"early_experts": "1, 4"})
    assert "profile" not in config.to_dict()
    assert config.to_dict()["early_experts"] == (1, 4)
    with pytest.warns(UserWarning, match="sets profile, which is ignored"):
        assert MeshConfig.of_checkpoint({"quant_method": "mesh", "profile": "/etc/passwd"}).profile is None
    monkeypatch.setenv("TORCH_MESH_PROFILE", os.fspath(saved))
    assert MeshConfig().profile == os.fspath(saved)


def test_replace_keeps_values_that_loading_has_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = MeshConfig.from_dict({"quant_method": "mesh", "resident": 0.5})
    for name, value in (("stats", {"file": "x.jsonl"}), ("resident", 0.25)):  # as from_pretrained does
        setattr(stored, name, value)
    monkeypatch.setenv("TORCH_MESH_RESIDENT", "0.75")
    changed = stored.replace(prefill="off")
    assert (changed.stats.file, changed.resident, changed.prefill) == ("x.jsonl", 0.25, "off")
    assert stored.prefill == "auto"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residency": {"early_experts": (1, 0)}}, r"residency.early_experts=\(1, 0\) .* two positive numbers"),
        ({"residency": {"early_experts": 4}}, "residency.early_experts=4 .* two positive numbers"),
        ({"residency": {"early_experts": (1, 1.5)}}, "two positive numbers"),
        ({"residency": {"early_experts": "1"}}, "two positive numbers"),
        ({"profile": ""}, "profile='' is not a file"),
    ],
)
def test_wrong_fields_say_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


def test_counts_of_long_profiles_are_scaled_down(tmp_path: Path) -> None:
    tokens = np.array([5_000_000, 3], dtype=np.int64)
    write_profile(Profile(tokens, np.array([[5_000_000, 10], [3, 1]]), 1), tmp_path / "p.json")
    faded = pool_profile(str(tmp_path / "p.json"), 2, 2, 1)
    assert faded is not None and (faded[0] == [1_000_000, 3]).all() and (faded[1] == [[1_000_000, 2], [3, 1]]).all()


def test_a_trace_is_not_replaced_by_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).parents[1] / "data" / "mesh_tiny_routing.npz"
    traces = [tmp_path / "a.npz", tmp_path / "b.npz"]  # as a shell completes *.npz
    for trace in traces:
        trace.write_bytes(data.read_bytes())
    assert main(["routing", "profile", *map(str, traces)]) == 2
    assert "b.npz exists and is no earlier output of this kind: name another file" in capsys.readouterr().err
    assert traces[1].read_bytes() == data.read_bytes()
    profile = tmp_path / "p.json"
    profile.touch()
    for _ in range(2):  # an empty file, then a profile
        assert main(["routing", "profile", str(traces[0]), str(profile)]) == 0
    assert load_profile(profile).layers == 6


def test_a_trace_makes_a_profile_that_simulate_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, profile = Path(__file__).parents[1] / "data" / "mesh_tiny_routing.npz", tmp_path / "p.json"
    assert main(["routing", "profile", str(trace), str(profile), "--prompts", "0:9"]) == 0
    assert "6 layers of 32 experts" in capsys.readouterr().out
    out = tmp_path / "out.json"
    options = ["--resident", "0.25", "--policy", "lru", "--prompts", "9:", "--json", str(out)]
    assert main(["routing", "simulate", str(trace), *options, "--profile", str(profile)]) == 0
    [plain] = json.loads(out.read_text())["rows"]
    assert plain["early_hit_rate"] is None and plain["other_hit_rate"] is not None
    assert main(["routing", "simulate", str(trace), *options, "--early-experts", "2,16"]) == 0
    [kept] = json.loads(out.read_text())["rows"]
    assert kept["early_hit_rate"] > kept["other_hit_rate"]
    assert "others" in capsys.readouterr().out
    assert main(["routing", "simulate", str(trace), "--early-experts", "2"]) == 2
    assert "two positive numbers" in capsys.readouterr().err
    assert main(["routing", "simulate", str(trace), "--profile", str(tmp_path / "none")]) == 1
