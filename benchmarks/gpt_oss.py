"""Claim: a checkpoint of gpt-oss-20b's full size opens as it is published, in MXFP4, with no more memory than `--resident` says and the rest of the model: from its
own files within seconds, and from a store that a conversion makes at .6 of the disk's speed.

The weights are random, written in the published layout. Routers of random weights choose nearly the same experts for every token: tokens per second are therefore those of a hit rate that
is given beside them, not those of the trained model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, Row
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from torch_mesh.speed import disk_speed

LAYERS = 24  # of the 20b; the 120b has 36 layers of 128 experts
EXPERTS = 32
TOKENIZER = Path(__file__).parents[1] / "examples" / "mesh-tiny"
_BLOCK = 8 << 20  # of reads by which the disk is measured


def write(folder: Path, layers: int, experts: int) -> Path:
    """A layer to a file, the experts' codes drawn and their scales such that weights are about as large as trained ones."""
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
    for file in TOKENIZER.glob("tokenizer*"):  # any will do: its ids are some of gpt-oss's
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
    done = subprocess.run(
        [sys.executable, "-m", "torch_mesh.cli", *arguments], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return time.perf_counter() - begin, done.stdout


def _forget(folder: Path) -> None:
    """Takes files out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(options: Any) -> Report:
    raw = write(options.dir, options.layers, options.experts)
    stored = options.dir / f"{raw.name}-mesh"
    report = Report(
        f"gpt-oss's shapes, {options.layers} layers of {options.experts} experts, {options.resident} resident"
    )
    _forget(raw)
    seconds, _ = _command("convert", str(raw), str(stored), "--weights", "auto", "--force")
    held = sum(path.stat().st_size for path in raw.iterdir())
    disk = disk_speed([path for path in raw.iterdir() if path.suffix == ".safetensors"], _BLOCK)
    report.add(Row("conversion", held / seconds / 1e9, "GB/s", "disk", (disk or 0) / 1e9, at_least=0.6))
    for name, folder in (("its own files", raw), ("a store", stored)):
        _forget(folder)
        out = options.dir / "bench.json"
        lines = ("--resident", options.resident, "--tokens", str(options.tokens), "--json", str(out))
        _command("bench", str(folder), *lines)
        run = json.loads(out.read_text())
        report.details[name] = run
        for key, unit in (("open_seconds", "s"), ("tokens_per_second", "tok/s"), ("hit_rate", ""), ("peak_bytes", "B")):
            if run.get(key) is not None:
                report.add(Row(f"from {name}: {key}", run[key], unit))
    report.notes.append("random weights: the hit rate is that of their routers")
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--experts", type=int, default=EXPERTS)
    arguments.add_argument("--resident", default="8GB")
    arguments.add_argument("--tokens", type=int, default=32)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
