"""Writes a Qwen3-MoE GGUF file of random Q4_0 weights, without an original. Runs in the peers' environment.

usage: write_random_gguf.py CONFIG.json OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from write_gguf import FLOAT32, add_metadata, sources

Q4_0 = gguf.GGMLQuantizationType.Q4_0
# A block has 32 weights of standard deviation 0.02. Nibbles are uniform in -8 ... 7, with a standard deviation of 4.6.
SCALE = np.float16(0.02 / 4.6)


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


def blocks(count: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    block, size = gguf.GGML_QUANT_SIZES[Q4_0]
    data = generator.integers(0, 256, (count // block, size), dtype=np.uint8)
    data[:, :2] = np.frombuffer(SCALE.tobytes(), np.uint8)
    return data.reshape(-1)


def write(config: dict, output: Path) -> None:
    generator = np.random.default_rng(0)
    partial = output.with_name(output.name + ".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    add_metadata(writer, config)
    tensors = []
    for target, names in sources(config):
        shape = shape_of(names[0], config)
        shape = shape if len(names) == 1 else (len(names), *shape)
        exact = target.endswith(FLOAT32)
        form = gguf.GGMLQuantizationType.F32 if exact else Q4_0
        block, size = gguf.GGML_QUANT_SIZES[form]
        count = int(np.prod(shape))
        writer.add_tensor_info(target, shape, np.dtype(np.float32), count // block * size, raw_dtype=form)
        tensors.append((target, shape, count, exact))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target, shape, count, exact in tensors:
        if not exact:
            writer.write_tensor_data(blocks(count, generator))
        elif target.endswith("norm.weight"):
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(generator.standard_normal(count, np.float32).reshape(shape) * np.float32(0.02))
    writer.close()
    partial.rename(output)


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
