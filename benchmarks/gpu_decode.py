"""Claim, on a CUDA device: with half of the experts on it a model decodes 1.5 x as fast as the faster of two
alternatives: all experts on the CPU, and every cold expert of a token copied to the device.

The synthetic model (4 layers of Qwen3-30B-A3B's shapes) with int4 experts, all of them in memory, and the rest in bf16
on the device; one sequence, the same seeded tokens for all, from an empty cache. Runs that a CUDA graph can capture are
measured both eagerly and replayed: half of the experts on the device, and all on the CPU through the same host nodes
(but for one expert, without which no layer would have nodes). Copying depends on each layer's routing and is eager:
through the buffers of prompts, and from pinned memory that holds every cold expert. Contenders take turns, and their
logits are compared.

Also shows where a step's time goes, by torch's profiler: a trace for chrome://tracing, and a figure.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import card
import harness
import synthetic
import torch
from decode_steps import DecodeSteps
from harness import Report, Row
from torch import Tensor
from torch_mesh.ops.device import find
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.modules.experts import MeshExperts, patched_modules

HALF, HALF_EAGER = "half on the card, replayed", "half on the card, eager"
CPU, CPU_EAGER, CPU_WAITING = "all on the CPU, replayed", "all on the CPU, eager", "all on the CPU, gpu.experts=0"
UPLIFT, PINNED = "copied up by prompts' way", "copied up from pinned memory"
OTHERS = (CPU, CPU_EAGER, CPU_WAITING, UPLIFT, PINNED)
TRACED_STEPS = 4


def open_model(folder: Path, device: torch.device, **fields: Any) -> Any:
    """Open the model with all experts in memory or on the device."""
    config = torch_mesh.MeshConfig(resident=1.0, verify="never", **fields)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=str(device))
    for module in patched_modules(model):
        here = None if module._mesh_device is None else find(module._mesh_handle).here
        cold = torch.arange(module.num_experts) if here is None else (~here).nonzero().flatten()
        torch.ops.torch_mesh.promote(module._mesh_handle, cold)
    return model


# -- contenders ------------------------------------------------------------------------------------


class CopiedUp:
    """Replaces a layer's forward: copies a step's experts without a slot to the device, which computes all of them."""

    def __init__(self, module: MeshExperts) -> None:
        self.layer = find(module._mesh_handle)
        self.cold = set((~self.layer.here).nonzero().flatten().tolist())
        assert self.layer.shared is not None
        self.shared = self.layer.shared

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        cold = sorted(self.cold.intersection(ids.flatten().tolist()))  # waits for the device: only the host can copy
        inputs = x, ids, weights
        arriving = self.begin(cold)
        out = self.compute(inputs, self.layer.records, self.layer.table)
        for experts, records in arriving:
            table = torch.full((self.layer.table.numel(),), -1, dtype=torch.int32)
            table[experts] = torch.arange(len(experts), dtype=torch.int32)
            out += self.compute(inputs, records, table.to(x.device))
        return out.to(x.dtype)

    def compute(self, inputs: tuple[Tensor, Tensor, Tensor], records: Tensor, table: Tensor) -> Tensor:
        from torch_mesh.ops import experts_triton

        part = dataclasses.replace(self.layer, records=records, table=table)
        return experts_triton.experts(*inputs, part, False, torch.float32)

    def begin(self, cold: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Batches of experts, and the buffers that hold them once the current stream gets there."""
        raise NotImplementedError


class UpliftedExperts(CopiedUp):
    """Copies experts as prompts do: from the pool to pinned memory, then to the device."""

    def begin(self, cold: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        uplift, buffers = self.shared.uplift, self.shared.buffers
        assert uplift is not None and buffers is not None
        if not cold:
            return
        with uplift.turn(self.shared.stream()) as turn:
            for first in range(0, len(cold), uplift.batch):
                batch = cold[first : first + uplift.batch]
                yield batch, buffers[turn.bring(self.layer.index, batch)]


class PinnedExperts(CopiedUp):
    """Copies from pinned memory that holds all cold experts of the layer, while the device computes the experts it
    has."""

    def __init__(self, module: MeshExperts) -> None:
        super().__init__(module)
        engine, device = module._mesh_pool.engine, self.layer.records.device
        self.row_of = {expert: row for row, expert in enumerate(sorted(self.cold))}
        read = [torch.from_numpy(engine.read_record(self.layer.index, expert)) for expert in self.row_of]
        self.records = card.pinned(torch.stack(read), device)
        self.buffer = torch.empty((module._mesh_pool.top_k, self.records.size(1)), dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, cold: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        # The buffer is free: the host has waited for this step's ids, and so for the last step.
        with torch.cuda.stream(self.stream):
            for row, expert in enumerate(cold):
                self.buffer[row].copy_(self.records[self.row_of[expert]], non_blocking=True)
        return self.arrive(cold)

    def arrive(self, cold: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        if self.stream is not None:
            torch.cuda.current_stream(self.buffer.device).wait_stream(self.stream)
        if cold:
            yield cold, self.buffer


@dataclass(frozen=True)
class Contender:
    """One way to decode ``tokens``, int64 [tokens] on the device; ``forwards`` replace those of the layers."""

    steps: DecodeSteps
    step: Callable[[Tensor], Tensor]
    tokens: Tensor
    forwards: Sequence[CopiedUp] | None = None

    def decode(self) -> Tensor:
        """Logits of the last token."""
        for token in self.tokens:
            logits = self.step(token)
        return logits

    def tokens_per_second(self) -> float:
        with self.replaced():
            self.steps.reset()
            return len(self.tokens) / card.seconds(self.steps.device, self.decode)

    def logits(self) -> Tensor:
        with self.replaced():
            self.steps.reset()
            return self.decode().double().cpu()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        modules = list(patched_modules(self.steps.model)) if self.forwards else []
        before = [vars(module).get("forward") for module in modules]
        for module, forward in zip(modules, self.forwards or (), strict=True):
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward


def contenders(folder: Path, device: torch.device, shape: synthetic.Shape, tokens: Tensor) -> dict[str, Contender]:
    one = torch.zeros((shape.layers, shape.experts), dtype=torch.bool)
    one[0, 0] = True
    placed: dict[str, Any] = {"half": shape.experts // 2, "one": one, "none": 0}
    models = {name: open_model(folder, device, gpu={"experts": experts}) for name, experts in placed.items()}
    half, host, waiting = (DecodeSteps(model, len(tokens)) for model in models.values())
    for steps in (half, host):
        steps.capture()
    uplifted, pinned = (
        [kind(module) for module in patched_modules(models["half"])] for kind in (UpliftedExperts, PinnedExperts)
    )
    return {
        HALF: Contender(half, half.replay, tokens),
        HALF_EAGER: Contender(half, half.eager, tokens),
        CPU: Contender(host, host.replay, tokens),
        CPU_EAGER: Contender(host, host.eager, tokens),
        CPU_WAITING: Contender(waiting, waiting.eager, tokens),
        UPLIFT: Contender(half, half.eager, tokens, uplifted),
        PINNED: Contender(half, half.eager, tokens, pinned),
    }


# -- where the time goes ---------------------------------------------------------------------------

Intervals = list[tuple[float, float]]  # microseconds from the first kernel's beginning, in order, without overlap
KERNELS, COPIES = "kernels", "copies between host and card"
NODES, LAUNCHES = "the CPU's experts (between the copies down and up)", "the thread that launches"


def united(intervals: Sequence[tuple[float, float]]) -> Intervals:
    """The same intervals, merged so that they do not overlap."""
    result: Intervals = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def lanes(events: Sequence[Mapping[str, Any]]) -> dict[str, Intervals]:
    """The intervals of kernels, copies, host nodes and launches in the events of a chrome trace; empty without kernels.

    A profiler does not show host nodes. Each layer's node lies between its last copy down and the copy of its sum up.
    """
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    found: dict[str, Intervals] = {KERNELS: [], COPIES: [], NODES: [], LAUNCHES: []}
    last_down: float | None = None
    for event in sorted(timed, key=lambda event: event["ts"]):
        category, name = event.get("cat", ""), event.get("name", "")
        interval = event["ts"], event["ts"] + event["dur"]
        if category in ("kernel", "gpu_memset") or (category == "gpu_memcpy" and "DtoD" in name):
            found[KERNELS].append(interval)
        elif category == "gpu_memcpy":
            found[COPIES].append(interval)
            if "HtoD" in name and last_down is not None:
                found[NODES].append((last_down, interval[0]))
            last_down = interval[1] if "DtoH" in name else None
        elif category in ("cpu_op", "cuda_runtime", "cuda_driver"):
            found[LAUNCHES].append(interval)
    if not found[KERNELS]:
        return {}
    first = min(begin for begin, _ in found[KERNELS])
    last = max(end for _, end in found[KERNELS])
    return {
        name: [
            (max(begin, first) - first, min(end, last) - first)
            for begin, end in united(intervals)
            if end > first and begin < last
        ]
        for name, intervals in found.items()
    }


def idle_fraction(lane: Intervals) -> float:
    """The idle fraction of the time between the lane's first and last event."""
    busy = sum(end - begin for begin, end in lane)
    return 1 - busy / (lane[-1][1] - lane[0][0])


def profile(contender: Contender, path: Path) -> list[dict[str, Any]]:
    """Profile a few steps; return the events of the trace, which is written to ``path``."""
    device = contender.steps.device
    contender.steps.reset()
    first, rest = contender.tokens[:1], contender.tokens[1 : 1 + TRACED_STEPS]
    card.seconds(device, lambda: contender.step(first[0]))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for token in rest:
            with torch.profiler.record_function("decode step"):
                contender.step(token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"]


def add_time(report: Report, name: str, contender: Contender, path: Path) -> None:
    """Add rows of the parts of a step's time, from the engine's own counters and from a profile, which slows the step
    down."""
    model = contender.steps.model
    torch_mesh.reset_stats(model)
    step = 1 / contender.tokens_per_second()
    counted = torch_mesh.stats(model).device
    assert counted is not None
    nodes = counted.node_seconds / len(contender.tokens)
    report.add(Row(f"host nodes, a step, {name}", nodes * 1e3, "ms", "of the step", step * 1e3))
    if counted.waited_calls:
        layers = counted.calls / len(contender.tokens)
        waited = counted.waited_seconds / counted.waited_calls * layers
        report.add(Row(f"the card waited for them, a step, {name}", waited * 1e3, "ms", "of the step", step * 1e3))
    found = lanes(profile(contender, path))
    report.notes.append(f"trace, {name}: {path}")
    if not found:
        report.notes.append(f"{name}: the profiler saw no kernels, so there is no timeline")
        return
    report.details.setdefault("timeline", {})[name] = found
    report.add(Row(f"no kernel runs, {name}, profiled", 100 * idle_fraction(found[KERNELS]), "%"))


# -- the report ------------------------------------------------------------------------------------


def cosine(left: Tensor, right: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(left, right, dim=0).item()


@torch.no_grad()
def measure(
    device: torch.device, shape: synthetic.Shape, folder: Path, tokens: int, rounds: int, traces: Path
) -> Report:
    about = card.facts(device)
    report = Report(
        f"Decode, {shape.layers} layers, int4, on {about['device']}", notes=[card.describe(about)], details=dict(about)
    )
    stream = torch.randint(0, shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    ways = contenders(folder, device, shape, stream)
    logits = {name: way.logits() for name, way in ways.items()}  # warms up, too
    models = {id(way.steps): way.steps.model for way in ways.values()}.values()
    for model in models:
        torch_mesh.reset_stats(model)
    speeds = harness.interleave({name: way.tokens_per_second for name, way in ways.items()}, rounds)
    read = sum(torch_mesh.stats(model).bytes_read for model in models)
    best = max(OTHERS, key=lambda name: statistics.median(speeds[name]))
    report.add(harness.paired_row(HALF, speeds[HALF], "tok/s", best, speeds[best], at_least=1.5))
    for name in ways:
        if name != HALF:
            report.add(harness.paired_row(name, speeds[name], "tok/s", HALF, speeds[HALF]))
    for name in ways:
        if name != HALF:
            report.add(Row(f"cosine of logits, {name}", cosine(logits[name], logits[HALF]), ""))
    report.add(Row("read from disk meanwhile", read / 1e6, "MB"))
    for name, file in ((HALF, "gpu_decode_replayed"), (HALF_EAGER, "gpu_decode_eager")):
        add_time(report, name, ways[name], traces / f"{file}.trace.json")
    report.details["tokens per second"] = speeds
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument(
        "--traces", type=Path, default=synthetic.ROOT / "build" / "benchmarks", help="folder for traces and the figure"
    )
    options = arguments.parse_args()
    device = card.find_card("gpu_decode.py")
    if device is None:
        return card.NO_CARD
    shape = synthetic.Shape(layers=options.layers)
    folder = synthetic.store(options.dir, shape, "int4")
    report = measure(device, shape, folder, options.tokens, options.rounds, options.traces)
    if "timeline" in report.details:
        import figure

        target = options.traces / "gpu_decode.svg"
        figure.draw("gpu-timeline", harness.as_json(report), target)
        report.notes.append(f"figure: {target}")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
