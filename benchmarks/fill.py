"""Claim: a decoding model that fits into memory has 99 % hits after at most 1.2 x (bytes of its experts / the disk's
speed) from opening. It decodes no slower meanwhile than with `residency.fill="off"`.

The 4-layer model in int4 with every expert in memory, dense layers in int4, eager. Both variants are opened
alternately, with none of the store in the page cache.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import synthetic
import torch
from direct_reads import read_records
from harness import Report, Row
from prefill_cold import forward, open_model

from torch_mesh.modules.experts import patched_modules

PAST = 16  # tokens of the prompt
FULL = 0.99


@dataclass(frozen=True)
class Start:
    """Figures of the first tokens after opening."""

    # From opening to the first of ten tokens with FULL of their accesses hit; None: not within the tokens.
    seconds_to_full: float | None
    tokens_per_second: float  # of all tokens decoded


def decode_from_opening(folder: Path, tokens: int, fill: str) -> Start:
    model = open_model(folder, resident=1.0, dense="int4", prefetch="off", residency={"fill": fill})
    opened = time.perf_counter()
    engine = next(iter(patched_modules(model)))._mesh_pool.engine
    stream = torch.randint(0, synthetic.Shape.vocab, (1, PAST + tokens), generator=torch.Generator().manual_seed(1))
    past = forward(model, stream[:, :PAST])
    begin = time.perf_counter()
    end_times, rates = [], []
    before = engine.totals()
    for at in range(PAST, PAST + tokens):
        past = forward(model, stream[:, at : at + 1], past)
        now = engine.totals()
        rates.append((now["hits"] - before["hits"]) / (now["accesses"] - before["accesses"]))
        end_times.append(time.perf_counter())
        before = now
    full = [at for at in range(tokens - 10) if statistics.fmean(rates[at : at + 10]) >= FULL]
    del model, past
    gc.collect()
    return Start(end_times[full[0]] - opened if full else None, tokens / (end_times[-1] - begin))


def measure(options: Any) -> Report:
    folder = synthetic.store(options.dir, synthetic.Shape(), "int4")
    runs = harness.interleave(
        {fill: lambda fill=fill: decode_from_opening(folder, options.tokens, fill) for fill in ("on", "off")},
        options.rounds,
    )
    reading = statistics.median(read_records(folder) for _ in range(3))
    report = Report("Decoding from opening on, everything fits, int4")
    filled = [run.seconds_to_full for run in runs["on"]]
    if any(seconds is None for seconds in filled):
        raise SystemExit(f"{options.tokens} tokens end before {FULL:.0%} of the accesses hit; take more: --tokens")
    report.add(Row("seconds to 99 % hits", statistics.median(filled), "s", "reading it all", reading, at_most=1.2))
    speeds = {fill: [run.tokens_per_second for run in results] for fill, results in runs.items()}
    report.add(
        harness.paired_row(
            f"first {options.tokens} tokens", speeds["on"], "tok/s", "fill off", speeds["off"], at_least=1.0
        )
    )
    slow = [run.seconds_to_full for run in runs["off"]]
    report.notes.append(f"with fill off 99 % after {', '.join('longer' if s is None else f'{s:.2f} s' for s in slow)}")
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    arguments.add_argument("--tokens", type=int, default=150)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
