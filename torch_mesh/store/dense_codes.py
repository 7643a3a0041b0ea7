"""A GGUF file's codes of linear layers outside the experts: packed, in files of a store beside the layers' values."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from torch_mesh.formats import FORMATS, GGUF_FORMATS
from torch_mesh.store.checkpoint import CheckpointExperts
from torch_mesh.store.dense_weights import Dense, read_stretch, spread, tensor_file
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.gguf_model import RowBlocks, blocks_of_rest
from torch_mesh.store.header import Tensor, parse_json, read_header, read_range, store_error
from torch_mesh.store.manifest import MAX_FILE_BYTES, Store, is_same_name, read_manifest
from torch_mesh.store.store_plan import Chunk, NewFile, Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "mesh-dense"
_NAME = re.compile(rf"{_PREFIX}-\d{{5}}-of-\d{{5}}\.safetensors")


class LinearCodes(Protocol):
    """A matrix [out, in] of codes for a linear layer."""

    @property
    def format(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    def packed(self) -> torch.Tensor:
        """uint8, as the kernels take it; read now. Raises ``StoreError``."""


@dataclass(frozen=True)
class StoredMatrix:
    """A packed matrix in a file of a store."""

    path: Path
    tensor: Tensor
    format: str
    group_size: int
    shape: tuple[int, int]  # [out, in]

    def packed(self) -> torch.Tensor:
        return torch.from_numpy(read_range(self.path, self.tensor.offset, self.tensor.bytes))

    def chunks(self) -> Iterator[memoryview]:
        return read_stretch(self.path, self.tensor.offset, self.tensor.bytes)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix to write."""

    name: str  # the parameter's
    format: str
    group_size: int
    shape: tuple[int, int]
    packed: Callable[[], Iterable[Chunk]]
    pieces: tuple[Piece, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        version = FORMATS[self.format].version
        return {"weights": self.format, "version": version, "group_size": self.group_size, "shape": self.shape}

    @property
    def dense(self) -> Dense:
        size = packed_bytes(self.format, self.group_size, self.shape)
        return Dense(Tensor(self.name, "U8", (size,), 0, size), self.packed, self.pieces)


def packed_bytes(weights: str, group_size: int, shape: Sequence[int]) -> int:
    from torch_mesh import _C

    return _C.linear_bytes(weights, group_size, shape[1], shape[0])


def is_codes_file(name: str) -> bool:
    """Whether a store's file of this name holds codes of linear layers."""
    return _NAME.fullmatch(name) is not None


def codes_of_checkpoint(experts: CheckpointExperts, model: PreTrainedModel) -> dict[str, RowBlocks] | None:
    """The codes of a GGUF file's matrices outside the experts, by parameter; None for other checkpoints."""
    if not is_gguf(experts.folder):
        return None
    return blocks_of_rest(experts.folder, experts.weights, experts.names, model)


def codes_files(
    experts: CheckpointExperts, model: PreTrainedModel, max_file_bytes: int, changed: Container[str] = ()
) -> list[NewFile]:
    """The files of a store for the linear layers of a checkpoint, without those of ``changed`` parameters."""
    found = codes_of_checkpoint(experts, model) or {}
    matrices = [
        Matrix(
            name,
            blocks.format,
            blocks.group_size,
            shape,
            functools.partial(_packed_chunks, blocks),
            tuple(piece for part in blocks.parts for piece in part.pieces(None)),
        )
        for name, shape in _linear_shapes(model).items()
        if (blocks := found.get(name)) is not None and name not in changed
    ]
    return files_of_codes(matrices, max_file_bytes)


def copied_codes(store: Store, max_file_bytes: int, changed: Container[str]) -> list[NewFile]:
    """The files of a copy of ``store`` for its linear layers, without those of ``changed`` parameters."""
    matrices = [
        Matrix(name, held.format, held.group_size, held.shape, held.chunks)
        for name, held in stored_codes(store.folder).items()
        if name not in changed
    ]
    return files_of_codes(matrices, max_file_bytes)


def codes_of_store(folder: Path, model: nn.Module) -> dict[str, StoredMatrix] | None:
    """The codes in a store, by the parameters of ``model``, which may be a part of the stored one; None if it has
    none.

    Raises ``StoreError`` for damaged files, and for matrices of another size than the model's.
    """
    stored = stored_codes(folder)
    if not stored:
        return None
    found: dict[str, StoredMatrix] = {}
    for name, parameter in model.named_parameters():
        for of_store, held in stored.items():
            if is_same_name(name, of_store):
                if held.shape != tuple(parameter.shape):
                    raise store_error(
                        held.path, f"{of_store} is {list(held.shape)}, and the model's {name} {list(parameter.shape)}"
                    )
                found[name] = held
    return found


def _linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The shapes of all linear layers' weights, by parameter. A tied head has the name of the embedding."""
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return {
        name: (parameter.shape[0], parameter.shape[1])
        for name, parameter in model.named_parameters()
        if id(parameter) in weights
    }


def _packed_chunks(blocks: RowBlocks) -> Iterator[Chunk]:
    yield blocks.packed().numpy().data


def files_of_codes(matrices: Sequence[Matrix], max_file_bytes: int = MAX_FILE_BYTES) -> list[NewFile]:
    """The files of a store for ``matrices``."""
    about = {matrix.name: matrix.about for matrix in matrices}
    files = []
    for name, members in spread([matrix.dense for matrix in matrices], max_file_bytes, _PREFIX) if matrices else ():
        own = {member.tensor.name: about[member.tensor.name] for member in members}
        files.append(tensor_file(name, members, {"format": "torch_mesh", "codes": json.dumps(own)}))
    return files


def stored_codes(folder: Path) -> dict[str, StoredMatrix]:
    """All codes in a store, by parameter. Raises ``StoreError`` for damaged headers."""
    names = sorted(file.name for file in read_manifest(folder).other_files if is_codes_file(file.name))
    return {name: held for file in names for name, held in _read_file(folder / file)}


def _read_file(path: Path) -> Iterator[tuple[str, StoredMatrix]]:
    header = read_header(path)
    try:
        about: Mapping[str, Any] = parse_json(header.metadata["codes"].encode())
        if about.keys() != header.tensors.keys():
            raise ValueError("it describes other tensors than it has")
        for name, tensor in header.tensors.items():
            yield name, _matrix_of(path, tensor, about[name])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise store_error(
            path, f"is no file of codes that this release reads ({problem}): convert the GGUF file again"
        ) from None


def _matrix_of(path: Path, tensor: Tensor, about: Mapping[str, Any]) -> StoredMatrix:
    weights, version = about["weights"], about["version"]
    if weights not in GGUF_FORMATS or version != FORMATS[weights].version:
        raise ValueError(f"{tensor.name} holds {weights!r} of version {version!r}")
    group_size, (rows, columns) = about["group_size"], about["shape"]
    if group_size not in FORMATS[weights].group_sizes:
        raise ValueError(f"{tensor.name} has groups of {group_size!r}")
    if tensor.dtype != "U8" or tensor.bytes != packed_bytes(weights, group_size, (rows, columns)):
        raise ValueError(f"{tensor.name} has {tensor.bytes} bytes of {rows} x {columns} {weights} weights")
    return StoredMatrix(path, tensor, weights, group_size, (rows, columns))
