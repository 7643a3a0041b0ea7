"""The checkpoint of the large benchmarks: Qwen3-30B-A3B's shapes, fewer layers, seeded random weights in bf16.

The same weights can be written in each system's format: torch_mesh's store, GGUF for llama.cpp, an offload folder for
accelerate. Files are created once below ``--dir`` and reused by name. A file with its final name is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / "build" / "peers-venv" / "bin" / "python"

# The embedding is of unit scale: with the usual 0.02 the residual stream of the later layers hardly depends on the
# token. Then every token has nearly the same experts, and any cache looks perfect.
EMBEDDING_STD = 1.0
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen3-MoE checkpoint; the defaults are Qwen3-30B-A3B's but for layers and vocabulary."""

    layers: int = 4
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    experts_per_token: int = 8
    heads: int = 32
    key_value_heads: int = 4
    head_dim: int = 128
    vocab: int = 8192
    seed: int = 0

    @property
    def name(self) -> str:
        return f"qwen3-moe-{self.layers}x{self.experts}-{self.hidden}-{self.intermediate}-seed-{self.seed}"

    @property
    def expert_bytes_bf16(self) -> int:
        return 2 * self.layers * self.experts * 3 * self.hidden * self.intermediate


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }


def layer_tensors(shape: Shape, layer: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, bf16 tensor) of one decoder layer, in the order of the checkpoint."""
    prefix = f"model.layers.{layer}."

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(WEIGHT_STD).to(torch.bfloat16)

    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    for norm, size in (
        ("input_layernorm", shape.hidden),
        ("post_attention_layernorm", shape.hidden),
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
    ):
        yield f"{prefix}{norm}.weight", torch.ones(size, dtype=torch.bfloat16)
    yield f"{prefix}self_attn.q_proj.weight", weight(queries, shape.hidden)
    yield f"{prefix}self_attn.k_proj.weight", weight(keys, shape.hidden)
    yield f"{prefix}self_attn.v_proj.weight", weight(keys, shape.hidden)
    yield f"{prefix}self_attn.o_proj.weight", weight(shape.hidden, queries)
    yield f"{prefix}mlp.gate.weight", weight(shape.experts, shape.hidden)
    for expert in range(shape.experts):
        yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", weight(shape.intermediate, shape.hidden)
        yield f"{prefix}mlp.experts.{expert}.up_proj.weight", weight(shape.intermediate, shape.hidden)
        yield f"{prefix}mlp.experts.{expert}.down_proj.weight", weight(shape.hidden, shape.intermediate)


def outer_tensors(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(EMBEDDING_STD)
    head = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(WEIGHT_STD)
    return {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": head.to(torch.bfloat16),
    }


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write one shard per layer. Memory is bounded by one layer."""
    generator = torch.Generator().manual_seed(shape.seed)
    shards = shape.layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    for index in range(shards):
        outer = index == shape.layers
        tensors = outer_tensors(shape, generator) if outer else dict(layer_tensors(shape, index, generator))
        shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json) + "\n")


def made(path: Path, write: Callable[[Path], object]) -> Path:
    """The folder ``path``. If it is not there, ``write`` fills a folder beside it, which is renamed when complete."""
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(path)
    return path


def checkpoint(directory: Path, shape: Shape) -> Path:
    """Return the bf16 Hugging Face checkpoint."""
    return made(directory / shape.name, lambda folder: write_checkpoint(folder, shape))


def gguf(directory: Path, shape: Shape, form: str) -> Path:
    """Return the same weights as GGUF, ``form`` being ``Q4_0`` or ``BF16``. The peers' environment writes it."""
    path = directory / f"{shape.name}-{form}.gguf"
    if not path.exists():
        run_peer("write_gguf.py", str(checkpoint(directory, shape)), str(path), form)
    return path


def store(directory: Path, shape: Shape, weights: str) -> Path:
    """torch_mesh's converted checkpoint."""
    path = directory / f"{shape.name}-mesh-{weights}"
    return path if path.exists() else converted(checkpoint(directory, shape), weights)


def converted(source: Path, weights: str) -> Path:
    """The folder beside ``source`` with ``source`` converted to ``weights``."""
    path = source.with_name(f"{source.name}-mesh-{weights}")
    if not path.exists():
        command = [sys.executable, "-m", "torch_mesh", "convert", str(source), str(path), "--weights", weights]
        subprocess.run(command, check=True)
    return path


def store_expert_bytes(folder: Path) -> int:
    """Bytes of all records of a converted checkpoint."""
    manifest = json.loads((folder / "mesh_manifest.json").read_text())
    return manifest["record_bytes"] * sum(file["records"] for file in manifest["record_files"])


def offload_folder(directory: Path, shape: Shape) -> Path:
    """Return accelerate's offload folder of the experts."""
    script = Path(__file__).parent / "contenders" / "accelerate_offload.py"

    def prepare(folder: Path) -> None:
        source = checkpoint(directory, shape)
        subprocess.run([sys.executable, str(script), "--prepare", str(source), str(folder)], check=True)

    return made(directory / f"{shape.name}-accelerate", prepare)


def run_peer(script: str, *arguments: str, python: Path = PEERS_PYTHON) -> None:
    if not python.exists():
        raise SystemExit(f"{python} is missing: run benchmarks/peers.sh first (it builds llama.cpp)")
    here = Path(__file__).parent
    command = [str(python), str(here / "contenders" / script), *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(here)})


def dense_bytes(checkpoint_folder: Path) -> int:
    """Bytes of all tensors that are not experts."""
    total = 0
    for shard in sorted(checkpoint_folder.glob("*.safetensors")):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__" and ".mlp.experts." not in name:
                total += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return total


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, default=Shape.layers)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    add_arguments(arguments)
    arguments.add_argument("--seed", type=int, default=Shape.seed)
    arguments.add_argument(
        "--gguf", nargs="*", choices=("Q4_0", "Q8_0", "BF16"), default=[], help="also write these forms"
    )
    options = arguments.parse_args()
    shape = Shape(layers=options.layers, seed=options.seed)
    print(checkpoint(options.dir, shape))
    for form in options.gguf:
        print(gguf(options.dir, shape, form))


if __name__ == "__main__":
    main()
