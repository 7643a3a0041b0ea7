"""``speculate(assistant=...)``: drafts of a smaller model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from test_speculation import Always, _generate, _patched
from tiny_models import TINY_MODELS
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

import torch_mesh
from torch_mesh.speculation.assistant import Assistant, _why_not
from torch_mesh.speculation.decoding import Speculation

WINDOWS, KEYS = "GptOssExperts", "Qwen3MoeExperts"
PROMPTS = ["And it came to pass in those days, that", "def main():\n    parser ="]


@pytest.fixture(scope="module")
def smaller(original: PreTrainedModel) -> PreTrainedModel:
    """The same with experts in two bits: much the same text."""
    return torch_mesh.patch(copy.deepcopy(original), weights="tcq2", attention="mesh")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_plain_decoding(
    original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any, sampled: bool, compiled: bool
) -> None:
    model = _patched(original, dense="bf16", resident=0.3)
    if compiled:
        torch_mesh.compile(model, backend="eager")
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        how = {"do_sample": sampled, "disable_compile": not compiled}
        plain = _generate(model, inputs, **how)
        controller = Always(3)
        speculation = Speculation(controller, functools.partial(Assistant, smaller))  # type: ignore[arg-type]
        assert torch.equal(plain, _generate(model, inputs, **how, custom_generate=speculation))
        assert sampled or sum(controller.accepted) > 1.5 * len(controller.accepted)


def test_several_texts_have_an_assistant_each(
    original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any
) -> None:
    model = _patched(original, dense="bf16")
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    speculation = Speculation(Always(3), functools.partial(Assistant, smaller))  # type: ignore[arg-type]
    assert torch.equal(_generate(model, inputs), _generate(model, inputs, custom_generate=speculation))
    tally = torch_mesh.stats(model).speculation
    assert tally is not None and tally.accepted > 0.3 * tally.drafted > 0


def test_the_controller_has_the_say(original: PreTrainedModel, smaller: PreTrainedModel, tokenizer: Any) -> None:
    """An assistant that takes as long as the model does not pay."""
    model = _patched(original, dense="bf16", resident=1.0)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    speculation = torch_mesh.speculate(assistant=smaller)
    options = {"max_new_tokens": 100, "eos_token_id": None}
    assert torch.equal(
        _generate(model, inputs, **options), _generate(model, inputs, **options, custom_generate=speculation)
    )
    tally = torch_mesh.stats(model).speculation
    assert tally is not None and 0 < tally.drafted < 100


def _are_greedy(model: PreTrainedModel, text: list[int], drafted: list[int]) -> bool:
    """As far as rounding leaves it open, for which tokens that are read at once and one by one differ."""
    logits = model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 : -1]
    largest, chosen = logits.amax(-1), logits.gather(-1, torch.tensor(drafted)[:, None])[:, 0]
    return bool((largest - chosen <= largest.abs() / 64).all())


@pytest.mark.parametrize("name", [KEYS, WINDOWS])
@pytest.mark.parametrize("patched", [False, True])
@torch.no_grad()
def test_what_was_drafted_in_vain_leaves_no_trace(name: str, patched: bool) -> None:
    """Beyond the window, too, of 16 tokens."""
    model = TINY_MODELS[name].build().float()
    if reason := _why_not(model):  # transformers 5.17 has no windows that go back
        pytest.skip(reason)
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
def test_a_text_that_went_on_without_it_is_read_at_once() -> None:
    model = TINY_MODELS[KEYS].build()
    assistant = Assistant(model, [5, 6, 7])
    assert not assistant.is_behind and len(assistant.draft(2)) == 2
    assistant.extend(range(10, 26))
    assert not assistant.is_behind
    assistant.extend([26])
    assert assistant.is_behind
    expected = Assistant(model, [5, 6, 7, *range(10, 27)]).draft(3)
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert assistant.draft(3) == expected and len(calls) == 3
    hook.remove()


@torch.no_grad()
def test_tokens_that_it_does_not_have_end_its_drafts() -> None:
    model = TINY_MODELS[KEYS].build()
    assistant = Assistant(model, [5, 6, 119])
    assert len(assistant.draft(3)) == 3 and assistant.draft(0) == ()
    assistant.extend([120])
    assert assistant.draft(3) == ()


def test_drafted_tokens_that_the_model_does_not_have_are_cut(original: PreTrainedModel, tokenizer: Any) -> None:
    class Foreign(Assistant):
        def draft(self, length: int) -> list[int]:
            return [original.config.vocab_size] * length

    model, inputs = _patched(original, dense="bf16"), tokenizer(PROMPTS[0], return_tensors="pt")
    speculation = Speculation(Always(3), functools.partial(Foreign, original))  # type: ignore[arg-type]
    assert torch.equal(_generate(model, inputs), _generate(model, inputs, custom_generate=speculation))


@torch.no_grad()
def test_a_forward_that_fails_is_made_good() -> None:
    model = TINY_MODELS[KEYS].build()
    assistant = Assistant(model, [5, 6, 7])
    expected = assistant.draft(3)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    assistant.extend([9])
    with pytest.raises(KeyboardInterrupt):
        assistant.draft(3)
    hook.remove()
    assert assistant.draft(3) == Assistant(model, [5, 6, 7, 9]).draft(3)
    assert Assistant(model, [5, 6, 7]).draft(3) == expected


def test_models_that_cannot_draft_are_refused() -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    encoder = T5ForConditionalGeneration(T5Config(**small))
    for model, why in (
        ("gpt2", "no model of transformers"),
        (encoder, "an encoder and a decoder"),
        (TINY_MODELS["Qwen3NextExperts"].build(), "linear attention"),
    ):
        with pytest.raises(ValueError, match=f"cannot draft: .*{why}.*smaller causal language model"):
            torch_mesh.speculate(assistant=model)
