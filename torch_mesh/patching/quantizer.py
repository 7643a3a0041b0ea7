"""``from_pretrained`` without materializing the experts, of raw, quantized and converted checkpoints."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as format_bytes
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import auto

from torch_mesh.config import MeshConfig
from torch_mesh.hf.compat import (
    FIND_FILES,
    clear_quantized,
    gguf_config_readers,
    ignore_unexpected,
    replace_gguf_tokenizers,
)
from torch_mesh.hf.expert_parallel import check_divisible, divide, expert_range_of, finish_forwards, prepare_forwards
from torch_mesh.hf.parallelism_checks import check_launch, expert_ranks
from torch_mesh.hf.saving import PatchedModelQuantizer
from torch_mesh.hf.streaming_save import keep_conversions
from torch_mesh.hf.wrapping import wrap
from torch_mesh.models.families import ExpertsLayer, find_experts
from torch_mesh.models.tables import TableLayer, embeddings, find_vocabularies
from torch_mesh.modules.dense import dense_bytes
from torch_mesh.modules.experts import DetachedParameters, PackedModule, patched_modules
from torch_mesh.patching.checkpoint_source import CheckpointSource, HubFiles, fetch_missing, find_source
from torch_mesh.patching.expert_source import TableSource, open_tables
from torch_mesh.patching.pipeline import assemble, check
from torch_mesh.patching.unpooled import load_tables, load_unpooled
from torch_mesh.pool.expert_pool import record_bytes
from torch_mesh.pool.row_tables import tables_memory, vocabulary_in_files
from torch_mesh.store.checkpoint import find_unpooled
from torch_mesh.store.dense_weights import WITHOUT_TORCH_MESH
from torch_mesh.store.gguf import gguf_files, is_gguf
from torch_mesh.store.gguf_families import FAMILIES
from torch_mesh.store.gguf_model import (
    ARCHITECTURES,
    READ_BY_FUNCTIONS,
    READ_BY_TABLES,
    complete_config,
    complete_table,
    config_table,
)
from torch_mesh.store.gguf_sizes import limit_layers
from torch_mesh.store.sources import method_of, source_of
from torch_mesh.store.tables import packed_tables, tables_in_files
from torch_mesh.system.memory import available_bytes


@auto.register_quantizer("mesh")
class MeshQuantizer(PatchedModelQuantizer):
    """Detach the experts' parameters while the rest of the model is loaded, then put the experts into a pool."""

    quantization_config: MeshConfig
    config_of_gguf: PretrainedConfig  # set if a GGUF file is loaded

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
        """The default dtype for a GGUF file, which names none (None), is bf16: its experts are computed in it."""
        return torch.bfloat16 if dtype is None else dtype

    def read_header(self, gguf_file: str) -> None:
        """transformers calls this for a GGUF file before it makes the model: complete the config."""
        complete_config(self.config_of_gguf, Path(gguf_file))
        if not gguf_file.endswith(".gguf") and self.config_of_gguf.dtype is None:
            # transformers does not recognize names in capitals, and would look for a dtype in the file.
            self.config_of_gguf.dtype = self.update_dtype(None)

    def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> None:
        """Return None: the source's checkpoint files are read, also for a GGUF file."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: HubFiles | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        check_launch()
        _clear_quantization_attributes(model)  # transformers would treat the checkpoint as quantized by another tool
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
        source = find_source(model, layers, checkpoint_files, self.quantization_config, key_mapping)
        if ranks > 1:
            layers = _divided(model, layers, source, ranks)
        check(model, layers, source.config, source)
        assert checkpoint_files
        named = [*checkpoint_files]
        source.prepare()
        of_rest = source.folder if checkpoint_files == named else Path(checkpoint_files[0]).parent
        unpooled = find_unpooled(of_rest, model, key_mapping)
        find_tables = functools.partial(tables_in_files, of_rest, model, source.config.tables, key_mapping)
        found = find_tables()
        if self._on_cpu and _is_short_of_memory(model, layers, source, [layer for layer, _ in found]):
            found = find_tables(vocabularies=True)
            _warn_of_vocabularies(model, [layer for layer, _ in found])
        if found:
            source.tables = TableSource(*zip(*found, strict=True))
        in_files = {layer.path for layer, _ in found}
        whole = [each for each in packed_tables(of_rest, model, embeddings(model)) if each[0].path not in in_files]
        unloaded: list[ExpertsLayer | TableLayer] = [*layers, *(layer for layer, _ in unpooled)]
        unloaded += [layer for layer, _ in (*found, *whole)]
        absent = [DetachedParameters(layer) for layer in unloaded]
        # The checkpoint's tensors of these modules are expected: the pool reads them. Their names lack the prefix if
        # the checkpoint was saved without the head.
        paths = {each.layer.path for each in absent}
        inner = {path.removeprefix(f"{model.base_model_prefix}.") for path in paths}
        expected = {rf"(^|\.){re.escape(path)}\." for path in paths}
        ignore_unexpected(model, expected | {rf"^{re.escape(path)}\." for path in inner})
        self._loading = layers, source, unpooled, whole, absent

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        layers, source, unpooled, whole, absent = self._loading
        del self._loading
        for each in absent:
            each.end()
        load_unpooled(model, unpooled)
        if whole:
            with contextlib.closing(open_tables([stored for _, stored in whole], source.config)) as reader:
                load_tables(model, [layer for layer, _ in whole], reader)
        _clear_quantization_attributes(model)
        tables = [] if source.tables is None else [*source.tables.layers]
        tables += [layer for layer, _ in whole]
        if source.expert_range is not None:
            finish_forwards(model, layers, [table.module for table in tables])
        keep_conversions(model, [*(layers if source.stored else ()), *tables])
        assemble(model, layers, source.config, source, self)
        if source.expert_range is not None:
            for module in model.modules():
                if isinstance(module, PackedModule):
                    module._mesh_of_rank = True
        next(patched_modules(model))._mesh_pool.choice = source.choice
        return model


def _divided(model: Any, layers: list[ExpertsLayer], source: CheckpointSource, ranks: int) -> list[ExpertsLayer]:
    """Leave this rank its part of the experts. A collective call."""
    if source.choice:
        raise ValueError("max_error= does not work with ranks: give weights= a format.")
    config = source.config
    check_divisible(
        model,
        layers,
        ranks,
        gpu_experts=config.gpu.experts,
        lossy_modes=config.lossy.modes,
        speculation=config.speculation,
    )
    source.expert_range = expert_range_of(ranks, layers)
    own = divide(model, layers, source.expert_range)
    prepare_forwards(model, own)
    return own


def _is_short_of_memory(
    model: PreTrainedModel, layers: list[ExpertsLayer], source: CheckpointSource, tables: Sequence[TableLayer]
) -> bool:
    """Whether the rows of the input embedding stay in files, beside ``tables``: where ``plan`` predicts it."""
    config, vocabularies = source.config, find_vocabularies(model)
    # Ranks would have to agree; processes with a shared pool share the page cache too.
    alone = source.expert_range is None and config.shared is None
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


def _clear_quantization_attributes(model: Any) -> None:
    """transformers refuses to train or move quantized models, but a patched model supports both."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            clear_quantized(module.config)
    vars(model).pop("quantization_method", None)
    model.is_quantized = False


def _config_of(given: Any) -> Any:
    """A ``quantization_config=``, of which a dict may stand for a MeshConfig."""
    is_ours = isinstance(given, dict) and given.get("quant_method") == "mesh"
    return MeshConfig.from_dict(given) if is_ours else given


def _with_gguf(find: Any, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> Any:
    """transformers' search for a quantizer, which accepts none with a GGUF file but its own."""
    given = _config_of(kwargs.get("quantization_config", args[1] if len(args) > 1 else None))
    if gguf_file is not None and not isinstance(given, MeshConfig):
        kwargs["gguf_file"] = gguf_file
    quantizer, config, device_map = find(*args, **kwargs)
    if isinstance(quantizer, MeshQuantizer):
        quantizer.config_of_gguf = config
    return quantizer, config, device_map


def _with_hub_arguments(find: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' search for a checkpoint's files, which gets ``token=`` and the like. Quantizers get its result
    only."""
    files, metadata = find(*args, **kwargs)
    if files is None or (kwargs.get("user_agent") or {}).get("quant") != "mesh":
        return files, metadata
    files = HubFiles(files, kwargs["download_kwargs"])
    if is_gguf(files[0]):
        fetch_missing(gguf_files(Path(files[0]), all_there=False), files.arguments)
    return files, metadata


def _with_key_mapping(
    find: Any, model: Any, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """transformers' search for conversions of names, which gets ``key_mapping=``. Quantizers get its result only."""
    if isinstance(hf_quantizer, MeshQuantizer):
        hf_quantizer.detach_experts(model, key_mapping)
    return find(model, key_mapping, hf_quantizer, *args, **kwargs)


def _merged(merge: Any, *args: Any) -> Any:
    """The quantization config of a checkpoint merged with a passed one, if either is torch_mesh's.

    ``args`` end with the two. transformers' class method gets the class before them; a function that another library
    has put in its place does not.
    """
    *owner, stored, given = args
    given = _config_of(given)
    table = stored if isinstance(stored, dict) else stored.to_dict()
    method = method_of(table)
    if isinstance(given, MeshConfig) and method != "mesh":
        source_of(table, "This checkpoint")  # raises for unsupported quantization
        return given
    if method == "mesh" and isinstance(stored, dict):
        stored = MeshConfig.of_checkpoint(stored)
    if not isinstance(given, MeshConfig):
        return merge(*owner, stored, given)
    with warnings.catch_warnings():
        # It says that the passed config is ignored, but fields of a MeshConfig are not.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        return merge(*owner, stored, given)


def _completed(read: Any) -> Any:
    """Wrap transformers' reader of a GGUF file's config, which makes a list of as many layers as the file states, and
    does not read all keys."""

    @functools.wraps(read)
    def completed(metadata: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        limit_layers(metadata, metadata["general.architecture"])
        return complete_table(read(metadata, *args, **kwargs), metadata)

    return completed


def _gguf_tokenizer(architecture: str, described: Mapping[str, Any], patterns: Mapping[str, str]) -> Any:
    """A byte-level tokenizer. None for other ones, and for architectures whose models are all or mostly dense."""
    if architecture not in {*ARCHITECTURES} - {"llama"} or described.get("tokenizer_type") != "gpt2":
        return None
    from torch_mesh.store.gguf_tokenizer import byte_level_tokenizer

    return byte_level_tokenizer(described, patterns)


auto.register_quantization_config("mesh")(MeshConfig)
# Without this, from_pretrained ignores the config that a user passes for a converted checkpoint, with a warning.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, MeshConfig)  # type: ignore[assignment]
# transformers calls these for every model. They pass models without a MeshConfig through.
wrap("transformers.quantizers.auto.AutoHfQuantizer", "merge_quantization_configs", _merged)
wrap("transformers.modeling_utils", "get_hf_quantizer", _with_gguf)
wrap("transformers.modeling_utils", FIND_FILES, _with_hub_arguments)
wrap("transformers.modeling_utils", "get_model_conversion_mapping", _with_key_mapping)
# transformers' readers omit sizes, do not check counts, and fail for gpt-oss: docs/decisions/0041. "llama" is left out,
# since transformers reads its dense models.
for _architecture in (*READ_BY_TABLES, *(name for name in FAMILIES if name != "llama")):
    gguf_config_readers().setdefault(_architecture, config_table)
replace_gguf_tokenizers(_gguf_tokenizer)
for _architecture in READ_BY_FUNCTIONS:
    if _architecture in gguf_config_readers():  # not up to transformers 5.17
        gguf_config_readers()[_architecture] = _completed(gguf_config_readers()[_architecture])
