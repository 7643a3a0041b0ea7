"""The files of a store beside its records: the dense weights, config.json and tokenizer, as in a checkpoint."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from torch_mesh.errors import MeshError
from torch_mesh.hf.known_types import with_known_type
from torch_mesh.models.families import WEIGHT_DTYPES
from torch_mesh.store.checkpoint import CheckpointExperts
from torch_mesh.store.dtypes import DTYPES, NAMES
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.gguf_model import rest_of_model, tokenizer_files
from torch_mesh.store.header import (
    DTYPE_BITS,
    Tensor,
    encode_header,
    is_plain_name,
    read_header,
    read_into,
    store_error,
)
from torch_mesh.store.journal import JOURNAL_NAME
from torch_mesh.store.manifest import MANIFEST_NAME, OtherFile, Store, config_text, quantization_table
from torch_mesh.store.sources import QUANTISATION_FILES
from torch_mesh.store.sources.layout import Weight
from torch_mesh.store.store_plan import TEMPLATES_FOLDER, Chunk, NewFile, Piece, StorePlan
from torch_mesh.store.table_files import StoredTable, is_table_file
from torch_mesh.store.weight_files import INDEX_NAME, weight_files

_COPY_BYTES = 8 << 20
# In a converted config.json this is the name of the weights' file for transformers. Without torch_mesh, transformers
# would initialize experts randomly; an invalid file name stops it, and its error repeats the name.
WITHOUT_TORCH_MESH = (
    "nothing is wrong with this checkpoint, but torch_mesh has packed its experts: `import "
    "torch_mesh` before from_pretrained"
)
# Weight files of a checkpoint in any format, and their indices, variants included. All other files are copied.
_OF_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|ot)|.*\.(safetensors|bin)\.index(\..+)?\.json", re.IGNORECASE
)


@dataclass(frozen=True)
class Dense:
    """A dense tensor to write."""

    tensor: Tensor
    chunks: Callable[[], Iterable[Chunk]]  # each valid until the next is requested
    pieces: tuple[Piece, ...] = ()  # the ranges of a checkpoint's files that ``chunks`` reads

    def read(self) -> torch.Tensor:
        data, filled = np.empty(self.tensor.bytes, dtype=np.uint8), 0
        for chunk in self.chunks():
            data.data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return torch.frombuffer(data, dtype=DTYPES[self.tensor.dtype]).view(self.tensor.shape)


@dataclass(frozen=True)
class Rest:
    """All of a model but its experts: config.json, dense tensors, tokenizer and other files."""

    config: str
    tensors: list[Dense]
    others: list[NewFile]


def rest_of_checkpoint(
    experts: CheckpointExperts,
    model: PreTrainedModel,
    tables: Sequence[StoredTable] = (),
    rows: Sequence[NewFile] = (),
    codes: Sequence[NewFile] = (),
) -> Rest:
    """``rows`` are files for ``tables``, whose tensors are then left out; ``codes`` are files of ``dense_codes``."""
    in_files = {name for table in tables for name in table.tensors}
    tensors = [member for member in tensors_of(experts, model) if member.tensor.name not in in_files]
    return Rest(_config_of(experts, model), tensors, [*_others_of(experts), *rows, *codes])


def rest_of_store(store: Store, codes: Sequence[NewFile] = ()) -> Rest:
    """The rest of a converted checkpoint, with ``codes`` for its files of ``dense_codes``.

    Raises ``StoreError`` for a store of records only.
    """
    folder = store.folder
    if not (folder / "config.json").is_file():
        raise store_error(folder, "has only records and no model: name the checkpoint that they were made from")
    tensors = [
        Dense(tensor, functools.partial(read_stretch, path, tensor.offset, tensor.bytes))
        for path in weight_files(folder)
        for tensor in read_header(path).tensors.values()
    ]
    others = _copied_files(folder)
    rows = [_copied_rows(folder / file.name, file) for file in store.manifest.other_files if is_table_file(file.name)]
    return Rest((folder / "config.json").read_text(encoding="utf-8"), tensors, [*others, *rows, *codes])


def files_beside(rest: Rest, model: PreTrainedModel, plan: StorePlan, max_file_bytes: int) -> list[NewFile]:
    index, *dense = dense_files(rest.tensors, max_file_bytes)
    config = mesh_config(rest.config, model, plan.modules, plan.weights, plan.group_size)
    return [index, _in_memory("config.json", config), *rest.others, *dense]


def dense_files(tensors: Iterable[Dense], max_file_bytes: int) -> list[NewFile]:
    """An index, and the files that it names."""
    dense = spread(tensors, max_file_bytes)
    index = {
        "metadata": {"total_size": sum(member.tensor.bytes for _, members in dense for member in members)},
        "weight_map": {member.tensor.name: name for name, members in dense for member in members},
    }
    text = json.dumps(index, indent=2) + "\n"
    return [_in_memory(INDEX_NAME, text), *(tensor_file(name, members, {"format": "pt"}) for name, members in dense)]


def _config_of(experts: CheckpointExperts, model: PreTrainedModel) -> str:
    if not is_gguf(experts.folder):
        text = (experts.folder / "config.json").read_text(encoding="utf-8")
        config = config_text(with_known_type(json.loads(text)))
        return _unquantized(config) if experts.weights else config
    table = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return json.dumps(table)


def _others_of(experts: CheckpointExperts) -> list[NewFile]:
    if is_gguf(experts.folder):
        return [_of_bytes(name, data) for name, data in tokenizer_files(experts.folder).items()]
    left_out = QUANTISATION_FILES if experts.weights else ()
    return [file for file in _copied_files(experts.folder) if file.name not in left_out]


def mesh_config(text: str, model: torch.nn.Module, modules: Sequence[str], weights: str, group_size: int) -> str:
    """``text``, the config.json of ``model``, as that of a checkpoint with the experts of ``modules`` in records."""
    table: dict[str, Any] = json.loads(plain_config(text))
    for part in _configs_with_experts(table, model, modules):
        part["quantization_config"] = quantization_table(weights, group_size)
        part["transformers_weights"] = WITHOUT_TORCH_MESH
    return config_text(table)


def _unquantized(text: str) -> str:
    table: dict[str, Any] = json.loads(text)
    parts = [table]
    for part in parts:
        part.pop("quantization_config", None)
        parts.extend(value for value in part.values() if isinstance(value, dict))
    return config_text(table)


def plain_config(text: str) -> str:
    """A config.json without the additions of ``mesh_config``."""
    table: dict[str, Any] = json.loads(text)
    parts = [table]
    for part in parts:
        if (part.get("quantization_config") or {}).get("quant_method") == "mesh":
            del part["quantization_config"]
        if part.get("transformers_weights") == WITHOUT_TORCH_MESH:
            del part["transformers_weights"]
        parts.extend(value for value in part.values() if isinstance(value, dict))
    return config_text(table)


def _configs_with_experts(
    config: dict[str, Any], model: torch.nn.Module, modules: Sequence[str]
) -> list[dict[str, Any]]:
    """``config``, and nested configs from which transformers opens a part with experts, such as the text model."""
    parts = {
        id(module.config)
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and any(experts.startswith(f"{path}.") for experts in modules)
    }

    def within(stored: dict[str, Any], of: PretrainedConfig) -> Iterator[dict[str, Any]]:
        for name, value in stored.items():
            part = vars(of).get(name)  # getattr raises for attributes that differ between layers
            if isinstance(value, dict) and isinstance(part, PretrainedConfig):
                if id(part) in parts:
                    yield value
                yield from within(value, part)

    described: Any = model.config
    return [config, *within(config, described)]


def _copied_files(folder: Path) -> list[NewFile]:
    paths = [*folder.iterdir(), *(folder / TEMPLATES_FOLDER).glob("*.jinja")]
    return [_copied(path, path.relative_to(folder).as_posix()) for path in sorted(paths) if _is_copied(path)]


def _is_copied(path: Path) -> bool:
    """Hidden files stay behind, and names that no manifest may have: transformers reads neither. So do files that are
    called like those of a conversion."""
    name = path.name
    if name.startswith(".") or not is_plain_name(name) or name in ("config.json", JOURNAL_NAME, MANIFEST_NAME):
        return False
    return path.is_file() and not is_weight_file(name)


def is_weight_file(name: str) -> bool:
    """Whether a checkpoint's file of this name holds weights in any format, or is an index of such files."""
    return _OF_WEIGHTS.fullmatch(name) is not None


def _in_memory(name: str, text: str) -> NewFile:
    return _of_bytes(name, text.encode())


def _of_bytes(name: str, data: bytes) -> NewFile:
    return NewFile(name, len(data), lambda: [data])


def _copied(path: Path, name: str) -> NewFile:
    size = path.stat().st_size
    return NewFile(name, size, lambda: read_stretch(path, 0, size))


def _copied_rows(path: Path, file: OtherFile) -> NewFile:
    """A store's file of rows. Opening the store has checked only its size, so the digest is compared while copying."""

    def chunks() -> Iterator[Chunk]:
        digest = hashlib.blake2b(digest_size=16)
        for chunk in read_stretch(path, 0, file.bytes):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != file.digest:
            raise store_error(path, "was changed since the conversion: copy the model again or convert it with --force")

    return NewFile(file.name, file.bytes, chunks)


def spread(tensors: Iterable[Dense], max_file_bytes: int, prefix: str = "model") -> list[tuple[str, list[Dense]]]:
    """Distribute tensors over files of bounded size; within one, wide types first, for alignment.

    Tensors of different files stay apart, so that a checkpoint's files can be fetched one after the other.
    """
    groups: list[list[Dense]] = [[]]
    size = 0
    for member in tensors:
        if groups[-1] and (size + member.tensor.bytes > max_file_bytes or _file_of(member) != _file_of(groups[-1][-1])):
            groups.append([])
            size = 0
        groups[-1].append(member)
        size += member.tensor.bytes
    for group in groups:
        group.sort(key=lambda member: -DTYPE_BITS[member.tensor.dtype])
    return [
        (f"{prefix}-{number + 1:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups)
    ]


def _file_of(member: Dense) -> Path | None:
    return member.pieces[0][0] if member.pieces else None


def tensors_of(experts: CheckpointExperts, model: PreTrainedModel) -> list[Dense]:
    """The dense tensors of a checkpoint. Raises ``StoreError`` if there are none."""
    tensors = list(_tensors_of(experts, model))
    if not tensors:
        raise store_error(experts.folder, "has only experts: not the checkpoint of a model")
    return tensors


def _tensors_of(experts: CheckpointExperts, model: PreTrainedModel) -> Iterator[Dense]:
    if is_gguf(experts.folder):
        for part in rest_of_model(experts.folder, experts.weights, experts.names, model):
            made_of = [part.weight] if part.companion is None else [part.weight, part.companion]
            pieces = tuple(piece for each in made_of for piece in each.pieces(None))
            yield written(part.name, part.dtype, part.shape, part.values, pieces)
        return
    weights = {weight.codes[1].name: weight for weight in experts.weights}
    dtype = getattr(model.config.get_text_config(), "dtype", None)
    for header, tensors in experts.other_tensors:
        for tensor in tensors:
            weight = weights.get(tensor.name)
            if not experts.weights or (weight is not None and weight.is_plain):
                read = functools.partial(read_stretch, header.path, tensor.offset, tensor.bytes)
                yield Dense(tensor, read, ((header.path, tensor.offset, tensor.bytes),))
            elif weight is not None:
                yield _values(weight, dtype if dtype in WEIGHT_DTYPES else torch.bfloat16)


def _values(weight: Weight, dtype: torch.dtype) -> Dense:
    is_transposed = weight.layout.is_transposed
    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if is_transposed else weight.shape

    def values() -> torch.Tensor:
        values = weight.read().to(dtype)
        return values.mT if is_transposed else values

    return written(weight.name, dtype, shape, values, weight.pieces(None))


def written(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    values: Callable[[], torch.Tensor],
    pieces: tuple[Piece, ...] = (),
) -> Dense:
    """A tensor that ``values`` makes when it is written."""

    def chunks() -> Iterator[memoryview]:
        made = values()
        if made.shape != shape or made.dtype != dtype:
            raise MeshError(f"{name} is {tuple(made.shape)}, {made.dtype}, but its file's header has {shape}, {dtype}")
        yield made.contiguous().flatten().view(torch.uint8).numpy().data

    return Dense(Tensor(name, NAMES[dtype], shape, 0, math.prod(shape) * dtype.itemsize), chunks, pieces)


def tensor_file(name: str, members: Sequence[Dense], metadata: dict[str, str]) -> NewFile:
    tensors = [member.tensor for member in members]
    header = encode_header(((t.name, t.dtype, t.shape, t.bytes) for t in tensors), metadata)
    pieces = tuple(piece for member in members for piece in member.pieces)
    return NewFile(name, len(header) + sum(t.bytes for t in tensors), lambda: _dense_chunks(header, members), pieces)


def _dense_chunks(header: bytes, members: Iterable[Dense]) -> Iterator[Chunk]:
    yield header
    for member in members:
        yield from member.chunks()


def read_stretch(path: Path, offset: int, size: int) -> Iterator[memoryview]:
    """A range of a file, in chunks that are each valid until the next is requested."""
    buffer = np.empty(min(size, _COPY_BYTES), dtype=np.uint8).data
    for begin in range(offset, offset + size, _COPY_BYTES):
        chunk = buffer[: offset + size - begin]
        read_into(path, begin, chunk)
        yield chunk
