"""Converted folders in programs that do not import torch_mesh."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_mesh.store.convert import convert

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def converted(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "mesh-tiny-int8"
    convert(mesh_tiny, destination, "int8")
    return destination


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program that has the entry point of an installed torch_mesh."""
    project = (CHECKOUT / "pyproject.toml").read_text()
    stated = re.search(r'entry-points."torch.backends"\]\n(\w+) = "([\w.:]+)"', project)
    assert stated is not None
    name, target = stated.groups()
    folder = tmp_path_factory.mktemp("installed")
    about = folder / "torch_mesh_entry-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_mesh_entry\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    path = os.pathsep.join([str(folder), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCH_MESH_")} | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
    }


def _run(program: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipeline_opens_a_converted_folder_with_fields_from_the_environment(
    converted: Path, environment: dict[str, str]
) -> None:
    program = (
        "import os, sys\n"
        "from transformers import AutoModelForCausalLM, pipeline\n"
        "opened = pipeline('text-generation', sys.argv[1])\n"
        "print(repr(opened('In the beginning', max_new_tokens=3, do_sample=False)[0]['generated_text']))\n"
        "os.environ['TORCH_MESH_RESIDENT'] = '0.75'\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "import torch_mesh\n"
        "print(torch_mesh.stats(opened.model).slots, torch_mesh.stats(model).slots)\n"
    )
    text, slots = _run(program, environment | {"TORCH_MESH_RESIDENT": "0.25"}, str(converted)).splitlines()
    generated = ast.literal_eval(text)
    assert generated.startswith("In the beginning") and len(generated.strip()) > len("In the beginning")
    few, many = map(int, slots.split())
    assert 0 < few < many


def test_torch_alone_does_not_import_torch_mesh(environment: dict[str, str]) -> None:
    program = (
        "import sys, torch\n"
        "found = [name for name in sys.modules if name.partition('.')[0] == 'torch_mesh']\n"
        "print(found, 'torch_mesh_autoload' in sys.modules, 'transformers' in sys.modules)\n"
        "import torch_mesh\n"
        "print('torch_mesh.ops' in sys.modules)\n"  # importing torch_mesh itself imports it at once
    )
    assert _run(program, environment).splitlines() == ["[] True False", "True"]


@pytest.mark.thorough
def test_a_torch_mesh_that_cannot_be_imported_does_not_break_torch(environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "torch_mesh"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken')")
    path = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    output = _run(
        "import torch, transformers\nfrom transformers.quantizers import auto\nprint('goes on')\n",
        environment | {"PYTHONPATH": path},
    )
    assert output == "goes on\n"


@pytest.mark.thorough
def test_a_quantizer_that_cannot_be_imported_does_not_break_transformers(environment: dict[str, str]) -> None:
    program = (
        "import sys, torch\n"
        "sys.modules['torch_mesh.patching.quantizer'] = None\n"
        "from transformers.quantizers import auto\n"
        "from transformers import Qwen3MoeForCausalLM\n"
        "print('goes on')\n"
    )
    assert _run(program, environment) == "goes on\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "first",
    [
        "import transformers.quantizers.auto",
        "import transformers.modeling_utils",
        "from transformers import Qwen3MoeForCausalLM",  # after this nothing more of transformers is imported
        "import torch, transformers.quantizers.auto",
    ],
)
def test_transformers_may_be_imported_before_torch(first: str, converted: Path, environment: dict[str, str]) -> None:
    program = (
        f"import sys\n{first}\n"
        "from transformers import Qwen3MoeForCausalLM\n"
        "print(type(Qwen3MoeForCausalLM.from_pretrained(sys.argv[1])).__name__)\n"
    )
    assert "Qwen3Moe" in _run(program, environment, str(converted))
