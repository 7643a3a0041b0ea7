"""``speculate(assistant=...)``: drafts of a smaller model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from drafted import Always, assert_same_answers, generate, patched
from pairs import first_quick
from peft import LoraConfig, get_peft_model
from tiny_models import TINY_MODELS
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

import torch_mesh
from torch_mesh.speculation.assistant import Assistant, _unsupported_reason
from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.decoding import Speculation

WINDOWS, KEYS = "GptOssExperts", "Qwen3MoeExperts"
PROMPTS = ["And it came to pass in those days, that", "def main():\n    parser ="]


@pytest.fixture(scope="module")
def smaller(original: PreTrainedModel) -> PreTrainedModel:
    """The same model with experts in two bits, which generates nearly the same text."""
    return torch_mesh.patch(copy.deepcopy(original), weights="tcq2", attention="mesh")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sampled", first_quick(False, True))
def test_tokens_are_those_of_plain_decoding(
    original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any, sampled: bool, compiled: bool
) -> None:
    model = patched(original, dense="bf16", resident=0.3)
    if compiled:
        torch_mesh.compile(model, backend="eager")
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        how = {"do_sample": sampled, "disable_compile": not compiled}
        plain = generate(model, inputs, **how)
        controller = Always(3)
        speculation = Speculation(controller, functools.partial(Assistant, smaller))
        assert torch.equal(plain, generate(model, inputs, **how, custom_generate=speculation))
        assert sampled or sum(controller.accepted) > 1.5 * len(controller.accepted)


def test_each_text_has_an_assistant_of_its_own(
    original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any
) -> None:
    model = patched(original, dense="bf16")
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    speculation = Speculation(Always(3), functools.partial(Assistant, smaller))
    assert torch.equal(generate(model, inputs), generate(model, inputs, custom_generate=speculation))
    tally = torch_mesh.stats(model).speculation
    assert tally is not None and tally.accepted > 0.3 * tally.drafted > 0


def test_the_controller_stops_drafts_that_do_not_pay(
    original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any
) -> None:
    """An assistant that takes as long as the model does not pay."""
    model = patched(original, dense="bf16", resident=1.0)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    speculation = torch_mesh.speculate(assistant=smaller)
    options = {"max_new_tokens": 100, "eos_token_id": None}
    assert torch.equal(
        generate(model, inputs, **options), generate(model, inputs, **options, custom_generate=speculation)
    )
    tally = torch_mesh.stats(model).speculation
    assert tally is not None and 0 < tally.drafted < 100


def _are_greedy(model: PreTrainedModel, text: list[int], drafted: list[int]) -> bool:
    """Whether ``drafted`` are the greedy tokens after ``text``, up to the different rounding of tokens that are read
    at once or one by one."""
    logits = model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 : -1]
    largest, chosen = logits.amax(-1), logits.gather(-1, torch.tensor(drafted)[:, None])[:, 0]
    return bool((largest - chosen <= largest.abs() / 64).all())


@pytest.mark.parametrize("name", [KEYS, WINDOWS])
@pytest.mark.parametrize("patched", [False, True])
@torch.no_grad()
def test_rejected_drafts_do_not_change_later_drafts(name: str, patched: bool) -> None:
    """The text is longer than the window of 16 tokens."""
    model = TINY_MODELS[name].build().float()
    assert not _unsupported_reason(model)
    if patched:
        torch_mesh.patch(model, attention="model")
    text = torch.randint(3, 100, (60,)).tolist()
    assistant = Assistant(model, text[:5])
    place = 5
    while place < len(text):
        drafted = list(assistant.draft(5))
        assert _are_greedy(model, text[:place], drafted)
        right = [*drafted[: torch.randint(0, 5, ()).item()], text[place]]
        text[place : place + len(right)] = right
        assistant.extend(right)
        place += len(right)


@torch.no_grad()
def test_tokens_that_the_assistant_has_not_seen_are_read_in_one_forward() -> None:
    model = TINY_MODELS[KEYS].build()
    assistant = Assistant(model, [5, 6, 7])
    drafted = assistant.draft(2)
    assert not assistant.is_behind and len(drafted) == 2
    following = [token for token in range(10, 28) if token != drafted[0]][:17]
    assistant.extend(following[:-1])
    assert not assistant.is_behind
    assistant.extend(following[-1:])
    assert assistant.is_behind
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    drafted = list(assistant.draft(3))
    hook.remove()
    assert len(calls) == 3 and _are_greedy(model, [5, 6, 7, *following], drafted)


@torch.no_grad()
def test_a_token_outside_its_vocabulary_ends_the_assistants_drafts() -> None:
    model = TINY_MODELS[KEYS].build()
    assistant = Assistant(model, [5, 6, 119])
    assert len(assistant.draft(3)) == 3 and assistant.draft(0) == ()
    assistant.extend([120])
    assert assistant.draft(3) == ()


def test_drafted_tokens_outside_the_models_vocabulary_are_cut(original: PreTrainedModel, tokenizer: Any) -> None:
    class Foreign(Assistant):
        def draft(self, length: int) -> list[int]:
            return [original.config.vocab_size] * length

    model, inputs = patched(original, dense="bf16"), tokenizer(PROMPTS[0], return_tensors="pt")
    speculation = Speculation(Always(3), functools.partial(Foreign, original))
    assert torch.equal(generate(model, inputs), generate(model, inputs, custom_generate=speculation))


class Costly(Assistant):
    """An assistant that takes as long as fifty plain steps and drafts ``tokens``, of which the first is wrong."""

    drafts = 0

    def __init__(self, model: Any, tick: Any, tokens: list[int], text: list[int]) -> None:
        super().__init__(model, text)
        self.tick, self.tokens = tick, tokens

    def draft(self, length: int) -> list[int]:
        if length:
            Costly.drafts += 1
            self.tick(50.0)
            super().draft(length)
        return (self.tokens * length)[:length]


def _costly(model: Any, smaller: Any, lengths: tuple[int, ...], tokens: list[int]) -> tuple[Speculation, list[float]]:
    """A Speculation with a simulated clock: each forward of the large model takes one second, each draft fifty."""
    now = [0.0]
    Costly.drafts = 0

    def tick(seconds: float) -> None:
        now[0] += seconds

    drafter = functools.partial(Costly, smaller, tick, tokens)
    model.register_forward_hook(lambda *_: tick(1.0))
    return Speculation(Controller(lengths), drafter, clock=lambda: now[0]), now


@pytest.mark.parametrize("known", first_quick(1, 0, 4))
def test_drafts_are_cut_at_the_first_token_outside_the_models_vocabulary(
    original: PreTrainedModel, tokenizer: Any, known: int
) -> None:
    """Wherever the draft is cut, the tokens are those of plain decoding. The loss counts to drafts and not to plain
    steps."""
    model = patched(original, dense="bf16")
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    options = {"max_new_tokens": 150, "eos_token_id": None}
    expected = generate(model, inputs, **options)
    speculation, now = _costly(model, original, (3, 7), [7] * known + [model.config.vocab_size])
    assert torch.equal(expected, generate(model, inputs, **options, custom_generate=speculation))
    assert 0 < Costly.drafts <= 4 and now[0] <= 150 + 50 * Costly.drafts
    assert speculation._controller._plain.value == 1.0


def test_an_assistant_that_does_not_pay_is_stopped_after_a_text_has_ended(
    original: PreTrainedModel, tokenizer: Any
) -> None:
    """A text that has ended gets no more drafts, so its assistant is never behind."""
    model = patched(original, dense="bf16")
    ids = torch.stack([tokenizer(prompt, return_tensors="pt")["input_ids"][0, :6] for prompt in PROMPTS]).repeat(1, 3)
    options = {"max_new_tokens": 150, "pad_token_id": 0}
    free = generate(model, {"input_ids": ids}, **options, eos_token_id=None)[:, 18:]
    ends = next(token for token in free[0, :3].tolist() if token not in free[1].tolist())
    expected = generate(model, {"input_ids": ids}, **options, eos_token_id=ends)
    assert expected.shape[1] == 168 and (expected[0, 22:] == 0).all()
    speculation, _ = _costly(model, original, (3,), [7])
    found = generate(model, {"input_ids": ids}, **options, eos_token_id=ends, custom_generate=speculation)
    assert torch.equal(found, expected)
    assert 0 < Costly.drafts <= 4


@torch.no_grad()
def test_no_drafts_for_a_text_longer_than_the_assistants_positions() -> None:
    """With learned positions, one more than the model has is an error of the device."""
    small = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, vocab_size=120))
    assistant = Assistant(small, [5] * 12)
    assert len(assistant.draft(4)) == 4 and assistant.draft(5) == ()
    model = patched(TINY_MODELS[KEYS].build())
    inputs = {"input_ids": torch.randint(3, 100, (1, 10))}
    assert_same_answers(model, inputs, Speculation(Always(3), functools.partial(Assistant, small)))


def test_the_assistant_computes_logits_of_the_last_token_only() -> None:
    base = TINY_MODELS[KEYS].build()
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    assert Assistant(adapted)._last == Assistant(base)._last == {"logits_to_keep": 1}
    torch_mesh.speculate(assistant=adapted)


def test_models_that_cannot_draft_are_refused() -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    encoder = T5ForConditionalGeneration(T5Config(**small))
    for model, why in (
        ("gpt2", "no model of transformers"),
        (encoder, "an encoder and a decoder"),
        (TINY_MODELS["Qwen3NextExperts"].build(), "linear attention"),
        (
            XLNetLMHeadModel(XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=16)),
            "it has a cache of its own",
        ),
    ):
        with pytest.raises(ValueError, match=f"cannot draft: .*{why}.*smaller causal language model"):
            torch_mesh.speculate(assistant=model)
