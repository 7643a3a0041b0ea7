"""Claim: without prefetch, a decode step with some of the experts resident takes at most 1.15 x its lower bound: the
time with all experts resident plus, for each layer, the time by which reading its cold experts exceeds computing them.

The synthetic model in int4 uses the routing of a synthetic trace (as in full_size.py). A loop of direct reads of as
many experts, with as many requests in flight, gives the reading time. Reads bypass the page cache. A simulated
predictor shows how much waiting prefetch hides: it predicts three of four of the next layer's experts, and a wrong
expert in place of each other one.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import synthetic
import torch
from direct_reads import DEPTH, reader_of
from full_size import OVERLAP
from harness import Report, Row
from prefill_cold import forward, open_model

import torch_mesh
from torch_mesh.modules.experts import patched_modules
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.store.manifest import open_store

WARM_UP = 128
PAST = 16  # tokens of the prompt
RECALL = 0.75


class Replayed:
    """A model whose layers use the experts of a trace. With ``predict`` a simulated predictor prefetches the next
    layer's experts."""

    def __init__(self, model: Any, routing: torch.Tensor, predict: bool) -> None:
        self.model, self.routing = model, routing  # [tokens, layers, top_k]
        self.modules = list(patched_modules(model))
        self.engine = self.modules[0]._mesh_pool.engine
        self.token = 0
        self.seconds = torch.zeros(len(self.modules))  # of each layer's experts in the last step
        self.predictions = simulate_predictions(routing, self.modules[0].num_experts) if predict else None
        for layer, module in enumerate(self.modules):
            module.register_forward_pre_hook(self._force(layer))
            module.register_forward_hook(self._stop(layer))

    def _force(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
            hidden, ids, weights = arguments
            if hidden.size(0) == 1:
                ids = self.routing[self.token, layer].unsqueeze(0)
                if self.predictions is not None:
                    self._prefetch(layer)
            self.seconds[layer] = -time.perf_counter()
            return hidden, ids, weights

        return hook

    def _prefetch(self, layer: int) -> None:
        token, next_layer = self.token + (layer + 1) // len(self.modules), (layer + 1) % len(self.modules)
        if token < len(self.routing):
            handle = self.modules[next_layer]._mesh_handle
            torch.ops.torch_mesh.prefetch(handle, self.predictions[token, next_layer])

    def _stop(self, layer: int) -> Any:
        def hook(*_: object) -> None:
            self.seconds[layer] += time.perf_counter()

        return hook

    def steps(self, tokens: int) -> Iterator[tuple[float, torch.Tensor, np.ndarray]]:
        """Yield for each token its seconds, each layer's seconds in its experts, and each layer's cold misses."""
        ids = torch.zeros(1, PAST, dtype=torch.long)
        past = forward(self.model, ids)
        for self.token in range(tokens):
            before = self.engine.stats()["cold_misses"].copy()
            begin = time.perf_counter()
            past = forward(self.model, ids[:, :1], past)
            seconds = time.perf_counter() - begin
            yield seconds, self.seconds.clone(), self.engine.stats()["cold_misses"] - before


def simulate_predictions(routing: torch.Tensor, experts: int) -> torch.Tensor:
    """Predict as many experts as are chosen, of which the fraction RECALL is right."""
    rng = np.random.default_rng(0)
    predicted = routing.numpy().copy()
    for chosen in predicted.reshape(-1, predicted.shape[-1]):
        others = np.setdiff1d(np.arange(experts), chosen)
        wrong = rng.random(len(chosen)) >= RECALL
        chosen[wrong] = rng.choice(others, int(wrong.sum()), replace=False)
    return torch.from_numpy(predicted)


@contextmanager
def replayed(folder: Path, routing: torch.Tensor, resident: float, predict: bool = False) -> Iterator[Replayed]:
    model = open_model(folder, resident=resident, dense="int4", verify="never", prefetch="off")
    yield Replayed(model, routing, predict)
    del model
    gc.collect()


def read_seconds(folder: Path, max_count: int) -> list[float]:
    """Seconds in which a plain loop reads 0, 1, ... ``max_count`` records at once."""
    source = open_store(folder).source_arguments()
    records = source["extents"].reshape(-1, 3)
    rng = np.random.default_rng(1)
    with reader_of([path for path, _ in source["files"]]) as seconds:

        def run(count: int) -> float:
            return seconds(records[rng.choice(len(records), count, replace=False)].tolist())

        run(DEPTH)  # starts the threads
        return [0.0, *(statistics.median(run(count) for _ in range(25)) for count in range(1, max_count + 1))]


def measure(options: Any) -> Report:
    shape = synthetic.Shape(layers=options.layers)
    folder = synthetic.store(options.dir, shape, "int4")
    tokens = WARM_UP + options.tokens
    trace = synthetic_trace(
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.experts_per_token,
        prompts=1,
        prompt_tokens=2 * tokens,
        overlap=OVERLAP,
    )
    routing = torch.from_numpy(trace.ids[:tokens]).long()
    report = Report(f"Decode with replayed routing, {shape.layers} layers, int4, dense int4, eager")

    with replayed(folder, routing, 1.0) as resident_model:
        steps = list(resident_model.steps(tokens))[WARM_UP:]
    resident_seconds = statistics.median(seconds for seconds, _, _ in steps)
    computing = [statistics.median(float(experts[layer]) for _, experts, _ in steps) for layer in range(shape.layers)]
    reading = read_seconds(folder, shape.experts_per_token)
    for resident in options.resident:
        with replayed(folder, routing, resident) as model:
            steps = list(model.steps(tokens))[WARM_UP:]
            rate = torch_mesh.stats(model.model).decode.hit_rate
        bounds = [
            resident_seconds
            + sum(max(0.0, reading[cold] - computes) for cold, computes in zip(misses, computing, strict=True))
            for _, _, misses in steps
        ]
        step_seconds = [seconds for seconds, _, _ in steps]
        name = f"{resident:.0%} resident"
        report.add(
            Row(
                f"a token, {name}",
                1e3 * statistics.mean(step_seconds),
                "ms",
                "bound",
                1e3 * statistics.mean(bounds),
                at_most=1.15,
            )
        )
        report.add(Row(f"hit rate, {name}", 100 * (rate or 0), "%"))
        with replayed(folder, routing, resident, predict=True) as model:
            prefetch_seconds = statistics.mean(seconds for seconds, _, _ in list(model.steps(tokens))[WARM_UP:])
        waiting = statistics.mean(step_seconds) - resident_seconds
        hidden = statistics.mean(step_seconds) - prefetch_seconds
        report.add(Row(f"hidden by a recall of {RECALL}, {name}", 1e3 * hidden, "ms", "waiting", 1e3 * waiting))
    report.add(Row("a token, everything resident", 1e3 * resident_seconds, "ms"))
    report.add(Row("reading one expert", 1e3 * reading[1], "ms", "all of a token's in a layer", 1e3 * reading[-1]))
    report.notes.append(
        f"means over {options.tokens} tokens after {WARM_UP}; {OVERLAP:.0%} of a token's experts are used by the next"
    )
    report.details |= {"reading": reading, "computing": computing}
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--layers", type=int, default=synthetic.Shape.layers)
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.25, 0.4])
    arguments.add_argument("--tokens", type=int, default=128)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
