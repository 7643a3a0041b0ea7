"""A converted folder opened by transformers without torch_mesh: an error names what is missing, and experts are never
random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from tiny_models import TINY_MODELS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.experts import patched_modules
from torch_mesh.store import dense_weights as rest
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import config_text

# Opens the folders in several ways, in a process that never imports torch_mesh, and prints each result or error.
_OPENERS = """
import sys, transformers
from transformers.cli.serving.model_manager import ModelManager

text, pictures = sys.argv[1:]
openers = {
    "AutoModelForCausalLM": lambda: transformers.AutoModelForCausalLM.from_pretrained(text),
    "device_map": lambda: transformers.AutoModelForCausalLM.from_pretrained(text, device_map="cpu"),
    "AutoModel": lambda: transformers.AutoModel.from_pretrained(text),
    "mismatches": lambda: transformers.AutoModelForCausalLM.from_pretrained(text, ignore_mismatched_sizes=True),
    "pipeline": lambda: transformers.pipeline("text-generation", model=text),
    "serve": lambda: ModelManager(force_model=text),
    "pictures": lambda: transformers.AutoModelForImageTextToText.from_pretrained(pictures),
    "part": lambda: transformers.AutoModelForCausalLM.from_pretrained(pictures),
}
for name, open_it in openers.items():
    try:
        said = f"opened {open_it()!r}"
    except Exception as error:
        said = str(error)
    print(f"<{name}>", said.replace(chr(10), " "))
assert "torch_mesh" not in sys.modules
"""


def _with_pictures() -> PreTrainedModel:
    text = TINY_MODELS["Qwen3_5MoeExperts"].build().config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"out_hidden_size": text["hidden_size"]})
    return Qwen3_5MoeForConditionalGeneration(config).bfloat16()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, mesh_tiny: Path) -> tuple[Path, Path]:
    """A converted language model with its tokenizer, and a converted model for pictures and text."""
    root = tmp_path_factory.mktemp("converted")
    convert(mesh_tiny, root / "text", "int4")
    _with_pictures().save_pretrained(root / "raw")
    convert(root / "raw", root / "pictures", "bf16")
    return root / "text", root / "pictures"


def test_opening_without_torch_mesh_says_to_import_it(folders: tuple[Path, Path]) -> None:
    done = warm.run(_OPENERS, *folders)
    assert done.returncode == 0, done.stderr
    answers = dict(line[1:].split("> ", 1) for line in done.stdout.splitlines() if line.startswith("<"))
    assert len(answers) == 8
    for name, message in answers.items():
        assert "`import torch_mesh` before from_pretrained" in message, (name, message)


def test_with_torch_mesh_a_folder_opens_and_a_saved_copy_has_no_hint(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    text, pictures = folders
    assert "torch_mesh" in AutoConfig.from_pretrained(text).transformers_weights
    part = AutoModelForCausalLM.from_pretrained(pictures, quantization_config=MeshConfig(resident=0.4))
    expected = torch_mesh.patch(AutoModelForCausalLM.from_pretrained(pictures.parent / "raw"))
    ids = torch.randint(3, 100, (2, 9))
    with torch.no_grad():
        assert torch.equal(part(input_ids=ids).logits, expected(input_ids=ids).logits)
    whole = AutoModelForImageTextToText.from_pretrained(pictures)
    assert list(patched_modules(whole))
    whole.save_pretrained(tmp_path / "saved")
    assert "transformers_weights" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_folder_converted_without_the_hint_still_opens(
    mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = rest.mesh_config

    def without_words(*arguments: Any) -> str:
        config = json.loads(now(*arguments))
        del config["transformers_weights"]
        return config_text(config)

    monkeypatch.setattr(rest, "mesh_config", without_words)
    convert(mesh_tiny, tmp_path / "old", "int4")
    assert "transformers_weights" not in (tmp_path / "old" / "config.json").read_text()
    assert list(patched_modules(AutoModelForCausalLM.from_pretrained(tmp_path / "old")))
