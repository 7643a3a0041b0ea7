"""Rewrites a Qwen3-MoE checkpoint in bf16 safetensors as GGUF, for llama.cpp. Runs in the peers' environment.

usage: write_gguf.py CHECKPOINT OUTPUT {Q4_0,Q8_0,BF16}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.utility import LocalTensor, SafetensorsLocal

ARCHITECTURE = "qwen3moe"
# name in the GGUF -> name in the checkpoint
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
PER_EXPERT = {"ffn_gate_exps.weight": "gate_proj", "ffn_up_exps.weight": "up_proj", "ffn_down_exps.weight": "down_proj"}
# As in llama.cpp's converter norms and the router are float32.
FLOAT32 = ("norm.weight", "ffn_gate_inp.weight")


def sources(config: dict) -> Iterator[tuple[str, list[str]]]:
    """Return (GGUF tensor, the checkpoint's tensors that it stacks), in the order of the file."""
    for target, source in OUTER.items():
        yield target, [source]
    for layer in range(config["num_hidden_layers"]):
        for target, source in PER_LAYER.items():
            yield f"blk.{layer}.{target}", [f"model.layers.{layer}.{source}"]
        for target, projection in PER_EXPERT.items():
            experts = f"model.layers.{layer}.mlp.experts"
            yield (
                f"blk.{layer}.{target}",
                [f"{experts}.{expert}.{projection}.weight" for expert in range(config["num_experts"])],
            )


def form_of(target: str, form: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32 if target.endswith(FLOAT32) else form


def encode(tensor: LocalTensor, form: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Return the tensor's bytes in ``form``."""
    if tensor.dtype != "BF16":
        raise ValueError(f"tensors must be BF16, not {tensor.dtype}")
    raw = tensor.mmap_bytes()
    if form == gguf.GGMLQuantizationType.BF16:
        return raw
    values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return gguf.quants.quantize(values, form).view(np.uint8).reshape(-1)


def add_metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    add_common(writer, config)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_common(writer: gguf.GGUFWriter, config: dict) -> None:
    """The metadata that have the same names in every config."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    # Inputs are token ids and outputs logits, so no vocabulary is needed.
    writer.add_tokenizer_model("no_vocab")


def add_tensor_infos(
    writer: gguf.GGUFWriter, config: dict, tensors: dict[str, LocalTensor], form: gguf.GGMLQuantizationType
) -> None:
    for target, names in sources(config):
        own_form = form_of(target, form)
        shape = tensors[names[0]].shape if len(names) == 1 else (len(names), *tensors[names[0]].shape)
        block, block_bytes = gguf.GGML_QUANT_SIZES[own_form]
        count = int(np.prod(shape))
        writer.add_tensor_info(target, shape, np.dtype(np.float32), count // block * block_bytes, raw_dtype=own_form)


def write(checkpoint: Path, output: Path, form: gguf.GGMLQuantizationType) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    tensors: dict[str, LocalTensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        tensors.update(SafetensorsLocal(shard).tensors)
    partial = output.with_name(output.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    add_metadata(writer, config)
    add_tensor_infos(writer, config, tensors, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target, names in sources(config):
        own_form = form_of(target, form)
        writer.write_tensor_data(np.concatenate([encode(tensors[name], own_form) for name in names]))
    writer.close()
    partial.rename(output)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), gguf.GGMLQuantizationType[sys.argv[3]])
