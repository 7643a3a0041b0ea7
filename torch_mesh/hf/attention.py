"""Attention of decode steps by torch_mesh's own kernel, where a model uses torch's ``scaled_dot_product_attention``.

torch's takes each query head by itself, emulates bf16 where the processor has none, and under torch.compile the keys of grouped
heads are repeated in memory first. With one token per step all of that costs more than the experts do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import _C
from ..config import MeshConfig
from ..errors import UnsupportedModelError
from ..modules.dense import computes_dense
from .compat import attention_of

_TAKEN = "_mesh_attention"  # attribute of the modules whose decode steps are torch_mesh's
# Of a decode step, drafted ones included; prompts are torch's. A token's bits are those of a step of its own, which torch's are not.
_MAX_TOKENS = _C.MOST_DECODE_ROWS
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Arguments that torch_mesh's kernel does not know.
_FOREIGN = ("position_bias", "cache", "softcap", "s_aux")


def _decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Of query [batch, heads, tokens, head_dim], key and value [batch, key_value_heads, keys, head_dim] the output
    [batch, tokens, heads, head_dim].

    None: for a prompt, in training, and for what the kernel does not know.
    """
    known = dropout == 0 and all(kwargs.get(name) is None for name in _FOREIGN)
    if not known or not _runs(query, key, value, attention_mask):
        return None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.torch_mesh.attention(query, key, value, attention_mask, scale)


def _around(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers calls for "sdpa": torch_mesh's kernel in decode steps of marked modules, else ``theirs``."""

    @functools.wraps(theirs)
    def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        computed = _decode_step(*args, **kwargs) if getattr(module, _TAKEN, False) else None
        return theirs(module, *args, **kwargs) if computed is None else (computed, None)

    attention_forward._mesh_original = theirs  # type: ignore[attr-defined]
    return attention_forward


def _register() -> None:
    """In the place of "sdpa" and not beside it: many models ask whether their implementation has that name."""
    with _registering:
        registered = AttentionInterface()["sdpa"]
        if not hasattr(registered, "_mesh_original"):
            AttentionInterface.register("sdpa", _around(registered))


_registering = threading.Lock()


def _is_torchs_own() -> bool:
    """Whether what is registered as "sdpa" is transformers' function and not the user's."""
    registered = AttentionInterface()["sdpa"]
    return getattr(registered, "_mesh_original", registered) is sdpa_attention_forward


def _runs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    batch, _, tokens, _ = query.shape
    dims = (key.shape[-1], value.shape[-1])
    return (
        query.device.type == "cpu"
        and tokens <= _MAX_TOKENS
        and batch == key.shape[0] == value.shape[0]
        and (tokens == 1 if mask is None else _known(mask, batch, tokens, key.shape[2]))
        and all(dim % _C.HEAD_DIM_STEP == 0 and dim <= _C.MOST_HEAD_DIM for dim in dims)
        and all(tensor.dtype in _DTYPES for tensor in (query, key, value))
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)))
    )


def _known(mask: Tensor, batch: int, tokens: int, keys: int) -> bool:
    """Whether the kernel takes such a mask: the same for all heads."""
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, tokens)
        and mask.shape[3] == keys
        and mask.dtype in (torch.bool, *_DTYPES)
    )


def install_attention(model: nn.Module, config: MeshConfig) -> None:
    """Lets the decode steps of ``model`` use torch_mesh's attention, if ``config`` asks for it. See ``check_attention``.

    ``"auto"`` leaves a function alone that was registered as "sdpa" in the place of transformers' own. ``unpatch``
    removes the attribute with all others.
    """
    # With torch's the bits of a token would depend on how many are drafted with it, and that on the time that steps take.
    wanted = (computes_dense(model) or config.speculation != "off") and _is_torchs_own()
    if config.attention == "mesh" or (config.attention == "auto" and wanted):
        _register()
        for module in model.modules():
            vars(module)[_TAKEN] = True


def check_attention(model: nn.Module, config: MeshConfig) -> None:
    """Raises UnsupportedModelError if ``config`` asks for torch_mesh's attention by name and ``model`` does not use torch's own."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    used = sorted({attention_of(each.config) for each in models})
    if config.attention == "mesh" and "sdpa" not in used:
        raise UnsupportedModelError(
            f"attention='mesh' takes the place of attn_implementation='sdpa'; {type(model).__name__} uses "
            f"{', '.join(used) or 'none'}. Load it with attn_implementation='sdpa' if it can, or leave attention at 'auto'."
        )
