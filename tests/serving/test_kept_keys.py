"""Keys kept between calls of generate: the tokens are the same as when everything is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StoppingCriteriaList,
)

from torch_mesh.hf import cache_state
from torch_mesh.hf.kv_cache import install_caches
from torch_mesh.serving.errors import RequestTooLongError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.system.memory import anonymous_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 97
WINDOW = 16
PLENTY = 2**30
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def _full() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2))


def _with_windows() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2))


Make = Callable[[], PreTrainedModel]
MODELS = pytest.mark.parametrize("make", [_full, _with_windows])


def _model(make: Make) -> PreTrainedModel:
    model = make().eval()
    for parameter in model.parameters():  # otherwise the model repeats one token for ever
        parameter.data.normal_(0, 0.3)
    return model


def _ask(generate: Callable[..., Tensor], tokens: Tensor, new: int, **more: Any) -> Tensor:
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    mask = torch.ones(1, len(tokens), dtype=torch.long)
    return generate(input_ids=tokens[None], attention_mask=mask, generation_config=config, **more)[0]


def _some(rng: np.random.Generator, least: int = 1, most: int = 30) -> Tensor:
    return torch.from_numpy(rng.integers(1, VOCABULARY, int(rng.integers(least, most))))


@MODELS
def test_a_conversations_answers_are_the_same_without_kept_keys(make: Make, rng: np.random.Generator) -> None:
    model = _model(make)
    kept = KeptKeys(model, PLENTY)
    prompt, length = _some(rng, 5), 0
    for _ in range(4):
        before = kept.counts.reused_tokens
        new = int(rng.integers(1, 20))
        answer = _ask(kept.generate, prompt, new)
        assert torch.equal(answer, _ask(model.generate, prompt, new))
        # All but the new tokens and the last generated one, whose keys were never computed.
        assert kept.counts.reused_tokens - before == length
        length = len(answer) - 1
        prompt = torch.cat([answer, _some(rng)])
    assert kept.counts.kept_tokens == length and len(kept.conversations) == 1


@MODELS
def test_answers_are_the_same_for_any_next_prompt(make: Make, rng: np.random.Generator) -> None:
    model = _model(make)
    kept = KeptKeys(model, PLENTY)
    answers = [_some(rng, 20, 60)]
    for _ in range(6):
        earlier = answers[int(rng.integers(len(answers)))]
        cut = int(rng.integers(0, len(earlier) + 1))  # an edited, repeated, shortened or different prompt
        tokens = torch.cat([earlier[:cut], _some(rng)])
        new = int(rng.integers(1, 12))
        answer = _ask(kept.generate, tokens, new)
        assert torch.equal(answer, _ask(model.generate, tokens, new))
        answers.append(answer)
    counts = kept.counts
    assert counts.reused_tokens < counts.prompt_tokens
    assert counts.kept_bytes == sum(each.nbytes for each in kept.conversations) > 0


def test_two_conversations_with_a_common_prefix_keep_their_own_keys(rng: np.random.Generator) -> None:
    model = _model(_full)
    kept = KeptKeys(model, PLENTY)
    beginning = _some(rng, 5, 6)
    both = [torch.cat([beginning, torch.tensor([which]), _some(rng, 40, 50)]) for which in (1, 2)]
    for _ in range(3):
        answers = [_ask(kept.generate, tokens, 5) for tokens in both]
        before = kept.counts.reused_tokens
        both = [torch.cat([answer, _some(rng)]) for answer in answers]
        lengths = [len(answer) - 1 for answer in answers]
    [_ask(kept.generate, tokens, 5) for tokens in both]
    assert kept.counts.reused_tokens - before == sum(lengths)
    assert len(kept.conversations) == 2


@MODELS
def test_agents_with_a_long_common_preamble_keep_their_own_keys(make: Make, rng: np.random.Generator) -> None:
    model = _model(make)
    kept = KeptKeys(model, PLENTY)
    preamble = _some(rng, 80, 90)
    both = [torch.cat([preamble, torch.tensor([which]), _some(rng, 30, 40)]) for which in (1, 2)]
    known = [0, len(preamble)]
    for _ in range(3):
        for which, tokens in enumerate(both):
            before = kept.counts.reused_tokens
            answer = _ask(kept.generate, tokens, 5)
            assert torch.equal(answer, _ask(model.generate, tokens, 5))
            assert kept.counts.reused_tokens - before == known[which]
            known[which] = len(tokens) - 3
            # The template's beginning of the answer is gone.
            both[which] = torch.cat([tokens[:-3], tokens[-3:-2] % (VOCABULARY - 1) + 1, _some(rng, 5)])
    assert len(kept.conversations) == 2


def test_a_chat_whose_template_drops_reasoning_evicts_no_other(rng: np.random.Generator) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    other = _ask(kept.generate, torch.cat([torch.tensor([1]), _some(rng, 60, 61)]), 5)
    kept.limit = 4 * kept.counts.kept_bytes
    chat = torch.cat([torch.tensor([2]), _some(rng, 40, 41)])
    for _ in range(6):
        answer = _ask(kept.generate, chat, 5)
        _ask(kept.generate, torch.cat([answer, _some(rng, 20, 21)]), 5)  # after reasoning and a call
        chat = torch.cat([chat, answer[len(chat) :][:1] % (VOCABULARY - 1) + 1, _some(rng, 5, 6)])
    assert len(kept.conversations) > 2
    assert any(torch.equal(each.tokens, other[:-1]) for each in kept.conversations)


def test_agents_evict_a_conversation_that_is_over(rng: np.random.Generator) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    over = _ask(kept.generate, torch.cat([torch.tensor([1]), _some(rng, 110, 111)]), 5)
    kept.limit = int(2.4 * kept.counts.kept_bytes)
    preamble = torch.cat([torch.tensor([2]), _some(rng, 80, 81)])
    both = [torch.cat([preamble, torch.tensor([which]), _some(rng, 20, 21)]) for which in (1, 2)]
    for _ in range(3):
        before = kept.counts.reused_tokens
        known = sum(map(len, both)) - 2 * 5 - 2  # all but the new tokens, and the last one of each answer
        answers = [_ask(kept.generate, tokens, 5) for tokens in both]
        both = [torch.cat([answer, _some(rng, 5, 6)]) for answer in answers]
    assert kept.counts.reused_tokens - before == known
    assert len(kept.conversations) == 2
    assert not any(torch.equal(each.tokens[: len(over) - 1], over[:-1]) for each in kept.conversations)


def test_a_conversation_that_fits_once_is_rewound(rng: np.random.Generator) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    tokens = _some(rng, 100, 110)
    _ask(kept.generate, tokens, 5)
    kept.limit = int(1.5 * kept.counts.kept_bytes)
    for length, left in ((60, 1), (20, 2)):
        _ask(kept.generate, torch.cat([tokens[:length], tokens[length : length + 1] % (VOCABULARY - 1) + 1]), 5)
        assert len(kept.conversations) == left
        kept.conversations = []
        _ask(kept.generate, tokens, 5)


def test_memory_of_an_evicted_source_is_the_conversations_own(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    tokens = _some(rng, 60, 70)
    _ask(kept.generate, tokens, 5)
    taken, held = kept._take(tokens[:30]), []

    def check(*_: Any, **given: int) -> None:
        held.append(given["held"])
        if kept.conversations:
            raise RequestTooLongError("no room", 0)

    monkeypatch.setattr(kept, "admission", SimpleNamespace(check=check))
    kept._evict_for(tokens[:30], 5, taken)
    assert held == [0, taken.nbytes]


@pytest.mark.parametrize("limit", [0, 1, 30_000, 120_000])
def test_the_limit_holds_and_the_last_used_conversations_stay(limit: int, rng: np.random.Generator) -> None:
    model = _model(_full)
    kept = KeptKeys(model, limit)
    for _ in range(4):
        tokens = _some(rng, 10, 40)
        assert torch.equal(_ask(kept.generate, tokens, 3), _ask(model.generate, tokens, 3))
        assert kept.counts.kept_bytes <= limit
    fits = limit == 120_000
    assert bool(kept.conversations) == fits
    if fits:
        assert torch.equal(kept.conversations[-1].tokens[: len(tokens)], tokens)


def test_a_conversation_larger_than_the_limit_evicts_no_others(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptKeys(_model(_full), 60_000)
    small, large = (torch.from_numpy(rng.integers(1, VOCABULARY, length)) for length in (10, 200))
    _ask(kept.generate, small, 3)
    assert not caplog.records
    for _ in range(2):
        _ask(kept.generate, large, 3)
    (left,) = kept.conversations
    assert torch.equal(left.tokens[: len(small)], small)
    (warning,) = caplog.messages  # a single one
    assert "202 tokens" in warning and "60,000" in warning and "--keep-keys 1MiB" in warning


def test_a_call_measures_no_other_conversations(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    kept, layers, measured = KeptKeys(_model(_full), PLENTY), [], []
    tensors_of = cache_state.tensors_of
    monkeypatch.setattr(cache_state, "tensors_of", lambda layer: layers.append(layer) or tensors_of(layer))
    for number in range(1, 7):
        layers.clear()
        _ask(kept.generate, torch.cat([torch.tensor([number]), torch.from_numpy(rng.integers(1, VOCABULARY, 20))]), 3)
        measured.append(len(layers))
        if number == 4:
            kept.limit = kept.counts.kept_bytes
    assert len(kept.conversations) == 4
    assert len(set(measured)) == 1


def test_without_kept_keys_there_is_no_warning(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptKeys(_model(_full), 0)
    _ask(kept.generate, _some(rng), 3)
    assert not kept.conversations and not caplog.records


@MODELS
def test_memory_of_dropped_conversations_is_freed_at_once(
    make: Make, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}.items():
        monkeypatch.setitem(_SIZES, name, value)
    model = _model(make)
    install_caches(model)
    kept = KeptKeys(model, PLENTY)
    for _ in range(16):  # of different lengths, so that no freed gap fits the next one
        _ask(kept.generate, _some(rng, 20, 60), 2)
    before, taken = kept.counts.kept_bytes, anonymous_bytes()
    for which in range(15, -1, -2):  # every other one, as when some clients come back
        del kept.conversations[which]
    _ask(kept.generate, _some(rng, 20, 21), 2)
    gone = before - kept.counts.kept_bytes
    assert gone > 3 << 20
    assert taken - anonymous_bytes() > 0.7 * gone


class _GoneError(Exception):
    pass


@MODELS
@pytest.mark.parametrize("when", ["between", "within"])
def test_an_aborted_generation_can_continue_or_is_forgotten(make: Make, when: str, rng: np.random.Generator) -> None:
    model = _model(make)
    kept = KeptKeys(model, PLENTY)
    tokens = _some(rng, 5)
    steps = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            steps.append(value)
            if when == "between" and len(steps) == 6:  # the first call has the prompt
                raise _GoneError

        def end(self) -> None:
            pass

    def leave(*_: Any) -> None:
        if when == "within" and len(steps) == 6:
            raise _GoneError

    hook = model.model.layers[1].register_forward_pre_hook(leave)
    with pytest.raises(_GoneError):
        _ask(kept.generate, tokens, 20, streamer=Streamer())
    hook.remove()
    assert len(kept.conversations) == (1 if when == "between" else 0)
    expected = _ask(model.generate, tokens, 12)
    assert torch.equal(_ask(kept.generate, tokens, 12), expected)
    assert kept.counts.reused_tokens == (len(tokens) - 1 if when == "between" else 0)


@MODELS
def test_a_generation_aborted_before_its_first_token_changes_nothing_kept(make: Make, rng: np.random.Generator) -> None:
    model = _model(make)
    kept = KeptKeys(model, PLENTY)

    class Gone:
        def put(self, value: Tensor) -> None:
            raise _GoneError

    with pytest.raises(_GoneError):
        _ask(kept.generate, _some(rng, 5), 5, streamer=Gone())
    assert not kept.conversations
    answer = _ask(kept.generate, _some(rng, 5), 5)
    tokens = torch.cat([answer, _some(rng, 20)])
    with pytest.raises(_GoneError):
        _ask(kept.generate, tokens, 5, streamer=Gone())
    assert kept.counts.kept_tokens == len(answer) - 1
    before = kept.counts.reused_tokens
    assert torch.equal(_ask(kept.generate, tokens, 5), _ask(model.generate, tokens, 5))
    assert kept.counts.reused_tokens - before == len(answer) - 1
    assert len(kept.conversations) == 1


def test_a_conversation_that_diverges_early_copies_no_keys(rng: np.random.Generator) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    tokens = _some(rng, 40, 50)
    _ask(kept.generate, tokens, 5)
    (first,) = kept.conversations
    held: list[Any] = first.cache.layers
    length = len(first.tokens)
    taken = kept._take(torch.cat([tokens[:10], tokens[10:11] % (VOCABULARY - 1) + 1, tokens[11:]]))
    mine: list[Any] = taken.cache.layers
    assert 10 <= len(taken.tokens) < length == len(first.tokens)
    for layer, theirs in zip(mine, held, strict=True):
        assert layer.keys.data_ptr() == theirs.keys.data_ptr() and layer.get_seq_length() == len(taken.tokens)
        assert theirs.get_seq_length() == length


def test_unsupported_calls_are_passed_to_the_model(rng: np.random.Generator) -> None:
    model = _model(_full)
    kept = KeptKeys(model, PLENTY)
    tokens = _some(rng, 5)
    unsupported: tuple[dict[str, Any], ...] = (
        {"use_cache": False},
        {"num_beams": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
    )
    for changed in unsupported:
        config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, **changed)
        answer = kept.generate(input_ids=tokens[None], generation_config=config)
        assert torch.equal(answer, model.generate(input_ids=tokens[None], generation_config=config))
    padded = torch.cat([torch.zeros(3, dtype=torch.long), tokens])
    mask = (torch.arange(len(padded)) >= 3).long()[None]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    arguments = {"input_ids": padded[None], "attention_mask": mask, "generation_config": config}
    assert torch.equal(kept.generate(**arguments), model.generate(**arguments))
    _ask(kept.generate, tokens, 4, prefix_allowed_tokens_fn=lambda _, ids: list(range(90)))
    assert not kept.conversations


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "assistant_early_exit"])
def test_assisted_generation_uses_no_kept_keys(option: str, rng: np.random.Generator) -> None:
    model = _model(_full)
    kept = KeptKeys(model, PLENTY)
    tokens = _ask(kept.generate, _some(rng, 20), 4)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, **{option: 1})
    answer = kept.generate(input_ids=tokens[None], generation_config=config)
    assert torch.equal(answer, model.generate(input_ids=tokens[None], generation_config=config))
    assert kept.counts.reused_tokens == 0 and len(kept.conversations) == 1


def test_other_stopping_criteria_still_apply(rng: np.random.Generator) -> None:
    kept = KeptKeys(_model(_full), PLENTY)
    tokens = _some(rng, 5)
    at_once = StoppingCriteriaList([lambda ids, _: torch.ones(1, dtype=torch.bool)])
    assert len(_ask(kept.generate, tokens, 9, stopping_criteria=at_once)) == len(tokens) + 1
