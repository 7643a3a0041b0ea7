"""Architectures of GGUF files whose keys and names transformers has no tables for.

A family says which keys of the metadata are which fields of the config. Its tensors' names are those of the gguf
package's map, and what llama.cpp's converter has changed is undone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from torch_mesh.errors import UnsupportedModelError

Said = Mapping[str, Any]  # a file's metadata, keys without the architecture

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
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
# Of families that have shared experts and dense layers first.
_DEEPSEEK = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}


_SIGMOID = 2  # of expert_gating_func
# Of DeepSeek-V3 and V2: the groups that routers choose from, and how many, by the number of experts.
_GROUPS_OF_EXPERTS = {(256, True): (8, 4), (160, False): (8, 3)}


def _nothing(said: Said, names: Sequence[str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture. ``more`` makes fields of several keys, or of the tensors' names.

    ``renamed`` has GGUF's names of parameters that the package's map lacks, by the end of the parameters' names.
    ``rotated`` parameters have rows that the converter has moved: llama.cpp rotates neighbouring values of a head,
    transformers the halves of a head.
    """

    model_type: str
    keys: Mapping[str, str]
    more: Callable[[Said, Sequence[str]], dict[str, Any]] = _nothing
    renamed: Mapping[str, str] = field(default_factory=dict)
    rotated: tuple[str, ...] = ()

    def table(self, said: Said, names: Sequence[str]) -> dict[str, Any]:
        """Fields of the config."""
        known = {**_COMMON, **self.keys}
        return {name: said[key] for key, name in known.items() if key in said} | self.more(said, names)


def _glm4(said: Said, names: Sequence[str]) -> dict[str, Any]:
    rotary = said["rope.dimension_count"] / said["attention.key_length"]
    return {
        "num_hidden_layers": said["block_count"] - said.get("nextn_predict_layers", 0),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": said["rope.freq_base"],
            "partial_rotary_factor": rotary,
        },
        "use_qk_norm": _has(names, "attn_q_norm.weight"),
        "attention_bias": _has(names, "attn_q.bias"),
    }


def _deepseek2(said: Said, names: Sequence[str]) -> dict[str, Any]:
    """V3 and what is built like it, or V2, whose router has no sigmoid."""
    is_v3 = said.get("expert_gating_func") == _SIGMOID
    rotary = said["rope.dimension_count"]
    # Older files lack these keys.
    n_group, topk_group = _GROUPS_OF_EXPERTS.get((said["expert_count"], is_v3), (1, 1))
    n_group, topk_group = said.get("expert_group_count", n_group), said.get("expert_group_used_count", topk_group)
    own = {} if is_v3 else {"topk_method": "greedy" if n_group == 1 else "group_limited_greedy"}
    return own | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "q_lora_rank": said.get("attention.q_lora_rank") or None,
        "num_key_value_heads": said["attention.head_count"],  # one, where keys and values are absorbed
        "head_dim": rotary,
        "qk_nope_head_dim": said.get("attention.key_length_mla", said["attention.key_length"]) - rotary,
        "v_head_dim": said.get("attention.value_length_mla", said["attention.value_length"]),
        "n_group": n_group,
        "topk_group": topk_group,
    }


def _mixtral(said: Said, names: Sequence[str]) -> dict[str, Any]:
    if not said.get("expert_count"):
        raise UnsupportedModelError(
            "A GGUF file of the architecture 'llama' without experts holds a dense model: torch_mesh reads models with "
            "experts."
        )
    return {"sliding_window": None}


def _ernie(said: Said, names: Sequence[str]) -> dict[str, Any]:
    return {"moe_layer_end_index": said["block_count"] - 1, "use_bias": _has(names, "attn_q.bias")}


def _has(names: Sequence[str], ending: str) -> bool:
    return any(name.endswith(ending) for name in names)


FAMILIES: Mapping[str, Family] = {
    "olmoe": Family("olmoe", {"expert_count": "num_experts"}),
    "glm4moe": Family("glm4_moe", _DEEPSEEK, _glm4, {"gate.e_score_correction_bias": "exp_probs_b.bias"}),
    "deepseek2": Family(
        "deepseek_v3",
        _DEEPSEEK | {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"},
        _deepseek2,
        {"gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "llama": Family("mixtral", {"expert_count": "num_local_experts"}, _mixtral, rotated=("q_proj", "k_proj")),
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
        rotated=("q_proj", "k_proj"),
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


_KEYS = ".attn_k_b.weight"  # of DeepSeek: the part of kv_b_proj that makes keys, transposed


class Names(ABC):
    """The way from GGUF's tensors to a model's parameters."""

    @abstractmethod
    def target(self, name: str) -> str | None:
        """The parameter, or None if it knows none."""

    def companion(self, name: str) -> str | None:
        """The tensor that makes up the parameter together with this one, which comes first; None: it is all of it."""
        return None

    @abstractmethod
    def values(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        """What the parameter is where the file has ``values``, and those of its companion."""


class PackageNames(Names):
    """The way from GGUF's tensors to a model's parameters, by the gguf package's map."""

    def __init__(self, architecture: str, model: transformers.PreTrainedModel) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._family = FAMILIES[architecture]
        self._config = model.config
        layers = model.config.num_hidden_layers
        kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._map = get_tensor_name_map(kind, layers)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._targets = {own: name for name in self._shapes if (own := self._own_name(name)) is not None}

    def target(self, name: str) -> str | None:
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= self._config.num_hidden_layers:
            return f"model.layers.{layer[1]}.mtp"  # layers for multi-token prediction stand behind the others
        if name.endswith(_KEYS):
            return self._targets.get(name.replace(_KEYS, ".attn_kv_b.weight"))
        return self._targets.get(name)

    def companion(self, name: str) -> str | None:
        return name.replace(_KEYS, ".attn_v_b.weight") if name.endswith(_KEYS) else None

    def values(self, name: str, values: torch.Tensor, companion: torch.Tensor | None = None) -> torch.Tensor:
        target = self.target(name)
        assert target is not None
        if companion is not None:  # [heads, latent, keys] and [heads, values, latent]
            values = torch.cat([values.transpose(1, 2), companion], dim=1)
        if any(f".{each}." in target for each in self._family.rotated):
            kv = ".k_proj." in target
            heads = self._config.num_key_value_heads if kv else self._config.num_attention_heads
            rows = values.reshape(heads, -1, 2, *values.shape[1:])
            values = rows.transpose(1, 2)
        return values.reshape(self._shapes[target])

    def _own_name(self, name: str) -> str | None:
        for ending, own in self._family.renamed.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            if name.endswith(ending) and layer is not None:
                return f"blk.{layer[1]}.{own}"
        stem, _, leaf = name.rpartition(".")
        found = self._map.get_name(stem) if leaf in ("weight", "bias") else None
        return None if found is None else f"{found}.{leaf}"
