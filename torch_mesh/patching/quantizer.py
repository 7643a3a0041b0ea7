"""``from_pretrained`` without materializing the experts, of raw, quantised and converted checkpoints."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as format_bytes
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import auto
from transformers.utils.hub import cached_file

from ..config import MeshConfig
from ..errors import NoRoomError, StoreError, UnsupportedModelError
from ..formats import FORMATS, short_name
from ..hf.compat import clear_quantized, gguf_config_readers, ignore_unexpected, wrap
from ..hf.expert_parallel import check_divisible, divide, finish_forwards, prepare_forwards, share_of
from ..hf.parallelism_checks import check_launch, expert_ranks
from ..hf.saving import PatchedModelQuantizer
from ..hf.streaming_save import keep_conversions
from ..models.families import ExpertsLayer, Geometry, common_geometry, find_experts
from ..models.tables import TableLayer, embeddings, find_vocabularies
from ..modules.dense import CODES, dense_bytes
from ..modules.experts import DetachedParameters, PackedModule, patched_modules
from ..pool.expert_pool import record_bytes
from ..pool.row_tables import tables_memory, vocabulary_in_files
from ..pool.secondary_pool import Records, other_config, packed_format
from ..store.checkpoint import (
    CheckpointExperts,
    find_checkpoint_experts,
    find_left_alone,
    find_quantisation,
    meta_model,
    read_config,
)
from ..store.convert import (
    checked_group_size,
    convert,
    convert_store,
    fingerprint_of,
    source_name,
    weights_of_checkpoint,
    write_rest,
)
from ..store.dense_codes import codes_of_checkpoint, codes_of_store, is_codes_file
from ..store.dense_weights import WITHOUT_TORCH_MESH
from ..store.disk_cache import cache_folder, note_use
from ..store.gguf import gguf_files, is_gguf
from ..store.gguf_families import FAMILIES
from ..store.gguf_model import READ_BY_FUNCTIONS, READ_BY_TABLES, complete_config, config_table
from ..store.gguf_sizes import limit_layers
from ..store.header import store_error, weight_files
from ..store.manifest import MANIFEST_NAME, Manifest, Store, is_store, open_store, read_manifest
from ..store.progress import progress_bar
from ..store.sources import method_of, own_quantisation, source_of
from ..store.table_files import is_table_file
from ..store.tables import packed_tables, tables_in_files
from ..store.verify import check_other_files
from ..store.writer import Written
from ..system.memory import available_bytes
from .expert_source import RecordSource, TableSource, open_tables
from .pipeline import assemble, check
from .unpooled import load_left_alone, load_tables

_LOG = logging.getLogger(__name__)


@auto.register_quantizer("mesh")
class MeshQuantizer(PatchedModelQuantizer):
    """Detach the experts' parameters while the rest of the model is loaded, then put the experts into a pool."""

    quantization_config: MeshConfig
    config_of_gguf: PretrainedConfig  # where a GGUF file is loaded

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """transformers calls this before it looks for files: remove the entry that stops it without torch_mesh."""
        if getattr(config, "transformers_weights", None) == WITHOUT_TORCH_MESH:
            del config.transformers_weights
        for part in vars(config).values():
            if isinstance(part, PretrainedConfig):
                self.update_attn_implementation(part)
        return config

    update_tp_plan = update_attn_implementation  # up to transformers 5.19, which does not call the other

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of a GGUF file, which names none (None), is bf16, in which its experts are computed."""
        return torch.bfloat16 if dtype is None else dtype

    def read_header(self, gguf_file: str) -> None:
        """transformers calls this for a GGUF file before it makes the model: complete the config."""
        _fetch_parts(Path(gguf_file))
        complete_config(self.config_of_gguf, Path(gguf_file))
        if not gguf_file.endswith(".gguf") and self.config_of_gguf.dtype is None:
            # transformers does not recognize names in capitals, and would look for a dtype in the file.
            self.config_of_gguf.dtype = self.update_dtype(None)

    def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> None:
        """Nothing: also for a GGUF file, the checkpoint files of the source are read."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        check_launch()
        _forget_quantization(model)  # transformers would treat the checkpoint as quantised by another tool
        self._checkpoint_files = checkpoint_files
        if isinstance(device_map, str):  # such as "auto", which transformers resolves later
            self._on_cpu = not torch.cuda.is_available()
        else:
            self._on_cpu = {str(device) for device in (device_map or {"": "cpu"}).values()} == {"cpu"}

    def detach_experts(self, model: PreTrainedModel, key_mapping: Mapping[str, str] | None) -> None:
        """Find the experts and detach their parameters, before transformers reads the first tensor of ``model``."""
        checkpoint_files = self._checkpoint_files
        del self._checkpoint_files
        ranks = expert_ranks(model)
        layers = find_experts(model)
        source = _find_source(model, layers, checkpoint_files, self.quantization_config, key_mapping)
        if ranks > 1 and source.choice:
            raise ValueError("max_error= does not work with ranks: give weights= a format.")
        if ranks > 1:
            config = source.config
            check_divisible(
                model,
                layers,
                ranks,
                gpu_experts=config.gpu.experts,
                lossy_modes=config.lossy.modes,
                speculation=config.speculation,
            )
            source.share = share_of(ranks, layers)
            layers = divide(model, layers, source.share)
            prepare_forwards(model, layers)
        check(model, layers, source.config, source)
        assert checkpoint_files
        named = [*checkpoint_files]
        source.prepare()
        of_rest = source.folder if checkpoint_files == named else Path(checkpoint_files[0]).parent
        left_alone = find_left_alone(of_rest, model, key_mapping)
        found = tables_in_files(of_rest, model, source.config.tables, key_mapping)
        if self._on_cpu and _is_short_of_memory(model, layers, source, [layer for layer, _ in found]):
            found = tables_in_files(of_rest, model, source.config.tables, key_mapping, vocabularies=True)
            _warn_of_vocabularies(model, [layer for layer, _ in found])
        if found:
            source.tables = TableSource(*zip(*found, strict=True))
        tables = [layer for layer, _ in found]
        paths = {layer.path for layer in tables}
        whole = [each for each in packed_tables(of_rest, embeddings(model)) if each[0].path not in paths]
        unloaded: list[ExpertsLayer | TableLayer] = [*layers, *tables, *(layer for layer, _ in left_alone)]
        unloaded += [layer for layer, _ in whole]
        absent = [DetachedParameters(layer) for layer in unloaded]
        # The checkpoint's tensors of these modules are expected: the pool reads them.
        ignore_unexpected(model, {rf"(^|\.){re.escape(each.layer.path)}\." for each in absent})
        self._loading = layers, source, left_alone, whole, absent

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        layers, source, left_alone, whole, absent = self._loading
        del self._loading
        for each in absent:
            each.end()
        load_left_alone(model, left_alone)
        if whole:
            with contextlib.closing(open_tables([stored for _, stored in whole], source.config)) as reader:
                load_tables([layer for layer, _ in whole], reader)
        _forget_quantization(model)
        tables = [] if source.tables is None else [*source.tables.layers]
        tables += [layer for layer, _ in whole]
        if source.share is not None:
            finish_forwards(model, layers, [table.module for table in tables])
        keep_conversions(model, [*(layers if source.stored else ()), *tables])
        assemble(model, layers, source.config, source, self)
        if source.share is not None:
            for module in model.modules():
                if isinstance(module, PackedModule):
                    module._mesh_of_rank = True
        next(patched_modules(model))._mesh_pool.choice = source.choice
        return model


def _name_of(model: PreTrainedModel) -> str:
    return model.config.name_or_path or ""


def _is_short_of_memory(
    model: PreTrainedModel, layers: list[ExpertsLayer], source: _CheckpointSource, tables: Sequence[TableLayer]
) -> bool:
    """Whether the rows of the input embedding stay in files, beside ``tables``: where ``plan`` predicts it."""
    config, vocabularies = source.config, find_vocabularies(model)
    # Ranks would have to agree; processes with a shared pool share the page cache too.
    alone = source.share is None and config.shared is None
    if not (config.chooses_tables and vocabularies and alone):
        return False
    try:
        available = available_bytes()
    except OSError:
        return False
    elsewhere = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    elsewhere |= {id(table.weight) for table in (*tables, *vocabularies)}
    freed, taken = dense_bytes(
        model, layers, dense=config.dense, group_size=config.group_size, blocks=source.blocks, loaded=False
    )
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in elsewhere)
    others += taken - freed + config.workspace_bytes + source.staging
    others += tables_memory([table.nbytes for table in tables], config.table_cache_bytes)
    experts = source.counted * layers[0].num_experts * record_bytes(layers, source.weights, source.group_size)
    return vocabulary_in_files(sum(each.nbytes for each in vocabularies), experts, available - others)


def _warn_of_vocabularies(model: PreTrainedModel, tables: Sequence[TableLayer]) -> None:
    paths = {table.path for table in find_vocabularies(model)}
    taken = [f"{table.path} ({format_bytes(table.nbytes)})" for table in tables if table.path in paths]
    if taken:
        warnings.warn(
            f"Memory is short, so {' and '.join(taken)} stays in the checkpoint's files, and is frozen: its rows are "
            "read when they are looked up. With tables='off', or with names of other tables, it is in memory.",
            stacklevel=2,
        )


def _forget_quantization(model: Any) -> None:
    """transformers refuses to train or move quantised models, but a patched model supports both."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            clear_quantized(module.config)
    vars(model).pop("quantization_method", None)
    model.is_quantized = False


class _CheckpointSource(RecordSource):
    choice = ""  # why max_error chose their format; empty without it
    folder: Path  # of the checkpoint, or its GGUF file

    def __init__(
        self, layers: list[ExpertsLayer], config: MeshConfig, weights: str, group_size: int, **about: Any
    ) -> None:
        super().__init__(**about)
        self.weights, self.group_size = weights, group_size
        self._layers = layers
        self.config = config

    def prepare(self) -> None:
        """Find the records, or convert to them: after all checks that need none."""
        raise NotImplementedError

    def _made(self, make: Callable[..., Written], fingerprint: str, name: str, config: MeshConfig) -> Records:
        """The records of a store that ``make`` writes by ``config``, unless the cache has it."""
        # The cache has no conversion of what can be read as it is.
        weights = config.weights if config.store is not None else packed_format(config.weights)
        folder = config.store or _cached(
            f"{name}-{short_name(weights)}", f"{fingerprint} {weights} {config.group_size}", weights
        )
        aim = "" if weights == "auto" else f" to {short_name(weights)}"
        with progress_bar(f"Converting {name}{aim}") as progress:
            written = make(folder, weights, config.group_size, progress=progress)
        if config.store is None:
            note_use(written.store.folder)
        how = "was there" if written.existed else "has been converted"
        _LOG.info("The experts of %s are read from %s, which %s.", name, folder, how)
        return _records_of(written.store, self._layers, config)


def _cached(name: str, source: str, weights: str) -> Path:
    """The folder in the cache for a conversion of ``source``."""
    digest = hashlib.blake2b(f"{FORMATS[weights].version} {source}".encode(), digest_size=8).hexdigest()
    return cache_folder() / "stores" / f"{name}-{digest}"


class _OfCheckpoint(_CheckpointSource):
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
        self._name = os.path.basename(os.path.normpath(_name_of(model)))
        self._raw = experts.reads_as(weights, group_size) and config.store is None
        # A store does not record the checkpoint's dtype.
        from_bf16 = layers[0].dtype == torch.bfloat16 or (self._raw and self._experts.dtype == "bf16")
        super().__init__(layers, config, weights, group_size, exact=FORMATS[weights].holds_bf16 and from_bf16)

    def prepare(self) -> None:
        self.set_records(self._as_they_are(self.weights, self.group_size) if self._raw else self._converted_as_chosen())

    def _converted_as_chosen(self) -> Records:
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
            return self._as_they_are(*own)
        return self._converted(other_config(self.config, weights))

    def check_other(self, weights: str) -> None:
        every, own = len(find_experts(meta_model(read_config(self.folder)))), len(self._layers)
        if every != own:
            raise StoreError(
                f"gpu.weights={weights!r} needs records beside the {self.weights} ones, and this model has {own} of "
                f"the {every} MoE layers of "
                f"{self.folder}: save it with save_pretrained and load that, or leave gpu.weights at 'auto'."
            )

    def _as_they_are(self, weights: str, group_size: int) -> Records:
        if FORMATS[weights].holds_bf16 and self._experts.dtype != "bf16" and self._layers[0].dtype != torch.bfloat16:
            warnings.warn(
                f"The experts of {self._experts.folder} are {self._experts.dtype} and are rounded to bf16.",
                stacklevel=2,
            )
        count = len(self._layers)
        return Records(weights, group_size, count, list(range(count)), self._experts.source_arguments(), store=None)

    def _converted(self, config: MeshConfig) -> Records:
        key_mapping = self._experts.key_mapping
        make = functools.partial(convert, self._experts.folder, name=self._name, key_mapping=key_mapping)
        return self._made(make, self._experts.fingerprint, self._name, config)


class _OfQuantised(_OfCheckpoint):
    """Experts of a checkpoint that another tool quantised. Replaces ``checkpoint_files``, from which transformers reads
    the rest of the model, by unquantised files."""

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
        weights, group_size = weights_of_checkpoint(experts, config.weights, config.group_size)
        config = config.replace(weights=weights)
        if FORMATS[weights].chosen_groups:
            config = config.replace(group_size=group_size)
        super().__init__(experts, model, layers, config, weights, group_size)
        if is_gguf(folder):  # its folder may have several
            self._name = source_name(folder)
            if config.dense == CODES:
                self.blocks = codes_of_checkpoint(experts, model)

    def prepare(self) -> None:
        super().prepare()
        store = self._records.store
        if store is not None:
            check_other_files(store, self.config.verify, codes=False)  # which are read from the file itself
            self._files[:] = [str(path) for path in weight_files(store.folder)]
        elif self._experts.rest_is_quantised:
            folder = _cached(f"{self._name}-rest", self._fingerprint, "bf16")
            with progress_bar(f"Dequantising the rest of {self._name}") as progress:
                self._files[:] = map(str, write_rest(self._experts, self._fingerprint, folder, progress))
            note_use(folder)


class _OfStore(_CheckpointSource):
    """Experts of a converted folder. Without the originals, other formats are converted from its records."""

    def __init__(self, model: PreTrainedModel, folder: Path, layers: list[ExpertsLayer], config: MeshConfig) -> None:
        self._model = model
        self.folder = folder
        _fetch(model, folder, [MANIFEST_NAME])
        manifest = read_manifest(folder)
        _check_manifest(manifest, folder, layers, config)
        exact = FORMATS[manifest.weights].holds_bf16 and layers[0].dtype == torch.bfloat16
        super().__init__(
            layers, config, manifest.weights, manifest.group_size, exact=exact, only_format=manifest.weights
        )
        others = [file.name for file in manifest.other_files]
        self._rows = list(filter(is_table_file, others))
        if config.dense == CODES:
            _fetch(model, folder, list(filter(is_codes_file, others)))
            self.blocks = codes_of_store(folder, model)

    def prepare(self) -> None:
        records = [file.name for file in read_manifest(self.folder).record_files]
        _fetch(self._model, self.folder, [*records, *self._rows])
        self._store = open_store(self.folder)
        check_other_files(self._store, self.config.verify, codes=self.blocks is not None)
        self.set_records(_records_of(self._store, self._layers, self.config))

    def other_records(self, weights: str) -> Records:
        manifest = self._store.manifest
        name, make = self._store.folder.resolve().name, functools.partial(convert_store, self._store)
        return self._made(make, manifest.values_fingerprint, name, other_config(self.config, weights))


def _find_source(
    model: PreTrainedModel,
    layers: list[ExpertsLayer],
    checkpoint_files: list[str] | None,
    config: MeshConfig,
    key_mapping: Mapping[str, str] | None,
) -> _CheckpointSource:
    if checkpoint_files and is_gguf(checkpoint_files[0]):
        file = Path(checkpoint_files[0])
        config, choice = _with_format(file, config, key_mapping)
        return _chosen(_OfQuantised(model, file, layers, config, checkpoint_files, key_mapping), choice)
    if not checkpoint_files or not all(file.endswith(".safetensors") for file in checkpoint_files):
        raise UnsupportedModelError(
            f"torch_mesh reads experts from safetensors and GGUF files; {_name_of(model)!r} has "
            f"{sorted(map(os.path.basename, checkpoint_files or [])) or 'no files'}. Save the model with "
            "save_pretrained first."
        )
    folder = _folder_of(model, checkpoint_files)
    stored = own_quantisation(folder)
    if is_store(folder) or (
        stored and method_of(stored) == "mesh" and not _has_expert_weights(folder, model, key_mapping)
    ):
        if config.max_error is not None:
            raise ValueError(
                f"max_error={config.max_error} chooses a format, but the experts in {folder} have one already: leave "
                "max_error out, or give the checkpoint that it was converted from."
            )
        return _OfStore(model, folder, layers, config)
    _check_files(folder, checkpoint_files)
    config, choice = _with_format(folder, config, key_mapping)
    if find_quantisation(folder) is not None:
        return _chosen(_OfQuantised(model, folder, layers, config, checkpoint_files, key_mapping), choice)
    experts, weights = find_checkpoint_experts(folder, model, key_mapping), packed_format(config.weights)
    group_size = checked_group_size(weights, config.group_size)
    return _chosen(_OfCheckpoint(experts, model, layers, config, weights, group_size), choice)


def _with_format(folder: Path, config: MeshConfig, key_mapping: Mapping[str, str] | None) -> tuple[MeshConfig, str]:
    """Return ``config`` with the format that ``max_error`` chooses, and the reason."""
    if config.max_error is None:
        return config, ""
    if key_mapping:
        raise ValueError(f"max_error={config.max_error} does not work with key_mapping=: give weights= a format.")
    from ..planning.choosing import choose_format  # late: imports all of planning

    max_error = config.max_error
    config, why = choose_format(folder, config)
    _LOG.info("max_error=%s chose %s: %s", max_error, config.weights, why)
    return config, why


def _chosen(source: _CheckpointSource, choice: str) -> _CheckpointSource:
    source.choice = choice
    return source


def _has_expert_weights(folder: Path, model: PreTrainedModel, key_mapping: Mapping[str, str] | None) -> bool:
    """Whether the folder has ordinary experts, although its config names records: it was saved with the config of a
    patched model."""
    try:
        find_checkpoint_experts(folder, model, key_mapping)
    except StoreError:
        return False
    return True


def _folder_of(model: PreTrainedModel, checkpoint_files: Sequence[str]) -> Path:
    """The folder of a checkpoint: that of its files, or a parent whose index names them with their subfolders.

    Raises ``StoreError`` for an index with a path outside its folder, which transformers would follow.
    """
    files = [Path(file) for file in checkpoint_files]
    opened = Path(_name_of(model))
    snapshot = next((folder for folder in files[0].parents if folder.parent.name == "snapshots"), files[0].parent)
    root = opened if opened.is_dir() else snapshot
    for file in files:
        if not file.is_relative_to(root) or ".." in file.relative_to(root).parts:
            raise store_error(root, f"its index names {file}, outside of this folder: download the checkpoint again")
    below = len(files[0].parent.relative_to(root).parts)
    for folder in (*reversed(files[0].parents[: below + 1]),):
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
    manifest.check_weights(folder, config.weights)
    if FORMATS[manifest.weights].chosen_groups and config.group_size != manifest.group_size:
        raise ValueError(
            f"group_size={config.group_size}, but the experts in {folder} have groups of {manifest.group_size}: leave "
            "group_size out, or give the original checkpoint."
        )
    shape, own = manifest.shape, common_geometry(layers)
    stored = Geometry(shape.experts, *shape.sizes, own.fused)
    if stored != own:
        raise StoreError(
            f"The experts in {folder} are {stored}, but the model's are {own}: open the store with its own config."
        )


def _fetch(model: PreTrainedModel, folder: Path, names: Sequence[str]) -> None:
    """Download files that transformers does not know into the hub's cache."""
    name = _name_of(model)
    missing = [] if os.path.isdir(name) else [file for file in names if not (folder / file).is_file()]
    for file in missing:
        cached_file(name, file, cache_dir=folder.parents[2], revision=folder.name)


def _fetch_parts(path: Path) -> None:
    """Download the other parts of a split GGUF model into the hub's cache, which has the first."""
    snapshot = next((folder for folder in path.parents if folder.parent.name == "snapshots"), None)
    if snapshot is None:
        return  # reading names missing parts
    model = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
    for part in gguf_files(path, all_there=False):
        if not part.is_file():
            name = part.relative_to(snapshot).as_posix()
            cached_file(model, name, cache_dir=snapshot.parents[2], revision=snapshot.name)


def _with_gguf(find: Any) -> Any:
    """Wrap transformers' search for a quantizer, which accepts none with a GGUF file but its own."""

    @functools.wraps(find)
    def found(*args: Any, gguf_file: str | None = None, **kwargs: Any) -> Any:
        given = kwargs.get("quantization_config", args[1] if len(args) > 1 else None)
        if isinstance(given, dict) and given.get("quant_method") == "mesh":
            given = MeshConfig.from_dict(given)
        if gguf_file is not None and not isinstance(given, MeshConfig):
            kwargs["gguf_file"] = gguf_file
        quantizer, config, device_map = find(*args, **kwargs)
        if isinstance(quantizer, MeshQuantizer):
            quantizer.config_of_gguf = config
        return quantizer, config, device_map

    return found


def _with_key_mapping(find: Any) -> Any:
    """Wrap transformers' search for conversions of names, which gets ``key_mapping=``. Quantizers get its result
    only."""

    @functools.wraps(find)
    def found(model: Any, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(hf_quantizer, MeshQuantizer):
            hf_quantizer.detach_experts(model, key_mapping)
        return find(model, key_mapping, hf_quantizer, *args, **kwargs)

    return found


def _merging(theirs: Any) -> Any:
    """Wrap how transformers merges the quantisation config of a checkpoint with a passed one, if either is
    torch_mesh's.

    ``theirs``: the attribute of the class: its own method or an earlier wrapper.
    """

    @functools.wraps(getattr(theirs, "__func__", theirs))
    def merged(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        merge = theirs.__get__(None, cls)
        stored, given = quantization_config, quantization_config_from_args
        table = stored if isinstance(stored, dict) else stored.to_dict()
        method = method_of(table)
        if isinstance(given, dict) and given.get("quant_method") == "mesh":
            given = MeshConfig.from_dict(given)
        if isinstance(given, MeshConfig) and method != "mesh":
            source_of(table, "This checkpoint")  # raises for unsupported quantisation
            return given
        if method == "mesh" and isinstance(stored, dict):
            stored = MeshConfig.of_checkpoint(stored)
        if not isinstance(given, MeshConfig):
            return merge(stored, given)
        with warnings.catch_warnings():
            # It says that the passed config is ignored, but fields of a MeshConfig are not.
            warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
            return merge(stored, given)

    return classmethod(merged)


def _with_few_layers(read: Any) -> Any:
    """Wrap transformers' reader of a GGUF file's config, which makes a list of as many layers as the file states."""

    @functools.wraps(read)
    def limited(metadata: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        limit_layers(metadata, metadata["general.architecture"])
        config: dict[str, Any] = read(metadata, *args, **kwargs)
        return config

    return limited


# transformers calls these for every model. They pass models without a MeshConfig through.
wrap("transformers.quantizers.auto.AutoHfQuantizer", "merge_quantization_configs", _merging)
wrap("transformers.modeling_utils", "get_hf_quantizer", _with_gguf)
wrap("transformers.modeling_utils", "get_model_conversion_mapping", _with_key_mapping)
# transformers' readers omit sizes, do not check counts, and fail for gpt-oss: docs/decisions/0041. "llama" is left out,
# since transformers reads its dense models.
for _architecture in (*READ_BY_TABLES, *(name for name in FAMILIES if name != "llama")):
    gguf_config_readers().setdefault(_architecture, config_table)
for _architecture in READ_BY_FUNCTIONS:
    if _architecture in gguf_config_readers():  # not up to transformers 5.17
        gguf_config_readers()[_architecture] = _with_few_layers(gguf_config_readers()[_architecture])
