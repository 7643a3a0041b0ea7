import os
import signal
from pathlib import Path

import pytest
import warm

from torch_mesh.cli import main
from torch_mesh.errors import StoreError
from torch_mesh.store.manifest import open_store
from torch_mesh.store.verify import verify


def test_the_second_run_of_convert_says_that_the_store_is_there(
    tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(mesh_tiny), str(tmp_path / "store"), "--weights", "int8", "--group-size", "32"]
    assert main(arguments) == 0
    assert "now holds 6 x 32 experts" in capsys.readouterr().out
    manifest = open_store(tmp_path / "store").manifest
    assert (manifest.weights, manifest.group_size, manifest.source_name) == ("int8", 32, "mesh-tiny")
    assert main(arguments) == 0
    assert "already holds 6 x 32 experts" in capsys.readouterr().out


def test_another_store_is_replaced_only_with_force(
    tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["convert", str(mesh_tiny), str(tmp_path / "store"), "--weights"]
    assert main([*base, "int8"]) == 0
    assert main([*base, "int4"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("torch-mesh: ") and "--force" in error
    assert main([*base, "int4", "--force"]) == 0
    assert open_store(tmp_path / "store").manifest.weights == "int4"


def test_a_damaged_store_is_replaced_only_with_force(
    tmp_path: Path, mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["convert", str(mesh_tiny), str(tmp_path / "store"), "--weights"]
    assert main([*base, "bf16"]) == 0
    for damaged in ("mesh-0*.safetensors", "model-*.safetensors", "model.safetensors.index.json"):
        (path,) = (tmp_path / "store").glob(damaged)
        os.truncate(path, path.stat().st_size - 1)
        for weights in ("bf16", "auto"):
            assert main([*base, weights]) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert path.name in error and "--force" in error
        assert main([*base, "bf16", "--force"]) == 0
        assert list(verify(open_store(tmp_path / "store"))) == []
    path.unlink()
    assert main([*base, "bf16"]) == 1
    assert f"{path.name}: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert"],
        ["convert", "a", "b"],
        ["convert", "a", "b", "--weights", "int3"],
        ["convert", "a", "b", "--weights", "int4", "--group-size", "48"],
        ["convert", "a", "b", "--weights", "int4", "--threads", "0"],
        ["conjure"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: torch-mesh" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["convert", "a", "b"], ["merge", "a", "b", "c"]])
@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_a_group_size_without_effect_is_exit_code_2(
    arguments: list[str], weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--weights", weights, "--group-size", "128"]) == 2
    refused = f"group_size=128 (--group-size) has no effect with weights='{weights}': leave it out"
    assert refused in capsys.readouterr().err


def test_source_as_destination_is_exit_code_2(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(mesh_tiny), str(mesh_tiny), "--weights", "int8"]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_an_error_is_one_line_and_debug_shows_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("something\nis wrong")

    monkeypatch.setattr("torch_mesh.store.convert.convert", fail)
    arguments = ["convert", str(tmp_path), str(tmp_path / "store"), "--weights", "int8"]
    assert main(arguments) == 1
    assert capsys.readouterr().err == "torch-mesh: something is wrong\n"
    assert main(["--debug", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_convert_says_how_to_continue(tmp_path: Path, mesh_tiny: Path) -> None:
    """A real SIGINT to a real process, in the middle of the records."""
    arguments = [str(mesh_tiny), str(tmp_path / "store"), "--weights", "int4", "--threads", "1"]
    process = warm.start(INTERRUPTIBLE, "convert", *arguments)
    assert process.stdout.readline() == "packing\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "torch-mesh: interrupted; the same command continues where it stopped"
    assert "Traceback" not in error
    assert sorted(os.listdir(tmp_path)) == [".store.partial"]
    assert main(["convert", *arguments]) == 0
    assert list(verify(open_store(tmp_path / "store"))) == []


INTERRUPTIBLE = """
import sys, time
from torch_mesh.cli import main
from torch_mesh.store import convert
original = convert.pack_from_checkpoint
def slowly(experts, layer, expert, **format):
    if (layer, expert) == (1, 0):
        print("packing", flush=True)
    time.sleep(0.02)
    return original(experts, layer, expert, **format)
convert.pack_from_checkpoint = slowly
sys.exit(main(sys.argv[1:]))
"""
