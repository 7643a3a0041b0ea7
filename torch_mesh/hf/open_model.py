"""Open a model, its tokenizer and texts for commands that run it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import FIELDS, MeshConfig
from ..errors import MeshError
from ..store.gguf import is_gguf
from ..store.header import variant_of

_SHORTEST = 2  # tokens of a sequence: an input and the token that it predicts


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


def read_documents(paths: Sequence[str]) -> list[str]:
    """The texts of plain files, and the ``text`` fields of .jsonl files. Raises MeshError for a line without one."""
    documents: list[str] = []
    for path in paths:
        try:
            content = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise MeshError(f"{path} is not text in UTF-8: {error}") from error
        documents += _lines(path, content) if path.endswith(".jsonl") else [content]
    return documents


def _lines(path: str, content: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), start=1):  # JSON strings may contain other separators
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise MeshError(f'{path}, line {number}: not a JSON object with a text, as in {{"text": "..."}}')
        yield text


def token_sequences(tokenizer: Any, documents: Sequence[str], length: int, tokens: int) -> list[Any]:
    """Tensors of token ids [at most ``length``], in order and at most ``tokens`` in all; remainders shorter than two
    tokens are dropped."""
    import torch

    sequences = []
    for document in documents:
        ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long)
        for part in ids.split(length):
            if len(part[:tokens]) >= _SHORTEST:
                sequences.append(part[:tokens])
                tokens -= len(sequences[-1])
    return sequences
