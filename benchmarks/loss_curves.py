"""Claim: adapters on experts on disk learn as with plain PEFT. Over 200 steps the two losses differ by no more than
those of two seeds, at any step and on average.

examples/mesh-tiny learns examples/text/ships_log.txt with LoRA of rank 8 on attention and all experts, in float32:
patched with a quarter of its experts resident, and in plain transformers and PEFT. A seed determines the adapters and
the order of the text for both. Means over the last steps are compared, since each step has another text.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, Row
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mesh

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1)
VARIANTS = ("patched", "unpatched")
SMOOTHED = 20  # steps


def open_model(path: Path, variant: str, resident: float) -> PreTrainedModel:
    config = {"quantization_config": torch_mesh.MeshConfig(resident=resident)} if variant == "patched" else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **config)


def curve(model: PreTrainedModel, rows: torch.Tensor, seed: int, steps: int, batch: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    adapted = get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-3)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (batch,), generator=order)]
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measure(options: Any) -> Report:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    report = Report(
        f"Losses of {options.model.name} over {options.steps} steps of {options.batch} x {options.length} tokens, "
        f"means of {SMOOTHED} steps; patched: {options.resident:.0%} of the experts resident"
    )
    curves: dict[tuple[str, int], torch.Tensor] = {}
    for seed in SEEDS:
        for variant in VARIANTS:
            model, begin = open_model(options.model, variant, options.resident), time.perf_counter()
            losses = curve(model, rows, seed, options.steps, options.batch)
            report.details[f"{variant}, seed {seed}"] = {"losses": losses, "seconds": time.perf_counter() - begin}
            means = torch.tensor(losses).unfold(0, min(SMOOTHED, options.steps), 1).mean(-1)
            curves[variant, seed] = means
            report.add(Row(f"{variant}, seed {seed}: last loss", means[-1].item(), "", "first", means[0].item()))
    first, second = SEEDS
    differences = torch.stack([curves["patched", seed] - curves["unpatched", seed] for seed in SEEDS]).abs()
    seed_differences = torch.stack([curves[variant, first] - curves[variant, second] for variant in VARIANTS]).abs()
    reference_name = "of the two seeds"
    report.add(
        Row(
            "patched to unpatched: widest",
            differences.max().item(),
            "",
            reference_name,
            seed_differences.max().item(),
            at_most=1.0,
        )
    )
    report.add(
        Row(
            "patched to unpatched: mean",
            differences.mean().item(),
            "",
            reference_name,
            seed_differences.mean().item(),
            at_most=1.0,
        )
    )
    return report


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=ROOT / "examples" / "mesh-tiny")
    arguments.add_argument("--text", type=Path, default=ROOT / "examples" / "text" / "ships_log.txt")
    arguments.add_argument("--resident", type=float, default=0.25)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--batch", type=int, default=4, help="sequences in a step")
    arguments.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    options = arguments.parse_args()
    # Time is not measured, and on a busy machine the threads of so small a model wait for each other.
    torch.set_num_threads(1)
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
