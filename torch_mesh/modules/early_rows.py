"""Requesting the rows of a decode step before its first layer runs, where they follow from the tokens alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from torch_mesh import _C
from torch_mesh.hf.generation_compat import given_cache
from torch_mesh.models.families import named_in
from torch_mesh.models.tables import OF_TOKENS
from torch_mesh.modules.tables import MeshEmbedding


def install_early_rows(model: nn.Module) -> None:
    """Make each model with such tables request their rows when a decode step begins."""
    for decoder in model.modules():
        inner = [module for module in decoder.modules() if isinstance(module, PreTrainedModel)]
        if not isinstance(decoder, PreTrainedModel) or len(inner) > 1:
            continue
        found = [module for module in decoder.modules() if _embedding(module) is not None]
        if found:
            owner: Any = decoder
            owner._mesh_early_rows = found  # in a list, which registers nothing
            owner._mesh_early_rows_hook = decoder.register_forward_pre_hook(_request_rows, with_kwargs=True)


def uninstall_early_rows(model: nn.Module) -> None:
    for module in model.modules():
        hook = vars(module).pop("_mesh_early_rows_hook", None)
        if hook is not None:
            hook.remove()
            del vars(module)["_mesh_early_rows"]


def _embedding(module: Any) -> MeshEmbedding | None:
    name = named_in(OF_TOKENS, type(module))
    embedding = None if name is None else getattr(module, name)
    return embedding if isinstance(embedding, MeshEmbedding) else None


def _request_rows(decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A forward pre-hook: changes nothing. torch.compile traces it, so a compiled step requests its rows too."""
    given = (kwargs.get("ple_input_ids"), kwargs.get("input_ids"), *args[:1])
    ids = next((each for each in given if isinstance(each, torch.Tensor)), None)
    if ids is None or ids.numel() > _C.MAX_DECODE_ROWS:
        return
    cache = given_cache(kwargs)
    with torch.no_grad():
        for module in decoder._mesh_early_rows:
            type(module).forward(_Requesting(module), ids, None if cache is None else _Unchanged(cache))


class _Requesting:
    """Replaces a module of ``OF_TOKENS``: its embedding requests the rows instead of looking them up."""

    def __init__(self, module: Any) -> None:
        self._module = module
        embedding = _embedding(module)
        assert embedding is not None
        setattr(self, next(name for name, child in module.named_children() if child is embedding), _Request(embedding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Request:
    def __init__(self, embedding: MeshEmbedding) -> None:
        self._embedding = embedding
        self.weight = embedding.weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        torch.ops.torch_mesh.prefetch_rows(ids.cpu(), self._embedding._mesh_handle)
        return ids.unsqueeze(-1)  # has as many dimensions as rows have; the caller drops it


class _Unchanged:
    """A view of a cache for the look-up of ids, which may read the cache but must not change it before the forward."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> None:
        pass
