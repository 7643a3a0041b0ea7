"""``from_pretrained`` with experts that are never materialised, from raw checkpoints and from converted ones."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import auto
from transformers.utils.hub import cached_file

from . import _C
from .attention import check_attention
from .cache import cache_folder
from .config import MeshConfig
from .dense import pack_dense
from .errors import StoreError, UnsupportedModelError
from .fallback import check_fallback, split_pool
from .families import ExpertsLayer, Geometry, common_geometry, find_experts
from .gpu import Placement, check_gpu_weights, choose_experts, gpu_pool_bytes, open_gpu_pool
from .left_alone import LeftAlone
from .lookahead import check_predictor, connect
from .lossy import check_lossy
from .modules import install, put_back, take_parameters
from .other_format import Records, open_other, other_config
from .patching import finish
from .pool import ExpertPool, least_slots, pool_slots
from .profiles import check_profile
from .saving import PatchedModelQuantizer
from .shards import keep_expert_conversions
from .store.checkpoint import (
    CheckpointExperts,
    find_checkpoint_experts,
    find_quantisation,
    meta_model,
    read_config,
)
from .store.convert import WITHOUT_TORCH_MESH, convert, convert_store, nearest_weights
from .store.header import weight_files
from .store.manifest import FORMAT_VERSIONS, MANIFEST_NAME, Store, is_store, open_store, read_manifest
from .store.progress import progress_bar
from .store.sources import method_of, own_quantisation, source_of
from .store.verify import check_other_files
from .undivided import check_forwards, check_launch, check_undivided


@dataclass(frozen=True)
class _Records(Records):
    """Of the model that is being loaded."""

    source_is_bf16: bool
    in_format: Callable[[str], Records]  # makes, or finds, records of the same experts in another format
    checkpoint: Path | None  # that those come from, of which the model may be a part

    def of_gpu(self, weights: str) -> Records:
        """Raises StoreError for a model with fewer layers than its checkpoint, before anything is made."""
        if self.checkpoint is not None:
            every, own = len(find_experts(meta_model(read_config(self.checkpoint)))), len(self.places)
            if every != own:
                raise StoreError(
                    f"gpu_weights={weights!r} needs records beside the {self.weights} ones, and this model has {own} of the {every} MoE layers of "
                    f"{self.checkpoint}: save it with save_pretrained and load that, or leave gpu_weights at 'auto'."
                )
        return self.in_format(weights)


@auto.register_quantizer("mesh")
class MeshQuantizer(PatchedModelQuantizer):
    """Keeps expert parameters out of the loading, and puts a pool in their place when the rest is loaded."""

    quantization_config: MeshConfig

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """transformers shows the config here before it looks for files: what stops it without torch_mesh has to go."""
        if getattr(config, "transformers_weights", None) == WITHOUT_TORCH_MESH:
            del config.transformers_weights
        for part in vars(config).values():
            if isinstance(part, PretrainedConfig):
                self.update_attn_implementation(part)
        return config

    update_tp_plan = update_attn_implementation  # up to transformers 5.19, which does not call the other

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        check_launch()
        check_undivided(model)
        _forget_quantization(model)  # or the checkpoint would pass for one that another tool has quantised
        layers = find_experts(model)
        check_attention(model, self.quantization_config)
        check_predictor(layers, self.quantization_config)
        check_profile(self.quantization_config, layers)
        check_lossy(model, layers, self.quantization_config)
        self._records = _find_records(model, layers, checkpoint_files, self.quantization_config)
        self._layers = layers
        assert checkpoint_files
        self._left_alone = LeftAlone(Path(checkpoint_files[0]).parent, model)
        self._taken = [*layers, *self._left_alone.layers]
        self._parameters = [take_parameters(layer.module, layer.parameter_names) for layer in self._taken]
        for layer in self._taken:
            vars(layer.module).update(_is_hf_initialized=True, **dict.fromkeys(layer.parameter_names, _initialized()))
        # The checkpoint's tensors of these modules are not missing an owner: the pool reads them.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *(rf"(^|\.){re.escape(x.path)}\." for x in self._taken)}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        layers, records, config = self._layers, self._records, self.quantization_config
        check_forwards(layers)
        for layer, parameters in zip(self._taken, self._parameters, strict=True):
            for name in layer.parameter_names:
                del vars(layer.module)[name]
            put_back(layer.module, parameters)
        self._left_alone.load(model)
        del self._layers, self._left_alone, self._taken, self._parameters, self._records
        pack_dense(model, layers, config)  # before the pool, which takes what memory is left
        placement = choose_experts(
            model, layers, config, records.weights, records.group_size, records.layers, records.places
        )
        for_pool = placement.adjusted(config)
        others = records.of_gpu(placement.weights) if placement.needs_pool(records.weights) else None
        pool = _open_pool(layers, records, for_pool, placement)
        gpu_pool = None if others is None else open_gpu_pool(layers, config, others)
        for layer, place in zip(layers, records.places, strict=True):
            install(layer, pool, place)
        connect(model, layers, config)
        _forget_quantization(model)
        finish(model, layers, config, pool, placement, gpu_pool, self)
        if records.store is not None:
            keep_expert_conversions(model, layers)
        return model


def _initialized() -> torch.Tensor:
    """In the place of a parameter that is out of its module: of some families the module around initialises it."""
    tensor = torch.empty(0)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def _forget_quantization(model: Any) -> None:
    """transformers treats a quantised model as one that cannot be trained or moved; with its experts in a pool it can."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module.config).pop("quantization_config", None)
            vars(module.config).pop("_is_quantized", None)
    vars(model).pop("quantization_method", None)
    model.is_quantized = False


def _find_records(
    model: PreTrainedModel,
    layers: list[ExpertsLayer],
    checkpoint_files: list[str] | None,
    config: MeshConfig,
) -> _Records:
    if not checkpoint_files or not all(file.endswith(".safetensors") for file in checkpoint_files):
        raise UnsupportedModelError(
            f"torch_mesh reads experts from safetensors files; {model.config._name_or_path!r} has "
            f"{sorted(map(os.path.basename, checkpoint_files or [])) or 'no files'}. Save the model with save_pretrained first."
        )
    folder = Path(checkpoint_files[0]).parent
    stored = own_quantisation(folder)
    if is_store(folder) or (stored and method_of(stored) == "mesh" and not _has_expert_weights(folder, model)):
        store = _local_store(model, folder)
        check_other_files(store, config.verify)
        check_fallback(model, layers, config, store.manifest.weights)
        check_gpu_weights(config, stored=store.manifest.weights)

        def again(weights: str) -> Records:
            other = other_config(config, weights)
            return _records_of(_convert_again(store, other), layers, other)

        return _with_others(_records_of(store, layers, config), in_format=again)
    _check_files(folder, checkpoint_files)
    if find_quantisation(folder) is not None:
        return _convert_quantised(model, layers, folder, checkpoint_files, config)
    check_fallback(model, layers, config, "bf16" if config.weights == "auto" else config.weights)
    check_gpu_weights(config)
    experts = find_checkpoint_experts(folder, model)

    name = os.path.basename(os.path.normpath(model.config._name_or_path))

    def anew(weights: str) -> Records:
        if weights == "bf16":
            return _raw_records(experts, layers)
        other = other_config(config, weights)
        return _records_of(_convert(name, experts, other), layers, other)

    if config.weights in ("auto", "bf16") and config.store is None:
        raw = _raw_records(experts, layers)
        return _with_others(raw, in_format=anew, checkpoint=folder, source_is_bf16=experts.dtype == "bf16")
    return _with_others(_records_of(_convert(name, experts, config), layers, config), in_format=anew, checkpoint=folder)


def _convert_quantised(
    model: PreTrainedModel,
    layers: list[ExpertsLayer],
    folder: Path,
    checkpoint_files: list[str],
    config: MeshConfig,
) -> _Records:
    """Of a checkpoint that another tool has quantised. It opens as what it is converted to, the rest of the model included: what transformers
    reads of that rest is in ``checkpoint_files``, which from now on are the store's."""
    experts = find_checkpoint_experts(folder, model)
    if config.weights == "auto":
        weights, group_size = nearest_weights(experts)
        config = config.replace(weights=weights, group_size=group_size or config.group_size)
    check_fallback(model, layers, config, config.weights)
    check_gpu_weights(config)
    name = os.path.basename(os.path.normpath(model.config._name_or_path))

    def anew(weights: str) -> Records:
        other = other_config(config, weights)
        return _records_of(_convert(name, experts, other), layers, other)

    store = _convert(name, experts, config)
    checkpoint_files[:] = [str(path) for path in weight_files(store.folder)]
    return _with_others(_records_of(store, layers, config), in_format=anew, checkpoint=folder)


def _has_expert_weights(folder: Path, model: PreTrainedModel) -> bool:
    """Whether the folder of a config that speaks of records has ordinary experts, as one that was saved with a patched model's config."""
    try:
        find_checkpoint_experts(folder, model)
    except StoreError:
        return False
    return True


def _check_files(folder: Path, checkpoint_files: Sequence[str]) -> None:
    """Experts are read from the checkpoint's own names: with ``variant=`` they would be another variant's than the rest."""
    read, own = {os.path.basename(file) for file in checkpoint_files}, {path.name for path in weight_files(folder)}
    if read != own:
        raise UnsupportedModelError(
            f"transformers reads {', '.join(sorted(read))} of {folder}, and torch_mesh {', '.join(sorted(own))}: leave variant= out, or "
            "put the variant's files under the usual names into a folder of their own."
        )


def _with_others(
    records: Records,
    *,
    in_format: Callable[[str], Records],
    checkpoint: Path | None = None,
    source_is_bf16: bool = False,  # of a converted one it is not recorded
) -> _Records:
    return _Records(**vars(records), source_is_bf16=source_is_bf16, in_format=in_format, checkpoint=checkpoint)


def _raw_records(experts: CheckpointExperts, layers: list[ExpertsLayer]) -> Records:
    if experts.dtype != "bf16" and layers[0].dtype != torch.bfloat16:
        warnings.warn(f"The experts of {experts.folder} are {experts.dtype} and are rounded to bf16.", stacklevel=2)
    return Records(
        weights="bf16",
        group_size=0,
        layers=len(layers),
        places=list(range(len(layers))),
        source_arguments=experts.source_arguments(),
        store=None,
    )


def _records_of(store: Store, layers: list[ExpertsLayer], config: MeshConfig) -> Records:
    """Those of a store, which has to be as ``config`` says."""
    manifest = store.manifest
    if config.weights not in ("auto", manifest.weights):
        raise ValueError(
            f"weights={config.weights!r}, but the experts in {store.folder} are {manifest.weights}: leave weights at 'auto', or "
            "give the original checkpoint."
        )
    if manifest.group_size and config.group_size != manifest.group_size:
        raise ValueError(
            f"group_size={config.group_size}, but the experts in {store.folder} have groups of {manifest.group_size}: leave "
            "group_size out, or give the original checkpoint."
        )
    shape, own = manifest.shape, common_geometry(layers)
    stored = Geometry(shape.experts, shape.hidden, shape.intermediate, shape.gated, shape.bias, own.activation)
    if stored != own:
        raise StoreError(
            f"The experts in {store.folder} are {stored}, and the model's {own}: open the store with its own config, not with another model's."
        )
    return Records.of_store(store, [store.layer_of(layer.path) for layer in layers])


def _convert(name: str, experts: CheckpointExperts, config: MeshConfig) -> Store:
    weights = "bf16" if config.weights == "auto" else config.weights
    cached = _cached_store(experts.fingerprint, name, weights, config.group_size)
    destination = Path(config.store) if config.store else cached
    with progress_bar(f"Converting {name} to {weights}") as progress:
        return convert(experts.folder, destination, weights, config.group_size, name=name, progress=progress).store


def _convert_again(store: Store, config: MeshConfig) -> Store:
    """Another format of a converted checkpoint, whose originals are not at hand: from its own records."""
    manifest = store.manifest
    name = store.folder.resolve().name
    source = f"{manifest.source_fingerprint} {manifest.weights} {manifest.group_size}"
    cached = _cached_store(source, name, config.weights, config.group_size)
    destination = Path(config.store) if config.store else cached
    with progress_bar(f"Converting {name} to {config.weights}") as progress:
        return convert_store(store, destination, config.weights, config.group_size, progress=progress).store


def _cached_store(fingerprint: str, name: str, weights: str, group_size: int) -> Path:
    text = f"{FORMAT_VERSIONS[weights]} {fingerprint} {weights} {group_size}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return cache_folder() / "stores" / f"{name}-{weights}-{digest}"


def _local_store(model: PreTrainedModel, folder: Path) -> Store:
    """The store in ``folder``, a folder of the hub's cache included: transformers fetches only the files that it knows."""
    name = model.config._name_or_path
    if not is_store(folder) and not os.path.isdir(name):
        where = {"cache_dir": folder.parents[2], "revision": folder.name}
        cached_file(name, MANIFEST_NAME, **where)
        for file in read_manifest(folder).record_files:
            cached_file(name, file.name, **where)
    return open_store(folder)


def _open_pool(layers: list[ExpertsLayer], records: _Records, config: MeshConfig, placement: Placement) -> ExpertPool:
    source = _C.Source(**records.source_arguments)
    slots = pool_slots(
        layers,
        config,
        stored_layers=records.layers,
        weights=records.weights,
        group_size=records.group_size,
        staging=source.staging_bytes + gpu_pool_bytes(layers, placement, records.weights, config),
    )
    every = records.layers * layers[0].num_experts
    slots = placement.cpu_slots(slots, every, least_slots(layers))
    where: Any = {"stored_layers": records.layers, "weights": records.weights, "group_size": records.group_size}
    slots, stand_ins = split_pool(layers, config, slots, **where)
    fallback = None
    if stand_ins > 0:
        fallback = open_other(
            layers, config, records.in_format(config.fallback), slots=stand_ins, least_slots=least_slots(layers)
        )
    return ExpertPool(
        common_geometry(layers),
        records.layers,
        slots,
        config,
        weights=records.weights,
        group_size=records.group_size,
        exact=records.weights == "bf16" and (records.source_is_bf16 or layers[0].dtype == torch.bfloat16),
        source=source,
        places=records.places,
        least_slots=least_slots(layers),
        fallback=fallback,
        elsewhere=placement.elsewhere(records.layers, records.places),
        store=records.store,
    )


def _merging(merge: Any) -> Any:
    """Around what transformers makes of a checkpoint's quantisation and the one that was passed, where either is torch_mesh's."""

    @functools.wraps(merge)
    def merged(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        stored, given = quantization_config, quantization_config_from_args
        table = stored if isinstance(stored, dict) else stored.to_dict()
        method = table.get("quant_method")
        if isinstance(given, dict) and given.get("quant_method") == "mesh":
            given = MeshConfig.from_dict(given)
        if isinstance(given, MeshConfig) and method != "mesh":
            source_of(table, "This checkpoint")  # which refuses what cannot be read
            return given
        if method == "mesh" and isinstance(stored, dict):
            stored = MeshConfig.of_checkpoint(stored)
        if not isinstance(given, MeshConfig):
            return merge(stored, given)
        with warnings.catch_warnings():
            # It says that what was passed is ignored, which is not so for any field of a MeshConfig.
            warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
            return merge(stored, given)

    return staticmethod(merged)


auto.AutoHfQuantizer.merge_quantization_configs = _merging(  # type: ignore[method-assign]
    auto.AutoHfQuantizer.merge_quantization_configs
)
