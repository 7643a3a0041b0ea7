"""Open a model and its tokenizer for commands that run it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
    return load_tokenizer(AutoTokenizer.from_pretrained, named, **gguf)


def load_tokenizer(from_pretrained: Callable[..., Any], folder: str | os.PathLike[str], **arguments: Any) -> Any:
    """A tokenizer, or a processor with one. ``folder`` may also be the name of a model of the hub.

    Raises MeshError, which names a damaged file, if transformers can load none.
    """
    try:
        return from_pretrained(folder, **arguments)
    except Exception as error:  # tokenizers raises no other class for files that are JSON
        damaged = _damaged_file(Path(folder))
        if damaged is not None:
            raise MeshError(f"{damaged} is no JSON object: fetch it again from where the model is published") from error
        raise MeshError(f"{folder} has no tokenizer that transformers can load: {error}") from error


def _damaged_file(folder: Path) -> Path | None:
    """The first file of a tokenizer or processor that holds no JSON object."""
    for name in ("tokenizer_config.json", "tokenizer.json", "processor_config.json", "preprocessor_config.json"):
        path = folder / name
        try:
            if path.is_file() and not isinstance(json.loads(path.read_bytes()), dict):
                return path
        except ValueError:
            return path
        except OSError:
            continue  # the error of opening it names the file
    return None


def _named(folder: Path) -> tuple[Path, dict[str, str]]:
    """A model's path for transformers: for a GGUF file, its folder and the argument that names the file."""
    return (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})
