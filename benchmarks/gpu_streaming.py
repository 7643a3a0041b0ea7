"""Claim, on a CUDA device: a prompt copies the 128 experts of a layer, all in the pool's memory and none on the device,
at 0.85 of the rate of plain copies of one record each from pinned memory in the same run.

The time is that of the whole forward: choosing, copying from the pool to pinned memory and to the device, and the
products of 512 tokens, 2048 x 768, top-8. The same records without products are shown too. Contenders take turns.
"""

from __future__ import annotations

import sys
from functools import partial

import card
import harness
import torch
from gpu_layer import FORMATS, record_of
from harness import Report
from op_layer import ResidentLayer, random_expert, random_routing
from synthetic import Shape
from torch_mesh.ops import device as devices
from torch_mesh.ops.streaming import Costs

from torch_mesh.gpu import placement

TOKENS = 512
COPIES_ARE_FREE = Costs(copy=0.0, row=1.0, expert=1.0)  # so all experts that a prompt needs are copied to the device


class ColdLayer:
    """A layer only in the pool's memory. Its prompts copy all experts to the device."""

    def __init__(self, weights: str, shape: Shape, device: torch.device, threads: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        experts = [random_expert(generator, shape) for _ in range(4)]
        self.pooled = ResidentLayer(weights, FORMATS[weights], threads, experts, shape)
        self.device, self.bytes = device, self.pooled.record_bytes
        self.shared = devices.SharedDevice(self.pooled.handle, device)
        batch = min(placement._MAX_BATCH, shape.experts)
        self.buffers = torch.empty((2, batch, self.bytes), dtype=torch.uint8, device=device)
        record = record_of(weights, FORMATS[weights], shape)
        self.shared.lend(*self.buffers, record)
        self.shared.costs = COPIES_ARE_FREE
        none = torch.full((shape.experts,), -1, dtype=torch.int32, device=device)
        self.layer = devices.DeviceLayer(
            record,
            self.buffers[0],  # in place of slots: there are none
            none,
            torch.zeros(shape.experts, dtype=torch.bool),
            complete=False,
            workspace=1 << 30,
            shared=self.shared,
        )
        devices.register(self.pooled.handle, self.layer)
        x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
        self.inputs = [each.to(device) for each in (x, *random_routing(tokens, generator, shape))]
        plain = torch.randint(0, 256, (shape.experts, self.bytes), dtype=torch.uint8, generator=generator)
        self.plain = card.pinned(plain, device)

    def forward(self) -> torch.Tensor:
        """[tokens, hidden] of a prompt."""
        return torch.ops.torch_mesh.experts_split(*self.inputs, self.pooled.handle, False)

    def bring(self) -> None:
        """Copy what the prompt copies to the device, without the products."""
        experts, batch = list(range(len(self.plain))), self.buffers.size(1)
        assert self.shared.uplift is not None
        with self.shared.uplift.turn(self.shared.stream()) as turn:
            for first in range(0, len(experts), batch):
                turn.bring(0, experts[first : first + batch])

    def copy(self) -> None:
        """Copy as many bytes from pinned memory, record by record."""
        batch = self.buffers.size(1)
        for expert, record in enumerate(self.plain):
            self.buffers[expert // batch % 2, expert % batch].copy_(record, non_blocking=True)

    def rates(self) -> dict[str, partial[float]]:
        return {
            "prompt": partial(self.rate_up, self.forward),
            "records": partial(self.rate_up, self.bring),
            "copies": partial(self.rate_of_copies),
        }

    def rate_up(self, run: partial[object]) -> float:
        """Bytes per second that are copied to the device."""
        before = self.shared.stats()["bytes_streamed"]
        seconds = card.seconds(self.device, run)
        return (self.shared.stats()["bytes_streamed"] - before) / seconds

    def rate_of_copies(self) -> float:
        return self.plain.nbytes / card.seconds(self.device, self.copy)


@torch.no_grad()
def measure(device: torch.device, shape: Shape, rounds: int, threads: int, tokens: int = TOKENS) -> Report:
    about = card.facts(device)
    report = Report(
        f"A cold layer on its way to {about['device']}, {tokens} tokens",
        notes=[card.describe(about)],
        details=dict(about),
    )
    for weights in FORMATS:
        cold = ColdLayer(weights, shape, device, threads, tokens)
        harness.interleave(cold.rates(), 1)  # compiles the kernels and touches all memory
        rates = harness.interleave(cold.rates(), rounds)
        report.details[f"bytes per second, {weights}"] = rates
        gigabytes = {name: [rate / 1e9 for rate in values] for name, values in rates.items()}
        for name, least in (("prompt", 0.85), ("records", None)):
            what = f"{weights}, {'a prompt' if name == 'prompt' else 'records alone'}"
            copies = gigabytes["copies"]
            report.add(harness.paired_row(what, gigabytes[name], "GB/s", "plain copies", copies, at_least=least))
        del cold  # frees its memory for the next layer
    return report


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=harness.available_cpus())
    arguments = parser.parse_args()
    device = card.find_card("gpu_streaming.py")
    if device is None:
        return card.NO_CARD
    return measure(device, Shape(), arguments.rounds, arguments.threads).finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
