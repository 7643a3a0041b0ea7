"""Writes a gpt-oss GGUF file of random weights, experts in MXFP4 and the rest in bf16 as published. Runs in the peers'
environment.

usage: write_gpt_oss_gguf.py CONFIG.json OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from write_gguf import add_common

Form = gguf.GGMLQuantizationType
FLOAT32 = ("norm.weight", "sinks.weight", "bias", "ffn_gate_inp.weight")


def tensors(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield "token_embd.weight", (config["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (hidden,)
        yield block + "post_attention_norm.weight", (hidden,)
        yield block + "attn_sinks.weight", (config["num_attention_heads"],)
        for name, rows, columns in (
            ("attn_q", queries, hidden),
            ("attn_k", keys, hidden),
            ("attn_v", keys, hidden),
            ("attn_output", hidden, queries),
            ("ffn_gate_inp", experts, hidden),
        ):
            yield f"{block}{name}.weight", (rows, columns)
            yield f"{block}{name}.bias", (rows,)
        for name, rows, columns in (
            ("ffn_gate_exps", inner, hidden),
            ("ffn_up_exps", inner, hidden),
            ("ffn_down_exps", hidden, inner),
        ):
            yield f"{block}{name}.weight", (experts, rows, columns)
            yield f"{block}{name}.bias", (experts, rows)


def form_of(name: str) -> Form:
    if name.endswith(FLOAT32):
        return Form.F32
    return Form.MXFP4 if name.endswith("_exps.weight") else Form.BF16


def values(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray:
    """Return random codes and scales for weights of standard deviation 0.02; norms are 1."""
    form, count = form_of(name), int(np.prod(shape))
    if form == Form.MXFP4:
        block, size = gguf.GGML_QUANT_SIZES[form]
        data = generator.integers(0, 256, (count // block, size), dtype=np.uint8)
        data[:, 0] = 120
        return data.reshape(-1)
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    drawn = generator.standard_normal(count, np.float32) * np.float32(0.02)
    return drawn.reshape(shape) if form == Form.F32 else (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def add_metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"]
    add_common(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_count(config["num_local_experts"])


def write(config: dict, output: Path) -> None:
    generator = np.random.default_rng(0)
    partial = output.with_name(output.name + ".partial")
    writer = gguf.GGUFWriter(partial, "gpt-oss")
    add_metadata(writer, config)
    for name, shape in tensors(config):
        form = form_of(name)
        block, size = gguf.GGML_QUANT_SIZES[form]
        count = int(np.prod(shape)) // block * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors(config):
        writer.write_tensor_data(values(name, shape, generator))
    writer.close()
    partial.rename(output)


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
