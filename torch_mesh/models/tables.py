"""Finding a model's embedding tables of which a token uses a few rows, and that nothing but look-ups read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from torch_mesh.errors import UnsupportedModelError

# Smaller ones are not worth a read per token: 256 MiB in bf16.
MIN_VALUES = 128 << 20

# Models whose code computes with the weight of their input embedding, by the name of their class: its multimodal
# forward takes the row of the padding token, as a slice of the weight.
READS_VOCABULARY = ("Gemma4Model",)

# Modules that compute row ids from the tokens alone, by class name, and the embedding in them. The rows that a decode
# step will look up are known before its first layer runs.
OF_TOKENS = {"Qwen4ExpTextNGramEmbedding": "ngram_embedding"}


@dataclass(frozen=True)
class TableLayer:
    """An ``nn.Embedding`` whose rows may stay in files."""

    path: str  # as in model.named_modules()
    module: nn.Module = field(repr=False)

    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return f"{self.path}.weight"

    @property
    def weight(self) -> torch.Tensor:
        weight: Any = self.module._parameters["weight"]
        return weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def find_tables(
    model: nn.Module, choice: str | int | tuple[str, ...], *, vocabularies: bool = False
) -> list[TableLayer]:
    """The tables that ``MeshConfig.tables`` chooses, in the order of the modules.

    Without names it chooses those of at least ``MIN_VALUES`` values that are neither the input embedding nor tied to
    anything: qwen4_exp's n-gram table, the per-layer embeddings of Gemma. ``vocabularies`` adds those of
    ``find_vocabularies``. Names may also choose smaller tables that are only looked up. Works on meta parameters.

    Raises UnsupportedModelError for a name that no module has, or whose weight is not only looked up.
    """
    if choice == "off":
        return []
    if not isinstance(choice, tuple):
        in_memory = set() if vocabularies and not _reads_vocabulary(model) else _inputs(model)
        return [table for table in _large(model) if id(table.module) not in in_memory]
    found: dict[str, TableLayer] = {}
    for name in choice:
        matching = [table for table in embeddings(model) if f".{table.path}".endswith(f".{name}")]
        if not matching:
            raise UnsupportedModelError(
                f"tables names {name!r}, and {type(model).__name__} has no embedding of that name. Its embeddings are "
                f"{', '.join(table.path for table in embeddings(model)) or 'none'}."
            )
        for table in matching:
            if reason := unsupported_reason(model, table):
                raise UnsupportedModelError(f"tables names {table.path}, which has to stay in memory: {reason}.")
            found[table.path] = table
    return [table for table in embeddings(model) if table.path in found]


def find_vocabularies(model: nn.Module) -> list[TableLayer]:
    """The input embeddings of at least ``MIN_VALUES`` values that are only looked up and tied to nothing."""
    inputs = set() if _reads_vocabulary(model) else _inputs(model)
    return [table for table in _large(model) if id(table.module) in inputs]


def _large(model: nn.Module) -> list[TableLayer]:
    return [
        table
        for table in embeddings(model)
        if table.weight.numel() >= MIN_VALUES and not unsupported_reason(model, table)
    ]


def _inputs(model: nn.Module) -> set[int]:
    return {id(_input_embedding(module)) for module in model.modules()}


def _reads_vocabulary(model: nn.Module) -> bool:
    return any(cls.__name__ in READS_VOCABULARY for module in model.modules() for cls in type(module).__mro__)


def unsupported_reason(model: Any, table: TableLayer) -> str:
    """Why something other than look-ups needs the table's weight; empty if nothing does."""
    tied = getattr(model, "all_tied_weights_keys", {})
    if table.name in tied or table.name in tied.values():
        return "its weight is tied to another"
    sharing = [path for path, module in model.named_modules() if module._parameters.get("weight") is table.weight]
    if len(sharing) > 1:
        return f"{' and '.join(sharing)} have one weight"
    if getattr(table.module, "max_norm", None) is not None:
        return "its look-ups change it (max_norm)"
    return ""


def embeddings(model: nn.Module) -> Iterator[TableLayer]:
    """All embeddings of a model, whatever uses them."""
    return (
        TableLayer(path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module._parameters.get("weight") is not None
    )


def _input_embedding(module: Any) -> nn.Module | None:
    if not hasattr(module, "get_input_embeddings"):
        return None
    try:
        found: nn.Module | None = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a model that takes no ids
        return None
    return found
