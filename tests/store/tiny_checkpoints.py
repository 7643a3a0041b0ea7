"""Tiny random models of many families, for tests of their checkpoints' layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_mesh.models.families import find_experts

_ARIA = Version("5.18")  # the first version that marks its experts
# Applied to configs that have the attribute.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "expert_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "mlp_hidden_size": 48,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_experts": 12,  # two digits, to detect sorting of numbers as text
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "moe_num_experts": 12,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "unpadded_vocab_size": 120,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "sliding_window": 32,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_gate_rank": 8,
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> transformers.PreTrainedModel:
    """A random model whose experts all differ. Skips the test where transformers is too old for it."""
    if model_type not in CONFIG_MAPPING or (model_type == "aria_text" and Version(transformers.__version__) < _ARIA):
        pytest.skip(f"this transformers has no experts of {model_type}")
    defaults = CONFIG_MAPPING[model_type]()
    options = {name: value for name, value in {**_SIZES, **sizes}.items() if hasattr(defaults, name)}
    if getattr(defaults, "kv_lora_rank", None):  # latent attention: as many key heads as heads, with their own size
        options["num_key_value_heads"] = options["num_attention_heads"]
        options.pop("head_dim", None)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**options))
    for layer in find_experts(model):
        for name in layer.parameter_names:
            torch.nn.init.normal_(getattr(layer.module, name))
    return model.to(dtype)


def save_tiny(folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Path:
    """Saves a ``tiny_model`` to ``folder``; returns it."""
    tiny_model(model_type, dtype, **sizes).save_pretrained(folder)
    return folder
