"""Attention of decode steps by torch_mesh's own kernel, where a model uses torch's ``scaled_dot_product_attention``.

torch's takes each query head by itself, emulates bf16 where the processor has none, and under torch.compile the keys of grouped
heads are repeated in memory first. With one token per step all of that costs more than the experts do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .config import MeshConfig
from .errors import UnsupportedModelError

NAME = "torch_mesh"  # of the attention implementation, in a model's config

_MOST_TOKENS = 4  # of a decode step, speculated ones included; prompts are torch's
_HEAD_DIM_STEP, _MOST_HEAD_DIM = 16, 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Arguments that torch_mesh's kernel does not know.
_FOREIGN = ("position_bias", "cache", "softcap", "s_aux")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [batch, heads, tokens, head_dim], key and value [batch, key_value_heads, keys, head_dim] to
    [batch, tokens, heads, head_dim]. A prompt, training, and what the kernel does not know, go to torch's own."""
    foreign = any(kwargs.get(name) is not None for name in _FOREIGN)
    if foreign or dropout > 0 or not _runs(query, key, value, attention_mask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.torch_mesh.attention(query, key, value, attention_mask, scale), None


def _runs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    tokens = query.shape[2]
    dims = (key.shape[-1], value.shape[-1])
    return (
        query.device.type == "cpu"
        and tokens <= _MOST_TOKENS
        and (tokens == 1 if mask is None else mask.shape[1] == 1)
        and all(dim % _HEAD_DIM_STEP == 0 and dim <= _MOST_HEAD_DIM for dim in dims)
        and all(tensor.dtype in _DTYPES for tensor in (query, key, value))
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)))
    )


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def take_attention(model: nn.Module, config: MeshConfig) -> None:
    """Lets the decode steps of ``model`` use torch_mesh's attention, if ``config`` asks for it. See ``check_attention``."""
    if config.attention == "model" or (config.attention == "auto" and config.dense == "none"):
        return
    for each in _configs(model):
        if each._attn_implementation == "sdpa":
            each._attn_implementation_internal = NAME  # the property would set it for sub-configs too


def check_attention(model: nn.Module, config: MeshConfig) -> None:
    """Raises UnsupportedModelError if ``config`` asks for torch_mesh's attention by name and ``model`` does not use torch's own."""
    used = sorted({str(each._attn_implementation) for each in _configs(model)})
    if config.attention == "mesh" and "sdpa" not in used:
        raise UnsupportedModelError(
            f"attention='mesh' takes the place of attn_implementation='sdpa'; {type(model).__name__} uses "
            f"{', '.join(used) or 'none'}. Load it with attn_implementation='sdpa' if it can, or leave attention at 'auto'."
        )


def give_back_attention(model: nn.Module) -> None:
    """The reverse of ``take_attention``."""
    for config in _configs(model):
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = "sdpa"


def _configs(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """That of each transformers model in ``model``, once."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield module.config
