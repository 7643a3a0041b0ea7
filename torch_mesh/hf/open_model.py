"""Open a model and its tokenizer for commands that run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_mesh.config import MeshConfig
from torch_mesh.config_fields import FIELDS
from torch_mesh.errors import MeshError
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.weight_files import variant_of


def open_model(folder: Path, config: MeshConfig) -> Any:
    """Open a model on the CPU. Raises ValueError for experts on a GPU, and whatever loading raises."""
    from transformers import AutoModelForCausalLM

    if config.gpu.experts != 0:
        variable = FIELDS["gpu_experts"].variable
        raise ValueError(f"{variable} is {config.gpu.experts}, but this command runs the model on the CPU: unset it.")
    named, gguf = _named(folder)
    variant = None if gguf else variant_of(folder)
    return AutoModelForCausalLM.from_pretrained(named, quantization_config=config, variant=variant, **gguf)


def open_tokenizer(folder: Path) -> Any:
    """The model's tokenizer. Raises MeshError if transformers can load none."""
    from transformers import AutoTokenizer

    named, gguf = _named(folder)
    try:
        return AutoTokenizer.from_pretrained(named, **gguf)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise MeshError(f"{folder} has no tokenizer that transformers can load: {error}") from error


def _named(folder: Path) -> tuple[Path, dict[str, str]]:
    """A model's path for transformers: for a GGUF file, its folder and the argument that names the file."""
    return (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})
