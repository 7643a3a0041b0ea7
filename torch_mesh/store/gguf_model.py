"""The config and tokenizer of a GGUF file, and its tensors outside the experts, through transformers."""

from __future__ import annotations

import copy
import math
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import core_model_loading
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.formats import GGUF_FORMATS
from torch_mesh.hf.compat import ignored_keys
from torch_mesh.store.codes import record_of
from torch_mesh.store.gguf import (
    MAX_FREQUENCIES,
    ROPE_DIVISORS,
    Counted,
    Gguf,
    keys_within,
    read_parts,
    require_package,
)
from torch_mesh.store.gguf_families import FAMILIES, Family, Names, PackageNames
from torch_mesh.store.gguf_sizes import check_sizes, limit_layers
from torch_mesh.store.header import read_range, store_error
from torch_mesh.store.sources.layout import Shape, Weight, read_tensor

# Architectures by GGUF's names for them: those with experts in transformers' tables for all architectures, ...
READ_BY_TABLES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
# ... and those for which transformers has functions.
READ_BY_FUNCTIONS = ("qwen35moe",)
ARCHITECTURES = (*READ_BY_TABLES, *READ_BY_FUNCTIONS, *FAMILIES)
# Keys that the tables leave out. Without them, a model of another size than the config's default would not fit its
# file.
_LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gpt-oss": {
        "expert_feed_forward_length": "intermediate_size",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
    },
    "minimax-m2": {},
}
_TABLES: Mapping[str, Mapping[str, str | None]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn and a message
# Ends that files state in part, as in the generation_config.json of these models.
_FURTHER_ENDS = {"gemma4": (1, 106, 50), "gpt-oss": (199999, 200012)}
_GATING = {0: "none", 1: "softmax", 2: "sigmoid"}
_ROPE_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_UNCHANGED = Family("", {})  # for architectures in transformers' tables
_MSCALE_UNIT = 0.1  # unit of DeepSeek's yarn_log_multiplier
_KEPT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float32}


_DERIVED_FIELDS = ("rope_parameters", "per_layer_config")  # fields that configs derive from others


def read_config(path: Path) -> transformers.PretrainedConfig:
    """The config of the model in ``path`` and its further parts.

    Raises ``UnsupportedModelError`` for architectures beyond ``ARCHITECTURES`` and for metadata of which transformers
    makes no config, ``StoreError`` for damaged files.
    """
    return _config_of(path, _table_of(path))


def complete_config(config: transformers.PretrainedConfig, path: Path) -> None:
    """Set fields of ``config`` that transformers leaves out, or takes from the first part of the model alone.

    Raises as ``read_config`` does.
    """
    table, first = _table_of(path), read_parts(path)[0]
    own, usual = _config_of(path, table), type(config)()
    if own.model_type != config.model_type:
        raise UnsupportedModelError(
            f"{path} holds a model of the type {own.model_type}, and transformers takes it for {config.model_type}: "
            "convert it (torch-mesh convert), and open the converted folder."
        )
    of_first = _config_of(path, config_table(first.metadata, list(first.header.tensors)))
    for name in dict.fromkeys((*table, *_DERIVED_FIELDS)):
        # Other values were set by the caller.
        left_out = _field(config, name) in (_field(usual, name), _field(of_first, name))
        if left_out and name in {*vars(own), *own.attribute_map, "per_layer_config"} - {"architectures"}:
            setattr(config, name, _field(own, name))


def _field(config: transformers.PretrainedConfig, name: str) -> Any:
    """A field of ``config``, without values that differ between layers."""
    if name == "per_layer_config":  # an attribute of every config
        return config.to_dict().get(name)
    return vars(config).get(config.attribute_map.get(name, name))


def _config_of(path: Path, table: dict[str, Any]) -> transformers.PretrainedConfig:
    try:
        config = transformers.AutoConfig.for_model(**table)
    except Exception as problem:
        raise _no_config(path, problem) from problem
    config.dtype = torch.bfloat16
    return config


def _table_of(path: Path) -> dict[str, Any]:
    parts = read_parts(path)
    metadata = parts[0].metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds a model of the architecture {architecture!r}. torch_mesh reads those with experts of which "
            f"it or transformers {transformers.__version__} knows the GGUF names: {', '.join(ARCHITECTURES)}. Take the "
            "model's safetensors."
        )
    if architecture in FAMILIES and not metadata.get(f"{architecture}.expert_count"):
        raise _dense_model(architecture)
    check_sizes(parts, architecture)
    names = [name for part in parts for name in part.header.tensors]
    try:
        table = config_table(metadata, names)
        divisors = _rope_divisors(parts)
        if divisors is not None:
            table["rope_parameters"] = FAMILIES.get(architecture, _UNCHANGED).rope(table, divisors)
    except MeshError:
        raise
    except Exception as problem:
        raise _no_config(path, problem) from problem
    return table


def _rope_divisors(parts: Sequence[Gguf]) -> list[float] | None:
    for part in parts:
        tensor = part.header.tensors.get(ROPE_DIVISORS)
        if tensor is None:
            continue
        if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FREQUENCIES:
            raise store_error(
                part.header.path,
                f"tensor {ROPE_DIVISORS!r} is {tensor.dtype} {list(tensor.shape)}; it must be F32 [n] with at most "
                f"{MAX_FREQUENCIES}",
                tensor.offset,
            )
        data = read_range(part.header.path, tensor.offset, tensor.bytes)
        found = torch.frombuffer(data, dtype=torch.float32)
        if not bool((torch.isfinite(found) & (found > 0)).all()):
            raise store_error(
                part.header.path,
                f"tensor {ROPE_DIVISORS!r} holds what frequencies cannot be divided by",
                tensor.offset,
            )
        return [float(each) for each in found]
    return None


def _no_config(path: Path, problem: Exception) -> UnsupportedModelError:
    """The error for any exception that transformers raises for unexpected metadata."""
    what = f"{type(problem).__name__}: {problem}"
    return UnsupportedModelError(f"{path}: transformers makes no config of its metadata ({what:.400})")


def config_table(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields of a config, from ``metadata`` of a ``Gguf`` or of transformers' own reader."""
    metadata = {key: value.count if isinstance(value, Counted) else value for key, value in metadata.items()}
    architecture = metadata["general.architecture"]
    limit_layers(metadata, architecture)  # also where transformers reads the first part of a model by itself
    if architecture in FAMILIES and not metadata.get(f"{architecture}.expert_count"):
        return _dense_table(metadata, architecture, names)
    metadata = _with_defaults(metadata, architecture)
    if architecture in READ_BY_FUNCTIONS:
        from transformers.integrations.gguf import get_gguf_config

        return complete_table(get_gguf_config(metadata, tuple(names)), metadata)
    own = keys_within(metadata, architecture)
    if architecture in FAMILIES:
        family = FAMILIES[architecture]
        table = {"model_type": family.model_type, **family.table(own, names)}
    else:
        model_type = READ_BY_TABLES[architecture]
        known = {**_TABLES[model_type], **_LEFT_OUT[architecture]}
        table = {"model_type": model_type, **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {})}
        table |= {name: own[key] for key, name in known.items() if name is not None and key in own}
        if "scoring_func" in table:
            table["scoring_func"] = _GATING.get(table["scoring_func"], "softmax")
    tokens = keys_within(metadata, "tokenizer")
    table |= {name: tokens[key] for key, name in _TABLES["tokenizer"].items() if name is not None and key in tokens}
    table.setdefault("vocab_size", tokens.get("ggml.tokens"))
    return complete_table(table, metadata) | {
        # transformers serve chooses the class by these names.
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[table["model_type"]]],
        "tie_word_embeddings": "output.weight" not in names,
    }


def _with_defaults(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """``metadata`` with llama.cpp's defaults for absent keys. Those of a config class are the values of one model."""
    own = keys_within(metadata, architecture)
    heads = own["attention.head_count"]
    width = own.get("attention.key_length", own["embedding_length"] // heads)
    defaults = {
        "attention.head_count_kv": heads,
        "attention.key_length": width,
        "attention.scale": width**-0.5,
        "expert_weights_norm": False,
        "expert_weights_scale": 1.0,
        "full_attention_interval": 4,
        "leading_dense_block_count": 0,
        "rope.freq_base": 10000.0,
    }
    return {f"{architecture}.{key}": value for key, value in defaults.items()} | {**metadata}


def complete_table(table: dict[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with what transformers does not read: the scaling of positions, which layers have linear attention, and
    all tokens that end an answer."""
    architecture = metadata["general.architecture"]
    own, tokens = keys_within(metadata, architecture), keys_within(metadata, "tokenizer.ggml")
    if (rope := _rope_parameters(own, architecture)) is not None:
        rope = {**table.get("rope_parameters", {}), **rope, "rope_theta": own["rope.freq_base"]}
        table = table | {"rope_parameters": rope}
    if (linear := own.get("attention.recurrent_layers")) is not None:  # those for multi-token prediction are last
        kinds = ["linear_attention" if each else "full_attention" for each in linear[: table["num_hidden_layers"]]]
        table = table | {"layer_types": kinds}
    ends = [tokens[key] for key in _ENDS if key in tokens]
    further = [end for end in _FURTHER_ENDS.get(architecture, ()) if end < (table.get("vocab_size") or 0)]
    ends = list(dict.fromkeys([*ends, *further]))
    return table | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def _dense_table(metadata: Mapping[str, Any], architecture: str, names: Sequence[str]) -> dict[str, Any]:
    """The fields that transformers' own reader makes of a dense Gemma 4, which plain transformers opens."""
    if architecture != "gemma4":
        raise _dense_model(architecture)
    table: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in names}
    for group in ("general", architecture, "tokenizer"):
        own = keys_within(metadata, group)
        table |= {name: own[key] for key, name in _TABLES[group].items() if isinstance(name, str) and key in own}
    if "tokenizer.ggml.tokens" in metadata:
        table.setdefault("vocab_size", metadata["tokenizer.ggml.tokens"])
    return table | {"model_type": FAMILIES[architecture].model_type, "eos_token_id": list(_FURTHER_ENDS[architecture])}


def _dense_model(architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"A GGUF file of the architecture {architecture!r} without experts holds a dense model: torch_mesh reads "
        "models with experts."
    )


def _rope_parameters(own: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    scaling = keys_within(own, "rope.scaling")
    kind = scaling.pop("type", "none")
    scaling.pop("finetuned", None)
    multiplier = scaling.pop("yarn_log_multiplier", None) if architecture == "deepseek2" else None
    if kind == "none":
        # gpt-oss's config scales by default, so state that this file does not.
        return {"rope_type": "default"} if architecture == "gpt-oss" else None
    if kind not in ("linear", "yarn") or not set(scaling) <= set(_ROPE_SCALING):
        raise UnsupportedModelError(
            f"A GGUF file with positions scaled by {kind!r} ({', '.join(sorted(scaling))}) cannot be read; torch_mesh "
            f"knows linear and yarn with {', '.join(_ROPE_SCALING)}. Take the model's safetensors."
        )
    more: dict[str, Any] = {"truncate": False} if architecture == "gpt-oss" else {}
    if multiplier is not None:
        more["mscale"] = more["mscale_all_dim"] = round(multiplier / _MSCALE_UNIT, 6)
    return {"rope_type": kind, **more, **{_ROPE_SCALING[key]: value for key, value in scaling.items()}}


@dataclass(frozen=True)
class DenseTensor:
    """A tensor outside the experts: its name in the model, its dtype in a store, and how its values are made."""

    name: str
    shape: Shape
    dtype: torch.dtype
    weight: Weight
    names: Names
    companion: Weight | None = None  # the second tensor that it is made of, beside ``weight``

    def values(self) -> torch.Tensor:
        """The values in ``dtype``, read now. Raises ``StoreError``."""
        with torch.device("cpu"):  # while transformers builds a model, the default device is "meta"
            companion = None if self.companion is None else self.companion.read()
            values = self.weight.read()
            path, tensor = self.weight.codes
            try:
                found = self.names.undone(self.weight.name, values, companion)
            except RuntimeError as problem:  # torch's errors about shapes
                raise store_error(
                    path,
                    f"tensor {tensor.name!r} {list(values.shape)} makes no {self.name} {list(self.shape)} ({problem})",
                    tensor.offset,
                ) from problem
        if [side for side in found.shape if side != 1] != [side for side in self.shape if side != 1]:
            raise store_error(
                path,
                f"tensor {tensor.name!r} has the shape {list(found.shape)}, {self.name} {list(self.shape)}",
                tensor.offset,
            )
        return found.reshape(self.shape).to(self.dtype)

    def blocks(self) -> RowBlocks | None:
        """The tensor's blocks in the file, if it is a matrix of whole rows of blocks whose type linear layers can
        have."""
        parts = (self.weight,) if self.companion is None else (self.weight, self.companion)
        codes = [part.passthrough_codes() for part in parts]
        if len(self.shape) != 2 or any(
            each is None or len(part.shape) != 2 for each, part in zip(codes, parts, strict=True)
        ):
            return None
        held = record_of([each for each in codes if each is not None])
        if held is None or held[0] not in GGUF_FORMATS:
            return None
        order = self.names.row_order(self.weight.name, *(part.shape[0] for part in parts))
        return None if order is None or len(order) != self.shape[0] else RowBlocks(held[0], held[1][0], parts, order)


@dataclass(frozen=True)
class RowBlocks:
    """A matrix [out, in] as the file stores it: rows of blocks, which ``pack_linear_blocks`` converts to ``format``."""

    format: str
    group_size: int
    parts: tuple[Weight, ...]
    order: torch.Tensor  # int64 [out]: the index of each row among the parts' rows

    def packed(self) -> torch.Tensor:
        """uint8, as the kernels take it; read now. Raises ``StoreError``, ValueError for scales that are not finite."""
        columns = self.parts[0].shape[-1]
        packed: torch.Tensor = torch.ops.torch_mesh.pack_linear_blocks(self.read(), columns, self.format)
        return packed

    def read(self) -> torch.Tensor:
        """uint8 [out, bytes of a row], read now. Raises ``StoreError``."""
        parts = [read_tensor(*part.codes) for part in self.parts]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        return rows if torch.equal(self.order, torch.arange(len(rows), device="cpu")) else rows[self.order]


def blocks_of_rest(
    path: Path, weights: Sequence[Weight], experts: frozenset[str], model: transformers.PreTrainedModel
) -> dict[str, RowBlocks]:
    """The parameters of ``rest_of_model`` that linear layers can keep in the file's codes, by name.

    Raises as ``rest_of_model``.
    """
    found = {part.name: part.blocks() for part in rest_of_model(path, weights, experts, model)}
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def rest_of_model(
    path: Path, weights: Sequence[Weight], experts: frozenset[str], model: transformers.PreTrainedModel
) -> Iterator[DenseTensor]:
    """The tensors of ``model`` that all ``weights`` but ``experts`` make, in the order of the files.

    Raises ``StoreError`` if one has another size than in the model, belongs to nothing, or is missing,
    ``UnsupportedModelError`` for metadata of which transformers makes no names.
    """
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    own = _without_experts(state, model)
    held = sum(math.prod(weight.shape) for weight in weights if weight.name not in experts)
    for name in sorted(own):  # before names are made: their tables for reordering heads have sizes of the metadata
        if math.prod(state[name]) > held:
            raise store_error(
                path,
                f"its metadata make {name} {list(state[name])}, and all tensors but the experts' have {held} values",
            )
    names = _names_of(path, model)
    by_name = {weight.name: weight for weight in weights}
    companions = {weight.name: by_name.get(names.companion(weight.name) or "") for weight in weights}
    joined = {companion.name for companion in companions.values() if companion is not None}
    dtype = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.bfloat16
    found: dict[str, str] = {}
    for weight in weights:
        if weight.name in experts or weight.name in joined or weight.name == ROPE_DIVISORS:
            continue  # the last is in the config
        file, tensor = weight.codes
        target = names.target(weight.name)
        if target is not None and _is_left_out(target, model):
            continue
        if target not in own:
            what = f"belongs to nothing in {type(model).__name__}"
            if tensor.name.endswith((".scale", ".input_scale")):
                what = "is a second scale of NVFP4, which torch_mesh does not read: take the model's safetensors"
            raise store_error(file, f"tensor {tensor.name!r} {what}", tensor.offset)
        if target in found:
            raise store_error(file, f"tensors {found[target]!r} and {tensor.name!r} are both {target}", tensor.offset)
        companion = companions[weight.name]
        size = math.prod(weight.shape) + (0 if companion is None else math.prod(companion.shape))
        if size != math.prod(state[target]):
            raise store_error(
                file,
                f"tensor {tensor.name!r} has the shape {list(weight.shape)}, {target} {list(state[target])}",
                tensor.offset,
            )
        found[target] = tensor.name
        kept = _KEPT_DTYPES.get(tensor.dtype, dtype)
        if companion is not None:
            kept = torch.promote_types(kept, _KEPT_DTYPES.get(companion.codes[1].dtype, dtype))
        yield DenseTensor(target, state[target], kept, weight, names, companion)
    missing = sorted(own - set(found) - set(model.all_tied_weights_keys))
    if missing:
        raise store_error(
            path, f"no tensor holds {', '.join(missing[:5])}{' and others' * (len(missing) > 5)}: incomplete?"
        )


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The files of the tokenizer that a GGUF file describes, by name; none, and a warning, where it cannot be made."""
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
        metadata = read_parts(path)[0].metadata
        for name in ("bos_token_id", "eos_token_id"):
            stated, found = metadata.get(f"tokenizer.ggml.{name}"), getattr(tokenizer, name)
            if stated is not None and found not in (None, stated):  # for example a token that was spelled otherwise
                raise ValueError(f"{name} is {stated}, and {found} in transformers' tokenizer")
        with tempfile.TemporaryDirectory(prefix="torch_mesh-tokenizer-") as folder:
            tokenizer.save_pretrained(folder)
            return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    except Exception as problem:  # noqa: BLE001  whatever transformers makes of what it does not expect
        what = f"{type(problem).__name__}: {problem}"
        warnings.warn(
            f"No tokenizer is written, because none can be made of what {path} says ({what:.600}): copy the original "
            "model's into the folder.",
            stacklevel=2,
        )
        return {}


class _TableNames(Names):
    """Names of an architecture in transformers' tables."""

    def __init__(self, architecture: str, model: transformers.PreTrainedModel) -> None:
        from transformers import modeling_gguf_pytorch_utils as utils

        self._processor = utils.TENSOR_PROCESSORS.get(architecture, utils.TensorProcessor)(
            config=model.config.to_dict()
        )
        # An object without the model's children: transformers would search each of them again, for 20 seconds. These
        # models have all names at the top.
        whole = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: None)
        self._map: dict[str, str] = utils.get_gguf_hf_weights_map(whole, self._processor)

    def target(self, name: str) -> str | None:
        # GGUF's name of a parameter outside of layers, such as a sink, may end with .weight too.
        return self._map.get(name) or self._map.get(name.removesuffix(".weight"))

    def undone(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        processed = self._processor.process(
            weights=values.numpy(), name=name, tensor_key_mapping=self._map, parsed_parameters={"tensors": {}}
        )
        return torch.from_numpy(np.ascontiguousarray(processed.weights))


class _FunctionNames(Names):
    """Names of an architecture for which transformers has functions."""

    def __init__(self, architecture: str, model: transformers.PreTrainedModel) -> None:
        from transformers.integrations.gguf import get_gguf_conversion_mapping

        # A copy, since renaming a name changes the mapping's state.
        mapping = copy.deepcopy(get_gguf_conversion_mapping(architecture, model.config))
        self._renamings = [each for each in mapping if isinstance(each, core_model_loading.WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, core_model_loading.WeightConverter)]

    def target(self, name: str) -> str | None:
        return core_model_loading.rename_source_key(name, self._renamings, self._converters)[0]

    def undone(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        target, pattern = core_model_loading.rename_source_key(name, self._renamings, self._converters)
        if pattern is None:
            return values
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        for operation in converter.operations:
            made: Mapping[str, Any] = operation.convert({pattern: values}, [pattern], [target], full_layer_name=target)
            (values,) = made.values()
        return values


def _names_of(path: Path, model: transformers.PreTrainedModel) -> Names:
    require_package()
    architecture = read_parts(path)[0].metadata["general.architecture"]
    try:
        if architecture in FAMILIES:
            return PackageNames(architecture, model)
        return (_FunctionNames if architecture in READ_BY_FUNCTIONS else _TableNames)(architecture, model)
    except Exception as problem:  # such as errors in tables with a row for each head of the metadata, or with none
        raise _no_config(path, problem) from problem


def _without_experts(state: Mapping[str, Shape], model: transformers.PreTrainedModel) -> frozenset[str]:
    from torch_mesh.models.families import find_experts, unpooled_layers

    layers = (*find_experts(model), *unpooled_layers(model))
    return frozenset(state) - {f"{layer.path}.{name}" for layer in layers for name in layer.parameter_names}


def _is_left_out(target: str, model: transformers.PreTrainedModel) -> bool:
    """Whether the model itself ignores this parameter, for example that of a layer for multi-token prediction."""
    return target.endswith(".mtp") or any(re.search(pattern, target) for pattern in ignored_keys(model))
