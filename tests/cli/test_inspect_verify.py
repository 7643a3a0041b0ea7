import json
from pathlib import Path

import pytest

from torch_mesh.cli import main
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import Store


@pytest.fixture
def store(tmp_path: Path, mesh_tiny: Path, request: pytest.FixtureRequest) -> Store:
    weights = getattr(request, "param", "int4")
    return convert(mesh_tiny, tmp_path / "store", weights, max_file_bytes=1 << 20).store


def damage(store: Store, layer: int, expert: int) -> tuple[str, int]:
    file, offset = store.manifest.locate(layer, expert)
    path = store.folder / store.manifest.record_files[file].name
    with path.open("r+b") as stream:
        stream.seek(offset + 100)
        (byte,) = stream.read(1)
        stream.seek(offset + 100)
        stream.write(bytes([byte ^ 0x10]))
    return str(path), offset


def test_an_undamaged_store_passes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--verify", str(store.folder)]) == 0
    assert "192 records" in capsys.readouterr().out


@pytest.mark.parametrize("store", ["int4", "bf12"], indirect=True)
def test_every_damaged_record_is_named(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    places = {place: damage(store, *place) for place in ((0, 0), (3, 17), (5, 31))}
    assert main(["inspect", "--verify", str(store.folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    for (layer, expert), (file, offset) in places.items():
        assert f"layer {layer}, expert {expert}: {file} at byte {offset}: its checksum is another" in lines
    assert lines[-1].endswith("3 damaged")
    assert main(["inspect", "--verify", str(store.folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {(d["layer"], d["expert"]): (d["file"], d["offset"]) for d in report["damages"]} == places


def test_changed_and_missing_other_files_are_named(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder / "tokenizer.json").unlink()
    with (store.folder / "config.json").open("a") as stream:
        stream.write(" ")
    assert main(["inspect", "--verify", str(store.folder)]) == 1
    output = capsys.readouterr().out
    assert "tokenizer.json: is missing" in output
    assert "config.json: has " in output


def test_verifying_a_checkpoint_is_a_failure(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--verify", str(mesh_tiny)]) == 1
    assert "is not a store" in capsys.readouterr().err
