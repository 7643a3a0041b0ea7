"""A model's part in the identity of a prompt's keys, beside the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.hf.compat import attention_of
from torch_mesh.hf.torch_compat import version_of
from torch_mesh.modules.dense import MeshLinear
from torch_mesh.modules.experts import patched_modules
from torch_mesh.modules.packed_weight import PackedWeight
from torch_mesh.modules.tables import MeshEmbedding
from torch_mesh.version import __version__

_LAYOUT = 1  # version of the kept data; a change makes earlier data unknown
# Fields of MeshConfig that change the values of a forward. The others change only the speed, or are in the weights.
_FIELDS = ("attention", "dense", "speculation", "lossy", "gpu")


class ModelIdentity:
    """A digest of a model's weights, config, formats and adapters; the same in any process that opens the same model.

    All weights in memory are read once, and again after one of them was replaced or written to in place. A write that
    torch does not count (to ``parameter.data``, or under inference mode) is not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: Any = None
        self._digest = b""

    def digest(self) -> bytes:
        """16 bytes."""
        seen = self._now()
        if seen != self._seen:
            self._digest = self._computed()
            self._seen = seen
        return self._digest

    def _now(self) -> Any:
        tensors = [(id(tensor), version_of(tensor), tensor.data_ptr()) for _, tensor in _tensors(self._model)]
        return tensors, [_adapter_state(module) for module in self._model.modules() if _has_adapters(module)]

    def _computed(self) -> bytes:
        model: Any = self._model
        digest = hashlib.blake2b(digest_size=16)
        versions = [_LAYOUT, __version__, torch.__version__, transformers.__version__]
        about = [*versions, type(model).__name__, str(model.device.type), attention_of(model.config)]
        digest.update(json.dumps([*about, _config(model)], sort_keys=True, default=str).encode())
        for name, tensor in _tensors(model):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_checksum(tensor)}".encode())
        for name, module in model.named_modules():
            if isinstance(module, MeshLinear):
                digest.update(f"{name} {module._mesh_format} {module._mesh_group_size}".encode())
            elif isinstance(module, MeshEmbedding):
                digest.update(f"{name} {_files_of(module)}".encode())
            if _has_adapters(module):
                digest.update(f"{name} {_adapter_state(module)}".encode())
        for module in patched_modules(model):
            digest.update(f"{module._mesh_layer} {module._mesh_pool.identity}".encode())
        return digest.digest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters, buffers and packed weights with memory of their own."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, PackedWeight):
            yield name, tensor
    for name, module in model.named_modules():
        if isinstance(module, MeshLinear):
            yield f"{name}.packed", module._mesh_packed


def _checksum(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return _C.record_checksum(bytes(16), 0, 0, values.numpy())


def _config(model: Any) -> dict[str, Any]:
    config = model.config.to_dict()
    given = getattr(model.config, "quantization_config", None)
    for name in ("_name_or_path", "transformers_version", "quantization_config"):
        config.pop(name, None)
    if isinstance(given, MeshConfig):
        config["mesh"] = {name: str(getattr(given, name)) for name in _FIELDS}
    return dict(config)


def _files_of(module: MeshEmbedding) -> str:
    table = module._mesh_tables.tables[module._mesh_table]
    files = {Path(stretch.path) for stretch in table.stretches}
    described = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(files)]
    return f"{table.name} {table.salt!r} {described}"


def _has_adapters(module: nn.Module) -> bool:
    """Whether the module itself has adapters of PEFT."""
    return hasattr(module, "merged_adapters")


def _adapter_state(module: Any) -> tuple[Any, ...]:
    scaling = dict(getattr(module, "scaling", {}))
    return list(module.active_adapters), module.disable_adapters, scaling, list(module.merged_adapters)
