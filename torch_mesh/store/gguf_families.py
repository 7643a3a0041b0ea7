"""Architectures of GGUF files for whose keys and names transformers has no tables.

A family maps keys of the metadata to fields of the config. Its tensors' names come from the gguf package's map. The
changes that llama.cpp's converter made to the values are reversed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.store.gguf import ROPE_DIVISORS

Metadata = Mapping[str, Any]  # a file's metadata, keys without the architecture
Undo = Callable[[transformers.PretrainedConfig, torch.Tensor], torch.Tensor]
Table = dict[str, Any]  # fields of a config

_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "vocab_size": "vocab_size",
}
# For families with shared experts, whose first layers are dense.
_DEEPSEEK = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}


# For Qwen's families with linear attention in most layers.
_DELTA_NET = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}

_SIGMOID = 2  # a value of expert_gating_func
# DeepSeek-V3's and V2's router groups: their number, and how many of them a router chooses, by number of experts and
# version.
_GROUPS_OF_EXPERTS = {(256, True): (8, 4), (160, False): (8, 3)}


def _nothing(metadata: Metadata, names: Sequence[str]) -> Table:
    return {}


def _divided(table: Table, divisors: Sequence[float]) -> Table:
    """Rope parameters that divide the frequencies by ``divisors``, whatever scaling made them: LongRoPE with the same
    divisors at all lengths."""
    rope = table.get("rope_parameters", {})
    if rope.get("rope_type", "default") != "default" or "partial_rotary_factor" in rope:
        raise UnsupportedModelError(
            f"A GGUF file with {ROPE_DIVISORS} beside other scaling of positions ({rope}) cannot be read. Take the "
            "model's safetensors."
        )
    factors = list(divisors)
    return {
        "rope_type": "longrope",
        "rope_theta": table["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": table["max_position_embeddings"],
    }


@dataclass(frozen=True)
class Split:
    """A parameter that a file has as two tensors. GGUF's names end with ``whole``, ``first`` and ``second``."""

    whole: str
    first: str
    second: str
    join: Callable[[transformers.PretrainedConfig, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture. ``keys`` maps keys of the metadata to fields of the config, or to None if ``more`` reads them.
    ``more`` makes fields from several keys, or from the tensors' names.

    ``renamed``: GGUF's names of parameters that the package's map lacks, by the end of the parameters' names.
    ``changed``: functions that reverse what the converter did to a parameter, by a pattern of the parameters' names.
    ``rope`` makes rope_parameters from the table and the divisors of the frequencies in the file.
    """

    model_type: str
    keys: Mapping[str, str | None]
    more: Callable[[Metadata, Sequence[str]], Table] = _nothing
    renamed: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, Undo] = field(default_factory=dict)
    split: Split | None = None
    rope: Callable[[Table, Sequence[float]], Table] = _divided

    def table(self, metadata: Metadata, names: Sequence[str]) -> Table:
        """Fields of the config."""
        known = {**_COMMON, **self.keys}
        table = {name: metadata[key] for key, name in known.items() if name is not None and key in metadata}
        return table | {"num_hidden_layers": _layers(metadata)} | self.more(metadata, names)


def _layers(metadata: Metadata) -> int:
    """The number of layers without those for multi-token prediction, which the file counts too and numbers last."""
    count: int = metadata["block_count"] - metadata.get("nextn_predict_layers", 0)
    return count


def _partly_rotated(metadata: Metadata) -> Table:
    return {
        "rope_type": "default",
        "rope_theta": metadata["rope.freq_base"],
        "partial_rotary_factor": metadata["rope.dimension_count"] / metadata["attention.key_length"],
    }


def _glm4(metadata: Metadata, names: Sequence[str]) -> Table:
    return {
        "rope_parameters": _partly_rotated(metadata),
        "use_qk_norm": _has(names, "attn_q_norm.weight"),
        "attention_bias": _has(names, "attn_q.bias"),
    }


def _deepseek2(metadata: Metadata, names: Sequence[str]) -> Table:
    """DeepSeek V3 and models built like it, or V2, whose router has no sigmoid."""
    # Files that lack the key: V2, whose router has no bias, and some of GLM-4.7-Flash, whose router has one.
    gating = metadata.get("expert_gating_func") or (_SIGMOID if _has(names, "exp_probs_b.bias") else None)
    is_v3 = gating == _SIGMOID
    # Mistral Large 3 has both. transformers' DeepSeek V2 does not normalize weights, and neither version scales queries
    # by their position.
    if (metadata.get("expert_weights_norm") and not is_v3) or metadata.get("attention.temperature_scale"):
        raise UnsupportedModelError(
            "A GGUF file of the architecture 'deepseek2' with expert_weights_norm beside an expert_gating_func other "
            f"than {_SIGMOID} (sigmoid), or with attention.temperature_scale, is neither DeepSeek V2 nor V3, which "
            "torch_mesh reads. Take the model's safetensors."
        )
    rotary = metadata["rope.dimension_count"]
    # Older files lack these keys.
    n_group, topk_group = _GROUPS_OF_EXPERTS.get((metadata["expert_count"], is_v3), (1, 1))
    n_group = metadata.get("expert_group_count", n_group)
    topk_group = metadata.get("expert_group_used_count", topk_group)
    own = {} if is_v3 else {"topk_method": "greedy" if n_group == 1 else "group_limited_greedy"}
    return own | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "q_lora_rank": metadata.get("attention.q_lora_rank") or None,
        "num_key_value_heads": metadata["attention.head_count"],  # head_count_kv is one if keys and values are absorbed
        "head_dim": rotary,
        "qk_nope_head_dim": metadata.get("attention.key_length_mla", metadata["attention.key_length"]) - rotary,
        "v_head_dim": metadata.get("attention.value_length_mla", metadata["attention.value_length"]),
        "n_group": n_group,
        "topk_group": topk_group,
    }


def _mixtral(metadata: Metadata, names: Sequence[str]) -> Table:
    return {"sliding_window": None}


_MAVERICK = 128  # experts; llama.cpp infers from this number that queries and keys are not normalized


def _llama4(metadata: Metadata, names: Sequence[str]) -> Table:
    if "attention.sliding_window" in metadata:
        raise UnsupportedModelError(
            "A GGUF file of the architecture 'llama4' with attention.sliding_window has other layers of attention than "
            "Scout and Maverick, which torch_mesh reads. Take the model's safetensors."
        )
    return {"use_qk_norm": metadata["expert_count"] != _MAVERICK}


def _qwen3next(metadata: Metadata, names: Sequence[str]) -> Table:
    interval = metadata["full_attention_interval"]
    layers = range(1, _layers(metadata) + 1)
    return {
        "linear_value_head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "layer_types": ["linear_attention" if layer % interval else "full_attention" for layer in layers],
        "rope_parameters": _partly_rotated(metadata),
        "attention_bias": _has(names, "attn_q.bias"),
    }


def _gemma4(metadata: Metadata, names: Sequence[str]) -> Table:
    if metadata.get("rope.scaling.type", "none") != "none":
        raise UnsupportedModelError(
            f"A GGUF file of the architecture 'gemma4' with positions scaled by {metadata['rope.scaling.type']!r} "
            "cannot be read. Take the model's safetensors."
        )
    width = metadata["attention.key_length_swa"]
    rotated = metadata.get("rope.dimension_count_swa", width)
    if rotated != width:
        raise UnsupportedModelError(
            f"A GGUF file of the architecture 'gemma4' that rotates {rotated} of {width} values of a head in layers of "
            "sliding windows cannot be read; transformers rotates all. Take the model's safetensors."
        )
    slides, heads = metadata["attention.sliding_window_pattern"], metadata["attention.head_count_kv"]
    of_kind = dict(zip(slides, heads if isinstance(heads, list) else [heads] * len(slides), strict=True))
    full = [f"blk.{layer}.attn_" for layer, sliding in enumerate(slides) if not sliding]
    return {
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
        "num_key_value_heads": of_kind.get(True),
        "num_global_key_value_heads": of_kind.get(False),
        "attention_k_eq_v": any(f"{start}k.weight" in names and f"{start}v.weight" not in names for start in full),
        "enable_moe_block": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata["rope.freq_base_swa"]},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata["rope.freq_base"],
                "partial_rotary_factor": 0.25,  # replaced when the divisors are read
            },
        },
    }


def _gemma4_rope(table: Table, divisors: Sequence[float]) -> Table:
    """Infer the rotated fraction: to leave values of full layers unrotated, llama.cpp divides their frequencies by
    1e30."""
    rotated = sum(divisor == 1 for divisor in divisors)
    if any((divisor != 1) if at < rotated else (divisor < 1e20) for at, divisor in enumerate(divisors)):
        raise UnsupportedModelError(
            f"A GGUF file of the architecture 'gemma4' whose {ROPE_DIVISORS} are not ones and then 1e30 cannot be "
            "read. Take the model's safetensors."
        )
    rope = table["rope_parameters"]
    full = {**rope["full_attention"], "partial_rotary_factor": rotated / len(divisors)}
    return {**rope, "full_attention": full}


def _ernie(metadata: Metadata, names: Sequence[str]) -> Table:
    return {"moe_layer_end_index": _layers(metadata) - 1, "use_bias": _has(names, "attn_q.bias")}


def _has(names: Sequence[str], ending: str) -> bool:
    return any(name.endswith(ending) for name in names)


def _in_halves(heads: str, config: transformers.PretrainedConfig, values: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates pairs of adjacent values of a head, transformers pairs from its two halves."""
    rows = values.reshape(getattr(config, heads), -1, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape)


def _less_one(config: transformers.PretrainedConfig, values: torch.Tensor) -> torch.Tensor:
    return values.float() - 1


def _log_of_negative(config: transformers.PretrainedConfig, values: torch.Tensor) -> torch.Tensor:
    return torch.log(-values.float())


def _keys_and_values(config: transformers.PretrainedConfig, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Join [heads, latent, keys] and [heads, values, latent]."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _by_key_head(config: transformers.PretrainedConfig, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """llama.cpp stores all queries, then all keys, values and gates; transformers groups them by key head."""
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = (*qkv.split([heads * width, heads * width, values]), z)
    return torch.cat([part.reshape(heads, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


_ROTATED = {
    r"\.q_proj\.": partial(_in_halves, "num_attention_heads"),
    r"\.k_proj\.": partial(_in_halves, "num_key_value_heads"),
}


FAMILIES: Mapping[str, Family] = {
    "olmoe": Family("olmoe", {"expert_count": "num_experts"}),
    "glm4moe": Family("glm4_moe", _DEEPSEEK, _glm4, {"gate.e_score_correction_bias": "exp_probs_b.bias"}),
    "deepseek2": Family(
        "deepseek_v3",
        _DEEPSEEK | {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"},
        _deepseek2,
        {"gate.e_score_correction_bias": "exp_probs_b.bias"},
        split=Split("attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight", _keys_and_values),
    ),
    "llama": Family("mixtral", {"expert_count": "num_local_experts"}, _mixtral, changed=_ROTATED),
    "llama4": Family(
        "llama4_text",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        _llama4,
    ),
    "qwen3next": Family(
        "qwen3_next",
        _DELTA_NET,
        _qwen3next,
        {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"},
        {r"(layernorm|self_attn\.[qk]_norm|model\.norm)\.weight$": _less_one, r"\.A_log$": _log_of_negative},
        # Files of older converters have the whole parameter.
        Split("ssm_in.weight", "attn_qkv.weight", "attn_gate.weight", _by_key_head),
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base": None,
        },
        _gemma4,
        {
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
        },
        rope=_gemma4_rope,
    ),
    "granitemoe": Family(
        "granitemoe",
        {
            "expert_count": "num_local_experts",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        renamed={"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
        changed=_ROTATED,
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        _ernie,
        {"gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        renamed={"mlp.gate.wg.weight": "ffn_gate_inp.weight"},
    ),
}


class Names(ABC):
    """Maps GGUF's tensors to a model's parameters."""

    @abstractmethod
    def target(self, name: str) -> str | None:
        """The parameter for the tensor ``name``; None if there is none."""

    def companion(self, name: str) -> str | None:
        """The second tensor of the parameter, if this one is its first; None if this one is the whole parameter."""
        return None

    @abstractmethod
    def undone(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        """Reverse the converter's changes to ``values``, joined with those of the companion. The shape is the
        parameter's, but may have other dimensions of one."""

    def row_order(self, name: str, rows: int, of_companion: int = 0) -> torch.Tensor | None:
        """The order in which the rows of the matrix, followed by those of its companion, make up the parameter: int64
        [rows].

        None if the parameter is not made of whole rows of these.
        """
        index = torch.arange(rows + of_companion, dtype=torch.float32, device="cpu")
        marked = torch.stack([2 * index, 2 * index + 1], dim=1)  # two columns, which must stay adjacent
        companion = marked[rows:] if of_companion else None
        try:
            found = self.undone(name, marked[:rows], companion).reshape(-1, 2)
        except (RuntimeError, IndexError):  # the conversion needs more columns
            return None
        order = found[:, 0] / 2
        if not torch.equal(found[:, 1], found[:, 0] + 1) or not torch.equal(order.sort().values, index):
            return None
        return order.long()


class PackageNames(Names):
    """Maps GGUF's tensors to a model's parameters by the gguf package's map."""

    def __init__(self, architecture: str, model: transformers.PreTrainedModel) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._family = FAMILIES[architecture]
        self._config = model.config
        layers = model.config.num_hidden_layers
        kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._map = get_tensor_name_map(kind, layers)
        self._targets = {own: name for name in model.state_dict() if (own := self._own_name(name)) is not None}

    def target(self, name: str) -> str | None:
        layer = re.match(r"blk\.([0-9]{1,9})\.", name)
        if layer is not None and int(layer[1]) >= self._config.num_hidden_layers:
            return f"model.layers.{layer[1]}.mtp"  # layers for multi-token prediction are numbered last
        split = self._family.split
        if split is not None and name.endswith(f".{split.first}"):
            name = name.removesuffix(split.first) + split.whole
        return self._targets.get(name)

    def companion(self, name: str) -> str | None:
        split = self._family.split
        if split is None or not name.endswith(f".{split.first}"):
            return None
        return name.removesuffix(split.first) + split.second

    def undone(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        target = self.target(name)
        assert target is not None
        if companion is not None:
            assert self._family.split is not None
            values = self._family.split.join(self._config, values, companion)
        for pattern, undo in self._family.changed.items():
            if re.search(pattern, target):
                values = undo(self._config, values)
        return values

    def _own_name(self, name: str) -> str | None:
        for ending, own in self._family.renamed.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            if name.endswith(ending) and layer is not None:
                return f"blk.{layer[1]}.{own}"
        stem, _, leaf = name.rpartition(".")
        found = self._map.get_name(stem) if leaf in ("weight", "bias") else None
        return None if found is None else f"{found}.{leaf}"
