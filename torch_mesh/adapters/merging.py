"""Merge an adapter into a base and write a new store, expert by expert."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torch_mesh.adapters.factors import Factors
from torch_mesh.adapters.folder import Adapter, Change, adapter_fingerprint, read_adapter
from torch_mesh.formats import ROUNDED_FORMATS, is_passthrough
from torch_mesh.models.families import ExpertsLayer, ExpertTensors, find_experts
from torch_mesh.store.checkpoint import checkpoint_fingerprint, find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import (
    check_group_size_applies,
    check_unchanged,
    checked_group_size,
    fingerprint_of,
    pack_expert,
    pack_from_checkpoint,
    source_name,
    stored_expert,
    stored_record,
    warn_of_other_groups,
    weights_of_checkpoint,
)
from torch_mesh.store.dense_codes import codes_files, copied_codes
from torch_mesh.store.dense_weights import Dense, Rest, files_beside, rest_of_checkpoint, rest_of_store, written
from torch_mesh.store.dtypes import DTYPES, FLOATS
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import store_error
from torch_mesh.store.hub import local_folder
from torch_mesh.store.manifest import MAX_FILE_BYTES, Shape, is_store, open_store
from torch_mesh.store.mapping import model_names
from torch_mesh.store.store_plan import Progress, StorePlan
from torch_mesh.store.table_files import table_files
from torch_mesh.store.tables import tables_in_files
from torch_mesh.store.verify import check_other_files
from torch_mesh.store.weight_files import weight_files
from torch_mesh.store.writer import Written, write_store


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    weights: str = "auto",
    group_size: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write a converted checkpoint to ``destination``: ``base`` with the PEFT adapter in the folder ``adapter`` merged
    into it.

    ``base`` is a checkpoint's folder, a GGUF file, a converted folder, or a model id on the hub, with ``revision`` and
    ``token``. ``weights`` and ``group_size`` set the experts' format; 'auto' keeps the base's. A base in the format
    ``weights`` keeps its group size unless one is given. Sums are fp32 and rounded once. Weights of a quantized base
    outside the experts are rounded to its dtype before, as in a model that is opened and trained. Experts without an
    adapter are copied unchanged. After an interruption the same call continues.

    Raises ``StoreError`` for an adapter that does not fit the base, cannot be merged or has unused parts, and as
    ``torch-mesh convert`` does; ``ValueError`` for formats that nothing can be rounded to, and for a ``group_size``
    that the format does not take.
    """
    if weights not in ("auto", *ROUNDED_FORMATS):
        checked_group_size(weights, group_size)  # raises for other values
    check_group_size_applies(weights, group_size)
    folder = Path(adapter)
    of_adapter = adapter_fingerprint(folder)  # before a base is downloaded
    source = local_folder(base, revision=revision, token=token)
    destination = Path(destination)
    for path in (source, folder):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(destination)):
            raise ValueError(f"the store cannot replace its own base {path}: choose another folder")
    found = _base_of(source, weights, group_size)
    plan = StorePlan(
        shape=found.shape,
        modules=found.modules,
        weights=found.weights,
        group_size=found.group_size,
        source_name=f"{os.fspath(base) if not os.path.exists(base) else source_name(source)} + {folder.resolve().name}",
        source_fingerprint=f"{found.fingerprint} + {of_adapter}",
        tables=found.tables,
    )
    outline = meta_model(read_config(source))
    read = read_adapter(folder, outline, find_experts(outline))
    of_base = found.rest(read.rest, max_file_bytes)
    rest = replace(of_base, tensors=_changed_tensors(source, folder, found.model, of_base.tensors, read.rest))
    return write_store(
        destination,
        plan,
        functools.partial(_record, folder, found, read),
        files_beside(rest, found.model, plan, max_file_bytes),
        force=force,
        workers=workers,
        progress=progress,
        max_file_bytes=max_file_bytes,
        check_source=functools.partial(_check_unchanged, source, found.fingerprint, folder, of_adapter),
    )


@dataclass(frozen=True)
class _Base:
    model: Any
    layers: Mapping[int, ExpertsLayer]
    shape: Shape
    modules: tuple[str, ...]
    weights: str
    group_size: int
    fingerprint: str
    rest: Callable[[Container[str], int], Rest]  # takes the changed parameters and the maximum bytes of a file
    expert: Callable[[int, int], ExpertTensors]
    unchanged: Callable[[int, int], torch.Tensor]  # reads the record of an expert without an adapter
    tables: str = ""  # the format that rows of embedding tables are rounded to


def _base_of(source: Path, weights: str, group_size: int | None) -> _Base:
    fingerprint = _fingerprint(source)  # before the headers are read
    model = meta_model(read_config(source))
    return (_of_store if is_store(source) else _of_checkpoint)(source, model, fingerprint, weights, group_size)


def _of_checkpoint(source: Path, model: Any, fingerprint: str, weights: str, group_size: int | None) -> _Base:
    experts = find_checkpoint_experts(source, model)
    with warnings.catch_warnings():
        if is_passthrough(experts.nearest().weights):
            warnings.simplefilter("ignore")  # their causes are refused
        weights, groups = weights_of_checkpoint(experts, weights, group_size)
    _check_rounds(source, weights)

    def rest(changed: Container[str], max_file_bytes: int) -> Rest:
        # A table that the adapter changes is written like any other tensor, since its rows differ from the base's.
        tables = [table for _, table in tables_in_files(source, model, "auto") if table.name not in changed]
        rows = table_files(tables, fingerprint, max_file_bytes)
        return rest_of_checkpoint(experts, model, tables, rows, codes_files(experts, model, max_file_bytes, changed))

    return _Base(
        model=model,
        layers=dict(enumerate(find_experts(model))),
        shape=experts.shape,
        modules=experts.modules,
        weights=weights,
        group_size=groups,
        fingerprint=fingerprint,
        rest=rest,
        expert=experts.read_expert,
        unchanged=lambda layer, expert: pack_from_checkpoint(experts, layer, expert, weights, groups),
    )


def _of_store(source: Path, model: Any, fingerprint: str, weights: str, group_size: int | None) -> _Base:
    store = open_store(source)
    check_other_files(store, "always")
    manifest = store.manifest
    own = (manifest.weights, manifest.group_size)
    keeps = weights == "auto" or (weights == own[0] and group_size is None)
    becomes = own if keeps else (weights, checked_group_size(weights, group_size))
    if becomes != own and weights == own[0]:
        warn_of_other_groups(source, own, becomes[1], stacklevel=5)  # the caller of merge
    _check_rounds(source, becomes[0])
    layers = find_experts(model)
    if len(layers) != manifest.shape.layers:
        raise store_error(
            source,
            f"has records of {manifest.shape.layers} layers, and its config.json has {len(layers)}: open it with "
            "from_pretrained, save it with save_pretrained, and merge into that folder",
        )

    def unchanged(layer: int, expert: int) -> torch.Tensor:
        if becomes == own:
            return stored_record(store, layer, expert)
        return pack_expert(stored_expert(store, layer, expert), *becomes)

    return _Base(
        model=model,
        layers={store.layer_of(layer.path): layer for layer in layers},
        shape=manifest.shape,
        modules=manifest.modules,
        weights=becomes[0],
        group_size=becomes[1],
        fingerprint=fingerprint,
        rest=lambda changed, max_file_bytes: rest_of_store(store, copied_codes(store, max_file_bytes, changed)),
        expert=functools.partial(stored_expert, store),
        unchanged=unchanged,
        tables=manifest.tables,
    )


def _check_rounds(source: Path, weights: str) -> None:
    if is_passthrough(weights):
        raise ValueError(
            f"{source} has {weights} experts, a format that nothing is rounded to: choose the format of the merged "
            f"experts with weights= (--weights), one of {', '.join(map(repr, ROUNDED_FORMATS))}. 'int8' is the most "
            "precise with few bits."
        )


def _fingerprint(source: Path) -> str:
    if not is_store(source):
        return fingerprint_of(source)
    manifest = open_store(source).manifest  # has the checksums of all records
    return f"{manifest.store_id.hex()} {checkpoint_fingerprint(weight_files(source))}"


def _check_unchanged(source: Path, of_source: str, folder: Path, of_adapter: str) -> None:
    check_unchanged(source, of_source, _fingerprint)
    check_unchanged(folder, of_adapter, adapter_fingerprint)


def _record(folder: Path, base: _Base, adapter: Adapter, layer: int, expert: int) -> torch.Tensor:
    described = base.layers[layer]
    factors = (adapter.experts.get((described.path, name)) for name in described.parameter_names[:2])
    gate_up, down = (None if of is None else _product(of, expert) for of in factors)
    if gate_up is None and down is None:
        return base.unchanged(layer, expert)
    own = base.expert(layer, expert)
    parts: dict[str, Any] = {name: None if part is None else part.float() for name, part in own._asdict().items()}
    added = {} if gate_up is None else {"up": gate_up[-1]}
    if gate_up is not None and len(gate_up) > 1:
        added["gate"] = gate_up[0]
    if down is not None:
        added["down"] = down[0]
    for name, delta in added.items():
        parts[name] = parts[name] + delta
        if not parts[name].isfinite().all():
            raise store_error(folder, f"makes expert {expert} of {base.modules[layer]} not finite")
    return pack_expert(ExpertTensors(**parts), base.weights, base.group_size)


def _product(factors: Factors, expert: int) -> torch.Tensor | None:
    """[parts, out, in]: the change of gate and up, or of down; None without one."""
    a, b = factors.a[expert], factors.b[expert]
    if not (a.any() and b.any()):
        return None
    return factors.scaling * torch.einsum("rpo,ri->poi", b.view(b.size(0), -1, b.size(-1)), a)


def _tied(model: Any) -> dict[str, str]:
    """The parameters that share their weights, by name."""
    pairs = model.all_tied_weights_keys
    return {**pairs, **{source: tied for tied, source in pairs.items()}}


def _changed_tensors(
    source: Path, folder: Path, model: Any, tensors: Sequence[Dense], changes: Mapping[str, Change]
) -> list[Dense]:
    names = {} if is_gguf(source) else model_names(model, [dense.tensor.name for dense in tensors])
    found: dict[str, Dense] = {}
    for dense in tensors:
        parameter, whole = names.get(dense.tensor.name, (dense.tensor.name, True))
        if parameter in changes and whole:
            found[parameter] = dense
    for parameter in changes:
        _check_weight(source, folder, model, parameter, found.get(parameter))
    changed = {
        found[parameter].tensor.name: _changed(folder, found, parameter, change)
        for parameter, change in changes.items()
    }
    return [changed.get(dense.tensor.name, dense) for dense in tensors]


def _check_weight(source: Path, folder: Path, model: Any, parameter: str, dense: Dense | None) -> None:
    tied = _tied(model)
    if parameter in tied:
        raise store_error(
            folder,
            (
                f"has an adapter on {parameter}, which shares its weights with {tied[parameter]}: merging would change "
                "both. Use the adapter unmerged"
            ),
        )
    if dense is None:
        raise store_error(
            folder,
            f"has an adapter on {parameter}, which no single tensor of {source} holds: it cannot be merged",
        )
    if dense.tensor.dtype not in FLOATS:
        raise store_error(folder, f"has an adapter on {parameter}, which is {dense.tensor.dtype} in {source}")
    shape = model.state_dict()[parameter].shape
    if dense.tensor.shape != tuple(shape):
        raise store_error(
            source, f"tensor {dense.tensor.name!r} has the shape {list(dense.tensor.shape)}, {parameter} {list(shape)}"
        )


def _changed(folder: Path, found: Mapping[str, Dense], parameter: str, change: Change) -> Dense:
    tensor = found[parameter].tensor
    dtype = DTYPES[tensor.dtype]

    def values() -> torch.Tensor:
        made = change.made_of({name: found[name].read().float() for name in change.needs}).to(dtype)
        if not made.isfinite().all():
            raise store_error(folder, f"makes values of {parameter} that are not finite in {tensor.dtype}")
        return made

    return written(tensor.name, dtype, tensor.shape, values)
