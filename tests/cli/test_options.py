"""Command-line options for the fields of MeshConfig: each field has one, with the constructor's meaning."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from torch_mesh import MeshConfig
from torch_mesh.cli import COMMANDS, _parser, main
from torch_mesh.cli.options import add_config_arguments, given_config
from torch_mesh.config_fields import FIELDS


def _parsed(*arguments: str) -> MeshConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return given_config(parser.parse_args(arguments))


def test_options_give_what_the_constructor_gives() -> None:
    assert _parsed() == MeshConfig()
    options = ["--group-size", "32", "--gpu-streaming", "1,2,3", "--early-experts", "2,8", "--stats-file", "a.jsonl"]
    gpu, residency, stats = {"streaming": (1, 2, 3)}, {"early_experts": (2, 8)}, {"file": "a.jsonl"}
    assert _parsed(*options) == MeshConfig(group_size=32, gpu=gpu, residency=residency, stats=stats)


def test_a_wrong_value_is_reported_under_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "anything", "--gpu-placement", "often"]) == 2
    assert "--gpu-placement='often' is unknown; it is one of 'static', 'dynamic'" in capsys.readouterr().err


def test_help_lists_each_field_with_its_allowed_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    for field in FIELDS.values():
        assert f"--{field.flat.replace('_', '-')} VALUE" in output
        assert f"({field.values.words}; default: ".replace("`", "") in output


@pytest.mark.parametrize(
    "arguments", [["bench", "{model}"], ["routing", "fit", "{model}", "--out", "out", "--text", "{text}"]]
)
def test_commands_on_the_cpu_refuse_experts_on_a_gpu(
    arguments: list[str],
    mesh_tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch_mesh.planning.bench.measure_speeds", lambda *_: None)
    (tmp_path / "text").write_text("In the beginning God created the heaven and the earth. " * 500)
    filled = [argument.format(model=mesh_tiny, text=tmp_path / "text") for argument in arguments]
    with pytest.raises(SystemExit) as end:
        main([*filled, "--gpu-experts", "auto"])
    assert end.value.code == 2 and "unrecognized arguments: --gpu-experts" in capsys.readouterr().err
    monkeypatch.setenv("TORCH_MESH_GPU_EXPERTS", "auto")
    assert main(filled) == 2
    assert "TORCH_MESH_GPU_EXPERTS is auto, but this command runs the model on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["convert", "here", "there", "--weights", "int4", "--foo"], ""),
        (["convert", "here", "there", "--weights", "int4", "--revison=x"], " (did you mean --revision?)"),
        (["doctor", "--jsn"], " (did you mean --json?)"),
        (["inspect", "here", "there"], ""),
        (["serve", "here", "--debug"], " (give it before the command)"),
        (["cache", "ls", "--foo"], ""),
        (["routing", "simulate", "trace.npz", "--sed"], " (did you mean --seed?)"),
        (["plan", "here", "--rank"], " (did you mean --ranks or --lora-rank?)"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    stderr = capsys.readouterr().err
    command = " ".join(arguments[: 2 if arguments[0] in ("cache", "routing") else 1])
    assert end.value.code == 2 and stderr.startswith(f"usage: torch-mesh {command}")
    assert stderr.endswith(f"torch-mesh {command}: error: unrecognized arguments: {arguments[-1]}{hint}\n")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["plan", ""], "model"),
        (["convert", "here", "", "--weights", "int4"], "destination"),
        (["plan", "here", "--prefetch", ""], "--prefetch"),
        (["inspect", ""], "folder"),
        (["run", "model", "", "answers"], "requests"),
        (["doctor", "--folder", ""], "--folder"),
    ],
)
def test_an_empty_argument_is_refused_by_name(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"torch-mesh: {name} is empty" in capsys.readouterr().err


def test_options_of_generate_behind_others_are_taken_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse of some versions of Python ends a list of words at the first option."""
    given = ["chat", "here", "--resident", "8GiB", "max_new_tokens=500"]
    try:
        parsed = _parser(given).parse_args(given)
    except SystemExit:
        assert "unrecognized arguments: max_new_tokens=500 (give it before the options)" in capsys.readouterr().err
    else:
        assert parsed.flags == given[-1:]
    given = ["chat", "here", "max_new_tokens=500", "--resident", "8GiB"]
    assert _parser(given).parse_args(given).flags == ["max_new_tokens=500"]


@pytest.mark.parametrize("option", ["--seed", "--fetch", "--deferred-experts"])
@pytest.mark.parametrize("value", ["-1", str(2**64), "x"])
def test_numbers_out_of_range_are_wrong_usage(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["routing", "simulate", "--synthetic", "2,4,1", "--prefetch", "simulated", option, value])
    assert end.value.code == 2 and f"argument {option}: '{value}' is not a whole" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize("name", ["./models/tpyo.gguf", "models/tpyo.gguf", "../tpyo.gguf", "/models/new/tpyo.gguf"])
def test_a_missing_gguf_file_is_named(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, name]) == 1
    assert f"{name} there is no such file; name one of the hub" in capsys.readouterr().err.replace(":", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("convert maker/model {out} --weights int4 --calibrate {out}/tpyo.txt", 1, "tpyo.txt: no such file"),
        ("convert maker/model {out} --weights int4 --calibrate {text} --calibrate-tokens 9", 2, "give at least 256"),
        ("convert maker/model {out} --weights bf12 --calibrate {text}", 2, "'bf12' rounds little"),
        ("merge maker/model {out}/no-adapter {out}/merged", 1, "no-adapter"),
        ("bench maker/model --json {out}/missing/x.json", 1, "there is no such folder"),
        ("bench maker/model --timeline {out}/missing/x.csv", 1, "there is no such folder"),
    ],
)
def test_a_wrong_path_is_reported_before_a_download(
    arguments: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("a download began"))
    filled = arguments.format(out=tmp_path, text=__file__).split()
    assert main(filled) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["report"], ["routing", "simulate"], ["routing", "fit", "model", "--out", "out", "--text"]]
)
def test_a_missing_file_is_named(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert main([*arguments, str(missing)]) == 1
    assert capsys.readouterr().err == f"torch-mesh: {missing}: no such file or directory\n"


def test_a_shell_completes_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    output = capsys.readouterr().out
    assert end.value.code == 0
    words = ("--revision", "--keep-keys", "--dry-run", *(f"--{name.replace('_', '-')}" for name in FIELDS))
    assert all(name in output for name in (*COMMANDS, *words))
    done = subprocess.run(["bash", "-n"], input=output, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_revision_and_token_are_passed_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--weights", "int8", "--revision", "main"]) == 2
    assert "is on this machine and has no revision 'main'" in capsys.readouterr().err
    asked = []

    def download(*arguments: object, **options: object) -> str:
        asked.append((arguments, options))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda _, *arguments, **options: download(*arguments, **options)
    )
    for model in ("maker/model", "maker/model/file.gguf"):
        options = ["--weights", "int8", "--revision", "v2", "--token", "secret"]
        assert main(["convert", model, str(tmp_path / "out"), *options]) == 1
    assert [arguments for arguments, _ in asked] == [("maker/model",)] * 2
    assert all((options["revision"], options["token"]) == ("v2", "secret") for _, options in asked)
    assert "secret" not in capsys.readouterr().err
