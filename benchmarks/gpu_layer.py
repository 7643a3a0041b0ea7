"""Claim, on a CUDA device with all of a layer's experts on it: batch 1 and 8 read weights at 0.6 of the device's own copy rate in
bf16, int4 decodes 1.8 times as fast as bf16, 512 tokens reach 0.6 of torch's rate for the same products in bf16, and each is at
least as fast as transformers' grouped_mm and batched_mm.

128 experts of 2048 x 768, top-8. Sixteen calls with different experts, all 128 at batch 1, are captured in one CUDA graph, so that no
weight is in a cache when its turn comes and no launch is waited for; contenders take turns. Without a device there is nothing to say,
and nothing is printed but that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import harness
import torch
from harness import Report
from op_layer import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, WEIGHTS_PER_EXPERT, pack, random_expert
from torch import Tensor
from torch_mesh.ops.device import DeviceLayer, DeviceRecord
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from torch_mesh.experts import StandardExperts

FORMATS = {"bf16": 0, "int8": 64, "int4": 64}
CALLS = EXPERTS // TOP_K
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Routing:
    """The inputs of ``CALLS`` calls on the device."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: Tensor

    @classmethod
    def of(cls, tokens: int, generator: torch.Generator) -> Routing:
        """One token takes all experts in turn; several take random ones."""
        x = [torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16).cuda() for _ in range(CALLS)]
        if tokens == 1:
            ids = [torch.arange(TOP_K).add(TOP_K * call).unsqueeze(0) for call in range(CALLS)]
        else:
            ids = [torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices for _ in range(CALLS)]
        return cls(x, [each.cuda() for each in ids], torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda"))

    @property
    def distinct(self) -> float:
        """Experts that a call reads, on average."""
        return sum(ids.unique().numel() for ids in self.ids) / len(self.ids)


def place(weights: str, group_size: int, experts: Sequence[tuple[Tensor, Tensor]]) -> DeviceLayer:
    """Expert e is ``experts[e % len(experts)]``, with memory of its own."""
    packed = [pack(expert, weights, group_size) for expert in experts]
    records = torch.stack([packed[expert % len(packed)] for expert in range(EXPERTS)]).cuda()
    record = DeviceRecord(weights, group_size, HIDDEN, INTERMEDIATE, gated=True, bias=False, activation="silu")
    table = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    return DeviceLayer(record, records, table, torch.ones(EXPERTS, dtype=torch.bool), complete=True, workspace=1 << 30)


def on_card(layer: DeviceLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch_mesh.ops import experts_triton

    return lambda x, ids, weights: experts_triton.experts(x, ids, weights, layer, False, x.dtype)


def transformers_layer(name: str, module: StandardExperts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    function = ALL_EXPERTS_FUNCTIONS[name]
    return lambda x, ids, weights: function(module, x, ids, weights)


def captured(call: Callable[[Tensor, Tensor, Tensor], Tensor], routing: Routing) -> Callable[[], float]:
    """Replays all calls; returns the seconds of one."""

    def run() -> None:
        for x, ids in zip(routing.x, routing.ids, strict=True):
            call(x, ids, routing.weights)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles, and lets libraries choose their kernels
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: seconds(graph.replay) / CALLS


def seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_contender() -> Callable[[], float]:
    """Bytes per second that a copy on the device reads and writes."""
    source, to = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: 2 * COPY_BYTES / seconds(lambda: to.copy_(source))


def matmul_contender(tokens: int) -> Callable[[], float]:
    """Seconds that torch takes for one product of as many operations as a call has."""
    rows = torch.randn(tokens * TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)
    matrix = torch.randn(HIDDEN, WEIGHTS_PER_EXPERT // HIDDEN, device="cuda", dtype=torch.bfloat16)
    return lambda: seconds(lambda: rows @ matrix)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_layer.py needs a CUDA device, and torch sees none: nothing was measured", file=sys.stderr)
        return 2
    generator = torch.Generator().manual_seed(0)
    experts = [random_expert(generator) for _ in range(4)]
    layers = {weights: place(weights, group, experts) for weights, group in FORMATS.items()}
    stacked = [torch.stack([experts[e % 4][part] for e in range(EXPERTS)]).cuda() for part in range(2)]
    module = StandardExperts(*stacked, None, None, "silu", TOP_K)
    report = Report(f"experts on {torch.cuda.get_device_name()}")
    report.details |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for tokens in (1, 8, 512):
        routing = Routing.of(tokens, generator)
        contenders = {weights: captured(on_card(layer), routing) for weights, layer in layers.items()}
        peers = {}
        for name in ("grouped_mm", "batched_mm"):
            try:
                peers[name] = captured(transformers_layer(name, module), routing)
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                report.notes.append(f"{name}, {tokens} tokens: {error}".splitlines()[0])
        limit = {"copy": copy_contender(), "matmul": matmul_contender(tokens)}
        with torch.no_grad():
            times = harness.interleave(contenders | peers | limit, arguments.rounds)
        _add_rows(report, tokens, routing, layers, times, list(peers))
    return report.finish(arguments.json)


def _add_rows(
    report: Report,
    tokens: int,
    routing: Routing,
    layers: dict[str, DeviceLayer],
    times: dict[str, list[float]],
    peers: Sequence[str],
) -> None:
    for weights, layer in layers.items():
        name = f"{weights}, {tokens} token{'s' * (tokens > 1)}"
        if tokens < 512:
            read = routing.distinct * layer.records.size(1)
            rates = [read / time / 1e9 for time in times[weights]]
            bound = 0.6 if weights == "bf16" else None
            copy = [rate / 1e9 for rate in times["copy"]]
            report.add(harness.paired_row(name, rates, "GB/s", "device copy", copy, at_least=bound))
        else:
            bound = 1 / 0.6 if weights == "bf16" else None
            milliseconds = [[time * 1e3 for time in times[each]] for each in (weights, "matmul")]
            report.add(harness.paired_row(name, milliseconds[0], "ms", "torch matmul", milliseconds[1], at_most=bound))
    for other, bound in [*((peer, 1.0) for peer in peers), ("int4", None)]:
        microseconds = [[time * 1e6 for time in times[each]] for each in ("bf16", other)]
        least = 1.8 if other == "int4" and tokens < 512 else None
        report.add(
            harness.paired_row(
                f"bf16, {tokens} tokens", microseconds[0], "us", other, microseconds[1], at_most=bound, at_least=least
            )
        )


if __name__ == "__main__":
    sys.exit(main())
