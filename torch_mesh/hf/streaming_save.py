"""Weight files whose packed weights are unpacked while they are written, a layer at a time.

Packed weights take part in transformers' conversions and shards as ``LazyTensor``, without memory. ``Unpacking`` gives
their values when their file is written.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Any

import torch
from transformers import conversion_mapping, core_model_loading, modeling_utils

from torch_mesh.errors import MeshError
from torch_mesh.hf.compat import conversions_of
from torch_mesh.hf.torch_compat import make_wrapper, pytree, without_torch_function
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.models.tables import TableLayer
from torch_mesh.modules.packed_weight import NoStorage
from torch_mesh.store.dtypes import NAMES
from torch_mesh.store.header import DTYPE_BITS, encode_header
from torch_mesh.system.atomic_files import new_file


@dataclass(frozen=True)
class PackedPart:
    """Weights that are unpacked together: their names, meta tensors like them, and the function that makes them."""

    weights: Mapping[str, torch.Tensor]
    unpack: Callable[[], Mapping[str, torch.Tensor]]


class Unpacking:
    """A state dict in which the weights of ``parts`` are still packed.

    ``original_format``: the files have the names and layout of the original checkpoints, by transformers' conversions.
    ``separate``: tensors like weights that are saved separately. Only those conversions see them: some number the
    weights of several modules through.
    """

    def __init__(
        self,
        model: Any,
        state: Mapping[str, torch.Tensor],
        parts: Iterable[PackedPart],
        original_format: bool,
        separate: Mapping[str, torch.Tensor],
    ) -> None:
        self._model = model
        self._original_format = original_format
        self._parts = list(parts)
        lazy = {
            name: LazyTensor.of(like, self, frozenset([_block(name)]))
            for part in self._parts
            for name, like in part.weights.items()
        }
        if original_format:
            lazy |= {name: LazyTensor.of(like, self, _SEPARATE) for name, like in separate.items()}
        self.state: dict[str, torch.Tensor] = {**state, **lazy}

    @property
    def nbytes(self) -> int:
        """Bytes of all that is written; tied weights count once."""
        tensors = _without_separate(self.state).values()
        return sum({tensor.untyped_storage().data_ptr() or id(tensor): tensor.nbytes for tensor in tensors}.values())

    def values(self, blocks: frozenset[str]) -> Mapping[str, torch.Tensor]:
        """The tensors that ``blocks`` of the model become in the files, by their names there."""
        state = {name: tensor for name, tensor in self.state.items() if _block(name) in blocks}
        for part in self._parts:
            if state.keys() & part.weights.keys():
                state.update(part.unpack())
        if not self._original_format:
            return state
        converted: Mapping[str, torch.Tensor] = core_model_loading.revert_weight_conversion(self._model, state)
        return converted


class LazyTensor(torch.Tensor):
    """A packed weight, or a conversion of one: shape, strides and dtype of a CPU tensor, without values.

    ``blocks``: the parts of the model that it is made of; empty for tensors that are saved separately.
    """

    unpacking: Unpacking
    blocks: frozenset[str]
    _like: torch.Tensor
    _address: int

    @classmethod
    def of(cls, like: torch.Tensor, unpacking: Unpacking, blocks: frozenset[str]) -> LazyTensor:
        made: Any = make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu"), requires_grad=False
        )
        made._like, made.unpacking, made.blocks = like, unpacking, blocks
        made._address = next(_addresses)
        return made

    def untyped_storage(self) -> Any:
        """A storage of its own, for shard planning by address and size."""
        return NoStorage(self._address, self.nbytes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Disabled: torch would wrap results as LazyTensors without attributes."""
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inputs = pytree.tree_leaves((args, kwargs or {}))
        lazy = [leaf for leaf in inputs if isinstance(leaf, LazyTensor)]
        blocks = frozenset(block for leaf in lazy for block in leaf.blocks)
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        if len({_is_separate(tensor) for tensor in tensors}) > 1:
            raise MeshError(
                "This model's original layout joins rounded experts and other weights in one tensor, so that they "
                "cannot be saved apart: pass save_original_format=False, or call torch_mesh.unpatch(model, "
                "lossy=True) first."
            )
        args, kwargs = pytree.tree_map(_on_meta, (args, kwargs or {}))
        return pytree.tree_map_only(
            torch.Tensor, lambda like: LazyTensor.of(like, lazy[0].unpacking, blocks), func(*args, **kwargs)
        )


# Negative addresses never collide with a tensor's memory, nor with each other.
_addresses: Iterator[int] = itertools.count(-1, -1)


_SEPARATE: frozenset[str] = frozenset()


def _is_separate(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, LazyTensor) and tensor.blocks == _SEPARATE


def _without_separate(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not _is_separate(tensor)}


def _on_meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value._like
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _block(name: str) -> str:
    """``model.layers.3`` for all weights of that layer; '' for those of none. Conversions only join weights of one
    block."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


being_saved: ContextVar[Unpacking | None] = ContextVar("torch_mesh_being_saved", default=None)


def keep_conversions(model: Any, layers: Iterable[ExpertsLayer | TableLayer]) -> None:
    """Add the conversions of a loaded model's experts and tables, which loading did not read and so did not convert.

    transformers reverts the conversions that were used.
    """
    names = {f"{layer.path}.{name}" for layer in layers for name in layer.parameter_names}
    known = [_patterns(conversion) for conversion in conversions_of(model)]
    family = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)[::-1]
    for kind in (core_model_loading.WeightConverter, core_model_loading.WeightRenaming):  # in the order of reverting
        for conversion in family:
            if not isinstance(conversion, kind) or isinstance(conversion, core_model_loading.PrefixChange):
                continue
            reverse = conversion.reverse_transform()
            renamed = [reverse.rename_source_key(name) for name in names]
            names = {name for name, _ in renamed}
            if any(pattern is not None for _, pattern in renamed) and _patterns(conversion) not in known:
                conversions_of(model).append(conversion)


def _patterns(conversion: Any) -> tuple[type, list[str], list[str]]:
    return type(conversion), conversion.source_patterns, conversion.target_patterns


def wrap_saving() -> None:
    """Wrap two functions that save_pretrained calls, for models that are ``being_saved``.

    One is between its shards and safetensors, the other between converting weights and planning shards.
    """
    with _wrapping:
        for name, around in (("safe_save_file", _around_save), ("revert_weight_conversion", _around_revert)):
            theirs = getattr(modeling_utils, name)
            if not hasattr(theirs, "_mesh_original"):
                ours = functools.wraps(theirs)(around(theirs))
                ours._mesh_original = theirs  # type: ignore[attr-defined]
                setattr(modeling_utils, name, ours)


_wrapping = threading.Lock()


def _around_save(theirs: Any) -> Any:
    def save_file(tensors: Any, filename: Any, metadata: Any = None, **kwargs: Any) -> None:
        if being_saved.get() is None:
            theirs(tensors, filename, metadata=metadata, **kwargs)
        else:
            _write(tensors, filename, metadata or {})

    return save_file


def _around_revert(theirs: Any) -> Any:
    def revert_weight_conversion(model: Any, state_dict: Any) -> Any:
        reverted = theirs(model, state_dict)
        return reverted if being_saved.get() is None else _without_separate(reverted)

    return revert_weight_conversion


def _write(tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Unpack packed weights a block at a time, which bounds the memory."""
    dtypes = {name: _dtype_name(name, tensor.dtype) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-DTYPE_BITS[dtypes[name]], name))  # for alignment
    header = encode_header(((n, dtypes[n], tuple(tensors[n].shape), tensors[n].nbytes) for n in order), metadata)
    ends = list(itertools.accumulate((tensors[name].nbytes for name in order), initial=len(header)))
    offsets = dict(zip(order, ends, strict=False))
    waiting: dict[tuple[Unpacking, frozenset[str]], list[str]] = {}
    with new_file(filename) as file:
        file.write(header)
        for name in order:
            tensor = tensors[name]
            if isinstance(tensor, LazyTensor):
                waiting.setdefault((tensor.unpacking, tensor.blocks), []).append(name)
            else:
                _write_tensor(file, offsets[name], tensor)
        for (unpacking, blocks), names in waiting.items():
            values = unpacking.values(blocks)
            for name in names:
                value = values[name]
                if (value.shape, value.dtype) != (tensors[name].shape, tensors[name].dtype):
                    raise MeshError(
                        f"internal error: {name} was planned as {tensors[name].dtype} {list(tensors[name].shape)} and "
                        f"became {value.dtype} {list(value.shape)}."
                    )
                _write_tensor(file, offsets[name], value)
            del values


def _write_tensor(file: IO[bytes], offset: int, tensor: torch.Tensor) -> None:
    file.seek(offset)
    if tensor.numel():
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise MeshError(f"{name} is {dtype}, which cannot be written; allowed: {', '.join(map(str, NAMES))}.")
    return NAMES[dtype]
