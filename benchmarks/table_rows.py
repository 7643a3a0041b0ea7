"""Claim: a model whose n-gram table stays in files decodes at 0.95 of the speed with the table in memory, and takes at
most 1.05 x its time for a prompt of 4,096 tokens. Rows are read at 0.8 of the rate of raw random reads of their size.

A model of qwen4_exp's shapes has 4 of 48 layers, so the table weighs twelve times as much as in the whole model. All
experts are in memory, in int4, and the stream of tokens is random: nearly no row is in the cache. Rows are those of the
store and of the raw checkpoint. Raw reads are direct reads of one block for each row, in any order, by io_uring with as
many under way. Gemma's per-layer embeddings are one wide row a token: those of a model with 30 layers are read alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import synthetic
import torch
from harness import Report, Row
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen4ExpForCausalLM,
    Qwen4ExpTextConfig,
)

import torch_mesh
from torch_mesh import _testing
from torch_mesh.pool.row_tables import RowTables
from torch_mesh.store.checkpoint import meta_model, read_config
from torch_mesh.store.tables import tables_in_files

VOCABULARY = 8192
HEADS, ROW_VALUES = 16, 160
DEPTH = 128  # as in csrc/tables/tables.cpp
PROMPT = 4096  # tokens of the timed prompt
PER_LAYER_ROWS, GEMMA_LAYERS, PER_LAYER_VALUES = 1 << 16, 30, 256
PAST = 64  # tokens before the timed ones


def configured(layers: int, experts: int, rows: int) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(
        vocab_size=VOCABULARY, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts=experts, num_experts_per_tok=10, ple_layer_ids=[2], ple_embed_dim=HEADS * ROW_VALUES,
        ngram_size=3, heads_per_ngram=HEADS // 2, ngram_vocab_size_base=rows // HEADS, split_ngram_parts=8,
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=512, indexer_compress_ratio=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def per_layer() -> Gemma4TextConfig:
    """A small config, except for its per-layer embeddings: a token's row has those of all layers."""
    return Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=GEMMA_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, global_head_dim=32, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=64, vocab_size_per_layer_input=PER_LAYER_ROWS,
        hidden_size_per_layer_input=PER_LAYER_VALUES,
    )  # fmt: skip


def checkpoint(path: Path, family: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    def save(folder: Path) -> None:
        torch.manual_seed(0)
        model: Any = family._from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(0, synthetic.EMBEDDING_STD)
        model.save_pretrained(folder, max_shard_size="1GB")

    return synthetic.made(path, save)


def opened(folder: Path, tables: str) -> Any:
    config = torch_mesh.MeshConfig(resident=1.0, tables=tables)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()


@dataclass
class Stream:
    """Decodes one sequence of random tokens."""

    model: Any
    generator: torch.Generator
    cache: Any = None

    def step(self, ids: torch.Tensor) -> float:
        """The seconds of a forward."""
        begin = time.perf_counter()
        with torch.no_grad():
            self.cache = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1).cache
        return time.perf_counter() - begin

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (1, count), generator=self.generator)

    def prompt(self, tokens: int) -> float:
        self.cache = None
        seconds = self.step(self.tokens(tokens))
        self.cache = None
        return seconds


def decoded(streams: dict[str, Stream], tokens: int) -> dict[str, float]:
    """Tokens per second of each stream. Their steps alternate."""
    seconds = dict.fromkeys(streams, 0.0)
    for token in range(tokens):
        for name in list(streams)[:: 1 if token % 2 else -1]:
            seconds[name] += streams[name].step(streams[name].tokens(1))
    return {name: tokens / spent for name, spent in seconds.items()}


def add_models(report: Report, folder: Path, options: Any) -> None:
    streams = {
        name: Stream(opened(folder, tables), torch.Generator().manual_seed(options.seed))
        for name, tables in (("in files", "auto"), ("in memory", "off"))
    }
    from_files = streams["in files"].model
    for stream in streams.values():
        stream.step(stream.tokens(PAST))
    decoded(streams, options.tokens)
    torch_mesh.reset_stats(from_files)
    runs = [decoded(streams, options.tokens) for _ in range(options.rounds)]
    add_pair(report, "decode", {name: [run[name] for run in runs] for name in streams}, "tok/s", at_least=0.95)
    [table] = torch_mesh.stats(from_files).tables
    steps = options.rounds * options.tokens
    report.add(Row("rows looked up and not requested before, per token", table.reads / steps, ""))
    report.add(Row("waiting for rows, per token", 1e6 * table.wait_seconds / steps, "µs"))
    for tokens in options.prompts:
        for stream in streams.values():
            stream.prompt(tokens)
        torch_mesh.reset_stats(from_files)
        times = harness.interleave(
            {name: partial(stream.prompt, tokens) for name, stream in streams.items()},
            options.prompt_rounds,
        )
        add_pair(report, f"prompt of {tokens:,} tokens", times, "s", at_most=1.05 if tokens == PROMPT else None)
        [table] = torch_mesh.stats(from_files).tables
        report.add(Row(f"waiting for rows, prompt of {tokens:,}", table.wait_seconds / options.prompt_rounds, "s"))


def add_pair(report: Report, name: str, runs: dict[str, list[float]], unit: str, **bounds: float | None) -> None:
    row = harness.paired_row(f"{name}, rows from files", runs["in files"], unit, "in memory", runs["in memory"])
    report.add(Row(**{**vars(row), **bounds}))
    report.details[name] = runs


def gather_seconds(tables: RowTables, batches: Sequence[torch.Tensor]) -> float:
    handle, about = tables.handle(0), tables.tables[0]
    begin = time.perf_counter()
    for ids in batches:
        torch.ops.torch_mesh.gather_rows(ids, handle, about.dim, about.dtype)
    return time.perf_counter() - begin


def add_rows(report: Report, name: str, folder: Path, rows_of_token: int, options: Any) -> None:
    """Rows per second without a cache."""
    [(_, about)] = tables_in_files(folder, meta_model(read_config(folder)), "auto")
    tables = RowTables([about], cache_bytes=0, verify="first", timeout=30.0, io="auto")
    path, size = about.stretches[0].path, max(512, about.stride)
    blocks = sum(each.rows for each in about.stretches if each.path == path) * about.stride // size
    generator = torch.Generator().manual_seed(options.seed)

    def rows(count: int) -> torch.Tensor:
        return torch.randint(about.rows, (count,), generator=generator)

    for what, count, batch, minimum in (
        (f"a prompt of {PROMPT:,} tokens", PROMPT * rows_of_token, PROMPT * rows_of_token, 0.8),
        ("decode steps", 256 * rows_of_token, rows_of_token, None),
    ):
        contenders: dict[str, Callable[[], float]] = {
            "gather": lambda count=count, batch=batch: count / gather_seconds(tables, rows(count).split(batch)),
            "raw": lambda count=count, batch=batch: (
                count
                / _testing.random_read_seconds(
                    str(path),
                    (torch.randint(blocks, (count,), generator=generator) * size).tolist(),
                    bytes=size,
                    depth=DEPTH,
                    batch=0 if batch == count else batch,
                )
            ),
        }
        runs = harness.interleave(contenders, options.rounds)
        title = f"rows of {what}, {name}"
        raw = f"raw reads of {size}"
        report.add(harness.paired_row(title, runs["gather"], "rows/s", raw, runs["raw"], at_least=minimum))
        report.details[title] = runs
    tables.close()


def main() -> int:
    arguments = harness.parser(__doc__)
    harness.add_dir(arguments)
    harness.add_rounds(arguments, 15)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--experts", type=int, default=16)
    arguments.add_argument("--rows", type=int, default=2_000_000)
    arguments.add_argument("--tokens", type=int, default=32, help="decoded tokens in a round")
    arguments.add_argument("--prompts", type=int, nargs="*", default=[PROMPT], help="tokens of timed prompts")
    arguments.add_argument("--prompt-rounds", type=int, default=3)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    shape = (options.layers, options.experts, options.rows)
    path = options.dir / "qwen4-exp-{}x{}-{}-rows".format(*shape)
    raw = checkpoint(path, Qwen4ExpForCausalLM, configured(*shape))
    converted = synthetic.converted(raw, "int4")
    path = options.dir / f"gemma4-{PER_LAYER_ROWS}-rows-of-{GEMMA_LAYERS}x{PER_LAYER_VALUES}"
    wide = synthetic.converted(checkpoint(path, Gemma4ForCausalLM, per_layer()), "int4")
    report = Report(f"Rows of {2 * ROW_VALUES} bytes, {options.layers} layers, {options.threads} threads")
    for name, folder, rows_of_token in (
        ("store", converted, HEADS),
        ("raw checkpoint", raw, HEADS),
        ("per-layer embeddings of Gemma", wide, 1),
    ):
        add_rows(report, name, folder, rows_of_token, options)
    add_models(report, converted, options)
    report.notes.append(f"medians of {options.rounds} rounds; {HEADS} rows a token; steps of both models alternate")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
