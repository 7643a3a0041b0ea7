"""The command line and checkpoints that another tool has quantised."""

import json
from pathlib import Path

import pytest
from quantised import KINDS, change_config, write_gpt_oss, write_quantised

from torch_mesh.cli import main


def test_convert_auto_says_what_it_takes_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantised(tmp_path / "raw", KINDS["ct_int4"]())
    with pytest.warns(
        UserWarning, match="weights='auto' converts INT4 experts to int4 in groups of 32, which has the same"
    ):
        assert main(["convert", str(tmp_path / "raw"), str(tmp_path / "store"), "--weights", "auto"]) == 0
    assert "as int4" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "store")]) == 0


def test_plan_and_inspect_speak_of_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpt_oss(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "MXFP4" in capsys.readouterr().out
    speeds = ["--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
    assert main(["plan", str(tmp_path), *speeds]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "converts MXFP4 experts to" in printed and "holds every" in printed


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_what_cannot_be_read_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpt_oss(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "quark"})
    assert main([command, str(tmp_path)]) != 0
    printed = capsys.readouterr()
    assert "quark" in printed.out + printed.err


def test_doctor_names_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    (found,) = [
        each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "quantised checkpoints"
    ]
    assert found["status"] == "ok" and "mxfp4" in found["found"] and "gptq" in found["found"]
