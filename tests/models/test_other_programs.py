"""lm-eval and TRL, which do not import torch_mesh, on converted folders: scores and losses are those of the original.

Their packages are the dependency group "programs" of pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_mesh import MeshConfig
from torch_mesh.store.convert import convert

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
TASKS = ("mesh_choice", "mesh_rolling", "mesh_generation")
_DATA = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
"""
_TASKS = {
    "mesh_choice": """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "mesh_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
""",
    "mesh_generation": """output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
""",
}
_TRAINING = """
import json, sys
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model, out, texts = sys.argv[1:]
lora = LoraConfig(
    r=4,
    target_modules=["q_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
config = SFTConfig(
    output_dir=out, max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to="none",
    use_cpu=True, bf16=False, save_strategy="no", max_length=64, seed=1,
    model_init_kwargs={"dtype": "float32"},
)
data = Dataset.from_dict({"text": json.loads(texts)})
trainer = SFTTrainer(model=model, args=config, train_dataset=data, peft_config=lora)
trainer.train()
trainer.save_model(out)
print(json.dumps([each["loss"] for each in trainer.state.log_history if "loss" in each]))
"""


def _lines() -> list[str]:
    """Sentences that the model was not trained on."""
    text = json.loads((CHECKOUT / "tests/data/text/prose.jsonl").read_text().splitlines()[0])["text"]
    return [line for line in re.split(r"(?<=\.)\s+", text) if 14 <= len(line.split()) <= 30]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program. It skips if torch_mesh, and so its entry point, is not installed."""
    if not importlib.metadata.entry_points(group="torch.backends", name="torch_mesh"):
        pytest.skip("torch_mesh is not installed, so that torch does not find its entry point")
    cache = tmp_path_factory.mktemp("cache")
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_MESH_")}
    return own | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(cache / "datasets"),
        "XDG_CACHE_HOME": str(cache),
        "TORCH_MESH_RESIDENT": "0.5",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def converted(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "mesh-tiny-bf16"
    convert(mesh_tiny, destination, "bf16")  # the original's own format
    return destination


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of local tasks for lm-eval: choosing the true ending of a sentence among reordered ones, predicting the
    sentence, and continuing it."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = []
    for index, line in enumerate(_lines()[:16]):
        words = line.split()
        ending = words[7:]
        choices = [ending[::-1], sorted(ending), ending[1::2] + ending[::2]]
        choices.insert(index % 4, ending)
        document = {"context": " ".join(words[:7]), "choices": [" ".join(each) for each in choices]}
        documents.append(document | {"label": index % 4, "text": line})
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, text in _TASKS.items():
        data = _DATA.format(file=folder / "documents.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    return folder


Scores = dict[str, dict[str, Any]]


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def _evaluate(model: Path, tasks: Path, out: Path, environment: dict[str, str], options: str = "") -> Scores:
    """Run ``lm_eval``; return each task's metrics, and the model's answers as "answers"."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}{options}"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--device", "cpu", "--batch_size", "4"]
    _run([*command, "--output_path", str(out), "--log_samples"], environment)
    (results,) = out.rglob("results_*.json")
    metrics = json.loads(results.read_text())["results"]
    scores = {}
    for name in TASKS:
        (samples,) = out.rglob(f"samples_{name}_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
        scores[name] = _own(metrics[name]) | {"answers": [line["resps"] for line in lines]}
    return scores


def _own(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.endswith(",none") and "stderr" not in name}


def _loglikelihoods(scores: Scores) -> np.ndarray:
    flat: list[float] = []

    def collect(value: Any) -> None:
        if isinstance(value, list | tuple):
            for each in value:
                collect(each)
        elif str(value) not in ("True", "False"):  # a flag whether the text is the model's greedy choice
            flat.append(float(value))

    collect([scores["mesh_choice"]["answers"], scores["mesh_rolling"]["answers"]])
    return np.array(flat)


def _torch_mesh_scores(mesh_tiny: Path, tasks: Path) -> Scores:
    """The scores of the original model, opened by torch_mesh in this process."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(resident=0.5))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wrapped = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(mesh_tiny), batch_size=4)
        found = simple_evaluate(wrapped, tasks=list(TASKS), task_manager=TaskManager(include_path=str(tasks)))
    finally:
        torch.set_num_threads(threads)
    scores = {}
    for name in TASKS:
        lines = sorted(found["samples"][name], key=lambda line: line["doc_id"])
        scores[name] = _own(found["results"][name]) | {"answers": [line["resps"] for line in lines]}
    return scores


def test_lm_eval_scores_a_converted_folder_as_the_original(
    mesh_tiny: Path,
    converted: Path,
    tasks: Path,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", environment["HF_DATASETS_CACHE"])
    ours = _evaluate(converted, tasks, tmp_path / "converted", environment)
    theirs = _evaluate(mesh_tiny, tasks, tmp_path / "original", environment)
    exact = _evaluate(mesh_tiny, tasks, tmp_path / "float32", environment, ",dtype=float32")
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["mesh_choice"][metric] == theirs["mesh_choice"][metric] > 0.9
    # The original in bf16 rounds too, but in another order.
    reference = _loglikelihoods(exact)
    error, own_error = (np.abs(_loglikelihoods(each) - reference).mean() for each in (ours, theirs))
    assert error <= 1.5 * own_error
    perplexities = [each["mesh_rolling"]["byte_perplexity,none"] for each in (ours, theirs, exact)]
    assert perplexities == pytest.approx([perplexities[-1]] * 3, rel=0.01)
    # In one process or two, through torch_mesh the original and the converted folder are the same model.
    same = _torch_mesh_scores(mesh_tiny, tasks)
    assert np.array_equal(_loglikelihoods(ours), _loglikelihoods(same))
    assert ours["mesh_generation"]["answers"] == same["mesh_generation"]["answers"]
    metrics = [{task: _own(found) for task, found in scores.items()} for scores in (ours, same)]
    assert metrics[0] == metrics[1]


def test_trl_trains_adapters_on_experts_of_a_converted_folder(
    mesh_tiny: Path, converted: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from safetensors.torch import load_file

    def train(model: Path, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
        texts = json.dumps(_lines()[:24])
        output = _run([sys.executable, "-c", _TRAINING, str(model), str(out), texts], environment)
        return json.loads(output.splitlines()[-1]), load_file(out / "adapter_model.safetensors")

    losses, adapters = train(converted, tmp_path / "converted")
    expected, originals = train(mesh_tiny, tmp_path / "original")
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < losses[0] - 0.3
    assert {name: each.shape for name, each in adapters.items()} == {
        name: each.shape for name, each in originals.items()
    }
    assert any("experts" in name and "lora_B" in name and each.abs().max() > 0 for name, each in adapters.items())
