"""Writes a Qwen3-MoE GGUF file of random weights, without an original. Runs in the peers' environment, or torch_mesh's.

usage: write_random_gguf.py CONFIG.json OUTPUT [TYPES.json]      TYPES: by regular expressions of names; else Q4_0
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf_blocks import random_blocks
from write_gguf import FLOAT32, add_metadata, sources

# The embedding's and all others': as synthetic.py has them.
EMBEDDING_STD, STD = 1.0, 0.02


def shape_of(name: str, config: dict) -> tuple[int, ...]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (config["head_dim"],),
        "k_norm": (config["head_dim"],),
        "gate": (config["num_experts"], hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return shapes.get(name.split(".")[-2], (hidden,))


def form_of(target: str, types: Mapping[str, str]) -> gguf.GGMLQuantizationType:
    if target.endswith(FLOAT32):
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType[next((kind for name, kind in types.items() if re.search(name, target)), "Q4_0")]


def write(config: dict, output: Path, types: Mapping[str, str]) -> None:
    generator = np.random.default_rng(0)
    partial = output.with_name(output.name + ".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    add_metadata(writer, config)
    tensors = []
    for target, names in sources(config):
        shape = shape_of(names[0], config)
        shape = shape if len(names) == 1 else (len(names), *shape)
        form = form_of(target, types)
        block, size = gguf.GGML_QUANT_SIZES[form]
        count = int(np.prod(shape))
        writer.add_tensor_info(target, shape, np.dtype(np.float32), count // block * size, raw_dtype=form)
        tensors.append((target, shape, count, form))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target, shape, count, form in tensors:
        if form != gguf.GGMLQuantizationType.F32:
            std = EMBEDDING_STD if target.startswith("token_embd") else STD
            block = gguf.GGML_QUANT_SIZES[form][0]
            writer.write_tensor_data(random_blocks(form.name, count // block, std, generator).reshape(-1))
        elif target.endswith("norm.weight"):
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(generator.standard_normal(count, np.float32).reshape(shape) * np.float32(STD))
    writer.close()
    partial.rename(output)


if __name__ == "__main__":
    kinds = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else {}
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), kinds)
