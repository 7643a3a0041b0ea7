"""Convert a checkpoint, or the experts of a loaded model, to a store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_mesh import _C
from torch_mesh.errors import NoRoomError, StoreError
from torch_mesh.formats import (
    CALIBRATED_FORMATS,
    DEFAULT_GROUP_SIZE,
    FORMATS,
    GROUP_SIZES,
    PASSTHROUGH_FORMATS,
    ROUNDED_FORMATS,
    TABLE_FORMATS,
    ExpertSizes,
    format_of_layer,
    in_words,
    is_passthrough,
    short_name,
)
from torch_mesh.models.families import ExpertsLayer, ExpertTensors, describe_unpooled, find_experts
from torch_mesh.store.checkpoint import (
    CheckpointExperts,
    checkpoint_files,
    checkpoint_fingerprint,
    find_checkpoint_experts,
    find_quantization,
    find_unpooled,
    meta_model,
    read_config,
    shape_of,
)
from torch_mesh.store.dense_codes import codes_files
from torch_mesh.store.dense_weights import dense_files, files_beside, rest_of_checkpoint, tensors_of
from torch_mesh.store.folders import is_begun, is_finished, real_folder
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import store_error
from torch_mesh.store.hub import local_folder
from torch_mesh.store.hub_shards import streamed_folder
from torch_mesh.store.manifest import MAX_FILE_BYTES, Store
from torch_mesh.store.stages import Streaming, peak_bytes, stages
from torch_mesh.store.store_plan import NewFile, Packer, Progress, StorePlan
from torch_mesh.store.table_files import table_files
from torch_mesh.store.tables import tables_in_files
from torch_mesh.store.verify import read_record
from torch_mesh.store.weight_files import weight_files
from torch_mesh.store.writer import Written, write_folder, write_store

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    # Takes a checkpoint's experts, its model on the meta device, a format and a group size.
    Calibrate = Callable[[CheckpointExperts, PreTrainedModel, str, int], Packer]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    weights: str,
    group_size: int | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    keep_original: bool = False,
    name: str | None = None,
    calibrate: Calibrate | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    key_mapping: Mapping[str, str] | None = None,
    tables: str = "exact",
) -> Written:
    """Convert a checkpoint to a store, expert by expert.

    ``source`` is its folder, a GGUF file, or a model id on the hub, with ``revision`` and ``token``. A model of the hub
    is converted while it is downloaded, and its weight files are removed (docs/converting.md), unless ``keep_original``
    leaves them in the hub's cache.

    ``weights`` is 'bf16', 'bf12', 'int8', 'int4', 'lut4', 'tcq3', 'tcq2+tcq3' or 'tcq2', 'auto' (the nearest to the
    source; bf12 where that is bf16, unless its weights have no room in bf12), or the format that holds its codes
    unchanged; ``group_size`` (32, 64 or 128) applies to the formats that weights are rounded to, but bf16 and
    bf12. None is 64, or that of the source's codes if they have the format. ``name`` is the source's name in the
    manifest, by default its folder or its model id; ``key_mapping`` is as in ``from_pretrained``. After an interruption
    the same call continues.

    ``tables`` is the format of the rows of embedding tables that stay in files (docs/tables.md): 'exact', or 'int8' or
    'int4', to which they are rounded.

    ``calibrate`` packs int8, int4, lut4 and trellis records to preserve the experts' outputs on a text: see
    ``calibration.packing.on_text``.

    Raises ``UnsupportedModelError`` for models and layouts that cannot be converted, ``StoreError`` for damaged files,
    an occupied destination and a full disk; ``HubError`` for what the hub refuses and for files with another hash than
    it states; ``MeshError`` for a text that is too short and a checkpoint without a tokenizer; ``ValueError`` for
    formats that nothing can be rounded to, for a ``group_size`` that the format does not take, for ``revision`` and
    ``keep_original`` with a local ``source``, and for a format of tables where there are none.
    """
    destination = Path(destination)
    _check_options(source, destination, weights, group_size, keep_original, tables)
    if calibrate is not None and weights != "auto":
        _check_calibrated_format(weights)
    is_local = os.path.exists(source)

    def into(exact: str) -> Written:
        """``exact``: see ``weights_of_checkpoint``."""
        with (
            contextlib.nullcontext((local_folder(source, revision=revision, token=token), None))
            if is_local or calibrate is not None
            else streamed_folder(source, destination, revision=revision, token=token, keep_original=keep_original)
        ) as (folder, shards):
            fingerprint_now = functools.partial(fingerprint_of, key_mapping=key_mapping)
            # Before the headers are read.
            fingerprint = fingerprint_now(folder) if shards is None else shards.fingerprint(key_mapping)
            model = meta_model(read_config(folder))
            experts = find_checkpoint_experts(folder, model, key_mapping)
            _warn_of_unpooled(experts, model, key_mapping)
            chosen, groups = weights_of_checkpoint(experts, weights, group_size, 4, exact)
            named = weights != "auto" or not experts.weights  # otherwise weights_of_checkpoint warns
            if named and FORMATS[chosen].holds_bf16 and not experts.fits_bf16:
                warnings.warn(f"The experts of {source} are {experts.format}; they are rounded to bf16.", stacklevel=3)
            calibrator = None
            if calibrate is not None:
                _check_calibrated(experts, chosen, groups)
                calibrator = calibrate(experts, model, chosen, groups)
            plan = StorePlan(
                shape=experts.shape,
                modules=experts.modules,
                weights=chosen,
                group_size=groups,
                source_name=name or (source_name(folder) if is_local else os.fspath(source)),
                source_fingerprint=fingerprint,
                calibration=None if calibrator is None else calibrator.calibration,
                tables="" if tables == "exact" else tables,
            )
            in_bf16 = dataclasses.replace(plan, weights="bf16")
            folder_of_store = real_folder(destination)
            if (
                weights == "auto"
                and chosen == "bf12"
                and (is_begun(folder_of_store, in_bf16) or (not force and is_finished(folder_of_store, in_bf16)))
            ):
                plan = in_bf16  # bf12 had no room, or an earlier release made it
            pack = functools.partial(pack_from_checkpoint, experts, weights=plan.weights, group_size=groups)
            return write_store(
                destination,
                plan,
                pack if calibrator is None else calibrator.pack,
                _files_beside(experts, model, plan, max_file_bytes, key_mapping),
                force=force,
                workers=workers or (None if calibrator is None else 1),
                progress=progress,
                max_file_bytes=max_file_bytes,
                # Files of the hub are compared with its hashes.
                check_source=functools.partial(check_unchanged, folder, fingerprint, fingerprint_now)
                if shards is None
                else lambda: None,
                scratch=None if calibrator is None else calibrator.scratch,
                streaming=None if shards is None else Streaming(shards, experts.pieces),
            )

    try:
        return into("bf12")
    except NoRoomError as error:
        if weights != "auto":
            raise
        warnings.warn(f"{error}. So weights='auto' makes a store in bf16.", stacklevel=2)
    return into("bf16")


def _check_options(
    source: str | os.PathLike[str],
    destination: Path,
    weights: str,
    group_size: int | None,
    keep_original: bool,
    tables: str,
) -> None:
    if tables not in ("exact", *TABLE_FORMATS):
        raise ValueError(
            f"tables={tables!r} is unknown; it is one of {', '.join(map(repr, ('exact', *TABLE_FORMATS)))}."
        )
    if weights in ROUNDED_FORMATS:
        checked_group_size(weights, group_size)
    elif weights != "auto" and not is_passthrough(weights):
        raise ValueError(unknown_weights(weights, ("auto", *ROUNDED_FORMATS, *PASSTHROUGH_FORMATS)))
    check_group_size_applies(weights, group_size)
    is_local = os.path.exists(source)
    if is_local and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(destination)):
        raise ValueError(f"the store cannot replace its source {source}: choose another folder")
    if keep_original and is_local:
        raise ValueError(f"keep_original is for models of the hub, and {source} is on this machine: leave it out")


def _warn_of_unpooled(
    experts: CheckpointExperts, model: PreTrainedModel, key_mapping: Mapping[str, str] | None
) -> None:
    """Warn of experts of other shapes. Raises if they could not be read later."""
    if others := [layer for layer, _ in find_unpooled(experts.folder, model, key_mapping)]:
        records = f"The records are those of {experts.modules[0]} and its like"
        unpooled = f"Experts of other shapes stay as they are: {describe_unpooled(others)}"
        warnings.warn(f"{records}. {unpooled}.", stacklevel=4)


def _files_beside(
    experts: CheckpointExperts,
    model: PreTrainedModel,
    plan: StorePlan,
    max_file_bytes: int,
    key_mapping: Mapping[str, str] | None,
) -> list[NewFile]:
    tables = [table for _, table in tables_in_files(experts.folder, model, "auto", key_mapping)]
    if plan.tables and not tables:
        raise ValueError(
            f"tables={plan.tables!r}, and {experts.folder} has no embedding table that stays in files "
            "(docs/tables.md): leave it out."
        )
    rows = table_files(tables, plan.source_fingerprint, max_file_bytes, plan.tables)
    rest = rest_of_checkpoint(experts, model, tables, rows, codes_files(experts, model, max_file_bytes))
    return files_beside(rest, model, plan, max_file_bytes)


def streamed_bytes(folder: Path, weights: str, group_size: int | None = None) -> tuple[int, int]:
    """Bytes of the store that ``convert`` makes of a model of the hub, and the most that its weight files take beside
    it. ``folder`` needs headers alone.

    Raises as ``convert`` does.
    """
    model = meta_model(read_config(folder))
    experts = find_checkpoint_experts(folder, model)
    weights, groups = weights_of_checkpoint(experts, weights, group_size, exact="bf12")
    plan = StorePlan(experts.shape, experts.modules, weights, groups, source_name(folder), experts.fingerprint)
    files = _files_beside(experts, model, plan, MAX_FILE_BYTES, None)
    records = list(plan.shape.records())
    sizes = {header.path: header.file_bytes for header in experts.headers}
    store = len(records) * plan.record_bytes + sum(file.size for file in files)
    return store, peak_bytes(stages(sizes, experts.pieces, records, files), sizes)


def _check_calibrated_format(weights: str) -> None:
    if weights not in CALIBRATED_FORMATS:
        why = (
            "holds a checkpoint's codes as they are, and there is nothing to calibrate"
            if is_passthrough(weights)
            else "rounds little, and there is nothing to calibrate"
            if FORMATS[weights].holds_bf16
            else "cannot be calibrated yet"
        )
        allowed = ", ".join(map(repr, CALIBRATED_FORMATS))
        raise ValueError(f"weights={weights!r} {why}: give one of {allowed}, or convert without calibration.")


def _check_calibrated(experts: CheckpointExperts, weights: str, group_size: int) -> None:
    _check_calibrated_format(weights)
    if experts.kept is not None and experts.reads_as(weights, group_size):
        raise ValueError(
            f"{experts.folder} has {weights} codes in groups of {group_size}, which stay unchanged: convert it "
            "without calibration."
        )


def convert_model(
    model: torch.nn.Module,
    destination: str | os.PathLike[str],
    weights: str,
    group_size: int = 64,
    *,
    fingerprint: str | None = None,
    private: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the experts of a loaded model to a store of records only. ``private``: see ``write_store``.

    No other run can continue this. ``remove_made_from`` finds the store by its unique ``fingerprint``.
    """
    group_size = checked_group_size(weights, group_size)
    layers = find_experts(model)
    plan = plan_of_model(model, layers, weights, group_size, fingerprint)

    def pack(layer: int, expert: int) -> torch.Tensor:
        return pack_expert(layers[layer].expert(expert).on_cpu(), weights, group_size)

    return write_store(destination, plan, pack, private=private, progress=progress)


def plan_of_model(
    model: torch.nn.Module,
    layers: Sequence[ExpertsLayer],
    weights: str,
    group_size: int,
    fingerprint: str | None = None,
) -> StorePlan:
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
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Round the experts of a store once more, into a store of records only. ``force`` replaces another store.

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
        source_fingerprint=manifest.values_fingerprint,
    )

    def pack(layer: int, expert: int) -> torch.Tensor:
        return pack_expert(stored_expert(store, layer, expert), weights, group_size)

    return write_store(destination, plan, pack, force=force, progress=progress)


def weights_of_checkpoint(
    experts: CheckpointExperts, weights: str, group_size: int | None = None, stacklevel: int = 3, exact: str = "bf16"
) -> tuple[str, int]:
    """Resolve the format and group size for a checkpoint's experts; warns if 'auto' rounds, and if other groups round
    codes again. ``group_size`` applies to rounded formats; None is that of codes in the format, or else 64. ``exact``
    is the format that 'auto' takes for experts nearest to bf16: stores have bf12.

    Raises ``ValueError`` for unknown values, and for a format of codes that the checkpoint does not have.
    """
    own = experts.own_records
    if weights in ROUNDED_FORMATS and own is not None and own[0] == weights:
        if group_size is None:
            return own
        groups = checked_group_size(weights, group_size)
        if not experts.reads_as(weights, groups):
            warn_of_other_groups(experts.folder, own, groups, stacklevel + 1)
        return weights, groups
    if weights in ROUNDED_FORMATS:
        return weights, checked_group_size(weights, group_size)
    choice = experts.nearest()
    if weights not in ("auto", choice.weights):
        raise ValueError(
            f"weights={weights!r} holds the codes of a checkpoint unchanged, but {experts.folder} has "
            f"{experts.format} experts: give one of "
            f"{', '.join(map(repr, dict.fromkeys((choice.weights, *ROUNDED_FORMATS))))}, or 'auto'."
        )
    found = exact if choice.weights == "bf16" else choice.weights
    if experts.weights and (experts.kept is None or not choice.exact):
        nearest = describe_nearest(experts, found)
        warnings.warn(f"{experts.folder}: {nearest}. Name weights= for another format.", stacklevel=stacklevel)
    return found, choice.group_size


def warn_of_other_groups(source: Path, own: tuple[str, int], group_size: int, stacklevel: int) -> None:
    """Warn that experts in the format and groups ``own`` get other groups of the same format."""
    warnings.warn(
        f"{source}: its {own[0]} experts in groups of {own[1]} are rounded again, to groups of {group_size}. Leave "
        "group_size (--group-size) out to keep them as they are.",
        stacklevel=stacklevel,
    )


def describe_nearest(experts: CheckpointExperts, weights: str) -> str:
    """``weights`` is what 'auto' takes."""
    choice = experts.nearest()
    groups = f" in groups of {choice.group_size}" if choice.group_size else ""
    return f"weights='auto' converts {experts.format} experts to {short_name(weights)}{groups}, {choice.why}"


def fingerprint_of(source: Path, key_mapping: Mapping[str, str] | None = None) -> str:
    return checkpoint_fingerprint(checkpoint_files(source), find_quantization(source), key_mapping)


def check_unchanged(source: Path, fingerprint: str, fingerprint_now: Callable[[Path], str] = fingerprint_of) -> None:
    """Raises ``StoreError`` if the weights changed meanwhile: the result would mix two checkpoints."""
    try:
        now = fingerprint_now(source)
    except (StoreError, OSError) as problem:
        raise store_error(source, f"was changed while it was read ({problem}). Run the same again") from problem
    if now != fingerprint:
        raise store_error(
            source,
            "was changed while it was read, so that no store was made of it. Run the same again when it is complete",
        )


def source_name(source: Path) -> str:
    return source.stem if is_gguf(source) else source.resolve().name


def checked_group_size(weights: str, group_size: int | None) -> int:
    """The group size that a store of ``weights`` records: 0 for bf16 and bf12; None is 64. Raises ValueError for
    unknown values and formats that nothing is rounded to."""
    group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
    if is_passthrough(weights):
        raise ValueError(
            f"weights={weights!r} only holds the codes of a checkpoint that has them, and nothing is rounded to it: "
            f"give one of {', '.join(map(repr, ROUNDED_FORMATS))}."
        )
    if weights not in ROUNDED_FORMATS:
        raise ValueError(unknown_weights(weights, ROUNDED_FORMATS))
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size={group_size!r} is unknown; it is one of {', '.join(map(str, GROUP_SIZES))}.")
    return group_size if FORMATS[weights].chosen_groups else 0


def check_group_size_applies(weights: str, group_size: int | None) -> None:
    """Raises ValueError for a group size that ``weights`` does not take."""
    if group_size is not None and weights not in CALIBRATED_FORMATS:
        raise ValueError(
            f"group_size={group_size} (--group-size) has no effect with weights={weights!r}: leave it out, or give "
            f"weights= (--weights) {in_words(CALIBRATED_FORMATS, 'or')}."
        )


def unknown_weights(weights: str, known: Iterable[str]) -> str:
    return f"weights={weights!r} is unknown; it is one of {', '.join(map(repr, known))}."


def pack_expert(tensors: ExpertTensors, weights: str, group_size: int) -> torch.Tensor:
    """One expert's packed record, uint8 [record_bytes]. Raises ``NoRoomError``."""
    try:
        return torch.ops.torch_mesh.pack(*tensors, weights, group_size)
    except ValueError as error:
        if weights != "bf12":
            raise
        raise NoRoomError(str(error)) from error


def unpack_record(record: torch.Tensor, weights: str, group_size: int, layer: int, sizes: ExpertSizes) -> ExpertTensors:
    """One expert's values in fp32, of a record of that layer."""
    own, width = format_of_layer(weights, layer), sizes.intermediate
    # A record of another layer may be larger.
    record = record[: _C.record_bytes(own, group_size, *sizes)]
    gate_up, down, gate_up_bias, down_bias = torch.ops.torch_mesh.unpack(record, own, group_size, *sizes)
    gate, gate_bias = (rows[:width] if sizes.gated else None for rows in (gate_up, gate_up_bias))
    up, up_bias = (rows[-width:] for rows in (gate_up, gate_up_bias))
    return ExpertTensors(gate, up, down, *((gate_bias, up_bias, down_bias) if sizes.bias else (None, None, None)))


def pack_from_checkpoint(
    experts: CheckpointExperts, layer: int, expert: int, weights: str, group_size: int
) -> torch.Tensor:
    if experts.kept is not None and experts.reads_as(weights, group_size):
        return experts.pack_kept(layer, expert, group_size)
    return pack_expert(experts.read_expert(layer, expert), weights, group_size)


def stored_expert(store: Store, layer: int, expert: int) -> ExpertTensors:
    """One expert's values. Raises ``StoreError`` for a damaged record."""
    manifest, record = store.manifest, stored_record(store, layer, expert)
    return unpack_record(record, manifest.weights, manifest.group_size, layer, manifest.shape.sizes)


def stored_record(store: Store, layer: int, expert: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(read_record(store, layer, expert)), dtype=torch.uint8)


def with_all_layers(experts: CheckpointExperts) -> CheckpointExperts:
    """The experts of all layers of a checkpoint, of which the opened model may have fewer."""
    # Not the opened model, which may have another dtype too.
    model = meta_model(read_config(experts.folder))
    if len(experts.modules) == len(find_experts(model)):
        return experts
    return find_checkpoint_experts(experts.folder, model, experts.key_mapping)


def write_rest(
    experts: CheckpointExperts, fingerprint: str, folder: Path, progress: Progress | None = None
) -> list[Path]:
    """Write all but the experts of a quantized checkpoint to safetensors files in ``folder``, with an index, unless
    they exist. ``experts`` are those of all layers.

    Returns the files. ``fingerprint`` is the checkpoint's from before its headers were read. Raises ``StoreError`` for
    damaged files, a checkpoint that changed, and a full disk.
    """
    model = meta_model(read_config(experts.folder))
    files = dense_files(tensors_of(experts, model), MAX_FILE_BYTES)
    fingerprint_now = functools.partial(fingerprint_of, key_mapping=experts.key_mapping)
    write_folder(
        folder, files, progress, functools.partial(check_unchanged, experts.folder, fingerprint, fingerprint_now)
    )
    return weight_files(folder)
