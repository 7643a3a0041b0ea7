"""Claim: a checkpoint of gpt-oss-20b's full size opens as published, in MXFP4, with the memory of `--resident` and the
rest of the model. It opens from its own files within seconds, or from a store that is converted at 0.6 of the disk's
speed.

Weights are random, in the published layout. Routers of random weights choose nearly the same experts for every token.
So routing is replayed from a synthetic trace whose tokens share 39 % of their experts with the next one. `--llama`
measures llama.cpp with the same types, shapes and routing in a GGUF file, under the peak memory of torch_mesh's
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import sessions
import synthetic
import torch
from harness import Report, Row
from isolation import evict
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from torch_mesh.planning.machine import disk_speed
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.routing.traces import save_trace

LAYERS = 24  # of the 20b; the 120b has 36 layers of 128 experts
EXPERTS = 32
TOKENIZER = Path(__file__).parents[1] / "examples" / "mesh-tiny"
TOP_K, VOCABULARY = 4, 201088
OVERLAP = 0.39
PROMPT, SEED = 16, 20260101
SLACK = 32 << 20
_BLOCK = 8 << 20  # bytes of a read that measures the disk


def write(folder: Path, layers: int, experts: int) -> Path:
    """Write one file per layer. The experts' codes are random, and their scales give weights of about the size of
    trained ones."""
    path = folder / f"gpt-oss-{layers}x{experts}"
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts, architectures=["GptOssForCausalLM"])
    config.dtype = torch.bfloat16
    table = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (partial / "config.json").write_text(json.dumps(table))
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in GptOssForCausalLM(config).state_dict().items()}
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        number = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        files.setdefault(f"model-{number:05d}-of-{layers:05d}.safetensors", {})[name] = shape
    weight_map = {}
    for file, members in files.items():
        tensors = {}
        for name, shape in members.items():
            tensors |= _tensors(name, shape)
        save_file(tensors, partial / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    for file in TOKENIZER.glob("tokenizer*"):  # any tokenizer whose ids are valid for gpt-oss
        shutil.copy(file, partial)
    (partial / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    partial.rename(path)
    return path


def _tensors(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, columns, rows = shape
        return {
            f"{name}_blocks": torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(119, 123, (experts, rows, columns // 32), dtype=torch.uint8),
        }
    if "norm" in name:
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    return {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02}


def _command(*arguments: str) -> tuple[float, str]:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "torch_mesh", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return time.perf_counter() - begin, done.stdout


def gguf(raw: Path) -> Path:
    path = raw.with_suffix(".gguf")
    if not path.exists():
        synthetic.run_peer("write_gpt_oss_gguf.py", str(raw / "config.json"), str(path))
    return path


def converted(raw: Path, report: Report) -> Path:
    stored = raw.with_name(f"{raw.name}-mesh")
    evict([raw])
    seconds, _ = _command("convert", str(raw), str(stored), "--weights", "auto", "--force")
    source_bytes = sum(path.stat().st_size for path in raw.iterdir())
    disk = disk_speed([path for path in raw.iterdir() if path.suffix == ".safetensors"], _BLOCK)
    report.add(Row("conversion", source_bytes / seconds / 1e9, "GB/s", "disk", (disk or 0) / 1e9, at_least=0.6))
    report.add(Row("conversion", source_bytes / seconds / 1e9, "GB/s", "cp and sync", _copy_rate(raw) / 1e9))
    return stored


def _copy_rate(folder: Path) -> float:
    """Bytes per second of copying some files. Like a conversion, a copy reads and writes at the same time."""
    paths = sorted(folder.glob("*.safetensors"))
    paths = paths[: -(-len(paths) // 4)]
    evict([folder])
    with tempfile.TemporaryDirectory(dir=folder.parent) as copies:
        begin = time.perf_counter()
        for path in paths:
            shutil.copy(path, copies)
        os.sync()
        return sum(path.stat().st_size for path in paths) / (time.perf_counter() - begin)


def measure(options: Any) -> Report:
    raw = write(options.dir, options.layers, options.experts)
    report = Report(
        f"gpt-oss's shapes, {options.layers} layers of {options.experts} experts, {options.resident / 1e9:g} GB "
        "resident"
    )
    contenders = [("its own files", raw)]
    if options.convert:
        contenders.append(("a store", converted(raw, report)))
    tokens = {"prompt": PROMPT, "warm_up": options.warm_up, "measured": options.tokens}
    request = tokens | {"vocab": VOCABULARY, "seed": SEED, "threads": options.threads, "watch_memory": True}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.npz"
        length = PROMPT + max(options.warm_up + options.tokens, options.llama_warm_up + options.llama_tokens)
        shape = {"layers": options.layers, "experts": options.experts, "top_k": TOP_K}
        save_trace(synthetic_trace(**shape, prompts=1, prompt_tokens=2 * length, overlap=OVERLAP), trace)
        request["trace"] = str(trace)
        own = request | {"resident": options.resident, "prefetch": "off", "compiled": False}
        results = {
            name: sessions.run(Path(sys.executable), "mesh_replay.py", path, sessions.NO_LIMIT, own)
            for name, path in contenders
        }
        limit = max(result["group_peak"] for result in results.values()) + SLACK
        for label in options.llama:
            peer = request | {"repack": False, "random_access": label == "random"}
            peer |= {"measured": options.llama_tokens, "warm_up": options.llama_warm_up}
            results[f"llama.cpp, {label}"] = sessions.run(
                synthetic.PEERS_PYTHON, "llama_replay.py", gguf(raw), limit, peer
            )
    for name, result in results.items():
        for what, entry, unit, scale in (
            ("seconds to open", "load_seconds", "s", 1.0),
            ("speed", "tokens_per_second", "tok/s", 1.0),
            ("hit rate", "hit_rate", "%", 100.0),
            ("read per token", "read_per_token", "MB", 1e-6),
            ("peak of anonymous memory", "anonymous_peak", "GB", 1e-9),
        ):
            if result.get(entry) is not None:
                report.add(Row(f"{name}: {what}", scale * result[entry], unit))
    report.details = sessions.without_logits({name: [result] for name, result in results.items()})
    report.notes += [
        (
            f"{options.tokens} timed tokens after {options.warm_up}, of llama.cpp {options.llama_tokens} after "
            f"{options.llama_warm_up}"
        ),
        "stock: llama.cpp's mapping without advice; random: with MADV_RANDOM",
    ]
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--experts", type=int, default=EXPERTS)
    arguments.add_argument("--resident", type=float, default=8.0, help="GB of experts")
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--warm-up", type=int, default=48, help="tokens that fill the pool")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments.add_argument("--convert", action=argparse.BooleanOptionalAction, default=True, help="measure a store too")
    arguments.add_argument("--llama", nargs="*", choices=("random", "stock"), default=[], help="measure llama.cpp too")
    arguments.add_argument("--llama-tokens", type=int, default=8, help="timed tokens of llama.cpp")
    arguments.add_argument("--llama-warm-up", type=int, default=24, help="tokens that fill the page cache")
    options = arguments.parse_args()
    options.resident = int(options.resident * 1e9)
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
