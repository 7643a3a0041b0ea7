"""Read text files, and divide their texts into sequences of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_mesh.errors import MeshError

_SHORTEST = 2  # tokens of a sequence: an input and the token that it predicts


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
        if tokens < _SHORTEST:
            break
        ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long)
        for part in ids.split(length):
            if len(part[:tokens]) >= _SHORTEST:
                sequences.append(part[:tokens])
                tokens -= len(sequences[-1])
    return sequences
