import json
from pathlib import Path

import gguf_files
import pytest
from loopback_hub import MODEL, LoopbackHub, loopback_hub

from torch_mesh import _C
from torch_mesh.cli import main
from torch_mesh.store.convert import convert

SHAPE = {
    "layers": 6,
    "experts": 32,
    "top_k": 4,
    "hidden": 192,
    "intermediate": 64,
    "gated": True,
    "bias": False,
    "activation": "silu",
}


def serve(hub: type[LoopbackHub], folder: Path) -> None:
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def inspect(folder: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["inspect", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("weights", "group_size"), [("int4", 64), ("bf12", None)])
def test_inspect_describes_a_store(
    tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str], weights: str, group_size: int | None
) -> None:
    store = convert(mesh_tiny, tmp_path / "store", weights).store
    held = inspect(store.folder, capsys)
    of_store = {"kind": "store", "source": "mesh-tiny", "weights": weights, "group_size": group_size}
    assert held.items() >= (SHAPE | of_store).items()
    assert held["expert_bytes"] == _C.record_bytes(weights, group_size or 0, 192, 64, True, False)
    assert held["reads_per_expert"] == 1


def test_inspect_describes_a_checkpoint(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = inspect(mesh_tiny, capsys)
    assert held.items() >= {**SHAPE, "kind": "checkpoint", "weights": "bf16", "group_size": None}.items()
    assert held["expert_bytes"] == 3 * 192 * 64 * 2
    size = (mesh_tiny / "model.safetensors").stat().st_size
    assert 0 < size - held["all_experts_bytes"] - held["other_bytes"] < 100_000  # the size of the header


def test_the_table_shows_the_same_figures(tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(mesh_tiny, tmp_path / "store", "int8")
    assert main(["inspect", str(tmp_path / "store")]) == 0
    table = capsys.readouterr().out
    for words in ("int8, groups of 64", "32, 4 of them per token", "hidden 192, intermediate 64", "mesh-tiny"):
        assert words in table


@pytest.mark.parametrize("command", ["inspect", "plan", "bench", "cache ls"])
def test_a_folders_name_is_no_markup(
    command: str, tmp_path: Path, mesh_tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a[old]:smile:[/b]"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).symlink_to(mesh_tiny)
    options = {
        "plan": ["--disk-speed", "1GB", "--memory-speed", "10GB"],
        "bench": ["--tokens", "2", "--prompt-tokens", "17", "--resident", "0.5"],
    }
    assert main([*command.split(), *([] if command == "cache ls" else [name]), *options.get(command, [])]) == 0
    assert name in capsys.readouterr().out.replace("\n", "")  # a title is as wide as its table


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_a_model_of_the_hub_is_described_without_its_weights(
    kind: str, tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mesh_tiny if kind == "checkpoint" else convert(mesh_tiny, tmp_path / "store", "int4").store.folder
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        serve(hub, folder)
        assert inspect(MODEL, capsys) == inspect(folder, capsys) | {"folder": MODEL} | (
            {"source": "model"} if kind == "checkpoint" else {}
        )
        weights = sum(len(data) for name, data in hub.files.items() if name.endswith(".safetensors"))
        assert 0 < hub.sent.total() < weights / 5
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        hub.sent.clear()
        assert main(["inspect", "--verify", MODEL]) == (kind == "checkpoint")
        printed = capsys.readouterr()
        if kind == "checkpoint":
            assert f"{MODEL}: is not a store" in printed.err
            assert hub.sent.total() < weights / 5
        else:
            assert f"{MODEL}: 192 records" in printed.out and hub.sent.total() > weights
            assert inspect(MODEL, capsys)["folder"] != MODEL  # now it is in the cache


def test_codes_of_linear_layers_on_the_hub_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q8_0", "attn_q": "Q4_0"}).path
    folder = convert(source, tmp_path / "store", "auto").store.folder
    with loopback_hub(str(tmp_path / "cache"), monkeypatch) as hub:
        serve(hub, folder)
        here = inspect(folder, capsys)
        assert here["dense_codes"] and inspect(MODEL, capsys) == here | {"folder": MODEL}


def test_a_folder_that_is_neither_store_nor_checkpoint_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "has neither" in capsys.readouterr().err
