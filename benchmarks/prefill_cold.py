"""Claim: a cold prompt of 2,048 tokens with a quarter of the experts resident takes at most 1 / 0.85 of the longer of
reading and computing. It reads no expert twice. After it those experts are resident that decoding needs.

Speed is measured with the synthetic model in int4, in pairs: computing is the prompt with everything resident; reading
is a loop of direct reads of the same records with as many requests in flight as the reader has. Hit rates are those of
mesh-tiny, whose routing is trained, on text, without lookahead.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
import torch
from direct_reads import read_records
from harness import Report, Row
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_mesh
from torch_mesh.modules.experts import patched_modules

RESIDENT = 0.25
DECODED = 32


def open_model(folder: Path, **fields: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=torch_mesh.MeshConfig(**fields))


def forward(model: Any, ids: torch.Tensor, past: Any = None) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values


def cold_prompt(folder: Path, ids: torch.Tensor, prefill: str) -> tuple[float, Any]:
    """Return the seconds of a prompt in a new model, and its statistics."""
    isolation.evict(sorted(folder.glob("mesh-*.safetensors")))
    model = open_model(folder, resident=RESIDENT, prefill=prefill, dense="int8", verify="never")
    return timed_prompt(model, ids)


def timed_prompt(model: Any, ids: torch.Tensor) -> tuple[float, Any]:
    # torch's first call is slow: make it with one row, and evict the few experts that it reads.
    forward(model, ids[:, :1])
    for module in patched_modules(model):
        torch.ops.torch_mesh.evict(module._mesh_handle, torch.arange(module.num_experts))
    next(patched_modules(model))._mesh_pool.engine.drain()
    torch_mesh.reset_stats(model)
    begin = time.perf_counter()
    forward(model, ids)
    seconds = time.perf_counter() - begin
    stats = torch_mesh.stats(model)
    del model
    gc.collect()
    return seconds, stats


def resident_prompt(model: Any, ids: torch.Tensor) -> float:
    begin = time.perf_counter()
    forward(model, ids)
    return time.perf_counter() - begin


def max_reads(stats: Any) -> int:
    return max(max(layer.experts.promoted) for layer in stats.per_layer)


def add_speed(report: Report, options: Any) -> None:
    folder = synthetic.store(options.dir, synthetic.Shape(layers=options.layers), "int4")
    generator = torch.Generator().manual_seed(0)
    for tokens in options.tokens:
        ids = torch.randint(0, synthetic.Shape.vocab, (1, tokens), generator=generator)
        resident_model = open_model(folder, resident=1.0, dense="int8", verify="never")
        for _ in range(2):
            resident_prompt(resident_model, ids)
        runs: dict[str, list[Any]] = {"computing": [], "reading": [], "window": [], "off": []}
        for _ in range(options.rounds):
            runs["computing"].append(resident_prompt(resident_model, ids))
            runs["reading"].append(read_records(folder))
            for setting in ("window", "off"):
                runs[setting].append(cold_prompt(folder, ids, "auto" if setting == "window" else "off"))
        del resident_model
        gc.collect()
        bounds = [max(pair) for pair in zip(runs["computing"], runs["reading"], strict=True)]
        for setting in ("window", "off"):
            seconds = [run[0] for run in runs[setting]]
            min_ratio = 0.85 if setting == "window" and tokens == 2048 else None
            report.add(
                harness.paired_row(
                    f"max(reading, computing) of {tokens} tokens", bounds, "s", setting, seconds, at_least=min_ratio
                )
            )
            stalls = [run[1].prefill.stall_seconds for run in runs[setting]]
            report.add(Row(f"waiting, {setting}, {tokens} tokens", statistics.median(stalls), "s"))
            read_count = max(max_reads(run[1]) for run in runs[setting])
            bound = 1.0 if setting == "window" else None
            report.add(
                Row(f"reads of one expert, {setting}, {tokens} tokens", read_count, "", "once", 1.0, at_most=bound)
            )
        for part in ("computing", "reading"):
            report.add(Row(f"{part}, {tokens} tokens", statistics.median(runs[part]), "s"))


def hit_rate(folder: Path, ids: torch.Tensor, prompt: int, prefill: str) -> float:
    """Return the hit rate of the last DECODED tokens in %. The first ``prompt`` tokens are one forward, the others one
    forward each."""
    model = open_model(folder, resident=RESIDENT, prefill=prefill, prefetch="off")
    past = forward(model, ids[:, :prompt]) if prompt else None
    for token in range(prompt, ids.size(1)):
        if token == ids.size(1) - DECODED:
            next(patched_modules(model))._mesh_pool.engine.drain()
            torch_mesh.reset_stats(model)
        past = forward(model, ids[:, token : token + 1], past)
    rate = torch_mesh.stats(model).decode.hit_rate
    assert rate is not None
    return 100 * rate


def add_hits(report: Report, options: Any) -> None:
    folder = synthetic.ROOT / "examples" / "mesh-tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [
        line
        for name in ("prose", "code")
        for line in (synthetic.ROOT / "tests" / "data" / "text" / f"{name}.jsonl").read_text().splitlines()
    ]
    documents = [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids for line in lines]
    length = options.prompt + DECODED
    parts = [document[:, :length] for document in documents if document.size(1) >= length][: options.texts]
    if not parts:
        raise SystemExit(f"no document of the test text has {length} tokens; ask for a shorter --prompt")
    decoding_rates = [hit_rate(folder, part, 0, "auto") for part in parts]
    for setting in ("auto", "off"):
        rates = [hit_rate(folder, part, options.prompt, setting) for part in parts]
        name = f"hits of {DECODED} tokens after a prompt of {options.prompt}, prefill={setting!r}, mesh-tiny"
        min_ratio = 1.0 if setting == "auto" else None
        report.add(
            Row(
                name,
                statistics.mean(rates),
                "%",
                "warmed by decoding",
                statistics.mean(decoding_rates),
                at_least=min_ratio,
            )
        )


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--tokens", type=int, nargs="*", default=[512, 2048], help="lengths of timed prompts")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--prompt", type=int, default=384, help="tokens of the prompt before the counted ones")
    arguments.add_argument("--texts", type=int, default=8)
    options = arguments.parse_args()
    report = Report(f"A cold prompt with {RESIDENT:.0%} of the experts resident, int4, dense int8")
    if options.tokens:
        add_speed(report, options)
    if options.texts:
        add_hits(report, options)
    report.notes.append(f"medians of {options.rounds} rounds; the model is opened anew and its files are cold for each")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
