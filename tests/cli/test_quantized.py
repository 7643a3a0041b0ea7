"""The command line on checkpoints that another tool has quantized."""

import json
from pathlib import Path

import gguf_files
import pytest
from quantized import KINDS, change_config, write_gpt_oss, write_quantized

from torch_mesh.cli import _parser, main
from torch_mesh.cli.options import given_config
from torch_mesh.store.hub import local_folder


def test_convert_auto_names_its_format_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantized(tmp_path / "raw", KINDS["awq"]())
    with pytest.warns(UserWarning, match="weights='auto' converts AWQ experts to int8 in groups of 32, which rounds"):
        assert main(["convert", str(tmp_path / "raw"), str(tmp_path / "store"), "--weights", "auto"]) == 0
    assert "as int8" in capsys.readouterr().out
    assert main(["inspect", "--verify", str(tmp_path / "store")]) == 0


def test_plan_and_inspect_name_the_source_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpt_oss(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "MXFP4" in capsys.readouterr().out
    speeds = ["--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
    assert main(["plan", str(tmp_path), *speeds]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "MXFP4 experts are read as they are, in 6 reads each" in printed


@pytest.mark.parametrize("kind", ["ct_nvfp4", "ct_int4", "awq", "layers of several types"])
def test_commands_take_the_options_that_plan_names(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    if kind in KINDS:
        write_quantized(model := tmp_path / "raw", KINDS[kind]())
    else:
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
        gguf_files.write(model, "qwen3moe", {"blk.0.ffn_down_exps": "Q6_K", "_exps": "Q4_K"}, **sizes)
    given = ["--memory", "8GiB", "--max-error", "5%", "--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
    assert main(["plan", str(model), *given]) == 0
    printed = capsys.readouterr().out.partition("Fastest within --max-error: ")[2]
    options = printed.split(":")[0].split()
    assert (options == ["--weights", "auto"]) == (kind != "awq")  # no record holds AWQ's codes
    if kind == "layers of several types":
        assert "keeps the checkpoint's codes in q4_k+q6_k|q4_k" in printed
    converted = _parser(["convert"]).parse_args(["convert", str(model), "store", *options])
    opened = given_config(_parser(["bench"]).parse_args(["bench", str(model), *options]))
    assert (opened.weights, opened.given_group_size) == (converted.weights, converted.group_size)


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_an_unsupported_quantization_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpt_oss(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "quark"})
    assert main([command, str(tmp_path)]) != 0
    printed = capsys.readouterr()
    assert "quark" in printed.out + printed.err


def test_commands_take_a_gguf_file_in_place_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps": "Q5_0"}).path)
    assert main(["convert", path, str(tmp_path / "store"), "--weights", "auto"]) == 0
    assert "as q5_0" in capsys.readouterr().out
    assert main(["inspect", "--verify", str(tmp_path / "store")]) == 0
    assert main(["inspect", path]) == 0
    assert "Q5_0" in capsys.readouterr().out
    assert main(["plan", path, "--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]) == 0
    assert "Q5_0 experts are read as they are" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path / "other.gguf")]) != 0
    assert "no such file; name one of the hub as maker/model/file.gguf" in capsys.readouterr().err


def test_all_parts_of_a_gguf_file_are_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", {"_exps": "Q8_0"}, parts=2)
    asked = []

    def download(model: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_folder(f"maker/model/{made.path.name}") == made.path
    assert asked == [("maker/model", [f"m-0000{part}-of-00002.gguf" for part in (1, 2)])]


def test_doctor_names_the_quantized_formats(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    (found,) = [
        each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "quantized checkpoints"
    ]
    assert found["status"] == "ok" and "mxfp4" in found["found"] and "gptq" in found["found"]
    assert "and GGUF files, with gguf" in found["found"]
