"""Trains low-rank adapters on the experts and the attention of a model whose experts stay on disk, with transformers'
Trainer.

python examples/finetune_trainer.py examples/mesh-tiny --text examples/text/ships_log.txt --resident 0.25 --steps 60
--out adapter
"""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

import torch_mesh


def lora_config(model: PreTrainedModel, rank: int) -> LoraConfig:
    """Adapters on the experts of a patched ``model``, whatever their layers are called, and on its attention."""
    linear = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted(linear & {"q_proj", "k_proj", "v_proj", "o_proj"}),
        target_parameters=["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder or a hub id; raw, or converted with torch-mesh convert")
    parser.add_argument(
        "--text", type=Path, required=True, help="a file of plain text to learn; the last tenth is kept for evaluation"
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder for the adapter")
    parser.add_argument("--resident", default="auto", help="'auto', bytes such as 8GiB, or a fraction such as 0.25")
    parser.add_argument("--weights", default="auto", help="as MeshConfig's, such as int4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--checkpointing", action="store_true", help="keep no activations: less memory, one more forward a step"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args()
    if not arguments.text.is_file():
        parser.error(f"there is no file {arguments.text}")
    if arguments.rank < 1:
        parser.error(f"--rank is {arguments.rank}; it must be 1 or more")
    if arguments.resume and not list(arguments.out.glob("checkpoint-*")):
        parser.error(f"{arguments.out} has no checkpoint to resume from: leave out --resume")

    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.checkpoint,
        quantization_config=torch_mesh.MeshConfig(resident=arguments.resident, weights=arguments.weights),
    )
    model = get_peft_model(model, lora_config(model, arguments.rank))

    tokens = tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(tokens) - arguments.length + 1, arguments.length)
    parts = [tokens[start : start + arguments.length] for start in starts]
    sequences = [{"input_ids": part, "labels": part} for part in parts]
    if len(sequences) < 2:
        parser.error(
            f"{arguments.text} has {len(tokens)} tokens, fewer than two sequences of --length {arguments.length}: give "
            "more text, or a smaller --length"
        )
    kept = max(1, len(sequences) // 10)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(arguments.out),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=arguments.learning_rate,
            gradient_checkpointing=arguments.checkpointing,
            logging_steps=10,
            save_steps=max(1, arguments.steps // 10),  # for --resume
            save_total_limit=1,
            use_cpu=True,  # where the experts are; without it processes that torchrun started would not find each other
            report_to=[],
        ),
        train_dataset=sequences[:-kept],
        eval_dataset=sequences[-kept:],
        callbacks=[torch_mesh.MeshTrainerCallback()],
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    found = trainer.evaluate()
    trainer.save_model()  # the adapter, by the first of several processes
    if trainer.is_world_process_zero():
        print(found)
        print(torch_mesh.stats(model))


if __name__ == "__main__":
    main()
