"""Models with embedding tables, and adapters on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import TINY_MODELS
from torch import nn
from transformers import PreTrainedModel

from torch_mesh import MeshConfig
from torch_mesh.modules.tables import MeshEmbedding, table_modules

# By class of experts: the attribute of the tables, and how many the tiny model has.
FAMILIES = {
    "Qwen4ExpTextExperts": ("ngram_embedding", 2),
    "Gemma4TextExperts": ("embed_tokens_per_layer", 1),
}
QWEN = "Qwen4ExpTextExperts"
VOCABULARY = "OlmoeExperts"  # its input embedding is not tied to its head


def save(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = TINY_MODELS[family].build().to(dtype)
    model.save_pretrained(folder)
    return model


def reopen(model: PreTrainedModel, folder: Path, **fields: Any) -> PreTrainedModel:
    return type(model).from_pretrained(folder, quantization_config=MeshConfig(**fields))


def embeddings(model: nn.Module) -> list[MeshEmbedding]:
    return [module for _, module in table_modules(model)]


def untied(folder: Path) -> PreTrainedModel:
    """A model whose only table for look-ups is its input embedding."""
    model = TINY_MODELS[VOCABULARY].build().bfloat16()
    model.save_pretrained(folder)
    return model


def save_adapter(model: PreTrainedModel, folder: Path, **fields: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # the other helpers need no PEFT

    adapted = get_peft_model(model, LoraConfig(**{"r": 2, "init_lora_weights": False, **fields}))
    adapted.save_pretrained(folder)
    return adapted
