"""Turning a checkpoint, or the experts of a loaded model, into a store."""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from torch_mesh.errors import StoreError
from torch_mesh.families import ExpertsLayer, ExpertTensors, describe_left_alone, find_experts
from torch_mesh.store.checkpoint import (
    CheckpointExperts,
    checkpoint_files,
    checkpoint_fingerprint,
    find_checkpoint_experts,
    find_left_alone,
    find_quantisation,
    meta_model,
    read_config,
    shape_of,
)
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.gguf_model import rest_of_model, tokenizer_files
from torch_mesh.store.header import DTYPE_BITS, INDEX_NAME, Tensor, encode_header, store_error
from torch_mesh.store.manifest import (
    GROUP_SIZES,
    MAX_FILE_BYTES,
    OF_CODES,
    WEIGHTS,
    Store,
    config_text,
    quantization_table,
)
from torch_mesh.store.sources import QUANTISATION_FILES
from torch_mesh.store.sources.layout import Weight
from torch_mesh.store.verify import read_record
from torch_mesh.store.writer import NewFile, Progress, StorePlan, Written, write_folder, write_store

_COPY_BYTES = 8 << 20
_DENSE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Stands in a converted config.json where transformers takes the name of the weights' file from. Without torch_mesh it would skip a
# quantisation that it does not know and draw random experts; a name that is no safetensors file stops it, and its error repeats the name.
WITHOUT_TORCH_MESH = "nothing is wrong with this checkpoint, but torch_mesh has packed its experts: `import torch_mesh` before from_pretrained"
# Files of a checkpoint that hold weights in some format. All others are copied.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    weights: str,
    group_size: int = 64,
    *,
    name: str | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Converts the checkpoint in the folder ``source``, or in the GGUF file of that name, to a store, expert by expert.

    ``weights`` is 'bf16', 'int8', 'int4' or 'lut4', 'auto', which is what is nearest to the source, or the format that holds its codes as they
    are; ``group_size`` (32, 64 or 128) is for the integers that it names; ``name`` is what the manifest calls the source, by default its folder. Memory is bounded by a few experts. Interrupted at any moment, the same call continues.

    Raises ``UnsupportedModelError`` for models and layouts that cannot be converted, ``StoreError`` for damaged files, a destination
    that is something else, and a disk without room.
    """
    source, destination = Path(source), Path(destination)
    if weights in WEIGHTS:
        checked_group_size(weights, group_size)
    elif weights not in ("auto", *OF_CODES):
        raise ValueError(unknown_weights(weights, ("auto", *WEIGHTS, *OF_CODES)))
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(destination)):
        raise ValueError(f"the store cannot replace its source {source}: choose another folder")
    fingerprint = fingerprint_of(source)  # before the headers are read by which it is converted
    model = meta_model(read_config(source))
    experts = find_checkpoint_experts(source, model)
    if others := [layer for layer, _ in find_left_alone(source, model)]:  # which says now what could not be read later
        left_alone = (
            f"The records are those of {experts.modules[0]} and its like. Experts of other shapes stay as they are"
        )
        warnings.warn(f"{left_alone}: {describe_left_alone(others)}.", stacklevel=2)
    asked = weights
    weights, group_size = weights_of_checkpoint(experts, weights, group_size)
    if asked == "bf16" and not _fits_bf16(experts):
        warnings.warn(f"The experts of {source} are {experts.format}; they are rounded to bf16.", stacklevel=2)
    plan = StorePlan(
        shape=experts.shape,
        modules=experts.modules,
        weights=weights,
        group_size=group_size,
        source_name=name or source_name(source),
        source_fingerprint=fingerprint,
    )
    records = (
        (layer, expert, functools.partial(_pack_from_checkpoint, experts, layer, expert, weights, group_size))
        for layer in range(experts.shape.layers)
        for expert in range(experts.shape.experts)
    )
    return write_store(
        destination,
        plan,
        records,
        _files_beside_records(experts, model, plan, max_file_bytes),
        force=force,
        workers=workers,
        progress=progress,
        max_file_bytes=max_file_bytes,
        check_source=functools.partial(_check_unchanged, source, fingerprint),
    )


def convert_model(
    model: torch.nn.Module,
    destination: str | os.PathLike[str],
    weights: str,
    group_size: int = 64,
    *,
    fingerprint: str | None = None,
    force: bool = False,
    private: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Writes the experts of a loaded model, as they are in memory, to a store of records alone. ``private``: see ``write_store``.

    Weights in memory have no identity, and are never taken for another's: nobody can continue this, and ``fingerprint`` is one that no other
    store has, by which ``remove_made_from`` finds what was written.
    """
    group_size = checked_group_size(weights, group_size)
    layers = find_experts(model)
    plan = plan_of_model(model, layers, weights, group_size, fingerprint)
    records = (
        (number, expert, functools.partial(_pack_from_layer, layer, expert, weights, group_size))
        for number, layer in enumerate(layers)
        for expert in range(layer.num_experts)
    )
    return write_store(destination, plan, records, force=force, private=private, progress=progress)


def plan_of_model(
    model: torch.nn.Module,
    layers: Sequence[ExpertsLayer],
    weights: str,
    group_size: int,
    fingerprint: str | None = None,
) -> StorePlan:
    """Of experts in memory."""
    return StorePlan(
        shape=shape_of(layers),
        modules=tuple(layer.path for layer in layers),
        weights=weights,
        group_size=group_size,
        source_name=type(model).__name__,
        source_fingerprint=fingerprint or secrets.token_hex(16),
    )


def convert_store(
    store: Store,
    destination: str | os.PathLike[str],
    weights: str,
    group_size: int = 64,
    *,
    progress: Progress | None = None,
) -> Written:
    """Writes the experts of a store, rounded once more, to a store of records alone.

    Raises ``StoreError`` for a damaged record, and as ``convert`` does.
    """
    manifest = store.manifest
    group_size = checked_group_size(weights, group_size)
    plan = StorePlan(
        shape=manifest.shape,
        modules=manifest.modules,
        weights=weights,
        group_size=group_size,
        source_name=manifest.source_name,
        source_fingerprint=f"{manifest.source_fingerprint} {manifest.weights} {manifest.group_size}",
    )
    records = (
        (layer, expert, functools.partial(_pack_from_store, store, layer, expert, weights, group_size))
        for layer, expert in store.records()
    )
    return write_store(destination, plan, records, progress=progress)


def weights_of_checkpoint(experts: CheckpointExperts, weights: str, group_size: int = 64) -> tuple[str, int]:
    """What a checkpoint's experts become, and the group size; says so where 'auto' rounds values. ``group_size`` is for what is rounded to it.

    Raises ``ValueError`` for unknown ones, and where the checkpoint's codes are not those of a format of codes.
    """
    if weights in WEIGHTS:
        return weights, checked_group_size(weights, group_size)
    choice = experts.nearest()
    if weights not in ("auto", choice.weights):
        raise ValueError(
            f"weights={weights!r} holds the codes of a checkpoint as they are, and {experts.folder} has {experts.format} experts: give one of "
            f"{', '.join(map(repr, dict.fromkeys((choice.weights, *WEIGHTS))))}, or 'auto'."
        )
    if experts.weights and experts.kept is None:
        warnings.warn(f"{experts.folder}: {describe_nearest(experts)}. Name weights= for another format.", stacklevel=3)
    return choice.weights, choice.group_size


def describe_nearest(experts: CheckpointExperts) -> str:
    choice = experts.nearest()
    groups = f" in groups of {choice.group_size}" if choice.group_size else ""
    return f"weights='auto' converts {experts.format} experts to {choice.weights}{groups}, {choice.why}"


def _fits_bf16(experts: CheckpointExperts) -> bool:
    choice = experts.nearest()
    return choice.exact and choice.weights == "bf16"


def fingerprint_of(source: Path) -> str:
    return checkpoint_fingerprint(checkpoint_files(source), find_quantisation(source))


def _check_unchanged(source: Path, fingerprint: str) -> None:
    """Raises ``StoreError`` if the weights are not those that they were at first: what was read is then of two checkpoints."""
    try:
        now = fingerprint_of(source)
    except (StoreError, OSError) as problem:
        raise store_error(source, f"was changed while it was converted ({problem}). Convert it again") from problem
    if now != fingerprint:
        raise store_error(
            source,
            "was changed while it was converted, so that no store was made of it. Convert it again when it is complete",
        )


def source_name(source: Path) -> str:
    """What a manifest calls it."""
    return source.stem if is_gguf(source) else source.resolve().name


def checked_group_size(weights: str, group_size: int) -> int:
    """The group size that a store of ``weights`` records: 0 for bf16. ValueError for unknown ones, and those that nothing is rounded to."""
    if weights in OF_CODES:
        raise ValueError(
            f"weights={weights!r} holds the codes of a checkpoint that has them, and nothing is rounded to it: give one of "
            f"{', '.join(map(repr, WEIGHTS))}."
        )
    if weights not in WEIGHTS:
        raise ValueError(unknown_weights(weights, WEIGHTS))
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size={group_size!r} is unknown; it is one of {', '.join(map(str, GROUP_SIZES))}.")
    return 0 if weights == "bf16" else group_size


def unknown_weights(weights: str, known: Iterable[str]) -> str:
    return f"weights={weights!r} is unknown; it is one of {', '.join(map(repr, known))}."


def pack_expert(tensors: ExpertTensors, weights: str, group_size: int) -> torch.Tensor:
    """One expert's packed record, uint8 [record_bytes]."""
    return torch.ops.torch_mesh.pack(
        tensors.gate,
        tensors.up,
        tensors.down,
        tensors.gate_bias,
        tensors.up_bias,
        tensors.down_bias,
        weights,
        group_size,
    )


def _pack_from_checkpoint(
    experts: CheckpointExperts, layer: int, expert: int, weights: str, group_size: int
) -> torch.Tensor:
    if experts.kept is not None and experts.own_records == (weights, group_size):
        return experts.pack_kept(layer, expert)
    return pack_expert(experts.read_expert(layer, expert), weights, group_size)


def _pack_from_layer(layer: ExpertsLayer, expert: int, weights: str, group_size: int) -> torch.Tensor:
    return pack_expert(layer.expert(expert).on_cpu(), weights, group_size)


def _pack_from_store(store: Store, layer: int, expert: int, weights: str, group_size: int) -> torch.Tensor:
    manifest, shape = store.manifest, store.manifest.shape
    record = torch.frombuffer(bytearray(read_record(store, layer, expert)), dtype=torch.uint8)
    gate_up, down, gate_up_bias, down_bias = torch.ops.torch_mesh.unpack(
        record, manifest.weights, manifest.group_size, shape.hidden, shape.intermediate, shape.gated, shape.bias
    )
    gate, gate_bias = (rows[: shape.intermediate] if shape.gated else None for rows in (gate_up, gate_up_bias))
    up, up_bias = (rows[-shape.intermediate :] for rows in (gate_up, gate_up_bias))
    biases = (gate_bias, up_bias, down_bias) if shape.bias else (None, None, None)
    return torch.ops.torch_mesh.pack(gate, up, down, *biases, weights, group_size)


def _files_beside_records(
    experts: CheckpointExperts, model: PreTrainedModel, plan: StorePlan, max_file_bytes: int
) -> list[NewFile]:
    dense = _dense_files(experts, model, max_file_bytes)
    index = {
        "metadata": {"total_size": sum(member.tensor.bytes for _, members in dense for member in members)},
        "weight_map": {member.tensor.name: name for name, members in dense for member in members},
    }
    files = [_in_memory(INDEX_NAME, json.dumps(index, indent=2) + "\n")]
    text = _config_of(experts, model)
    files.append(_in_memory("config.json", mesh_config(text, model, plan.modules, plan.weights, plan.group_size)))
    files.extend(_others_of(experts))
    files.extend(_dense_file(name, members) for name, members in dense)
    return files


def write_rest(
    experts: CheckpointExperts, fingerprint: str, folder: Path, progress: Progress | None = None
) -> list[Path]:
    """All but the experts of a quantised checkpoint, as a conversion writes it, in safetensors files of ``folder``, unless they are there.

    ``fingerprint`` is the checkpoint's before its headers were read. Raises ``StoreError`` for damaged files, a checkpoint that is another by then,
    and a disk without room.
    """
    # Not the model that is being loaded, which may have another dtype.
    model = meta_model(read_config(experts.folder))
    files = [_dense_file(name, members) for name, members in _dense_files(experts, model, MAX_FILE_BYTES)]
    write_folder(folder, files, progress, functools.partial(_check_unchanged, experts.folder, fingerprint))
    return [folder / file.name for file in files]


def _config_of(experts: CheckpointExperts, model: PreTrainedModel) -> str:
    if not is_gguf(experts.folder):
        text = (experts.folder / "config.json").read_text(encoding="utf-8")
        return _unquantised(text) if experts.weights else text
    table = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return json.dumps(table)


def _others_of(experts: CheckpointExperts) -> list[NewFile]:
    """The tokenizer and whatever else is no weight."""
    if is_gguf(experts.folder):
        return [_of_bytes(name, data) for name, data in tokenizer_files(experts.folder).items()]
    left_out = QUANTISATION_FILES if experts.weights else ()
    return [
        _copied(path) for path in sorted(experts.folder.iterdir()) if _is_copied(path) and path.name not in left_out
    ]


def mesh_config(text: str, model: torch.nn.Module, modules: Sequence[str], weights: str, group_size: int) -> str:
    """``text``, the config.json of ``model``, as that of a checkpoint with the experts of ``modules`` in records."""
    table: dict[str, Any] = json.loads(plain_config(text))
    for part in _configs_with_experts(table, model, modules):
        part["quantization_config"] = quantization_table(weights, group_size)
        part["transformers_weights"] = WITHOUT_TORCH_MESH
    return config_text(table)


def _unquantised(text: str) -> str:
    """A config.json without what it says of the quantisation of another tool."""
    table: dict[str, Any] = json.loads(text)
    parts = [table]
    for part in parts:
        part.pop("quantization_config", None)
        parts.extend(value for value in part.values() if isinstance(value, dict))
    return config_text(table)


def plain_config(text: str) -> str:
    """A config.json without what ``mesh_config`` adds."""
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
    """``config``, and those within it from which transformers opens a part with experts by itself, such as the text model."""
    parts = {
        id(module.config)
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and any(experts.startswith(f"{path}.") for experts in modules)
    }

    def within(stored: dict[str, Any], of: PretrainedConfig) -> Iterator[dict[str, Any]]:
        for name, value in stored.items():
            part = vars(of).get(name)  # getattr raises for what differs from layer to layer
            if isinstance(value, dict) and isinstance(part, PretrainedConfig):
                if id(part) in parts:
                    yield value
                yield from within(value, part)

    described: Any = model.config
    return [config, *within(config, described)]


def _is_copied(path: Path) -> bool:
    name = path.name
    return path.is_file() and name != "config.json" and not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES)


def _in_memory(name: str, text: str) -> NewFile:
    return _of_bytes(name, text.encode())


def _of_bytes(name: str, data: bytes) -> NewFile:
    return NewFile(name, len(data), lambda: [data])


def _copied(path: Path) -> NewFile:
    size = path.stat().st_size
    return NewFile(path.name, size, lambda: _read_range(path, 0, size))


@dataclass(frozen=True)
class _Dense:
    """A tensor that is no expert's, as it is written."""

    tensor: Tensor
    chunks: Callable[[], Iterable[bytes]]


def _dense_files(
    experts: CheckpointExperts, model: PreTrainedModel, max_file_bytes: int
) -> list[tuple[str, list[_Dense]]]:
    """What is no expert's, spread over files of bounded size; within one, wide types first, so that all stay aligned."""
    groups: list[list[_Dense]] = [[]]
    size = 0
    for member in _dense(experts, model):
        if groups[-1] and size + member.tensor.bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(member)
        size += member.tensor.bytes
    if not groups[0]:
        raise store_error(experts.folder, "holds experts and nothing else: not the checkpoint of a model")
    for group in groups:
        group.sort(key=lambda member: -DTYPE_BITS[member.tensor.dtype])
    return [(f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups)]


def _dense(experts: CheckpointExperts, model: PreTrainedModel) -> Iterator[_Dense]:
    if is_gguf(experts.folder):
        for part in rest_of_model(experts.folder, experts.weights, experts.names, model):
            yield _written(part.name, part.dtype, part.shape, part.values)
        return
    weights = {weight.codes[1].name: weight for weight in experts.weights}
    dtype = getattr(model.config.get_text_config(), "dtype", None)
    for header, tensors in experts.other_tensors:
        for tensor in tensors:
            weight = weights.get(tensor.name)
            if not experts.weights or (weight is not None and weight.is_plain):
                read = functools.partial(_read_range, header.path, tensor.offset, tensor.bytes)
                yield _Dense(tensor, read)
            elif weight is not None:
                yield _values(weight, dtype if dtype in _DENSE_DTYPES else torch.bfloat16)


def _values(weight: Weight, dtype: torch.dtype) -> _Dense:
    """A quantised weight, as an unquantised checkpoint has it."""
    turned = weight.layout.turned
    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if turned else weight.shape

    def values() -> torch.Tensor:
        values = weight.read().to(dtype)
        return values.mT if turned else values

    return _written(weight.name, dtype, shape, values)


def _written(name: str, dtype: torch.dtype, shape: tuple[int, ...], values: Callable[[], torch.Tensor]) -> _Dense:
    """What ``values`` makes when it is wanted."""

    def chunks() -> Iterator[bytes]:
        for part in values().contiguous().flatten().split(_COPY_BYTES):
            yield part.view(torch.uint8).numpy().tobytes()

    return _Dense(Tensor(name, _DENSE_DTYPES[dtype], shape, 0, math.prod(shape) * dtype.itemsize), chunks)


def _dense_file(name: str, members: Sequence[_Dense]) -> NewFile:
    tensors = [member.tensor for member in members]
    header = encode_header(((t.name, t.dtype, t.shape, t.bytes) for t in tensors), {"format": "pt"})
    return NewFile(name, len(header) + sum(t.bytes for t in tensors), lambda: _dense_chunks(header, members))


def _dense_chunks(header: bytes, members: Iterable[_Dense]) -> Iterator[bytes]:
    yield header
    for member in members:
        yield from member.chunks()


def _read_range(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(offset)
        while size:
            chunk = stream.read(min(size, _COPY_BYTES))
            if not chunk:
                raise store_error(path, f"ends {size} bytes early: it was cut since it was opened", stream.tell())
            size -= len(chunk)
            yield chunk
