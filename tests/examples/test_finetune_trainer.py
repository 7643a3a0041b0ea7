"""examples/finetune_trainer.py runs to its end: alone, and in two processes that train together."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import torch_mesh

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 3
ALONE = ("accelerate.commands.launch", "--cpu", "--num_processes", "1")
TOGETHER = (
    "torch.distributed.run",
    "--nproc_per_node",
    "2",
    "--rdzv_backend",
    "c10d",
    "--rdzv_endpoint",
    "localhost:0",
)


def _train(launcher: tuple[str, ...], out: Path, batch: int) -> dict[str, Any]:
    """Run the example; return the metrics that it printed, with the epoch."""
    command = [sys.executable, "-m", *launcher, str(EXAMPLES / "finetune_trainer.py"), str(EXAMPLES / "mesh-tiny")]
    command += ["--text", str(EXAMPLES / "text" / "ships_log.txt"), "--resident", "0.25", "--out", str(out)]
    command += ["--steps", str(STEPS), "--batch", str(batch), "--length", "32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("{'eval_loss'")]
    assert "Experts train by adapters" in done.stdout and "hit rate" in done.stdout
    return ast.literal_eval(found)


def _run_here(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, out: Path, *more: str) -> None:
    command = ["finetune_trainer.py", str(checkpoint), "--text", str(EXAMPLES / "text" / "ships_log.txt")]
    command += ["--resident", "0.25", "--out", str(out), "--batch", "1", "--length", "16", *more]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(EXAMPLES / "finetune_trainer.py"), run_name="__main__")


def test_a_run_resumes_from_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class Interrupted(torch_mesh.MeshTrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)
            if steps == [1, 2, 3]:
                raise KeyboardInterrupt

    monkeypatch.setattr(torch_mesh, "MeshTrainerCallback", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run_here(monkeypatch, EXAMPLES / "mesh-tiny", tmp_path / "out", "--steps", "20")
    _run_here(monkeypatch, EXAMPLES / "mesh-tiny", tmp_path / "out", "--steps", "20", "--resume")
    assert steps == [1, 2, 3, *range(3, 21)]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-20"]


def test_a_tokenizer_needs_no_pad_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = shutil.copytree(EXAMPLES / "mesh-tiny", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    _run_here(monkeypatch, checkpoint, tmp_path / "out", "--steps", "1")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_text_of_less_than_two_sequences_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _run_here(monkeypatch, EXAMPLES / "mesh-tiny", tmp_path / "out", "--length", "1000000")
    assert "fewer than two sequences of --length 1000000" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_with_half_of_each_batch_train_as_one_does(tmp_path: Path) -> None:
    alone, together = _train(ALONE, tmp_path / "alone", 4), _train(TOGETHER, tmp_path / "together", 2)
    assert together["epoch"] == pytest.approx(alone["epoch"], rel=0.02)  # both read the same amount of text
    assert together["eval_loss"] == pytest.approx(alone["eval_loss"], rel=0.01)
    adapters = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "together")]
    assert adapters[0].keys() == adapters[1].keys() and any("experts" in name for name in adapters[0])
    assert all(tensor.any() for adapter in adapters for tensor in adapter.values())
    for name in ("alone", "together"):
        state = json.loads((tmp_path / name / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        assert state["global_step"] == STEPS
