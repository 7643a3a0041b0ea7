"""Tiny GGUF files of models with experts, in llama.cpp's layout, written by the gguf package."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torch_mesh.models.families import find_experts
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.gguf import read_gguf
from torch_mesh.store.gguf_model import rest_of_model, tokenizer_files

Tensors = dict[str, torch.Tensor]
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 20000.0,
    "rotary_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_FAMILIES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "qwen35moe": "qwen3_5_moe_text",
    "olmoe": "olmoe",
    "glm4moe": "glm4_moe",
    "llama": "mixtral",
    "granitemoe": "granitemoe",
    "ernie4_5-moe": "ernie4_5_moe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "deepseek2": "deepseek_v3",
    "qwen3next": "qwen3_next",
    "llama4": "llama4_text",
    "gemma4": "gemma4_text",
}
# Sizes that these architectures have besides _SIZES.
_OWN_SIZES: Mapping[str, dict[str, Any]] = {
    "glm4moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    },
    "granitemoe": {
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.75,
        "attention_multiplier": 0.25,
    },
    "ernie4_5-moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "hunyuan-moe": {"moe_topk": 2},
    "qwen3next": {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
    },
    "llama4": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 20000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma4": {
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 15000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
        },
    },
    "deepseek2": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
}
# Architectures whose query and key projections the converter permutes.
_ROTATED = ("llama", "granitemoe")
# transformers reads the config of qwen35moe itself if it knows that architecture; 5.17 does not.
READS_QWEN35MOE = "qwen35moe" in GGUF_CONFIG_ARCHS
ARCHITECTURES = tuple(name for name in _FAMILIES if name != "qwen35moe" or READS_QWEN35MOE)
# The architectures of every run, and those of thorough runs.
EACH_ARCHITECTURE = tuple(
    pytest.param(name, marks=pytest.mark.thorough)
    if name in ("olmoe", "granitemoe", "ernie4_5-moe", "hunyuan-moe")
    else name
    for name in ARCHITECTURES
)
# Architectures whose weights transformers reads too.
READ_BY_TRANSFORMERS = ("qwen2moe", "qwen3moe", "minimax-m2", *(["qwen35moe"] if READS_QWEN35MOE else []))
# Types that the gguf package cannot encode; their bytes are random.
_DRAWN = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "NVFP4"),
)
# Types whose blocks records hold.
RECORD_TYPES = (
    *("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
)
# Byte offsets of the fp16 scales in a block.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
_TOKENS = [
    "<pad>",
    "<s>",
    "</s>",
    *(chr(ord("a") + i) for i in range(26)),
    "\u0120",
    "he",
    "ll",
    "lo",
    "hell",
    "\u010a",
    "\u010a\u010a",
]


@dataclass(frozen=True)
class Written:
    path: Path
    model: PreTrainedModel  # in fp32, with the file's values
    tensors: Mapping[str, np.ndarray]  # by GGUF's names, in fp32


def tiny_model(architecture: str, **sizes: Any) -> PreTrainedModel:
    """A random model in fp32 whose experts all differ."""
    family = CONFIG_MAPPING[_FAMILIES[architecture]]
    defaults = family()
    own = _OWN_SIZES.get(architecture, {})
    known = {
        name: value
        for name, value in {**_SIZES, **sizes}.items()
        if name in {*vars(defaults), *defaults.attribute_map, "rotary_dim", "head_dim"}
    } | own
    if architecture in ("olmoe", "granitemoe", "ernie4_5-moe", "deepseek2"):
        del known["head_dim"]
    if architecture == "llama":
        known["sliding_window"] = None
    if architecture == "gpt-oss":
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
        known["rope_parameters"] = scaling | {"rope_theta": 20000.0, "beta_fast": 32.0, "beta_slow": 1.0}
    if architecture == "qwen35moe":
        rope = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True}
        known["rope_parameters"] = rope | {"mrope_section": [3, 3, 2]}
        known["full_attention_interval"] = 2
        known["layer_types"] = ["linear_attention", "full_attention"]
    if architecture == "qwen3moe":
        known["norm_topk_prob"] = True
    if architecture != "minimax-m2":
        known.pop("rotary_dim")
    if architecture == "qwen2moe":
        known.pop("head_dim", None)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[family](family(**known)).float().eval()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if "experts" in name:
                parameter.normal_(0, 0.03 if architecture == "gpt-oss" else 0.06)
            elif parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point() and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def write(
    path: Path,
    architecture: str,
    types: Mapping[str, str] | None = None,
    *,
    parts: int = 0,
    tied: bool = False,
    vocabulary: bool = True,
    pre: str = "qwen2",
    bos: str = "<s>",
    extra: Mapping[str, np.ndarray] | None = None,
    **sizes: Any,
) -> Written:
    """Write a model to a file. ``types`` maps name patterns to types; the first match counts, other tensors are F32.

    The returned model has the values of the file.
    """
    model = tiny_model(architecture, tie_word_embeddings=tied, **sizes)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0)
    tensors = dict(_tensors(architecture, model))
    if parts > 1:
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(tensors) // parts))
    _add_metadata(writer, architecture, model.config)
    if vocabulary:
        _add_tokenizer(writer, model.config, pre, bos)
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        kind = next((kind for pattern, kind in (types or {}).items() if re.search(pattern, name)), "F32")
        data, values[name] = encode(tensor.detach().contiguous().numpy(), kind if tensor.dim() > 1 else "F32")
        writer.add_tensor(name, data, raw_dtype=Type[kind if tensor.dim() > 1 else "F32"])
        if "gate_up_exps" in name:
            for part, half in zip(("gate", "up"), np.split(values[name], 2, axis=1), strict=True):
                values[name.replace("gate_up", part)] = half
    for name, array in {**_rope_divisors(model.config), **(extra or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _take(architecture, model, values)
    first = path if parts < 2 else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))
    return Written(first, model, values)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewrite(
    path: Path,
    to: Path,
    architecture: str = "qwen3moe",
    *,
    drop: str = "",
    reshape: str = "",
    fuse: bool = False,
    metadata: dict | None = None,
    extra: dict | None = None,
) -> None:
    """Write a copy of the file with one change. ``drop`` is a pattern of names."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, architecture)
    given = dict(metadata or {})
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in given:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for name, value in given.items():
        writer.add_key_value(
            name, value, gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        )
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, (data, kind) in list(tensors.items()):
        if fuse and "gate_exps" in name:
            up, _ = tensors.pop(name.replace("gate", "up"))
            tensors.pop(name)
            tensors[name.replace("gate", "gate_up")] = np.concatenate([data, up], axis=1), kind
    for name, (data, kind) in tensors.items():
        if name == reshape:
            data = data.reshape(*data.shape[:-2], data.shape[-2] * 2, data.shape[-1] // 2)
        if not re.fullmatch(drop, name):
            writer.add_tensor(name, data, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    finish(writer)


def encode(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a tensor in this type, and the values they represent."""
    if kind == "F32":
        return values, values
    if kind not in _DRAWN:
        data = gguf.quants.quantize(values, Type[kind])
        return data, gguf.quants.dequantize(data, Type[kind])
    count, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = np.random.randint(0, 256, (values.size // count, size), dtype=np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] = np.random.randint(1, 40, (len(blocks), 4))
    else:
        set_scales(kind, blocks, np.float16(3e-5).view(np.uint16))
    data = blocks.reshape(*values.shape[:-1], values.shape[-1] // count * size)
    return data, gguf.quants.dequantize(data, Type[kind])


def scales(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the scales, float16 [blocks, scales], of blocks, uint8 [blocks, bytes]."""
    if kind == "IQ1_M":  # each of four words holds four bits of its scale
        words = blocks[:, 48:56].copy().view(np.uint16) >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
        return words.sum(axis=1, dtype=np.uint16)[:, None].view(np.float16)
    return np.concatenate([blocks[:, at : at + 2].copy().view(np.float16) for at in SCALES.get(kind, (0,))], axis=1)


def set_scales(kind: str, blocks: np.ndarray, halves: np.ndarray) -> None:
    """Set every scale of ``blocks``, uint8 [blocks, bytes], from ``halves``, uint16 [blocks, scales] or fewer."""
    halves = np.broadcast_to(halves, (len(blocks), len(SCALES.get(kind, (0,)))))
    for number, at in enumerate(SCALES.get(kind, (0,))):
        if kind == "IQ1_M":
            quarters = halves >> np.arange(0, 16, 4, dtype=np.uint16) << 12
            blocks[:, 48:56] = (blocks[:, 48:56].copy().view(np.uint16) & 0x0FFF | quarters).view(np.uint8)
        else:
            blocks[:, at : at + 2] = halves[:, number].copy().view(np.uint8).reshape(-1, 2)


def with_number(data: bytes, path: Path, key: str, value: int) -> bytes:
    """Return ``data`` of the file at ``path`` with another 64-bit number under ``key``, in each element of an array."""
    header = read_gguf(path).header
    keyed = struct.pack("<Q", len(key)) + key.encode()
    at = data.index(keyed) + len(keyed)
    kind, element = struct.unpack_from("<II", data, at)
    is_array = kind == gguf.GGUFValueType.ARRAY
    count = struct.unpack_from("<Q", data, at + 8)[0] if is_array else 1
    size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 7: 1, 10: 8, 11: 8}[element if is_array else kind]
    end = at + (16 if is_array else 4) + count * size
    wide = struct.pack("<I", gguf.GGUFValueType.INT64 if value < 0 else gguf.GGUFValueType.UINT64)
    array = struct.pack("<I", kind) + wide + struct.pack("<Q", count) if is_array else wide
    changed = array + struct.pack("<q", value) * count
    name = list(header.tensors)[-1]
    named = struct.pack("<Q", len(name)) + name.encode()
    last = data.rindex(named, 0, header.data_start) + len(named)
    last += 4 + 8 * struct.unpack_from("<I", data, last)[0] + 4 + 8
    made = data[:at] + changed + data[end:last]
    return made + bytes(-len(made) % 32) + data[header.data_start :]


def read_whole(path: Path, tokenizer: bool = True) -> None:
    """Read everything, from the metadata to the values of every tensor."""
    model = meta_model(read_config(path))
    experts = find_checkpoint_experts(path, model)
    last = experts.shape.layers - 1, experts.shape.experts - 1
    experts.read_expert(*last)
    if experts.kept is not None:
        experts.pack_kept(*last, experts.kept.group_size)
    for part in rest_of_model(path, experts.weights, experts.names, model):
        assert part.values().shape == part.shape
    if tokenizer:
        tokenizer_files(path)


def _name_map(architecture: str, layers: int) -> gguf.TensorNameMap:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(arch, layers)


def _tensors(architecture: str, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters by GGUF's names and in its layouts."""
    experts = {f"{layer.path}.{name}": layer for layer in find_experts(model) for name in layer.parameter_names}
    for layer in find_experts(model):
        number = re.search(r"layers\.(\d+)", layer.path)[1]
        every = [layer.expert(index) for index in range(layer.num_experts)]
        parts = {part: torch.stack([getattr(expert, part) for expert in every]) for part in ("gate", "up", "down")}
        if architecture == "gemma4":
            parts = {"gate_up": torch.cat([parts["gate"], parts["up"]], dim=1), "down": parts["down"]}
        for part, stack in parts.items():
            yield f"blk.{number}.ffn_{part}_exps.weight", stack
        for part in ("gate", "up", "down"):
            if layer.has_bias:
                biases = torch.stack([getattr(expert, f"{part}_bias") for expert in every])
                yield f"blk.{number}.ffn_{part}_exps.bias", biases
    for name, tensor in model.state_dict().items():
        if (split := _split(model.config, name, tensor)) is not None:
            yield from split.items()
        elif name not in experts and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            yield _gguf_name(architecture, model, name), _forward(architecture, model, name, tensor)


def _split(config: Any, name: str, tensor: torch.Tensor) -> Tensors | None:
    """Return the two tensors, in GGUF's layouts, into which a file splits some parameters; None for others."""
    if name.endswith("kv_b_proj.weight"):
        prefix = f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.attn"
        heads = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return {f"{prefix}_k_b.weight": keys.transpose(1, 2), f"{prefix}_v_b.weight": values}
    if name.endswith("in_proj_qkvz.weight"):
        prefix = f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.attn"
        heads = tensor.reshape(config.linear_num_key_heads, -1, tensor.shape[1])
        values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        sizes = [config.linear_key_head_dim] * 2 + [values] * 2
        query, key, value, gate = (part.reshape(-1, tensor.shape[1]) for part in heads.split(sizes, dim=1))
        return {f"{prefix}_qkv.weight": torch.cat([query, key, value]), f"{prefix}_gate.weight": gate}
    return None


def _gguf_name(architecture: str, model: PreTrainedModel, name: str) -> str:
    if name.endswith(("router.weight", "gate.wg.weight")):
        return f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.ffn_gate_inp.weight"
    if name.endswith("e_score_correction_bias"):
        return f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.exp_probs_b.bias"
    own_names = {
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "per_expert_scale": "ffn_down_exps.scale",
    }
    for leaf, own in own_names.items():
        if name.endswith(leaf):
            return f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.{own}"
    stem, _, leaf = name.rpartition(".")
    stem, suffix = (stem, f".{leaf}") if leaf in ("weight", "bias") else (name, ".weight")
    if architecture == "qwen35moe" and stem.endswith("post_attention_layernorm"):
        return f"blk.{re.search(r'layers.([0-9]+)', name)[1]}.post_attention_norm{suffix}"
    found = _name_map(architecture, model.config.num_hidden_layers).get_name(stem)
    assert found is not None, name
    return found + suffix


def _head_order(config: Any, width: int) -> torch.Tensor:
    """Return llama.cpp's order of value-head rows: the first of each key head, then the second."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return torch.arange(values * width).reshape(keys, values // keys, width).transpose(0, 1).reshape(-1)


def _forward(architecture: str, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter in GGUF's layout."""
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    if name.endswith("moe_statics.e_score_correction_bias"):
        return tensor[0]
    if architecture in _ROTATED and name.endswith(("q_proj.weight", "k_proj.weight")):
        config = model.config
        heads = config.num_key_value_heads if "k_proj" in name else config.num_attention_heads
        return tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    if architecture not in ("qwen35moe", "qwen3next"):
        return tensor
    config = model.config
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if "linear_attn" not in name:
        return tensor
    if architecture == "qwen3next":  # keeps transformers' order of heads
        return -torch.exp(tensor) if name.endswith("A_log") else tensor.squeeze(1) if "conv1d" in name else tensor
    width, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    heads, rows = _head_order(config, 1), _head_order(config, width)
    if name.endswith("A_log"):
        return -torch.exp(tensor)[heads]
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tensor[heads]
    if name.endswith("in_proj_z.weight"):
        return tensor[rows]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        turned = torch.cat([tensor[:keys], tensor[keys:][rows]])
        return turned.squeeze(1) if "conv1d" in name else turned
    return tensor[:, rows] if name.endswith("out_proj.weight") else tensor


def _take(architecture: str, model: PreTrainedModel, values: Mapping[str, np.ndarray]) -> None:
    """Copy a file's values into the matrices of the model."""
    with torch.no_grad():
        for layer in find_experts(model):
            number = re.search(r"layers\.(\d+)", layer.path)[1]
            for index in range(layer.num_experts):
                expert = layer.expert(index)
                for part in ("gate", "up", "down"):
                    weight = values[f"blk.{number}.ffn_{part}_exps.weight"][index]
                    getattr(expert, part).copy_(torch.from_numpy(weight.copy()))
        for name, tensor in model.state_dict().items():
            order = torch.arange(tensor.numel()).reshape(tensor.shape)
            moved = _split(model.config, name, order)
            if moved is None and tensor.dim() == 2 and tensor.shape[0] > 1:
                own = None if "experts." in name and "shared" not in name else _gguf_name(architecture, model, name)
                moved = {own: _forward(architecture, model, name, order)} if own in values else {}
            for own, places in (moved or {}).items():
                tensor.view(-1)[places.flatten()] = torch.from_numpy(values[own].copy()).flatten()


def _rope_divisors(config: Any) -> dict[str, np.ndarray]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        smooth = (low / lengths - 1) / (low / high - 1)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        divisors = np.where(lengths < high, 1, np.where(lengths > low, rope["factor"], between))
    elif "full_attention" in rope:
        width = config.per_layer_config["full_attention"].head_dim // 2
        divisors = np.full(width, 1e30)
        divisors[: int(width * rope["full_attention"]["partial_rotary_factor"])] = 1
    else:
        return {}
    return {"rope_freqs.weight": divisors.astype(np.float32)}


def _add_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    each = [layer.num_key_value_heads for layer in config.per_layer_config]
    writer.add_head_count_kv(1 if architecture == "deepseek2" else each if architecture == "gemma4" else each[0])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    top_k = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    writer.add_expert_used_count(next(count for name in top_k if (count := getattr(config, name, None))))
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(count for name in names if (count := getattr(config, name, None))))
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_expert_feed_forward_length(inner)
    dense = ("intermediate_size_mlp", "intermediate_size")
    writer.add_feed_forward_length(next((size for name in dense if (size := getattr(config, name, None))), inner))
    if architecture == "deepseek2":
        rotary, latent = config.qk_rope_head_dim, config.kv_lora_rank
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(latent)
        writer.add_key_length(latent + rotary)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config.qk_nope_head_dim + rotary)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(rotary)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_log_mul(0.07)
    if architecture in ("glm4moe", "ernie4_5-moe", "deepseek2"):
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(1)
    if architecture in ("glm4moe", "deepseek2"):
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "glm4moe":
        writer.add_rope_dimension_count(16)
    if architecture in ("ernie4_5-moe", "llama4"):
        writer.add_interleave_moe_layer_step(2 if architecture == "llama4" else config.moe_layer_interval)
    if architecture == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gemma4":
        sliding, full = (config.per_layer_config[f"{kind}_attention"].head_dim for kind in ("sliding", "full"))
        writer.add_key_length(full)
        writer.add_value_length(full)
        writer.add_key_length_swa(sliding)
        writer.add_value_length_swa(sliding)
        writer.add_rope_dimension_count(full)
        writer.add_rope_dimension_count_swa(sliding)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif hasattr(config, "head_dim") and architecture not in ("qwen2moe", "deepseek2"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture in ("qwen2moe", "qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    if architecture == "minimax-m2":
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("qwen35moe", "qwen3next"):
        writer.add_full_attention_interval(2)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_count(config.head_dim // 2)
    if architecture == "qwen35moe":
        writer.add_rope_dimension_sections([3, 3, 2, 0])


def _add_tokenizer(writer: gguf.GGUFWriter, config: Any, pre: str, bos: str) -> None:
    tokens = [*_TOKENS, *(f"<unused{i}>" for i in range(config.vocab_size - len(_TOKENS)))]
    tokens[1] = bos
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<pad>", bos, "</s>") else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "l o", "he ll", "\u010a \u010a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
