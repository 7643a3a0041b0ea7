"""One training run of one system in its own process: open the model with adapters, train, report.

Every system has the same seeded tokens, AdamW, and adapters of the same rank on the same parameters.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import session
import torch
from peft import LoraConfig, get_peft_model

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(model: Any, rank: int) -> Any:
    """Return the model with adapters on all experts, and nothing else."""
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=PARAMETERS))


class SavedBytes:
    """Bytes of the distinct storages that a forward saves for its backward, without the model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Packed weights have another class, and no memory.
        parameters = [each for each in model.parameters() if type(each) is torch.nn.Parameter and not each.is_meta]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        self._saved: dict[int, int] = {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(self._saved.values())


class Trained:
    """The result of a run so far. A step that takes longer than ``limit`` seconds ends the process, and the result has
    this step with ``limit`` as its time."""

    def __init__(self, result: Path, limit: float) -> None:
        self._path = result
        self._limit = limit
        self._facts: dict[str, Any] = {"steps": [], "unfinished": False}

    def add(self, **facts: Any) -> None:
        self._facts |= facts

    def add_step(self, facts: dict[str, Any]) -> None:
        self._facts["steps"].append(facts)

    def write(self) -> None:
        self._path.write_text(json.dumps(self._facts | {"peak": session.status_bytes("VmHWM")}))

    def limited(self) -> threading.Timer:
        """Start and return the timer of a step. Cancel it when the step has ended."""
        timer = threading.Timer(self._limit, self._abort)
        timer.daemon = True
        timer.start()
        return timer

    def _abort(self) -> None:
        self._facts |= {"steps": [{"seconds": self._limit}], "unfinished": True}
        self.write()
        os._exit(0)


def train(model: Any, request: dict[str, Any], trained: Trained, after_step: Callable[[], dict[str, Any]]) -> None:
    """Train, and add the seconds, bytes read and ``after_step`` of each step. The first ``warm_up`` steps are not
    counted."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    generator = torch.Generator().manual_seed(request["seed"])
    shape = (request["sequences"], request["tokens"] // request["sequences"])
    if request["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for step in range(request["warm_up"] + request["steps"]):
        ids = torch.randint(0, request["vocab"], shape, generator=generator)
        limit = trained.limited()
        read, begin = session.bytes_read(), time.perf_counter()
        if step == 0:  # this step is not timed
            saved = SavedBytes(model)
            with saved.hooks():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            trained.add(activation_bytes=saved.total)
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = time.perf_counter() - begin
        loss.backward()
        backward = time.perf_counter() - begin - forward
        optimizer.step()
        optimizer.zero_grad()
        facts = {"forward": forward, "backward": backward, "seconds": time.perf_counter() - begin}
        limit.cancel()
        facts |= {"loss": loss.item(), "bytes_read": session.bytes_read() - read, **after_step()}
        del loss
        print(facts, file=sys.stderr, flush=True)
        if step >= request["warm_up"]:
            trained.add_step(facts)
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    adapter_bytes = sum(parameter.nbytes for parameter in adapters)
    trained.add(
        adapter_bytes=adapter_bytes, gradient_bytes=adapter_bytes, optimizer_bytes=sum(x.nbytes for x in states)
    )


def run(open_model: Callable[[dict[str, Any]], tuple[Any, Callable[[], dict[str, Any]]]]) -> None:
    """usage: <contender>.py REQUEST.json RESULT.json"""
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    imported = session.status_bytes("VmRSS")
    trained = Trained(Path(sys.argv[2]), request["limit"])
    model, after_step = open_model(request)
    trained.add(imported_bytes=imported)
    train(model, request, trained, after_step)
    trained.write()
