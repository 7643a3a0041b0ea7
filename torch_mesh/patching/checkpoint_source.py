"""The experts of a checkpoint that ``from_pretrained`` opens: raw, quantized or converted."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from torch_mesh.config import MeshConfig
from torch_mesh.errors import NoRoomError, StoreError, UnsupportedModelError
from torch_mesh.formats import CALIBRATED_FORMATS, FORMATS, short_name
from torch_mesh.models.families import ExpertsLayer, Geometry, common_geometry, find_experts
from torch_mesh.modules.dense import CODES
from torch_mesh.patching.expert_source import RecordSource
from torch_mesh.pool.conversions import cached_conversion, refuse_mirrors, source_of_conversion
from torch_mesh.pool.secondary_pool import Records, other_config, packed_format
from torch_mesh.store.checkpoint import (
    CheckpointExperts,
    find_checkpoint_experts,
    find_quantization,
    meta_model,
    read_config,
)
from torch_mesh.store.convert import (
    checked_group_size,
    convert,
    convert_store,
    fingerprint_of,
    source_name,
    weights_of_checkpoint,
    with_all_layers,
    write_rest,
)
from torch_mesh.store.dense_codes import codes_of_checkpoint, codes_of_store, is_codes_file
from torch_mesh.store.disk_cache import note_use
from torch_mesh.store.folders import OtherStoreError, lock_of
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import store_error
from torch_mesh.store.manifest import MANIFEST_NAME, Manifest, Store, check_sizes, is_store, open_store, read_manifest
from torch_mesh.store.progress import progress_bar
from torch_mesh.store.sources import method_of, own_quantization
from torch_mesh.store.table_files import is_table_file
from torch_mesh.store.verify import check_other_files
from torch_mesh.store.weight_files import weight_files
from torch_mesh.store.writer import Written

_LOG = logging.getLogger(__name__)


class HubFiles(list[str]):
    """The paths of a checkpoint's files, with ``token=`` and the like to fetch further ones."""

    def __init__(self, files: Sequence[str], given: Mapping[str, Any]) -> None:
        super().__init__(files)
        self.arguments = {name: given.get(name) for name in ("token", "proxies")}
        self.arguments["local_files_only"] = given.get("local_files_only", False)


class CheckpointSource(RecordSource):
    """The experts of a checkpoint, raw, quantized or converted: see ``find_source``."""

    choice = ""  # why max_error chose their format; empty without it
    folder: Path  # the checkpoint's folder, or its GGUF file

    def __init__(
        self, layers: list[ExpertsLayer], config: MeshConfig, weights: str, group_size: int, **about: Any
    ) -> None:
        super().__init__(**about)
        self.weights, self.group_size = weights, group_size
        self._layers = layers
        self.config = config

    def prepare(self) -> None:
        """Find the records, or convert to them. Called after all checks that need no records."""
        raise NotImplementedError

    def _stored(self, make: Callable[..., Written], fingerprint: str, name: str, config: MeshConfig) -> Records:
        """The records of the store at ``config.store`` or in the cache, which ``make`` writes unless it exists."""
        weights, folder = _destination(fingerprint, name, config)
        aim = "" if weights == "auto" else f" to {short_name(weights)}"
        with progress_bar(f"Converting {name}{aim}") as progress:
            group_size = config.group_size if weights in CALIBRATED_FORMATS else None
            write = functools.partial(make, folder, weights, group_size, progress=progress)
            try:
                written = write()
            except OtherStoreError as problem:
                if config.store is not None:
                    raise
                # The cache names folders by their weights: this one is damaged, or of another config.json.
                written = self._as_it_is(Path(folder), config) or self._replaced(Path(folder), config, write, problem)
        if config.store is None:
            note_use(written.store.folder)
        how = "was there" if written.existed else "has been converted"
        _LOG.info("The experts of %s are read from %s, which %s.", name, folder, how)
        return _records_of(written.store, self._layers, config)

    def _as_it_is(self, folder: Path, config: MeshConfig) -> Written | None:
        """The store in ``folder``; None if it is damaged or lacks layers of the model."""
        try:
            store = open_store(folder)
            check_sizes(folder, store.manifest)
            _records_of(store, self._layers, config)
        except StoreError:
            return None
        return Written(store, existed=True)

    def _replaced(
        self, folder: Path, config: MeshConfig, write: Callable[..., Written], problem: OtherStoreError
    ) -> Written:
        """Replace the store in ``folder``, unless another process has done so meanwhile and may have opened it."""
        with lock_of(folder.with_name(f"{folder.name}.replacing"), problem):
            return self._as_it_is(folder, config) or write(force=True)


def _destination(fingerprint: str, name: str, config: MeshConfig) -> tuple[str, str | Path]:
    """The format of a conversion, and its folder: ``config.store`` or one in the cache."""
    if config.store is not None:
        return config.weights, config.store
    weights = packed_format(config.weights)  # the cache has no conversion of what can be read as it is
    source = source_of_conversion(fingerprint, weights, config.group_size)
    return weights, cached_conversion(f"{name}-{short_name(weights)}", source, weights)


class _RawSource(CheckpointSource):
    """Experts that are read from the checkpoint's own files if records can hold them, or else converted."""

    def __init__(
        self,
        experts: CheckpointExperts,
        model: PreTrainedModel,
        layers: list[ExpertsLayer],
        config: MeshConfig,
        weights: str,
        group_size: int,
    ) -> None:
        self._experts = experts
        self.folder = experts.folder
        self._name = os.path.basename(os.path.abspath(_name_of(model)))
        self._raw = experts.reads_as(weights, group_size) and config.store is None
        # A store does not record the checkpoint's dtype.
        from_bf16 = layers[0].dtype == torch.bfloat16 or (self._raw and experts.read_dtype == "bf16")
        super().__init__(layers, config, weights, group_size, exact=FORMATS[weights].holds_bf16 and from_bf16)

    def prepare(self) -> None:
        records = self._raw_records(self.weights, self.group_size) if self._raw else self._converted_as_chosen()
        self.set_records(records, self.config.mirrors)

    def _converted_as_chosen(self) -> Records:
        _, folder = _destination(self._experts.fingerprint, self._name, self.config)
        if not is_store(Path(folder)):  # the store is still to be made
            refuse_mirrors(self.folder, self.config.mirrors)
        try:
            return self._converted(self.config)
        except NoRoomError as error:
            if not self.choice:
                raise
            raise ValueError(
                f"{error}. max_error= chose {self.weights}: give weights= another format in place of max_error."
            ) from error

    def other_records(self, weights: str) -> Records:
        own = self._experts.own_records
        if own is not None and own[0] == weights:
            return self._raw_records(*own)
        return self._converted(other_config(self.config, weights))

    def check_other(self, weights: str) -> None:
        every, own = len(find_experts(meta_model(read_config(self.folder)))), len(self._layers)
        if every != own:
            raise StoreError(
                f"gpu.weights={weights!r} needs records beside the {self.weights} ones, and this model has {own} of "
                f"the {every} MoE layers of "
                f"{self.folder}: save it with save_pretrained and load that, or leave gpu.weights at 'auto'."
            )

    def _raw_records(self, weights: str, group_size: int) -> Records:
        dtype = self._experts.read_dtype
        if FORMATS[weights].holds_bf16 and dtype != "bf16" and self._layers[0].dtype != torch.bfloat16:
            warnings.warn(f"The experts of {self._experts.folder} are {dtype} and are rounded to bf16.", stacklevel=2)
        count = len(self._layers)
        return Records(weights, group_size, count, list(range(count)), self._experts.source_arguments(), store=None)

    def _converted(self, config: MeshConfig) -> Records:
        key_mapping = self._experts.key_mapping
        make = functools.partial(convert, self._experts.folder, name=self._name, key_mapping=key_mapping)
        return self._stored(make, self._experts.fingerprint, self._name, config)


class _QuantizedSource(_RawSource):
    """Experts of a checkpoint that another tool quantized. Replaces ``checkpoint_files``, from which transformers reads
    the rest of the model, by unquantized files."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        layers: list[ExpertsLayer],
        config: MeshConfig,
        checkpoint_files: list[str],
        key_mapping: Mapping[str, str] | None,
    ) -> None:
        self._fingerprint = fingerprint_of(folder, key_mapping)
        experts = find_checkpoint_experts(folder, model, key_mapping)
        self._files = checkpoint_files
        if config.weights == "auto" and config.store is not None:  # making the store warns of what 'auto' rounds
            nearest = experts.nearest()
            weights, group_size = nearest.weights, nearest.group_size
        else:
            weights, group_size = weights_of_checkpoint(experts, config.weights, config.given_group_size)
        if weights != packed_format(config.weights):  # with 'auto', conversion to a store decides between bf16 and bf12
            config = config.replace(weights=weights)
        if FORMATS[weights].chosen_groups:
            config = config.replace(group_size=group_size)
        super().__init__(experts, model, layers, config, weights, group_size)
        if is_gguf(folder):  # the folder may have several files
            self._name = source_name(folder)
            if config.dense == CODES:
                self.blocks = codes_of_checkpoint(experts, model)

    def prepare(self) -> None:
        super().prepare()
        store = self._records.store
        if store is not None:
            # Codes are read from the GGUF file itself.
            check_other_files(store, self.config.verify, codes=False, cached=self.config.store is None)
            self._files[:] = [str(path) for path in weight_files(store.folder)]
        elif self._experts.rest_is_quantized and (every := with_all_layers(self._experts)).rest_is_quantized:
            folder = cached_conversion(f"{self._name}-rest", self._fingerprint, "bf16")
            with progress_bar(f"Dequantizing the rest of {self._name}") as progress:
                self._files[:] = map(str, write_rest(every, self._fingerprint, folder, progress))
            note_use(folder)


class _StoreSource(CheckpointSource):
    """Experts of a converted folder. Without the originals, other formats are converted from its records."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        layers: list[ExpertsLayer],
        config: MeshConfig,
        checkpoint_files: HubFiles,
    ) -> None:
        self.folder = folder
        self._files = checkpoint_files
        self._fetch = functools.partial(_fetch, model, folder, checkpoint_files.arguments)
        self._fetch([MANIFEST_NAME])
        manifest = read_manifest(folder)
        _check_manifest(manifest, folder, layers, config)
        exact = FORMATS[manifest.weights].holds_bf16 and layers[0].dtype == torch.bfloat16
        super().__init__(
            layers, config, manifest.weights, manifest.group_size, exact=exact, only_format=manifest.weights
        )
        self.layers = manifest.shape.layers
        others = [file.name for file in manifest.other_files]
        self._rows = list(filter(is_table_file, others))
        if config.dense == CODES:
            self._fetch(list(filter(is_codes_file, others)))
            self.blocks = codes_of_store(folder, model)

    def prepare(self) -> None:
        records = [file.name for file in read_manifest(self.folder).record_files]
        self._fetch([*records, *self._rows])
        self._store = open_store(self.folder)
        check_other_files(self._store, self.config.verify, codes=self.blocks is not None, loaded=self._files)
        self.set_records(_records_of(self._store, self._layers, self.config), self.config.mirrors)

    def other_records(self, weights: str) -> Records:
        manifest = self._store.manifest
        name, make = self._store.folder.resolve().name, functools.partial(convert_store, self._store)
        return self._stored(make, manifest.values_fingerprint, name, other_config(self.config, weights))


def find_source(
    model: PreTrainedModel,
    layers: list[ExpertsLayer],
    checkpoint_files: HubFiles | None,
    config: MeshConfig,
    key_mapping: Mapping[str, str] | None,
) -> CheckpointSource:
    if checkpoint_files and is_gguf(checkpoint_files[0]):
        folder = Path(checkpoint_files[0])
    elif checkpoint_files and all(file.endswith(".safetensors") for file in checkpoint_files):
        folder = _folder_of(model, checkpoint_files)
        if _has_records(folder, model, key_mapping):
            if config.max_error is not None:
                raise ValueError(
                    f"max_error={config.max_error} chooses a format, but the experts in {folder} have one already: "
                    "leave max_error out, or give the checkpoint that it was converted from."
                )
            return _StoreSource(model, folder, layers, config, checkpoint_files)
        _check_files(folder, checkpoint_files)
    else:
        raise UnsupportedModelError(
            f"torch_mesh reads experts from safetensors and GGUF files; {_name_of(model)!r} has "
            f"{sorted(map(os.path.basename, checkpoint_files or [])) or 'no files'}. Save the model with "
            "save_pretrained first."
        )
    config, choice = _with_format(folder, config, key_mapping)
    source: CheckpointSource
    if find_quantization(folder) is not None:
        source = _QuantizedSource(model, folder, layers, config, checkpoint_files, key_mapping)
    else:
        experts, weights = find_checkpoint_experts(folder, model, key_mapping), packed_format(config.weights)
        group_size = checked_group_size(weights, config.group_size)
        source = _RawSource(experts, model, layers, config, weights, group_size)
    source.choice = choice
    return source


def _with_format(folder: Path, config: MeshConfig, key_mapping: Mapping[str, str] | None) -> tuple[MeshConfig, str]:
    """Return ``config`` with the format that ``max_error`` chooses, and the reason."""
    if config.max_error is None:
        return config, ""
    if key_mapping:
        raise ValueError(f"max_error={config.max_error} does not work with key_mapping=: give weights= a format.")
    from torch_mesh.planning.choosing import choose_format  # late: imports all of planning

    max_error = config.max_error
    config, why = choose_format(folder, config)
    _LOG.info("max_error=%s chose %s: %s", max_error, config.weights, why)
    return config, why


def _has_records(folder: Path, model: PreTrainedModel, key_mapping: Mapping[str, str] | None) -> bool:
    """Whether the experts are records of a store. A folder that was saved with the config of a patched model names a
    store, and may have ordinary experts."""
    if is_store(folder):
        return True
    quantization = own_quantization(folder)
    if not quantization or method_of(quantization) != "mesh":
        return False
    try:
        find_checkpoint_experts(folder, model, key_mapping)
    except StoreError:
        return True
    return False


def _folder_of(model: PreTrainedModel, checkpoint_files: Sequence[str]) -> Path:
    """The folder of a checkpoint: that of its files, or a parent whose index names them with their subfolders.

    Raises ``StoreError`` for an index with a path outside its folder, which transformers would follow.
    """
    files = [Path(file) for file in checkpoint_files]
    opened = Path(_name_of(model))
    root = opened if opened.is_dir() else _snapshot_of(files[0]) or files[0].parent
    for file in files:
        if not file.is_relative_to(root) or ".." in file.relative_to(root).parts:
            raise store_error(root, f"its index names {file}, outside of this folder: download the checkpoint again")
    below = len(files[0].parent.relative_to(root).parts)
    for folder in reversed(files[0].parents[: below + 1]):
        with contextlib.suppress(StoreError):
            if sorted(weight_files(folder)) == sorted(files):
                return folder
    return files[0].parent


def _check_files(folder: Path, checkpoint_files: Sequence[str]) -> None:
    """Raises UnsupportedModelError if torch_mesh would read the experts from other files than transformers the rest,
    as with ``variant=``."""
    files = [Path(file) for file in checkpoint_files]
    try:
        own = weight_files(folder)
    except StoreError as problem:
        raise UnsupportedModelError(f"transformers reads {_names(files)}; {problem}") from problem
    if sorted(own) != sorted(files):
        raise UnsupportedModelError(
            f"transformers reads {_names(files)} of {folder}, but torch_mesh reads {_names(own)}: leave variant= out, "
            "or put the variant's files into a folder of their own, with the config and the tokenizer."
        )


def _names(files: Sequence[Path]) -> str:
    return ", ".join(sorted(file.name for file in files))


def _records_of(store: Store, layers: list[ExpertsLayer], config: MeshConfig) -> Records:
    _check_manifest(store.manifest, store.folder, layers, config)
    return Records.of_store(store, [store.layer_of(layer.path) for layer in layers])


def _check_manifest(manifest: Manifest, folder: Path, layers: list[ExpertsLayer], config: MeshConfig) -> None:
    """Raises ValueError for a store that does not match ``config``, StoreError for one of another model."""
    manifest.check_format(folder, config.weights, config.group_size)
    shape, own = manifest.shape, common_geometry(layers)
    stored = Geometry(shape.experts, *shape.sizes, own.fused)
    if stored != own:
        raise StoreError(
            f"The experts in {folder} are {stored}, but the model's are {own}: open the store with its own config."
        )


def _fetch(model: PreTrainedModel, folder: Path, hub_arguments: Mapping[str, Any], names: Sequence[str]) -> None:
    """Download files that transformers does not know into the hub's cache."""
    name = _name_of(model)
    if not os.path.isdir(name):
        fetch_missing([folder / file for file in names], hub_arguments)


def fetch_missing(paths: Iterable[Path], hub_arguments: Mapping[str, Any]) -> None:
    """Download the files of ``paths`` that the hub's cache lacks. Outside of it, reading names missing files."""
    for path in paths:
        snapshot = _snapshot_of(path)
        if snapshot is None or path.is_file():
            continue
        model = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
        name = path.relative_to(snapshot).as_posix()
        cached_file(model, name, cache_dir=snapshot.parents[2], revision=snapshot.name, **hub_arguments)


def _snapshot_of(path: Path) -> Path | None:
    """The snapshot in the hub's cache that ``path`` is in, also in a folder of it."""
    of_cache = (folder for folder in path.parents if folder.parent.name == "snapshots")
    return next((folder for folder in of_cache if folder.parents[1].name.startswith("models--")), None)


def _name_of(model: PreTrainedModel) -> str:
    return model.config.name_or_path or ""
