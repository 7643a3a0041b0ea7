"""Stores whose records are calibrated on a text."""

from __future__ import annotations

import gc
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from limited_processes import small_disk
from pairs import first_quick
from quantized import KINDS, write_quantized
from tiny_checkpoints import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.calibration import collecting, packing
from torch_mesh.calibration.collecting import collect, text_sequences
from torch_mesh.calibration.packing import on_text
from torch_mesh.calibration.rows import LayerRows, RowFiles
from torch_mesh.cli import main
from torch_mesh.errors import MeshError, StoreError
from torch_mesh.models.families import find_experts
from torch_mesh.store import writer
from torch_mesh.store.convert import convert, stored_expert
from torch_mesh.store.inspect import describe
from torch_mesh.store.manifest import MANIFEST_NAME, Store, open_store
from torch_mesh.store.verify import verify

TOKENS = 1024


@pytest.fixture(scope="module")
def prose() -> str:
    return str(Path(__file__).parents[1] / "data" / "text" / "prose.jsonl")


def _random_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the text by random tokens, for models without a tokenizer."""
    ids = torch.randint(3, 128, (8, 64))
    monkeypatch.setattr(packing, "text_sequences", lambda *_: ids)


def _output_error(store: Store, model: torch.nn.Module, seen: list[LayerRows]) -> float:
    """Return the relative error of the outputs of gate and up on the rows that the experts saw."""
    error = power = 0.0
    for number, layer in enumerate(find_experts(model)):
        rows = seen[number]
        for expert in range(layer.num_experts):
            own = rows.hidden[(rows.ids == expert).any(1)].float()
            exact, packed = layer.expert(expert).on_cpu(), stored_expert(store, number, expert)
            for name in ("gate", "up"):
                if getattr(exact, name) is not None:
                    made = own @ getattr(exact, name).float().T
                    error += float((own @ getattr(packed, name).T - made).square().sum())
                    power += float(made.square().sum())
    return (error / power) ** 0.5


def _seen(source: Path, sequences: torch.Tensor, folder: Path) -> list[LayerRows]:
    manifest = describe(source)
    files = RowFiles(manifest["layers"], manifest["top_k"], manifest["hidden"], sequences.numel())
    folder.mkdir()
    collect(source, sequences, files, folder, lambda _: None)
    return [files.read(folder, layer) for layer in range(files.layers)]


@pytest.mark.parametrize(
    "weights",
    [
        "int4",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("int8", "lut4", "tcq3", "tcq2+tcq3", "tcq2")),
    ],
)
def test_calibration_reduces_the_output_error_on_the_text(
    tmp_path: Path, mesh_tiny: Path, prose: str, weights: str
) -> None:
    done: list[tuple[int, int]] = []
    calibrated = convert(
        mesh_tiny,
        tmp_path / "calibrated",
        weights,
        calibrate=on_text(prose, TOKENS),
        progress=lambda *counts: done.append(counts),
    ).store
    plain = convert(mesh_tiny, tmp_path / "plain", weights).store
    assert done[-1][0] == done[-1][1] and [count for count, _ in done] == sorted(count for count, _ in done)
    assert sorted(path.name for path in calibrated.folder.iterdir()) == sorted(p.name for p in plain.folder.iterdir())
    assert calibrated.manifest.record_bytes == plain.manifest.record_bytes
    assert list(verify(calibrated)) == []
    seen = _seen(mesh_tiny, text_sequences(mesh_tiny, prose, TOKENS, None), tmp_path / "rows")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    assert _output_error(calibrated, model, seen) < 0.9 * _output_error(plain, model, seen)


def test_the_rows_are_what_the_experts_of_the_model_see(tmp_path: Path, mesh_tiny: Path, prose: str) -> None:
    sequences = text_sequences(mesh_tiny, prose, 600, 200)
    assert sequences.shape == (3, 200)
    seen = _seen(mesh_tiny, sequences, tmp_path / "rows")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    inputs: list[tuple[torch.Tensor, ...]] = []
    layers = find_experts(model)
    for layer in layers:
        layer.module.register_forward_pre_hook(lambda _, given: inputs.append(given))
    with torch.inference_mode():
        model(input_ids=sequences)
    for rows, (hidden, ids, weights) in zip(seen, inputs, strict=True):
        assert rows.hidden.shape == (600, 192) and rows.ids.shape == rows.weights.shape == (600, 4)
        torch.testing.assert_close(rows.hidden.float(), hidden.float(), rtol=0.5, atol=0.5)
        assert (rows.ids.sort(1).values == ids.sort(1).values).float().mean() > 0.9
        assert (rows.weights.sum(1) - weights.sum(1)).abs().max() < 0.05


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "llama4_text", "deepseek_v3"])
def test_families(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers biases, experts without a gate, weighted inputs and experts that compute nothing."""
    source = save_tiny(tmp_path / "source", family)
    _random_text(monkeypatch)
    store = convert(source, tmp_path / "store", "int4", 32, calibrate=on_text(__file__)).store
    plain = convert(source, tmp_path / "plain", "int4", 32).store
    assert list(verify(store)) == []
    changed = 0
    for layer, expert in store.records():
        exact, calibrated = (stored_expert(each, layer, expert) for each in (plain, store))
        if exact.up_bias is not None:
            assert torch.equal(calibrated.up_bias, exact.up_bias) and torch.equal(calibrated.down_bias, exact.down_bias)
        changed += not torch.equal(calibrated.up, exact.up)
    assert changed == store.manifest.shape.layers * store.manifest.shape.experts
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "store")
    assert torch.isfinite(model(input_ids=torch.randint(3, 128, (1, 8))).logits).all()


@pytest.mark.parametrize("kind", first_quick("ct_int4_asymmetric", "ct_mxfp4", "ct_int4", "gptq"))
def test_quantized_checkpoints_are_calibrated_by_their_values(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a quantized checkpoint is run as a converted store
    write_quantized(tmp_path / "source", KINDS[kind]())
    _random_text(monkeypatch)
    store = convert(tmp_path / "source", tmp_path / "store", "int4", 64, calibrate=on_text(__file__)).store
    plain = convert(tmp_path / "source", tmp_path / "plain", "int4", 64).store
    assert list(verify(store)) == []
    assert not torch.equal(stored_expert(store, 0, 0).up, stored_expert(plain, 0, 0).up)


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        ("ct_mxfp4", "auto", "holds a checkpoint's codes as they are.*'int8', 'int4', 'lut4'"),
        ("ct_int4", "int4", "int4 codes in groups of 32, which stay unchanged"),
    ],
)
def test_formats_that_keep_the_codes_are_not_calibrated(tmp_path: Path, kind: str, weights: str, message: str) -> None:
    write_quantized(tmp_path / "source", KINDS[kind]())
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "source", tmp_path / "store", weights, calibrate=on_text(__file__))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_expert_without_tokens_is_packed_by_the_others_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calibration uses the inputs of the other experts."""
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[5] = 0
            layer.mlp.gate.weight[[1, 2]] *= 100
    model.save_pretrained(tmp_path / "source")
    _random_text(monkeypatch)
    store = convert(tmp_path / "source", tmp_path / "store", "int4", 32, calibrate=on_text(__file__)).store
    plain = convert(tmp_path / "source", tmp_path / "plain", "int4", 32).store
    for layer in range(4):
        record = stored_expert(store, layer, 5)
        assert torch.isfinite(record.up).all() and not torch.equal(record.up, stored_expert(plain, layer, 5).up)


def test_the_manifest_records_the_calibration_and_inspect_shows_it(
    tmp_path: Path, mesh_tiny: Path, prose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(mesh_tiny), str(tmp_path / "store"), "--weights", "int4", "--calibrate", prose]
    assert main([*arguments, "--calibrate-tokens", "300"]) == 0
    calibration = open_store(tmp_path / "store").manifest.calibration
    assert calibration is not None and (calibration.tokens, calibration.sequence_length) == (300, 300)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "store")]) == 0
    assert f"on 300 tokens, {calibration.text[:8]}" in capsys.readouterr().out
    assert describe(tmp_path / "store")["calibration"]["text"] == calibration.text
    assert describe(mesh_tiny)["calibration"] is None
    assert main([*arguments, "--calibrate-tokens", "300"]) == 0
    assert "already holds" in capsys.readouterr().out
    assert main([*arguments, "--calibrate-tokens", "301"]) == 1  # another calibration makes another store
    assert "has another store (int4, group size 64, calibrated on 300 tokens" in capsys.readouterr().err
    assert main(arguments[:-2]) == 1
    assert "has another store" in capsys.readouterr().err


def test_invalid_calibrations_in_a_manifest_are_refused(tmp_path: Path, mesh_tiny: Path, prose: str) -> None:
    from torch_mesh.store import manifest as module

    convert(mesh_tiny, tmp_path / "store", "int4", calibrate=on_text(prose, 256))
    path = tmp_path / "store" / MANIFEST_NAME
    open_store(tmp_path / "store")
    written = path.read_text()
    for change in (
        {"tokens": 0},
        {"tokens": "300"},
        {"text": "zz"},
        {"sequence_length": None},
        {"method": 3},
        {"more": 1},
    ):
        table = json.loads(written)
        table["calibration"] |= change
        table["digest"] = module._digest(table)
        path.write_text(json.dumps(table))
        with pytest.raises(StoreError, match="malformed"):
            open_store(tmp_path / "store")


def test_a_calibrated_store_opens_and_runs(tmp_path: Path, mesh_tiny: Path, prose: str) -> None:
    convert(mesh_tiny, tmp_path / "store", "lut4", 32, calibrate=on_text(prose, TOKENS))
    ids = torch.randint(3, 4000, (1, 12))
    outputs = []
    for resident in (1.0, 0.2):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "store", quantization_config=torch_mesh.MeshConfig(resident=resident)
        )
        outputs.append(model(input_ids=ids).logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("weights", ["bf16", "bf12", "auto"])
def test_formats_without_rounding_are_refused(tmp_path: Path, mesh_tiny: Path, prose: str, weights: str) -> None:
    with pytest.raises(ValueError, match=f"'{weights.replace('auto', 'bf12')}' rounds little.*'int8', 'int4', 'lut4'"):
        convert(mesh_tiny, tmp_path / "store", weights, calibrate=on_text(prose))
    assert list(tmp_path.iterdir()) == []


def test_unusable_texts_are_refused(tmp_path: Path, mesh_tiny: Path, prose: str) -> None:
    destination = tmp_path / "store"
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        convert(mesh_tiny, destination, "int4", calibrate=on_text(tmp_path / "nothing.txt"))
    short = tmp_path / "short.txt"
    short.write_text("The sea was calm.")
    with pytest.raises(MeshError, match=r"short.txt has 6 tokens, and calibration needs at least 256"):
        convert(mesh_tiny, destination, "int4", calibrate=on_text(short))
    with pytest.raises(ValueError, match="tokens=100 .*give at least 256"):
        convert(mesh_tiny, destination, "int4", calibrate=on_text(prose, 100))
    short.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(MeshError, match="not text in UTF-8"):
        convert(mesh_tiny, destination, "int4", calibrate=on_text(short))
    shutil.copytree(mesh_tiny, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(MeshError, match="has no usable tokenizer"):
        convert(tmp_path / "mute", destination, "int4", calibrate=on_text(prose))
    assert not destination.exists() and not (tmp_path / ".store.partial").exists()


def test_tokens_without_a_text(tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(mesh_tiny), str(tmp_path / "store"), "--weights", "int4", "--calibrate-tokens", "999"]
    assert main(arguments) == 2
    assert "give --calibrate TEXT" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[3].mlp.experts.down_proj[7, 3, 3] = torch.inf
    model.save_pretrained(tmp_path / "source")
    _random_text(monkeypatch)
    with pytest.raises(StoreError, match=r"down of expert 7 in model\.layers\.3\.mlp\.experts is not finite"):
        convert(tmp_path / "source", tmp_path / "store", "int4", calibrate=on_text(__file__))


def test_an_interrupted_calibration_continues(
    tmp_path: Path, mesh_tiny: Path, prose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of the text, and in the middle of the records."""
    monkeypatch.setattr(collecting, "_LENGTH", 128)
    monkeypatch.setattr(collecting, "_TOKENS_AT_ONCE", 256)
    forwards: list[int] = []
    complete = RowFiles.complete

    def completed(files: RowFiles, folder: Path, sequences: int) -> None:
        complete(files, folder, sequences)
        forwards.append(sequences)
        if forwards == [0, 2, 4]:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowFiles, "complete", completed)
    packed: list[tuple[int, int]] = []
    pack = packing.Calibrator.pack

    def packing_one(calibrator: packing.Calibrator, layer: int, expert: int) -> torch.Tensor:
        packed.append((layer, expert))
        if len(packed) == 70:
            raise KeyboardInterrupt
        return pack(calibrator, layer, expert)

    monkeypatch.setattr(packing.Calibrator, "pack", packing_one)

    def run(folder: str) -> Store:
        return convert(mesh_tiny, tmp_path / folder, "int4", calibrate=on_text(prose, TOKENS)).store

    with pytest.raises(KeyboardInterrupt):
        run("store")
    with pytest.raises(KeyboardInterrupt):
        run("store")
    assert forwards == [0, 2, 4, 4, 6, 8], "sequences that were complete ran again"
    assert len(packed) == 70
    store = run("store")
    assert forwards[-1] == 8 and len(forwards) == 6, "the text ran again"
    assert len(packed) <= 70 + 192 - 68, "finished records were packed again"
    assert list(verify(store)) == []
    packed.clear()
    packed.extend([(0, 0)] * 70)
    uninterrupted = run("other")
    for layer, expert in store.records():
        one, other = (stored_expert(each, layer, expert) for each in (store, uninterrupted))
        assert torch.equal(one.up, other.up) and torch.equal(one.down, other.down)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]


@pytest.mark.parametrize("damage", first_quick("rows", "state"))
def test_rows_lost_by_a_power_failure_are_collected_again(
    tmp_path: Path, mesh_tiny: Path, prose: str, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing.Calibrator, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(mesh_tiny, tmp_path / "store", "int4", calibrate=on_text(prose, TOKENS))
    partial = tmp_path / ".store.partial"
    if damage == "rows":
        with next(partial.glob("calibration-*.rows")).open("r+b") as stream:
            stream.truncate(1000)
    else:
        (partial / "calibration.json").write_text('{"sequences":')
    store = convert(mesh_tiny, tmp_path / "store", "int4", calibrate=on_text(prose, TOKENS)).store
    assert list(verify(store)) == []
    assert not list(store.folder.glob("calibration*"))


@pytest.mark.thorough
def test_ctrl_c_while_the_text_runs(tmp_path: Path, mesh_tiny: Path, prose: str) -> None:
    arguments = [str(mesh_tiny), str(tmp_path / "store"), "--weights", "int4", "--calibrate", prose]
    process = warm.start(INTERRUPTIBLE, "convert", *arguments)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "torch-mesh: interrupted; the same command continues where it stopped"
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == [".store.partial"]
    assert main(["convert", *arguments]) == 0
    assert list(verify(open_store(tmp_path / "store"))) == []


INTERRUPTIBLE = """
import sys, time
from torch_mesh.cli import main
from torch_mesh.calibration.rows import RowFiles
original = RowFiles.append
def slowly(*arguments):
    print("running", flush=True)
    time.sleep(0.5)
    return original(*arguments)
RowFiles.append = slowly
sys.exit(main(sys.argv[1:]))
"""


def test_the_disk_space_check_includes_the_rows(
    tmp_path: Path, mesh_tiny: Path, prose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 40 << 20) as disk:
        with pytest.raises(StoreError, match="the disk has .* free"):
            convert(mesh_tiny, disk / "store", "int4", calibrate=on_text(prose, 16384))
        monkeypatch.setattr(writer, "check_free_space", lambda *_: None)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(33 << 20))
        with pytest.raises(StoreError, match="the disk is full.*run the same command again"):
            convert(mesh_tiny, disk / "store", "int4", calibrate=on_text(prose, 16384))
        gc.collect()  # frees what the error's frames reference
        ballast.unlink()
        monkeypatch.undo()
        store = convert(mesh_tiny, disk / "store", "int4", calibrate=on_text(prose, 4096)).store
        assert list(verify(store)) == []


def test_rows_read_back_as_written(tmp_path: Path) -> None:
    """Covers odd sizes, and layers with fewer experts per token than others."""
    files = RowFiles(layers=2, top_k=3, hidden=5, tokens=10)
    written = []
    for layer, top_k in ((0, 3), (1, 2)):
        parts = [
            LayerRows(torch.randint(9, (count, top_k)), torch.rand(count, top_k), torch.randn(count, 5).bfloat16())
            for count in (7, 3)
        ]
        assert sum(files.append(tmp_path, layer, part) for part in parts) * 2 == files.bytes
        written.append([torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "weights", "hidden")])
    for layer, (ids, weights, hidden) in enumerate(written):
        rows = files.read(tmp_path, layer)
        assert torch.equal(rows.hidden, hidden)
        assert torch.equal(rows.ids[:, : ids.shape[1]], ids) and (rows.ids[:, ids.shape[1] :] == -1).all()
        assert torch.equal(rows.weights[:, : ids.shape[1]], weights)
    empty = replace(files, layers=1)
    (tmp_path / "calibration-00000.rows").write_bytes(b"")
    assert empty.read(tmp_path, 0).hidden.shape == (0, 5)


def test_the_environment_does_not_change_what_is_calibrated_on(
    tmp_path: Path, mesh_tiny: Path, prose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = text_sequences(mesh_tiny, prose, 256, None)
    plain = _seen(mesh_tiny, sequences, tmp_path / "plain")
    fields = {
        "WEIGHTS": "int4",
        "MAX_ERROR": "0.15",
        "RESIDENT": "0.5",  # a lossy fallback would have a store
        "STORE": str(tmp_path / "store"),
        "SHARED": str(tmp_path / "socket"),
        "DENSE": "int4",
        "STATS_FILE": str(tmp_path / "stats"),
        "STATS_EVERY": "1",
        "GPU_EXPERTS": "auto",
        "GPU_PLACEMENT": "dynamic",
        "FALLBACK": "int4",
        "ROUTING_BIAS": "0.5",
        "PROFILE": str(tmp_path / "none"),
        "PREFETCH": str(tmp_path / "none"),
        "TABLES": "none",
        "GROUP_SIZE": "32",
        "SPECULATION": "lookup",
        "ATTENTION": "mesh",
        "PREFILL": "window",
        "POLICY": "lru",
    }
    for name, value in fields.items():
        monkeypatch.setenv(f"TORCH_MESH_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for alone, other in zip(plain, _seen(mesh_tiny, sequences, tmp_path / "rows"), strict=True):
        assert all(torch.equal(getattr(alone, name), getattr(other, name)) for name in ("ids", "weights", "hidden"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "rows"]
