"""Options that are fields of MeshConfig: every one is there, and means what the constructor means."""

from __future__ import annotations

import argparse

import pytest

from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.cli.options import add_config_arguments, given_config
from torch_mesh.config import FIELDS


def _parsed(*arguments: str) -> MeshConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return given_config(parser.parse_args(arguments))


def test_options_give_what_the_constructor_gives() -> None:
    assert _parsed() == MeshConfig()
    options = ["--group-size", "32", "--gpu-streaming", "1,2,3", "--early-layers", "2", "--stats-file", "a.jsonl"]
    gpu, residency, stats = {"streaming": (1, 2, 3)}, {"early_layers": 2}, {"file": "a.jsonl"}
    assert _parsed(*options) == MeshConfig(group_size=32, gpu=gpu, residency=residency, stats=stats)


def test_a_wrong_value_is_called_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "anything", "--gpu-placement", "often"]) == 2
    assert "--gpu-placement='often' is unknown; it is one of 'static', 'dynamic'" in capsys.readouterr().err


def test_help_says_what_each_field_may_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for field in FIELDS.values():
        assert f"--{field.flat.replace('_', '-')} VALUE" in said
        assert f"({field.values.words}; default: ".replace("`", "") in said
