"""Run a checkpoint on a text and record the inputs of its experts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_mesh.calibration.rows import LayerRows, RowFiles
from torch_mesh.config import fixed_config
from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.hf.open_model import open_model, open_tokenizer
from torch_mesh.models.families import InPool
from torch_mesh.store.text import read_documents

_MIN_TOKENS = 256
_LENGTH = 1024  # maximum length of a sequence
_TOKENS_AT_ONCE = 8192  # tokens of one forward, which reads each expert once
_MAX_CHARACTERS = 64  # characters per token: limits how much of a large file is tokenized

_Argument = tuple[str, int]
_ARGUMENTS: Sequence[_Argument] = (("hidden_states", 0), ("top_k_index", 1), ("top_k_weights", 2))


def text_documents(text: str, tokens: int) -> list[str]:
    """The documents of a plain file, or of a .jsonl file with a ``text`` in each line.

    Raises MeshError and OSError for a file that cannot be read, ValueError for too few ``tokens``.
    """
    if tokens < _MIN_TOKENS:
        raise ValueError(
            f"tokens={tokens} is too few to calibrate on: give at least {_MIN_TOKENS}, better {_TOKENS_AT_ONCE} or "
            "more."
        )
    return read_documents([text])


def text_sequences(source: Path, text: str, tokens: int, longest: int | None) -> torch.Tensor:
    """The first ``tokens`` tokens of a text as int64 [sequences, length], documents concatenated, by the tokenizer of
    ``source``.

    All sequences have the same length; the remainder is dropped. Raises MeshError for a text that is too short and for
    a missing tokenizer, and as ``text_documents`` does.
    """
    documents = text_documents(text, tokens)
    tokenizer = open_tokenizer(source)
    ids: list[int] = []
    for document in documents:
        left = tokens - len(ids)
        ids += tokenizer(document[: _MAX_CHARACTERS * left], verbose=False)["input_ids"]
        if len(ids) >= tokens:
            break
    if not ids and any(documents):
        raise MeshError(f"{source} has no usable tokenizer: it makes no tokens of {text}")
    ids = ids[:tokens]
    if len(ids) < _MIN_TOKENS:
        raise MeshError(
            f"{text} has {len(ids)} tokens, and calibration needs at least {_MIN_TOKENS}, better {_TOKENS_AT_ONCE} "
            "or more: give a longer text"
        )
    count = -(-len(ids) // min(_LENGTH, longest or _LENGTH))
    length = len(ids) // count
    return torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length)


def collect(
    source: Path, sequences: torch.Tensor, files: RowFiles, folder: Path, done: Callable[[int], None]
) -> list[int]:
    """Run the checkpoint ``source`` on ``sequences`` and write the experts' inputs to ``files`` in ``folder``; returns
    each layer's rows.

    Continues after the sequences that an earlier run completed. ``done`` gets the bytes as they are written.
    """
    finished = files.resume(folder)
    if finished < len(sequences):
        files.complete(folder, finished)  # creates all files
    done(sum(files.rows(folder)) * files.row_bytes)
    if finished == len(sequences):
        return files.rows(folder)
    # Other fields of the environment would change the inputs, write files or refuse a checkpoint.
    model = open_model(source, fixed_config())
    try:
        count = len({module._mesh_layer for module in _experts_of(model)})
        if count != files.layers:
            raise UnsupportedModelError(
                f"{source} opens as {type(model).__name__} with {count} layers of experts, but its files have "
                f"{files.layers}: convert it without calibration"
            )
        with _watched(model, lambda layer, rows: done(files.append(folder, layer, rows))), torch.inference_mode():
            for batch in sequences[finished:].split(max(1, _TOKENS_AT_ONCE // sequences.shape[1])):
                model.base_model(input_ids=batch.to(model.device), use_cache=False)  # logits are not needed
                finished += len(batch)
                files.complete(folder, finished)
    finally:
        for module in _experts_of(model):
            module._mesh_pool.close()
        del model
        gc.collect()
    return files.rows(folder)


def _experts_of(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, InPool))


@contextmanager
def _watched(model: Any, see: Callable[[int, LayerRows], None]) -> Iterator[None]:
    def record_inputs(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, ids, weights = (named[name] if name in named else positional[position] for name, position in _ARGUMENTS)
        see(module._mesh_layer, LayerRows(ids.cpu(), weights.cpu(), x.reshape(-1, x.shape[-1]).cpu()))

    handles = [module.register_forward_pre_hook(record_inputs, with_kwargs=True) for module in _experts_of(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
