"""The main job in one minute: a small MoE model generates with a quarter of its experts resident.

Converts examples/mesh-tiny to int8, opens it twice, once with a quarter and once with all of its experts resident,
and shows that both write the same tokens. Exits with 1 if they do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

import torch_mesh
from torch_mesh import cli

MODEL = Path(__file__).parent / "mesh-tiny"
CONVERTED = Path(__file__).parents[1] / "build" / "demo" / "mesh-tiny-int8"
PROMPTS = {
    "prose": "And it came to pass in those days, that",
    "code": "    def __init__(self, name, value=None):\n",
}
RESIDENT = 0.25
NEW_TOKENS = 120

console = Console(highlight=False)


def main() -> int:
    if not CONVERTED.exists():  # a conversion that was cut short leaves nothing under this name
        CONVERTED.parent.mkdir(parents=True, exist_ok=True)
        exit_code = cli.main(["convert", str(MODEL), str(CONVERTED), "--weights", "int8"])
        if exit_code:
            return exit_code

    tokenizer = AutoTokenizer.from_pretrained(CONVERTED)
    partly = open_model(resident=RESIDENT)
    fully = open_model(resident=1.0)

    all_equal = True
    for kind, prompt in PROMPTS.items():
        console.rule(f"{kind}, {RESIDENT:.0%} of the experts resident")
        tokens = generate(partly, tokenizer, prompt, TextStreamer(tokenizer))
        equal = torch.equal(tokens, generate(fully, tokenizer, prompt))
        all_equal &= equal
        verdict = "[green]the same as[/]" if equal else "[bold red]not the same as[/]"
        console.print(f"\n{tokens.numel()} tokens, {verdict} those of the fully resident run\n")

    console.rule(f"statistics, {RESIDENT:.0%} of the experts resident")
    print(torch_mesh.stats(partly))
    return 0 if all_equal else 1


def open_model(resident: float) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CONVERTED, quantization_config=torch_mesh.MeshConfig(resident=resident))


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, streamer: TextStreamer | None = None
) -> torch.Tensor:
    """Samples from the same random numbers each time, so that equal logits, and only those, give equal tokens."""
    torch.manual_seed(0)
    return model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.1,
        streamer=streamer,
    )


if __name__ == "__main__":
    sys.exit(main())
