"""Claim: on the same GGUF file torch_mesh decodes at least as fast as llama.cpp with all experts in memory, reads
prompts of 512 tokens 1.3 x as fast, and decodes 5 x as fast with 40 % of the experts in memory and one limit for both.

The files are random, with Qwen3-30B-A3B's shapes and 4 layers: a mixture as llama.cpp's Q4_K_M, and a dynamic one.
torch_mesh reads experts from the file itself, cold ones also from a converted store, and keeps the codes of all linear
layers (``dense="codes"``). Both systems have the same tokens and route them themselves. The parts run as whole_model.py
and cold_decode.py do.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import harness
import synthetic
from cold_decode import RESIDENT, SLACK, Contender, limit_of
from harness import Report, Row
from whole_model import PREFILL_TOKENS, System, measure_speeds, open_contenders

import torch_mesh

# Types by regular expressions of tensors' names; the first match counts.
OTHERS = {"^output": "Q6_K", "": "Q4_K"}
MIXTURES = {
    # llama.cpp gives half of the down projections and values more bits: with 4 layers, those of the last two.
    "Q4_K_M": {r"blk\.[23]\.(ffn_down_exps|attn_v)\.": "Q6_K", **OTHERS},
    "dynamic": {"ffn_down_exps|attn_v": "Q6_K", r"blk\.0\.ffn_(gate|up)_exps": "Q5_K", **OTHERS},
}
LLAMA, MESH, COMPILED = "llama.cpp", "torch_mesh", "torch_mesh, compiled"
CONVERTED = "torch_mesh, converted, compiled"
RANDOM = "llama.cpp, MADV_RANDOM"


def write(directory: Path, shape: synthetic.Shape, mixture: str) -> Path:
    path = directory / f"{shape.name}-{mixture}.gguf"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            config, types = Path(folder) / "config.json", Path(folder) / "types.json"
            config.write_text(json.dumps(synthetic.config(shape)))
            types.write_text(json.dumps(MIXTURES[mixture]))
            arguments = (str(config), str(path), str(types))
            synthetic.run_peer("write_random_gguf.py", *arguments, python=Path(sys.executable))
    return path


def convert(path: Path) -> Path:
    """Convert the file to a store of the same codes, whose records are read as they are. Returns its folder."""
    folder = path.with_name(f"{path.stem}-store")
    if not folder.exists():
        torch_mesh.convert(path, folder, "auto")
    return folder


def add_warm(report: Report, mixture: str, path: Path, options: Any) -> None:
    modes = {"eager": MESH, "compiled": COMPILED}
    systems = [
        System("warm_mesh.py", Path(sys.executable), path, modes, {"dense": "codes"}),
        System("warm_llama.py", synthetic.PEERS_PYTHON, path, {"": LLAMA}),
    ]
    contenders = open_contenders(systems, options)
    prompts = {name: contenders[name] for name in (MESH, LLAMA)}
    speeds = measure_speeds(prompts, options.rounds, what="prefill", tokens=PREFILL_TOKENS)
    row = partial(harness.paired_row, f"{mixture}, prompt of {PREFILL_TOKENS}, {MESH}", speeds[MESH], "tok/s")
    report.add(row(LLAMA, speeds[LLAMA], at_least=1.3))
    report.details[f"{mixture}, prompt"] = speeds
    speeds = measure_speeds(contenders, options.rounds, what="decode", tokens=options.tokens)
    for own in (MESH, COMPILED):
        row = partial(harness.paired_row, f"{mixture}, decode, {own}", speeds[own], "tok/s")
        report.add(row(LLAMA, speeds[LLAMA], at_least=1.0 if own == COMPILED else None))
    report.details[f"{mixture}, decode"] = speeds
    similarity = harness.cosine(contenders[MESH].logits, contenders[LLAMA].logits)
    report.add(Row(f"{mixture}, cosine of logits with llama.cpp's", similarity, ""))
    for worker in {contender.worker for contender in contenders.values()}:
        worker.close()


def expert_bytes(path: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors if "_exps." in tensor.name)


def add_cold(report: Report, mixture: str, path: Path, options: Any) -> None:
    experts = expert_bytes(path)
    system = partial(
        Contender,
        model=path,
        dense_bytes=path.stat().st_size - experts,
        expert_bytes=experts,
        warm_up=options.tokens // 4,
        measured=options.tokens,
    )
    mesh = partial(system, script="mesh.py", python=Path(sys.executable))
    # A fraction of the bytes instead of the experts, since all slots have the size of the largest record.
    of_mesh = {"threads": options.threads, "resident": str(int(RESIDENT * experts)), "dense": "codes"}
    llama = partial(system, script="llama.py", python=synthetic.PEERS_PYTHON)
    of_llama = {"threads": options.threads, "repack": False}
    systems = {
        MESH: mesh(options={**of_mesh, "eager": True}),
        COMPILED: mesh(options=of_mesh),
        CONVERTED: mesh(options=of_mesh, model=convert(path)),
        LLAMA: llama(options={**of_llama, "random_access": False}),
        RANDOM: llama(options={**of_llama, "random_access": True}),
    }
    limit = max(limit_of(systems[name]) for name in (MESH, COMPILED, CONVERTED))

    def session(name: str) -> dict[str, Any]:
        return systems[name].run(limit, options.tokens, options.tokens // 4)

    runs = harness.interleave({name: partial(session, name) for name in systems}, options.rounds)
    speeds = {name: [run["tokens_per_second"] for run in each] for name, each in runs.items()}
    where = f"{mixture}, decode, {RESIDENT:.0%} in memory"
    for own in (MESH, COMPILED, CONVERTED):
        for other in (LLAMA, RANDOM):
            row = partial(harness.paired_row, f"{where}, {own}", speeds[own], "tok/s", other, speeds[other])
            report.add(row(at_least=None if own == MESH else 5.0))
    report.details[where] = {"tokens per second": speeds, "limit": limit}
    report.notes.append(f"{mixture}: limit {limit / 1e6:,.0f} MB for each, {experts / 1e6:,.0f} MB of experts")


def measure(options: Any) -> Report:
    shape = synthetic.Shape(layers=options.layers)
    report = Report(f"{options.layers}-layer Qwen3-MoE GGUF files, {options.threads} threads, beside llama.cpp")
    for mixture in options.mixtures:
        path = write(options.dir, shape, mixture)
        for part in options.parts:
            {"warm": add_warm, "cold": add_cold}[part](report, mixture, path, options)
    report.notes += [
        f"medians of {options.rounds} interleaved rounds of {options.tokens} decode steps after a warm-up",
        f"limit = torch_mesh's own anonymous memory + dense bytes + {RESIDENT} x expert bytes + {SLACK >> 20} MiB",
    ]
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--mixtures", nargs="+", choices=tuple(MIXTURES), default=list(MIXTURES))
    arguments.add_argument("--parts", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    arguments.add_argument("--tokens", type=int, default=48, help="decode steps a round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
