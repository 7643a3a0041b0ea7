"""Generates from your own checkpoint with a bounded set of its experts resident.

python examples/generate.py Qwen/Qwen3-30B-A3B --resident 8GiB --weights int4 --prompt "The sea was"
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import torch_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder or a hub id; raw, or converted with torch-mesh convert")
    parser.add_argument("--resident", default="auto", help="'auto', bytes such as 8GiB, or a fraction such as 0.25")
    parser.add_argument("--weights", default="auto", help="as MeshConfig's, such as int4")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--new-tokens", type=int, default=100)
    arguments = parser.parse_args()

    config = torch_mesh.MeshConfig(resident=arguments.resident, weights=arguments.weights)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, quantization_config=config)
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    model.generate(**inputs, max_new_tokens=arguments.new_tokens, streamer=TextStreamer(tokenizer))
    print(torch_mesh.stats(model))


if __name__ == "__main__":
    main()
