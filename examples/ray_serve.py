"""A model behind Ray Serve, in several replicas on one machine.

    pip install "ray[serve]"
    torch-mesh convert MODEL FOLDER --weights int4
    python examples/ray_serve.py FOLDER --replicas 2

Each replica is a process with a model and a pool of its own. With io="buffered" they read through the page cache, which
has one copy for all. Or they borrow from one pool, which has its own reader and policy:

    torch-mesh share FOLDER --socket /tmp/pool.socket --resident 8GiB --workers 2
    python examples/ray_serve.py FOLDER --replicas 2 --shared /tmp/pool.socket

    curl localhost:8000/ -H 'content-type: application/json' -d '{"prompt": "The sea was", "max_new_tokens": 20}'
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_mesh

try:
    import ray
    from ray import serve
    from starlette.requests import Request
except ImportError:
    raise SystemExit('This example needs Ray Serve: pip install "ray[serve]"') from None


@serve.deployment(max_ongoing_requests=1)  # a forward uses all threads that the replica has
class Completions:
    def __init__(self, folder: str, config: dict[str, Any]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=torch_mesh.MeshConfig(**config))

    async def __call__(self, request: Request) -> dict[str, Any]:
        return self.complete(**await request.json())

    def complete(self, prompt: str, max_new_tokens: int = 40) -> dict[str, Any]:
        inputs = self.tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        text = self.tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        return {"text": text, "process": os.getpid(), "hit_rate": torch_mesh.stats(self.model).hit_rate}


def ask(port: int, prompt: str) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_new_tokens": 20}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a converted model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--resident", type=float, default=0.5, help="share of the experts (%(default)s)")
    parser.add_argument("--shared", metavar="SOCKET", help="borrow from the pool of torch-mesh share in its place")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ask", metavar="PROMPT", help="ask each replica a few times, print what comes, and end")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"port": arguments.port})
    # Ray gives a replica as many threads as it gives it processors.
    processors = max(1, (os.cpu_count() or 1) // arguments.replicas)
    deployment = Completions.options(num_replicas=arguments.replicas, ray_actor_options={"num_cpus": processors})
    if arguments.shared is None:
        config = {"resident": arguments.resident, "io": "buffered"}
    else:
        config = {"shared": os.path.abspath(arguments.shared)}
    application = deployment.bind(os.path.abspath(arguments.folder), config)
    serve.run(application, blocking=arguments.ask is None)  # until Ctrl-C
    if arguments.ask is not None:
        with ThreadPoolExecutor(2 * arguments.replicas) as pool:
            answers = [pool.submit(ask, arguments.port, arguments.ask) for _ in range(4 * arguments.replicas)]
            for each in answers:
                print(json.dumps(each.result()))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
