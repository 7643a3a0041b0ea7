"""Claim, on a CUDA device with all of a layer's experts on it: batch 1 and 8 read weights at 0.6 of the device's own
copy rate in bf16, int4 decodes 1.8 times as fast as bf16, 512 tokens reach 0.6 of torch's rate for the same products in
bf16, and each is at least as fast as transformers' grouped_mm and batched_mm.

128 experts of 2048 x 768, top-8. Sixteen calls with different experts, all 128 at batch 1, are captured in one CUDA
graph, so that no weight is in a cache and launches take no time; contenders take turns. Without a device only that is
printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import card
import harness
import torch
from harness import Report
from op_layer import pack, random_expert
from synthetic import Shape
from torch import Tensor
from torch_mesh.ops.device import DeviceLayer, DeviceRecord
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from torch_mesh.patching.single_layer import StandardExperts

FORMATS = {"bf16": 0, "int8": 64, "int4": 64}
FEW, MANY = (1, 8), 512  # tokens
COPY_BYTES = 1 << 30

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The inputs of calls that together take all experts in turn, on the device."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: Tensor

    @classmethod
    def of(cls, tokens: int, shape: Shape, generator: torch.Generator, device: torch.device) -> Routing:
        """One token takes all experts in turn; several take random ones."""
        top_k = shape.experts_per_token
        calls = shape.experts // top_k
        x = [torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16) for _ in range(calls)]
        if tokens == 1:
            ids = [torch.arange(top_k).add(top_k * call).unsqueeze(0) for call in range(calls)]
        else:
            ids = [torch.rand(tokens, shape.experts, generator=generator).topk(top_k).indices for _ in range(calls)]
        weights = torch.full((tokens, top_k), 1 / top_k, device=device)
        return cls([each.to(device) for each in x], [each.to(device) for each in ids], weights)

    @property
    def distinct(self) -> float:
        """Experts that a call reads, on average."""
        return sum(ids.unique().numel() for ids in self.ids) / len(self.ids)

    def run(self, layer: Layer) -> None:
        for x, ids in zip(self.x, self.ids, strict=True):
            layer(x, ids, self.weights)


def record_of(weights: str, group_size: int, shape: Shape) -> DeviceRecord:
    return DeviceRecord(
        weights, group_size, shape.hidden, shape.intermediate, gated=True, bias=False, activation="silu"
    )


def place(
    weights: str, group_size: int, experts: Sequence[tuple[Tensor, Tensor]], shape: Shape, device: torch.device
) -> DeviceLayer:
    """Put the experts on the device: expert e is ``experts[e % len(experts)]``, with memory of its own."""
    packed = [pack(expert, weights, group_size) for expert in experts]
    records = torch.stack([packed[expert % len(packed)] for expert in range(shape.experts)]).to(device)
    table = torch.arange(shape.experts, dtype=torch.int32, device=device)
    here = torch.ones(shape.experts, dtype=torch.bool)
    return DeviceLayer(record_of(weights, group_size, shape), records, table, here, complete=True, workspace=1 << 30)


def on_card(layer: DeviceLayer) -> Layer:
    from torch_mesh.ops import experts_triton

    return lambda x, ids, weights: experts_triton.experts(x, ids, weights, layer, False, x.dtype)


def copy_contender(device: torch.device) -> Callable[[], float]:
    """A function that measures the bytes per second that a copy on the device reads and writes."""
    source, to = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: 2 * COPY_BYTES / card.seconds(device, lambda: to.copy_(source))


def matmul_contender(tokens: int, shape: Shape, device: torch.device) -> Callable[[], float]:
    """A function that measures the seconds of one product by torch with as many operations as a call has."""
    rows = torch.randn(tokens * shape.experts_per_token, shape.hidden, device=device, dtype=torch.bfloat16)
    matrix = torch.randn(shape.hidden, 3 * shape.intermediate, device=device, dtype=torch.bfloat16)
    return lambda: card.seconds(device, lambda: rows @ matrix)


class Comparison:
    """The same experts in all formats and in transformers' own form, on one device."""

    def __init__(self, shape: Shape, device: torch.device, rounds: int) -> None:
        self.shape, self.device, self.rounds = shape, device, rounds
        self.generator = torch.Generator().manual_seed(0)
        experts = [random_expert(self.generator, shape) for _ in range(4)]
        self.layers = {weights: place(weights, group, experts, shape, device) for weights, group in FORMATS.items()}
        stacked = [torch.stack([experts[e % 4][part] for e in range(shape.experts)]).to(device) for part in range(2)]
        self.module = StandardExperts(*stacked, None, None, "silu", shape.experts_per_token)

    def add_rows(self, report: Report, tokens: int) -> None:
        routing = Routing.of(tokens, self.shape, self.generator, self.device)
        contenders = {
            weights: self.timed(routing, card.captured(self.device, partial(routing.run, on_card(layer))))
            for weights, layer in self.layers.items()
        }
        peers = {}
        for name in ("grouped_mm", "batched_mm"):
            run = partial(routing.run, partial(ALL_EXPERTS_FUNCTIONS[name], self.module))
            try:
                peers[name] = self.timed(routing, self.captured_if_possible(run, name, report))
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                report.notes.append(f"{name}, {tokens} tokens: {error}".splitlines()[0])
        limits = {
            "copy": copy_contender(self.device),
            "matmul": matmul_contender(tokens, self.shape, self.device),
        }
        times = harness.interleave(contenders | peers | limits, self.rounds)
        report.details[f"times, {tokens} tokens"] = times
        if tokens in FEW:
            self.add_bandwidth(report, tokens, routing, times)
        else:
            self.add_matmul(report, tokens, times)
        for other, bound in [*((peer, 1.0) for peer in peers), ("int4", None)]:
            microseconds = [[time * 1e6 for time in times[each]] for each in ("bf16", other)]
            least = 1.8 if other == "int4" and tokens in FEW else None
            name = f"bf16, {amount_of(tokens)}"
            report.add(
                harness.paired_row(name, microseconds[0], "us", other, microseconds[1], at_most=bound, at_least=least)
            )

    def timed(self, routing: Routing, run: Callable[[], object]) -> Callable[[], float]:
        """A function that measures the seconds of one call."""
        return lambda: card.seconds(self.device, run) / len(routing.x)

    def captured_if_possible(self, run: Callable[[], object], name: str, report: Report) -> Callable[[], object]:
        """Capture ``run``. If a peer does something that a capture forbids, it is launched call by call, as its users
        do."""
        run()  # an error here is not caused by the capture
        try:
            return card.captured(self.device, run)
        except RuntimeError as error:
            report.notes.append(f"{name} is launched call by call: {error}".splitlines()[0])
            return run

    def add_bandwidth(self, report: Report, tokens: int, routing: Routing, times: dict[str, list[float]]) -> None:
        for weights, layer in self.layers.items():
            read = routing.distinct * layer.records.size(1)
            rates = [read / time / 1e9 for time in times[weights]]
            copy = [rate / 1e9 for rate in times["copy"]]
            least = 0.6 if weights == "bf16" else None
            name = f"{weights}, {amount_of(tokens)}"
            report.add(harness.paired_row(name, rates, "GB/s", "device copy", copy, at_least=least))

    def add_matmul(self, report: Report, tokens: int, times: dict[str, list[float]]) -> None:
        for weights in self.layers:
            milliseconds = [[time * 1e3 for time in times[each]] for each in (weights, "matmul")]
            most = 1 / 0.6 if weights == "bf16" else None
            name = f"{weights}, {amount_of(tokens)}"
            report.add(harness.paired_row(name, milliseconds[0], "ms", "torch matmul", milliseconds[1], at_most=most))


def amount_of(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens > 1)}"


@torch.no_grad()
def measure(device: torch.device, shape: Shape, rounds: int) -> Report:
    about = card.facts(device)
    report = Report(f"experts on {about['device']}", notes=[card.describe(about)], details=dict(about))
    comparison = Comparison(shape, device, rounds)
    for tokens in (*FEW, MANY):
        comparison.add_rows(report, tokens)
    return report


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = card.find_card("gpu_layer.py")
    if device is None:
        return card.NO_CARD
    return measure(device, Shape(), arguments.rounds).finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
