"""Claim: with the keys of 8,000 tokens of tools on disk the first token takes a twentieth of the time, after a restart
too, and the answer is the same. Where plain reads of the turn's experts and of the keys take more than 0.8 of that
twentieth, the first token takes at most 1.25 times as long as those reads.

A conversation of token ids with a quarter of the experts resident has a first and a second turn. Another conversation
has the same tools. All three prompts are repeated in new processes, with and without the prefix cache. No file is in
the page cache when a process starts. Full attention is measured with the synthetic model in int4, windows and linear
attention with smaller models of random weights.

After a hit a prompt is computed in two forwards, which round otherwise than one, and random weights bring near ties
every few tokens. Answers after a restart are therefore compared, to the bit, with those of the process that stayed,
when it is asked once more. How far they are from one forward is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
import torch
from direct_reads import BLOCK, read_parts
from harness import Report, Row
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.generation import BaseStreamer

import torch_mesh

RESIDENT = 0.25
TURN, ANSWER = 40, 16  # tokens of a user's turn, and of an answer


class FirstToken(BaseStreamer):
    """Records the time of the first token, and the bytes read from disk until then."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calls = 0
        self._begin, self._read_before = time.perf_counter(), torch_mesh.stats(model).bytes_read
        self.seconds, self.bytes_read = 0.0, 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call is the prompt's
            self.seconds = time.perf_counter() - self._begin
            self.bytes_read = torch_mesh.stats(self._model).bytes_read - self._read_before

    def end(self) -> None:
        pass


def serve_turns(folder: Path, cached: bool, prompts: list[list[int]], logits: str) -> list[dict[str, Any]]:
    """Answer the prompts one after the other in this process. Return the seconds to each first token, and the
    answers.

    ``logits``: file for those of all answers, float32 [prompts, ANSWER, vocabulary].
    """
    weights = "auto" if (folder / "mesh_manifest.json").exists() else "int4"
    config = torch_mesh.MeshConfig(resident=RESIDENT, weights=weights)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    prefixes = torch_mesh.cache_prefixes(model, "64GiB") if cached else None
    found, all_logits = [], []
    for prompt in prompts:
        ids, first = torch.tensor([prompt]), FirstToken(model)
        options = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0, "streamer": first}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        reused = 0 if prefixes is None else prefixes.counts.tokens
        tokens = answer.sequences[0, len(prompt) :].tolist()
        found.append({"seconds": first.seconds, "bytes_read": first.bytes_read, "answer": tokens, "reused": reused})
        all_logits.append(torch.cat(answer.logits).float())
        if prefixes is not None:
            prefixes.flush()
    torch.save(torch.stack(all_logits), logits)
    return found


def in_process(
    folder: Path, cache: Path, cached: bool, prompts: list[list[int]]
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """What ``serve_turns`` returns and writes in a new process."""
    logits = cache / "logits.pt"
    isolation.evict(sorted(path for path in (*folder.iterdir(), *cache.rglob("*")) if path.is_file()))
    process = subprocess.run(
        [sys.executable, __file__, "--child"],
        check=True,
        input=json.dumps([str(folder), cached, prompts, str(logits)]),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    return json.loads(process.stdout.splitlines()[-1]), torch.load(logits)


def read_seconds(folder: Path, size: int) -> float:
    """Seconds of plain reads of ``size`` bytes of a folder's largest file."""
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    whole = file.stat().st_size // BLOCK * BLOCK
    return read_parts([file], [(0, 0, min(whole, size - start)) for start in range(0, size, whole)])


def bytes_of(cache: Path) -> int:
    """Bytes of the prefix cache's files."""
    return sum(path.stat().st_size for path in (cache / "torch_mesh" / "prefixes").rglob("*") if path.is_file())


def equal_steps(one: torch.Tensor, other: torch.Tensor) -> int:
    """The number of tokens of two answers with equal logits [ANSWER, vocabulary]."""
    return int((one == other).all(-1).sum())


def windows_model(hidden: int, positions: int) -> Any:
    config = GptOssConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
        max_position_embeddings=positions, rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def linear_model(hidden: int, positions: int) -> Any:
    config = Qwen3NextConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=hidden // 2,
        shared_expert_intermediate_size=hidden // 2, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=64, num_experts_per_tok=8, linear_num_key_heads=8, linear_num_value_heads=16,
        linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=positions,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def checkpoint_of(kind: str, options: Any) -> Path:
    if kind == "full":
        return synthetic.store(options.dir, synthetic.Shape(layers=options.layers, experts=options.experts), "int4")

    def save(folder: Path) -> None:
        torch.manual_seed(0)
        make = windows_model if kind == "windows" else linear_model
        make(options.hidden, 40960).bfloat16().save_pretrained(folder)

    return synthetic.made(options.dir / f"{kind}-{options.hidden}", save)


def add_kind(report: Report, kind: str, options: Any) -> None:
    folder, cache = checkpoint_of(kind, options), options.dir / "prefix-cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def random_tokens(count: int) -> list[int]:
        return torch.randint(1, 8192, (count,), generator=generator).tolist()

    tools = random_tokens(options.tokens)
    first, other, next_turn = tools + random_tokens(TURN), tools + random_tokens(TURN), random_tokens(TURN)
    in_process(folder, cache, False, [first])  # converts the checkpoint if needed
    ((first_result,), _) = in_process(folder, cache, False, [first])
    second = first + first_result["answer"] + next_turn
    prompts = {"first turn": first, "second turn": second, "another conversation": other}
    running, running_logits = in_process(folder, cache, True, [*prompts.values(), *prompts.values()])
    for index, (name, prompt) in enumerate(prompts.items()):
        found = running[index]
        (plain,), plain_logits = in_process(folder, cache, False, [prompt])
        (restarted,), logits = in_process(folder, cache, True, [prompt])
        report.add(Row(f"{name}, {kind}", found["seconds"], "s", "without", plain["seconds"]))
        reading = read_seconds(folder, restarted["bytes_read"] + bytes_of(cache))
        min_speedup = min(20.0, 0.8 * plain["seconds"] / reading) if options.tokens >= 8000 else None
        report.add(
            Row(
                f"without, {name}, {kind}",
                plain["seconds"],
                "s",
                "after a restart",
                restarted["seconds"],
                at_least=min_speedup,
            )
        )
        equal = equal_steps(logits[0], running_logits[len(prompts) + index])
        report.add(Row(f"tokens with logits of before, {name}, {kind}", equal, "", "of", ANSWER, at_least=1.0))
        worst = float((logits - plain_logits)[0, 0].abs().max())
        same = sum(own == its for own, its in zip(restarted["answer"], plain["answer"], strict=True))
        report.notes.append(
            f"{kind}, {name}: {restarted['reused']} tokens reused; {same} of {ANSWER} tokens are those of one forward, "
            f"the first one's logits at most {worst:.2g} apart; {restarted['bytes_read'] / 1e6:.0f} MB of experts read "
            f"for the first token, with the keys {reading:.2g} s by plain reads"
        )
        report.details[f"{kind}, {name}"] = {"without": plain, "running": found, "restarted": restarted}
    report.notes.append(f"{kind}: {bytes_of(cache) / 1e6:.1f} MB of files")
    shutil.rmtree(cache)


def main() -> int:
    arguments = harness.parser(__doc__)
    synthetic.add_arguments(arguments)
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--tokens", type=int, default=8000, help="tokens of tools")
    arguments.add_argument("--experts", type=int, default=synthetic.Shape.experts)
    arguments.add_argument(
        "--hidden", type=int, default=1024, help="hidden size of the models with windows and linear attention"
    )
    arguments.add_argument("--kinds", nargs="*", default=["full", "windows", "linear"])
    options = arguments.parse_args()
    if options.child:
        folder, *others = json.load(sys.stdin)
        print(json.dumps(serve_turns(Path(folder), *others)))
        return 0
    report = Report(f"Prompts with {options.tokens:,} tokens of tools, {RESIDENT:.0%} of the experts resident")
    for kind in options.kinds:
        add_kind(report, kind, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
