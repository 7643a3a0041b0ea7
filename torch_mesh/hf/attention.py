"""Attention of decode steps by torch_mesh's kernel, for models with torch's ``scaled_dot_product_attention``.

With one token per step torch's own costs more than the experts. With a few tokens after many keys, transformers' copies
of the keys for each head cost most (docs/decisions/0017).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torch_mesh import _C
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf.compat import attention_of
from torch_mesh.modules.dense import computes_dense

_TAKEN = "_mesh_attention"  # attribute of modules whose decode steps use torch_mesh
# The most tokens of a decode step with its drafts; torch computes longer forwards. With this kernel a token has the
# same bits with and without drafts, unlike with torch.
_MAX_TOKENS = _C.MAX_DECODE_ROWS
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Arguments that the kernel does not support.
_FOREIGN = ("position_bias", "cache", "softcap", "s_aux")


def _computed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    groups: bool,
    **kwargs: Any,
) -> Tensor | None:
    """query [batch, heads, tokens, head_dim], key and value [batch, key_value_heads, keys, head_dim] -> [batch, tokens,
    heads, head_dim].

    Decode steps use torch_mesh's kernel. With ``groups``, prompts with a mask use torch's: the bits are transformers',
    without its copies of keys and values for each of the grouped heads. (transformers makes these since torch's fast
    CUDA kernels take no mask; those of the CPU do.) None for other prompts, in training, and for unsupported arguments.
    """
    if query.device.type != "cpu" or dropout != 0 or _has_foreign(kwargs):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        return None
    if _runs(query, key, value, attention_mask):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return torch.ops.torch_mesh.attention(query, key, value, attention_mask, scale)
    if not groups or attention_mask is None or query.shape[1] <= key.shape[1]:
        return None
    attended = functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous()


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> list[tuple[int, int]] | None:
    """The ends of the sequences that continuous batching packs into one: of queries and of keys.

    None for other forwards, and for arguments of which a part would have to be cut out.
    """
    if cu_seq_lens_q is None or not isinstance(cu_seq_lens_k, Tensor) or torch.compiler.is_compiling():
        return None
    tokens, keys = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.shape != (1, 1, tokens, keys) or query.device.type != "cpu":
        return None
    if _has_foreign(kwargs):
        return None
    ends = list(zip(cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist(), strict=True))
    return ends if len(ends) > 2 and ends[-1] == (tokens, keys) else None  # otherwise one sequence, or padding


def _by_sequence(
    forward: Callable[..., tuple[Tensor, None]],
    ends: list[tuple[int, int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Compute each sequence separately. Together, each token would be multiplied by the keys of all sequences and
    masked."""
    kwargs |= {"cu_seq_lens_q": None, "cu_seq_lens_k": None}
    outputs = []
    for (first, first_key), (end, end_key) in itertools.pairwise(ends):
        if end > first:
            keys = slice(first_key, end_key)
            mask = attention_mask[:, :, first:end, keys]
            outputs.append(forward(query[:, :, first:end], key[:, :, keys], value[:, :, keys], mask, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def _has_foreign(arguments: dict[str, Any]) -> bool:
    return any(arguments.get(name) is not None for name in _FOREIGN)


def _around(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for transformers' "sdpa": ``_computed`` in marked modules; ``theirs`` in others, and for calls that
    ``_computed`` does not support."""

    @functools.wraps(theirs)
    def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not getattr(module, _TAKEN, False):
            return theirs(module, *args, **kwargs)
        if (ends := _packed(*args, **kwargs)) is not None:
            return _by_sequence(functools.partial(attention_forward, module), ends, *args, **kwargs), None
        computed = _computed(*args, groups=theirs is sdpa_attention_forward, **kwargs)
        return theirs(module, *args, **kwargs) if computed is None else (computed, None)

    attention_forward._mesh_original = theirs  # type: ignore[attr-defined]
    return attention_forward


def _register() -> None:
    """Replaces "sdpa" instead of adding a name: many models check for that name."""
    with _registering:
        registered = AttentionInterface()["sdpa"]
        if not hasattr(registered, "_mesh_original"):
            AttentionInterface.register("sdpa", _around(registered))


_registering = threading.Lock()


def _is_torchs_own() -> bool:
    """Whether "sdpa" is transformers' own function."""
    registered = AttentionInterface()["sdpa"]
    return getattr(registered, "_mesh_original", registered) is sdpa_attention_forward


def _runs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    batch, _, tokens, _ = query.shape
    return (
        tokens <= _MAX_TOKENS
        and batch == key.shape[0] == value.shape[0]
        and (tokens == 1 if mask is None else _known(mask, batch, tokens, key.shape[2]))
        and _fits(key.shape[-1])
        and _fits(value.shape[-1])
        and query.dtype in _DTYPES
        and key.dtype in _DTYPES
        and value.dtype in _DTYPES
    )


def _fits(head_dim: int) -> bool:
    return head_dim <= _C.MAX_HEAD_DIM and head_dim % _C.HEAD_DIM_STEP == 0


def _known(mask: Tensor, batch: int, tokens: int, keys: int) -> bool:
    """Whether the kernel supports this mask: the same for all heads."""
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, tokens)
        and mask.shape[3] == keys
        and mask.dtype in (torch.bool, *_DTYPES)
    )


def install_attention(model: nn.Module, *, attention: str, speculation: str) -> None:
    """Let decode steps of ``model`` use torch_mesh's attention where ``attention`` says so. See ``check_attention``.

    ``"auto"`` leaves a user's replacement of "sdpa" alone.
    """
    # With torch, a token's bits would depend on the number of drafts, and so on timing.
    wanted = (computes_dense(model) or speculation != "off") and _is_torchs_own()
    if attention == "mesh" or (attention == "auto" and wanted):
        _register()
        for module in model.modules():
            vars(module)[_TAKEN] = True


def check_attention(model: nn.Module, attention: str) -> None:
    """Raises UnsupportedModelError for ``attention="mesh"`` where ``model`` does not use "sdpa"."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    used = sorted({attention_of(each.config) for each in models})
    if attention == "mesh" and "sdpa" not in used:
        raise UnsupportedModelError(
            f"attention='mesh' replaces attn_implementation='sdpa', but {type(model).__name__} uses "
            f"{', '.join(used) or 'none'}. Load it with attn_implementation='sdpa', or set attention to 'auto'."
        )
