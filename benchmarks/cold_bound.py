"""Claims: without prefetch, a decode step with some of the experts resident takes at most 1.15 x its lower bound: the
time with all experts resident plus, for each layer, the time by which reading its cold experts exceeds computing them.
Lookahead with a recall of 0.6, 0.75 and 0.9 hides 20, 35 and 60 % of the waiting at 25 % resident, or 0.7 of what the
same decisions hide on a virtual disk without latency, where that is less. It never slows a step down.

The synthetic model in int4 uses the routing of a synthetic trace (as in full_size.py). A loop of direct reads of as
many experts, with as many requests in flight, gives the reading time. Reads bypass the page cache, and the model checks
each record at its first read, which the loop does not. Simulated routers of the next layers, as lookahead asks them,
name as many experts as are chosen, the likeliest first; each is right with a probability of its own, and the recall is
their mean.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import synthetic
import torch
from direct_reads import reader_of
from full_size import OVERLAP
from harness import Report, Row
from prefill_cold import forward, open_model

import torch_mesh
from torch_mesh import _C
from torch_mesh.modules.experts import patched_modules
from torch_mesh.prefetch.lookahead import NextLayer
from torch_mesh.routing.synthetic import synthetic_trace
from torch_mesh.store.manifest import open_store

WARM_UP = 128
PAST = 16  # tokens of the prompt
HIDDEN = {0.6: 0.2, 0.75: 0.35, 0.9: 0.6}  # by recall: the claimed fraction of the waiting that is hidden
CLAIMED = 0.25  # the resident fraction to which the claim applies
REACHED = 0.7  # claimed fraction of what a disk without latency hides at this machine's speeds, if that is less
TURN = 32  # tokens
READS = 9  # reads of each number of records in a turn


class SimulatedRouter:
    """Gives every expert the score set by ``tell``, whatever the hidden states."""

    bias = None
    scoring = "logits"

    def __init__(self, experts: int, hidden: int) -> None:
        self.weight = torch.zeros(experts, hidden)
        self.column = 0

    def tell(self, hidden_states: torch.Tensor, scores: torch.Tensor) -> None:
        """Make the product of ``hidden_states`` [1, hidden] and the weight equal ``scores`` [experts]."""
        self.weight[:, self.column] = 0
        self.column = int(hidden_states[0].abs().argmax())
        self.weight[:, self.column] = scores / hidden_states[0, self.column].float()


class Replayed:
    """A model whose layers use the experts of a trace. With ``recall`` lookahead asks simulated routers."""

    def __init__(self, model: Any, routing: torch.Tensor, recall: float | None) -> None:
        self.model, self.routing = model, routing  # [tokens, layers, top_k]
        self.modules = list(patched_modules(model))
        self.engine = self.modules[0]._mesh_pool.engine
        self.token = 0
        self.seconds = torch.zeros(len(self.modules), dtype=torch.float64)  # of each layer's experts in the last step
        experts = self.modules[0].num_experts
        self.scores = None if recall is None else simulate_scores(routing, experts, recall)
        self.routers: list[SimulatedRouter] = []
        for layer, module in enumerate(self.modules):
            if recall is not None:
                following = self.modules[(layer + 1) % len(self.modules)]
                self.routers.append(SimulatedRouter(experts, model.config.hidden_size))
                module._mesh_next = NextLayer(self.routers[-1], following._mesh_handle, routing.size(-1))
            module.register_forward_pre_hook(self._force(layer))
            module.register_forward_hook(self._stop(layer))

    def _force(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
            hidden, ids, weights = arguments
            if hidden.size(0) == 1:
                ids = self.routing[self.token, layer].unsqueeze(0)
                self._predict(layer, hidden)
            self.seconds[layer] = -time.perf_counter()
            return hidden, ids, weights

        return hook

    def _predict(self, layer: int, hidden: torch.Tensor) -> None:
        token, next_layer = self.token + (layer + 1) // len(self.modules), (layer + 1) % len(self.modules)
        if self.scores is not None and token < len(self.routing):
            self.routers[layer].tell(hidden, self.scores[token, next_layer])

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


def simulate_scores(routing: torch.Tensor, experts: int, recall: float) -> torch.Tensor:
    """float32 [tokens, layers, experts]: positive for as many experts as are chosen. A score is the probability that
    the expert is right, uniform around ``recall``. A wrong expert replaces a chosen one."""
    rng = np.random.default_rng(0)
    chosen = routing.numpy()
    scores = np.zeros((*chosen.shape[:-1], experts), np.float32)
    spread = min(recall, 1 - recall)
    for index in np.ndindex(chosen.shape[:-1]):
        right = rng.uniform(recall - spread, recall + spread, chosen.shape[-1])
        predicted = chosen[index].copy()
        wrong = rng.random(predicted.size) >= right
        others = np.setdiff1d(np.arange(experts), chosen[index])
        predicted[wrong] = rng.choice(others, int(wrong.sum()), replace=False)
        scores[index][predicted] = right
    return torch.from_numpy(scores)


@contextmanager
def replayed(folder: Path, routing: torch.Tensor, resident: float, recall: float | None = None) -> Iterator[Replayed]:
    model = open_model(folder, resident=resident, dense="int4", verify="first", prefetch="off")
    yield Replayed(model, routing, recall)
    del model
    gc.collect()


def read_seconds(seconds: Any, records: list[Any], max_count: int) -> list[float]:
    """Seconds in which a plain loop reads 0, 1, ... ``max_count`` records at once."""
    rng = np.random.default_rng(1)

    def run(count: int) -> float:
        return seconds([records[index] for index in rng.choice(len(records), count, replace=False)])

    run(max_count)  # starts the threads
    return [0.0, *(statistics.median(run(count) for _ in range(READS)) for count in range(1, max_count + 1))]


def take_turns(
    models: dict[str, Replayed], folder: Path, tokens: int
) -> tuple[dict[str, list[tuple[float, torch.Tensor, np.ndarray]]], list[float]]:
    """The steps of each model after its warm-up, and ``read_seconds`` measured in the same minutes.

    The models compute a few tokens each in turn, so that all have the same disk, whose speed may change.
    """
    source = open_store(folder).source_arguments()
    records = source["extents"].reshape(-1, 3).tolist()
    generators = {name: model.steps(WARM_UP + tokens) for name, model in models.items()}
    taken: dict[str, list[Any]] = {name: [] for name in models}
    readings = []
    top_k = next(iter(models.values())).routing.size(-1)
    with reader_of([path for path, _ in source["files"]]) as seconds:
        for _ in range(0, WARM_UP + tokens, TURN):
            for name, steps in generators.items():
                taken[name] += islice(steps, TURN)
            readings.append(read_seconds(seconds, records, top_k))
    steps_after = {name: steps[WARM_UP:] for name, steps in taken.items()}
    return steps_after, [statistics.median(times) for times in zip(*readings, strict=True)]


def replayed_waiting(
    routing: torch.Tensor, experts: int, resident: float, seconds: dict[str, float], scores: torch.Tensor | None
) -> float:
    """Seconds of waiting per token, if the pool's decisions meet a disk that reads one expert at a time at full speed:
    on the virtual clock of ``torch-mesh routing simulate`` with this machine's ``seconds``."""
    _, layers, top_k = routing.shape
    predicted: dict[str, Any] = {}
    if scores is not None:
        predicted = {"predictor": "lookahead", "prefetch": top_k, "lookahead": scores.numpy()}
    counts = _C.replay(
        routing.to(torch.int32).numpy(),
        experts=experts,
        policy="auto",
        slots=int(resident * layers * experts),
        **seconds,
        **predicted,
    )
    busy = layers * (top_k * seconds["expert_seconds"] + seconds["rest_seconds"])
    return typical(counts["seconds_of"][WARM_UP:].tolist()) - busy


def measure(options: Any) -> Report:
    shape = synthetic.Shape(layers=options.layers)
    folder = synthetic.store(options.dir, shape, "int4")
    trace = synthetic_trace(
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.experts_per_token,
        prompts=1,
        prompt_tokens=2 * (WARM_UP + options.tokens),
        overlap=OVERLAP,
    )
    routing = torch.from_numpy(trace.ids[: WARM_UP + options.tokens]).long()
    report = Report(f"Decode with replayed routing, {shape.layers} layers, int4, dense int4, eager")
    for resident in options.resident:
        add_rows(report, folder, shape, routing, resident, options.tokens)
    report.notes.append(
        f"means over the middle 80 % of {options.tokens} tokens after {WARM_UP}; {OVERLAP:.0%} of a token's experts "
        "are used by the next"
    )
    return report


def typical(values: list[float]) -> float:
    """The mean without the smallest and the largest tenth, since a virtual disk stalls occasionally."""
    tenth = len(values) // 10
    return statistics.mean(sorted(values)[tenth : len(values) - tenth])


def add_rows(
    report: Report, folder: Path, shape: synthetic.Shape, routing: torch.Tensor, resident: float, tokens: int
) -> None:
    name = f"{resident:.0%} resident"
    with ExitStack() as stack:

        def opened(part: float, recall: float | None = None) -> Replayed:
            return stack.enter_context(replayed(folder, routing, part, recall))

        models = {"all": opened(1.0), "none": opened(resident)}
        models |= {f"recall {recall}": opened(resident, recall) for recall in HIDDEN}
        steps, reading = take_turns(models, folder, tokens)
        decode = {name: torch_mesh.stats(model.model).decode for name, model in models.items()}
    seconds = {name: typical([step for step, _, _ in of_model]) for name, of_model in steps.items()}
    computing = [
        statistics.median(float(experts[layer]) for _, experts, _ in steps["all"]) for layer in range(shape.layers)
    ]
    bounds = [
        seconds["all"]
        + sum(max(0.0, reading[cold] - computes) for cold, computes in zip(misses, computing, strict=True))
        for _, _, misses in steps["none"]
    ]
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    report.add(Row(f"a token, {name}", milliseconds["none"], "ms", "bound", 1e3 * typical(bounds), at_most=1.15))
    report.add(Row(f"hit rate, {name}", 100 * (decode["none"].hit_rate or 0), "%"))
    top_k = shape.experts_per_token
    clock = {
        "read_seconds": reading[-1] / top_k,
        "expert_seconds": statistics.mean(computing) / top_k,
        "rest_seconds": (seconds["all"] - sum(computing)) / shape.layers,
    }
    waiting = milliseconds["none"] - milliseconds["all"]
    paper = replayed_waiting(routing, shape.experts, resident, clock, None)
    for recall, part in HIDDEN.items():
        scores = simulate_scores(routing, shape.experts, recall)
        possible = 1 - replayed_waiting(routing, shape.experts, resident, clock, scores) / paper
        report.add(
            Row(
                f"hidden by a recall of {recall}, {name}",
                milliseconds["none"] - milliseconds[f"recall {recall}"],
                "ms",
                "waiting",
                waiting,
                at_least=min(part, REACHED * possible) if resident == CLAIMED else 0.0,
            )
        )
        read, without = (decode[name].bytes_read / len(routing) / 1e6 for name in (f"recall {recall}", "none"))
        report.notes.append(
            f"{name}, recall {recall}: {read:.1f} MB a token, {without:.1f} without prefetch; a disk without latency "
            f"would hide {possible:.2f}"
        )
    report.add(Row(f"a token, everything resident, beside {name}", milliseconds["all"], "ms"))
    report.add(Row(f"reading one expert, beside {name}", 1e3 * reading[1], "ms", "all of a layer's", 1e3 * reading[-1]))
    report.details[name] = {"reading": reading, "computing": computing, "seconds": seconds}


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--resident", type=float, nargs="+", default=[0.25, 0.4])
    arguments.add_argument("--tokens", type=int, default=128)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
