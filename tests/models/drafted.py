"""Drafts that are known to be right or wrong, and comparisons with plain decoding."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from near_ties import assert_same_tokens
from tiny_models import ALL_EXPERTS, TINY_MODELS
from transformers import (
    DynamicCache,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import torch_mesh
from torch_mesh.speculation import linear_attention
from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.decoding import Speculation
from torch_mesh.speculation.drafter import Drafter

_REWRITTEN = (
    "    def add(self, name, value):\n        self.names.append(name)\n        self.values.append(value)\n   "
    "     return self\n\n"
)
PROMPTS = {
    "prose": "And it came to pass in those days, that",
    "code": "def main():\n    parser = argparse.ArgumentParser()\n",
    "rewriting": f"{_REWRITTEN * 3}    def add(self, name",
    "chat": (
        "User: Who was the king of Israel?\nAssistant: The king was David.\nUser: Who was the king of "
        "Judah?\nAssistant:"
    ),
}
OSS, QWEN, NEXT = "GptOssExperts", "Qwen3MoeExperts", "Qwen3NextExperts"


class Always(Controller):
    """A controller that always drafts, whatever it costs."""

    def __init__(self, length: int) -> None:
        super().__init__((length,))
        self.accepted: list[int] = []

    def choose(self, most: int, tier: int = 0) -> int:
        return self.fitting(most)

    def observe(self, length: int, accepted: int, seconds: float | None, tier: int = 0) -> None:
        self.accepted.append(accepted)


def always(length: int) -> Speculation:
    return Speculation(Always(length))


def place_behind(answer: list[int], tokens: list[int]) -> int:
    """The index in ``answer``, which may be padded on the left, of the token after ``tokens``, which are not padded."""
    return next(at for at, token in enumerate(answer) if token == tokens[0]) + len(tokens)


class Oracle(Drafter):
    """A drafter that knows the text to come, and is wrong in about every fourth token."""

    def __init__(self, answer: torch.Tensor, tokens: list[int]) -> None:
        self.answer = answer[0].tolist()
        self.place = place_behind(self.answer, tokens)

    def draft(self, length: int) -> list[int]:
        drafted = self.answer[self.place : self.place + length]
        right = torch.rand(len(drafted)) < 0.75
        return [token if known else token ^ 1 for token, known in zip(drafted, right.tolist(), strict=True)]

    def extend(self, tokens: list[int]) -> None:
        self.place += len(tokens)


def knowing(answer: torch.Tensor, length: int) -> Speculation:
    return Speculation(Always(length), functools.partial(Oracle, answer))


def patched(original: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    return torch_mesh.patch(copy.deepcopy(original), **{"resident": 0.5, "attention": "mesh"} | fields)


def generate(model: PreTrainedModel, inputs: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0} | options
    if "input_ids" in inputs and "attention_mask" not in inputs:
        # transformers would take a generated 0 in a prompt for padding.
        settings["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return model.generate(**inputs, **settings)


def rows_are_exact(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether a token has the same bits in forwards of one and of sixteen tokens. Some kernels, and some of torch's
    linear layers, do not give the same bits."""
    ids = ids.repeat(1, 17)[:, :17]
    with torch.no_grad():
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        alone = [model(input_ids=ids[:, [i]], past_key_values=cache).logits[0] for i in range(17)]
        together = [model(input_ids=ids[:, :1], past_key_values=other).logits[0]]
        mixers = linear_attention.LinearAttention(model, other)
        together.append(model(input_ids=ids[:, 1:], past_key_values=other).logits[0])
        mixers.finish()
        return torch.equal(torch.cat(alone), torch.cat(together))


def generate_plainly(model: PreTrainedModel, inputs: Any, **options: Any) -> Any:
    return generate(model, inputs, return_dict_in_generate=True, output_logits=True, **options)


def check_tokens(model: PreTrainedModel, inputs: Any, plain: Any, tokens: torch.Tensor) -> None:
    """Check that ``tokens`` are those of ``plain``. Where rounding may differ, this holds up to a near tie."""
    if not torch.equal(tokens, plain.sequences):
        assert not rows_are_exact(model, inputs["input_ids"])
        assert_same_tokens(tokens, plain)


def assert_same_answers(model: PreTrainedModel, inputs: Any, how: Any, **options: Any) -> None:
    """Check that generating with ``how`` gives the tokens of plain decoding."""
    how = how if isinstance(how, dict) else {"custom_generate": how}
    check_tokens(model, inputs, generate_plainly(model, inputs, **options), generate(model, inputs, **options, **how))


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def spread_model(name: str) -> PreTrainedModel:
    """A tiny random model that generates different tokens. It is in fp32, where few logits are nearly equal."""
    tiny = TINY_MODELS[name]
    model = dataclasses.replace(tiny, fields={**tiny.fields, **ALL_EXPERTS}).build().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    return model


def random_inputs(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 100, (1, length))}


class KeptTokens(StoppingCriteria):
    """Records how many tokens a text had when it ended, also by an error."""

    count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count = input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)
