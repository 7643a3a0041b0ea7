"""Claim: a model of Qwen3-30B-A3B's full size takes no more memory than `torch-mesh plan` predicts. With --eager, which
is what it predicts, tokens/s are within 25 %.

All 48 layers of 128 experts in int4, 15 GB of random weights. Routing is replayed from a synthetic trace whose tokens
share 39 % of their experts with the next one, as Qwen3's do: routers of random weights choose nearly the same experts
for every token. llama.cpp runs with the same routing on a Q4_0 file of the same shapes, with the memory that torch_mesh
took.

--weights int4 tcq3 tcq2 compares formats: of int4's bytes per token tcq3 reads 0.65 and tcq2 0.4 with 1.5 and 4 GB.
With 1.5 GB they reach 1.3 and 1.8 times its tokens/s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import sessions
import synthetic
import torch
from harness import Report, Row
from rich.console import Console
from safetensors.torch import save_file

from torch_mesh.models.families import ExpertTensors
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.routing.traces import save_trace
from torch_mesh.store.convert import pack_expert
from torch_mesh.store.manifest import Shape as StoreShape
from torch_mesh.store.store_plan import NewFile, StorePlan
from torch_mesh.store.writer import write_store

SHAPE = synthetic.Shape(layers=48, vocab=151936)
GROUP_SIZES = {"int4": 64, "tcq3": 128, "tcq2": 128}
# Relative to int4 in the same memory: maximum bytes per token (up to 4 GB), and minimum tokens/s (up to 1.5 GB).
MAX_READ, MIN_SPEED = {"tcq3": 0.65, "tcq2": 0.4}, {"tcq3": 1.3, "tcq2": 1.8}
OVERLAP = 0.39
DENSE = "int4"
PROMPT, SEED = 16, 20260101
SLACK = 32 << 20
LAYER_MICROSECONDS, PROMOTION_MICROSECONDS = 2, 10  # maximum of decisions
DISTINCT_EXPERTS = 64  # with random weights; more would only take longer to pack


def dense_shards(folder: Path, weights: str) -> None:
    """Write everything but the experts as safetensors with an index, and the config."""
    generator = torch.Generator().manual_seed(0)
    without_experts = synthetic.Shape(**{**vars(SHAPE), "experts": 0})
    weight_map = {}
    for index in range(SHAPE.layers + 1):
        if index == SHAPE.layers:
            tensors = synthetic.outer_tensors(SHAPE, generator)
        else:
            tensors = dict(synthetic.layer_tensors(without_experts, index, generator))
            router = torch.randn(SHAPE.experts, SHAPE.hidden, generator=generator).mul_(synthetic.WEIGHT_STD)
            tensors[f"model.layers.{index}.mlp.gate.weight"] = router.to(torch.bfloat16)
        name = f"model-{index + 1:05d}-of-{SHAPE.layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"quant_method": "mesh", "weights": weights, "group_size": GROUP_SIZES[weights]}
    config = synthetic.config(SHAPE) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def random_records(weights: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(synthetic.WEIGHT_STD).to(torch.bfloat16)

    inner, hidden = SHAPE.intermediate, SHAPE.hidden
    return [
        pack_expert(
            ExpertTensors(weight(inner, hidden), weight(inner, hidden), weight(hidden, inner), None, None, None),
            weights,
            GROUP_SIZES[weights],
        )
        for _ in range(DISTINCT_EXPERTS)
    ]


def file_of(path: Path) -> NewFile:
    return NewFile(path.name, path.stat().st_size, lambda: [path.read_bytes()])


def store(directory: Path, weights: str) -> Path:
    path = directory / f"{SHAPE.name}-random-mesh-{weights}"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    shape = StoreShape(
        layers=SHAPE.layers,
        experts=SHAPE.experts,
        hidden=SHAPE.hidden,
        intermediate=SHAPE.intermediate,
        top_k=SHAPE.experts_per_token,
        gated=True,
        bias=False,
        activation="silu",
    )
    modules = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(SHAPE.layers))
    plan = StorePlan(shape, modules, weights, GROUP_SIZES[weights], "random", "random-0")
    records = random_records(weights)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        dense_shards(Path(folder), weights)
        write_store(
            path,
            plan,
            lambda layer, expert: records[(layer * SHAPE.experts + expert) % len(records)],
            [file_of(each) for each in sorted(Path(folder).iterdir())],
        )
    return path


def gguf(directory: Path) -> Path:
    path = directory / f"{SHAPE.name}-random-Q4_0.gguf"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump(synthetic.config(SHAPE), config)
            config.flush()
            synthetic.run_peer("write_random_gguf.py", config.name, str(path))
    return path


def run_plan(model: Path, resident: int, *plan_options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch_mesh", "plan", str(model), "--json", "--prefetch", "off"]
    command += ["--resident", str(resident), "--dense", DENSE, *plan_options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def measure(options: Any) -> Report:
    console = Console(stderr=True)
    formats = ", ".join(options.weights)
    report = Report(f"Qwen3-30B-A3B's shapes, {SHAPE.layers} layers, {formats}, dense {DENSE}, batch 1")
    tokens = PROMPT + options.warm_up + options.tokens
    request = {
        "watch_memory": True,  # sampled every 5 ms
        "vocab": SHAPE.vocab,
        "prompt": PROMPT,
        "seed": SEED,
        "measured": options.tokens,
        "warm_up": options.warm_up,
        "threads": options.threads,
        "eager": options.eager,
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.npz"
        shape = {"layers": SHAPE.layers, "experts": SHAPE.experts, "top_k": SHAPE.experts_per_token}
        save_trace(synthetic_trace(**shape, prompts=1, prompt_tokens=2 * tokens, overlap=OVERLAP), trace)
        request["trace"] = str(trace)
        results: dict[tuple[str, float], dict[str, Any]] = {}
        for weights in options.weights:
            model = store(options.dir, weights)
            for gigabytes in options.resident:
                name = f"{gigabytes:g} GB of experts" if len(options.weights) == 1 else f"{weights}, {gigabytes:g} GB"
                own = request | {"resident": int(gigabytes * 1e9), "dense": DENSE, "prefetch": "off"}
                result = sessions.run(Path(sys.executable), "mesh_replay.py", model, sessions.NO_LIMIT, own)
                console.print(f"{name}: {result['tokens_per_second']:.2f} tok/s, hit rate {result['hit_rate']:.1%}")
                results[weights, gigabytes] = result
                add_rows(report, name, model, int(gigabytes * 1e9), result, options.tokens, options.eager)
                add_llama(report, name, result, request, options, console)
            if options.remove:
                shutil.rmtree(model)
    add_comparison(report, results)
    report.notes += [
        (
            f"{options.tokens} timed tokens after {options.warm_up}; the trace's tokens share {OVERLAP:.0%} of their "
            "experts with the next"
        ),
        (
            f"torch_mesh: {'eager' if options.eager else 'compiled step'}, prefetch off (forced routing cannot be "
            "predicted by routers)"
        ),
        "llama.cpp is limited to the memory that torch_mesh's process group had charged at its peak",
        "stock: without advice; random: with MADV_RANDOM",
        f"{options.llama_tokens} tokens of llama.cpp after {options.llama_warm_up}, since each takes many seconds",
    ]
    return report


def add_rows(
    report: Report, name: str, model: Path, resident: int, result: dict[str, Any], tokens: int, eager: bool
) -> None:
    seconds = tokens / result["tokens_per_second"]
    for label, plan_options in (
        ("plan", ()),
        ("plan, told the overlap", ("--overlap", str(OVERLAP))),
        ("plan, told the hit rate it had", ("--hit-rate", str(result["hit_rate"]))),
    ):
        plan = run_plan(model, resident, *plan_options)
        speed = plan["tokens_per_second"]
        # Within 25 % in either direction: the larger over the smaller.
        ratio = max(speed, result["tokens_per_second"]) / min(speed, result["tokens_per_second"])
        report.add(Row(f"tokens/s, {name}", result["tokens_per_second"], "tok/s", label, speed))
        report.add(Row(f"off by, {name}, {label}", ratio, "x", "allowed", 1.25, at_most=1.0 if eager else None))
    peak = result["anonymous_peak"] / 1e9
    report.add(Row(f"peak memory, {name}", peak, "GB", "plan", plan["peak_bytes"] / 1e9, at_most=1.05))
    report.add(Row(f"seconds to open, {name}", result["load_seconds"], "s"))
    report.add(Row(f"hit rate, {name}", 100 * result["hit_rate"], "%"))
    report.add(Row(f"read per token, {name}", result["read_per_token"] / 1e6, "MB"))
    promoted, layers = result["promoted"] / tokens, SHAPE.layers
    report.add(Row(f"promoted per token, {name}", promoted, "experts"))
    decision_microseconds = 1e6 * result["decision_seconds"] / tokens
    # The time of a layer without cold experts, plus that of each promotion.
    allowed = LAYER_MICROSECONDS * layers + PROMOTION_MICROSECONDS * promoted
    report.add(Row(f"deciding per token, {name}", decision_microseconds, "µs", "allowed", allowed, at_most=1.0))
    report.add(Row(f"waiting for the disk, {name}", 100 * result["stall_seconds"] / seconds, "%"))
    report.details[name] = sessions.without_logits({"torch_mesh": [result]})


def add_llama(
    report: Report, name: str, result: dict[str, Any], request: dict[str, Any], options: Any, console: Console
) -> None:
    for label in options.llama:
        peer = request | {"repack": False, "random_access": label == "random"}
        peer |= {"measured": options.llama_tokens, "warm_up": options.llama_warm_up}
        limit = result["group_peak"] + SLACK
        run = sessions.run(synthetic.PEERS_PYTHON, "llama_replay.py", gguf(options.dir), limit, peer)
        console.print(f"llama.cpp, {label}: {run['tokens_per_second']:.2f} tok/s")
        for what, unit, entry, scale in (
            ("tokens/s", "tok/s", "tokens_per_second", 1.0),
            ("read per token", "MB", "read_per_token", 1e-6),
        ):
            peer_name = f"llama.cpp Q4_0, {label}"
            report.add(Row(f"{what}, {name}", scale * result[entry], unit, peer_name, scale * run[entry]))


def add_comparison(report: Report, results: dict[tuple[str, float], dict[str, Any]]) -> None:
    """Compare formats with int4 in the same memory."""
    for (weights, gigabytes), result in results.items():
        int4 = results.get(("int4", gigabytes))
        if weights == "int4" or int4 is None:
            continue
        max_read = MAX_READ[weights] if gigabytes <= 4 else None
        min_speed = MIN_SPEED[weights] if gigabytes <= 1.5 else None
        name = f"{weights}, {gigabytes:g} GB"
        read, speed = ([each[entry] for each in (result, int4)] for entry in ("read_per_token", "tokens_per_second"))
        report.add(Row(f"read per token, {name}", read[0] / 1e6, "MB", "int4", read[1] / 1e6, at_most=max_read))
        report.add(Row(f"tokens/s, {name}", speed[0], "tok/s", "int4", speed[1], at_least=min_speed))


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--resident", type=float, nargs="+", default=[1.5, 4.0, 8.0], help="GB of experts")
    arguments.add_argument("--weights", nargs="+", choices=GROUP_SIZES, default=["int4"], help="formats of the experts")
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--warm-up", type=int, default=96, help="tokens that fill the pool")
    arguments.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments.add_argument("--eager", action="store_true", help="eager steps, as generate without torch_mesh.compile")
    arguments.add_argument(
        "--llama",
        nargs="*",
        choices=("random", "stock"),
        default=[],
        help="measure llama.cpp too; how it maps its file of 17 GB",
    )
    arguments.add_argument("--llama-tokens", type=int, default=8, help="timed tokens of llama.cpp")
    arguments.add_argument("--llama-warm-up", type=int, default=24, help="tokens that fill the page cache")
    arguments.add_argument("--remove", action="store_true", help="remove each large file after its use")
    options = arguments.parse_args()
    status = measure(options).finish(options.json)
    if options.remove and options.llama:
        gguf(options.dir).unlink()
    return status


if __name__ == "__main__":
    sys.exit(main())
