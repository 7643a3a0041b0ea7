"""Several tokens verified in one forward: the tokens are those of plain decoding."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from drafted import (
    PROMPTS,
    QWEN,
    Always,
    always,
    assert_same_answers,
    generate,
    knowing,
    patched,
    place_behind,
    rows_are_exact,
)
from pairs import first_quick
from tiny_models import TINY_MODELS
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import torch_mesh
from torch_mesh.speculation.decoding import Speculation, _Pool, _Text
from torch_mesh.speculation.drafter import Drafter


@pytest.mark.parametrize(
    "resident",
    [
        0.25,
        pytest.param(0.1, marks=pytest.mark.slow),
        pytest.param(0.5, marks=pytest.mark.slow),
        pytest.param(1.0, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    "fields", first_quick({"weights": "bf16"}, {"weights": "int4", "dense": "bf16"}), ids=["bf16", "int4"]
)
def test_greedy_tokens_are_those_of_plain_decoding(
    original: PreTrainedModel, tokenizer: Any, fields: dict[str, str], resident: float
) -> None:
    model = patched(original, resident=resident, **fields)
    speculation = always(7)
    for text in PROMPTS.values():
        assert_same_answers(model, tokenizer(text, return_tensors="pt"), speculation)
    found = torch_mesh.stats(model).speculation
    assert found is not None and found.acceptance > 0.2 and found.forwards < 0.7 * found.tokens


def test_the_controller_changes_no_token(original: PreTrainedModel, tokenizer: Any) -> None:
    model, speculation = patched(original), torch_mesh.speculate()
    for text in ("chat", "rewriting"):
        assert_same_answers(model, tokenizer(PROMPTS[text], return_tensors="pt"), speculation, max_new_tokens=100)
    assert torch_mesh.stats(model).speculation.accepted > 0


def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(
    original: PreTrainedModel, tokenizer: Any
) -> None:
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    if not rows_are_exact(model, inputs["input_ids"]):
        pytest.skip("here a token's bits depend on how many come with it")
    for options in ({"temperature": 0.7}, {"top_k": 20, "temperature": 1.3}, {"top_p": 0.9}):
        plain = generate(model, inputs, do_sample=True, **options)
        assert torch.equal(plain, generate(model, inputs, do_sample=True, custom_generate=always(7), **options))
    assert torch_mesh.stats(model).speculation.accepted > 0


def _drawn(table: torch.Tensor, drafter: Any, tokens: int) -> tuple[int, ...]:
    """A text from a model whose next token depends only on the last one, by the logits ``table`` [tokens, tokens]."""
    config = GenerationConfig(do_sample=True, return_dict_in_generate=False)
    text = _Text(torch.tensor([[0]]), lambda ids, scores: scores, _Long(1 + tokens), config, None)
    while not text.finished:
        last = int(text.ids[0, -1])
        drafted = drafter(last)
        text.add_while([drafted], table[[last, *drafted]][None])
    return tuple(text.ids[0, 1:].tolist())


class _Long(StoppingCriteriaList):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("draws", [3000, pytest.param(12000, marks=pytest.mark.thorough)])
def test_sampled_tokens_have_the_models_distribution(draws: int) -> None:
    torch.manual_seed(11)
    table, tokens = torch.randn(4, 4) * 1.5, 3
    share = table.softmax(-1)
    drafts = {0: [1, 2, 0], 1: [1, 1], 2: [], 3: [0]}  # some drafts are sometimes right, others are never drawn
    found = Counter(_drawn(table, drafts.__getitem__, tokens) for _ in range(draws))
    squares = 0.0
    for text in itertools.product(range(4), repeat=tokens):
        expected = draws * float(torch.stack([share[a, b] for a, b in itertools.pairwise((0, *text))]).prod())
        squares += (found[text] - expected) ** 2 / expected
    assert squares < 63 + 6 * (2 * 63) ** 0.5, "chi-square of 63 degrees of freedom"


@pytest.mark.slow
@torch.no_grad()
def test_a_hundred_thousand_draws_are_distributed_as_in_plain_sampling() -> None:
    """``generate`` draws texts of four tokens from three allowed ones. Plain forwards give each text's probability."""
    model = torch_mesh.patch(TINY_MODELS[QWEN].build(), resident=0.5, attention="mesh", dense="bf16")
    prompt, allowed = torch.randint(3, 100, (1, 6)), [5, 30, 60]
    others = [token for token in range(model.config.vocab_size) if token not in allowed]

    def shares(text: tuple[int, ...]) -> list[float]:
        ids = torch.cat([prompt, torch.tensor([text], dtype=torch.long)], dim=1)
        return model(input_ids=ids).logits[0, -1, allowed].float().softmax(-1).tolist()

    expected = {(): 1.0}
    for _ in range(4):
        expected = {
            (*text, token): before * share
            for text, before in expected.items()
            for token, share in zip(allowed, shares(text), strict=True)
        }
    likely = max(expected, key=expected.__getitem__)  # drafted each time, and so sometimes right
    speculation = knowing(torch.cat([prompt, torch.tensor([[*likely, 0]])], dim=1), 2)
    texts, found = 4, Counter[tuple[int, ...]]()
    options = {"do_sample": True, "top_k": 0, "suppress_tokens": others, "max_new_tokens": 4, "eos_token_id": None}
    while sum(found.values()) * 4 < 100_000:
        drawn = model.generate(prompt.repeat(texts, 1), custom_generate=speculation, **options)[:, prompt.shape[1] :]
        found.update(map(tuple, drawn.tolist()))
    total = sum(found.values())
    assert set(found) <= set(expected)
    cells: dict[Any, list[float]] = {}  # counts drawn and expected; all rare texts share one cell
    for text, share in expected.items():
        cell = cells.setdefault(text if total * share > 5 else "rare", [0, 0.0])
        cell[0] += found[text]
        cell[1] += total * share
    squares = sum((drawn - share) ** 2 / share for drawn, share in cells.values())
    freedom = len(cells) - 1
    assert freedom > 40 and squares < freedom + 6 * (2 * freedom) ** 0.5, "chi-square"
    tally = torch_mesh.stats(model).speculation
    assert tally is not None and 0 < tally.accepted < tally.drafted


class _Ends(StoppingCriteria):
    """Ends a text at the third occurrence of a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([(input_ids[0] == self.token).sum() >= 3])


@pytest.mark.parametrize("length", [pytest.param(3, marks=pytest.mark.thorough), 15])
def test_logits_processors_and_stopping_criteria_see_every_token(
    original: PreTrainedModel, tokenizer: Any, length: int
) -> None:
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    common = int(generate(model, inputs)[0, inputs["input_ids"].shape[1] :].mode().values)
    for options in (
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 6},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 9},
        {"eos_token_id": common},
        {"eos_token_id": common, "min_new_tokens": 20},
        {"stopping_criteria": StoppingCriteriaList([_Ends(common)])},
        {"prefill_chunk_size": 16},
    ):
        assert_same_answers(model, inputs, always(length), **options)


@pytest.mark.parametrize("texts", first_quick(2, 4))
@pytest.mark.parametrize("fields", first_quick({"weights": "int4", "dense": "int4"}, {"dense": "bf16"}))
def test_several_texts_at_a_time_have_the_tokens_of_plain_decoding(
    original: PreTrainedModel, tokenizer: Any, fields: dict[str, str], texts: int
) -> None:
    """The texts are padded on the left, and some end before others. The reference is plain decoding of the same
    batch."""
    model = patched(original, resident=0.25, **fields)
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    prompts = [*PROMPTS.values()][-texts:]
    inputs = tokenizer([prompts[0], *(prompts[0] + each for each in prompts[1:])], return_tensors="pt", padding=True)
    assert (inputs["attention_mask"] == 0).any()
    length = inputs["input_ids"].shape[1]
    answers = generate(model, inputs)[:, length:]
    ends = int(answers[0, 25])  # the first text ends here at the latest
    seven = 16 // texts - 1
    for options in (
        {},
        {"eos_token_id": ends},
        {"stopping_criteria": StoppingCriteriaList([_EndsIn(ends)])},
        {"do_sample": True, "temperature": 0.7},
        {"repetition_penalty": 1.01, "return_dict_in_generate": True, "output_scores": True},
    ):
        plain = generate(model, inputs, **options)
        speculation = always(seven)
        found = generate(model, inputs, **options, custom_generate=speculation)
        if not isinstance(plain, torch.Tensor):
            assert len(found.scores) == len(plain.scores)
            plain, found = plain.sequences, found.sequences
        assert torch.equal(plain, found), options
        assert options or sum(speculation._controllers[texts].accepted) > 0
        assert not speculation._controller.accepted  # that controller is for single texts
    torch_mesh.reset_stats(model)
    speculation = torch_mesh.speculate()
    plain = generate(model, inputs, max_new_tokens=70)
    for _ in range(2):
        assert torch.equal(plain, generate(model, inputs, max_new_tokens=70, custom_generate=speculation))
    counts = torch_mesh.stats(model).speculation
    assert counts is not None and counts.tokens == 2 * texts * (plain.shape[1] - length - 1)


def test_pool_statistics_are_counted_across_a_reset(original: PreTrainedModel) -> None:
    model = patched(original, resident=0.3, prefetch="off")
    ids = torch.arange(5, 45).view(8, 5)
    model(ids[:1])
    pool = _Pool(model)
    model(ids[1:2])
    assert pool.since()[1] > 0 and pool.since() == (0.0, 0)
    torch_mesh.reset_stats(model)
    for row in ids:
        model(row[None])
    stalled, read = pool.since()
    counted = torch_mesh.stats(model)
    assert (stalled, read) == (pytest.approx(counted.stall_seconds), counted.bytes_read)


@pytest.mark.parametrize("ends", [2, pytest.param(63, marks=pytest.mark.thorough)])
def test_ended_texts_have_padding_in_the_cache_and_no_drafts(
    original: PreTrainedModel, tokenizer: Any, ends: int
) -> None:
    """Each text but the last ends before others. Drafts after its end, or in place of its end, are not among its
    tokens."""
    model = patched(original, resident=0.25, dense="bf16")
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    inputs = tokenizer([*PROMPTS.values()], return_tensors="pt", padding=True)
    length = inputs["input_ids"].shape[1]
    free = generate(model, inputs)
    kept = {"return_dict_in_generate": True, "output_logits": True}
    differed = False
    for end in list(dict.fromkeys(free[:3, length + 9 : length + 30].T.flatten().tolist()))[:ends]:
        plain = generate(model, inputs, eos_token_id=end, **kept)
        for drafts in (free, free ^ (free == end)):  # drafts with the end token, and drafts without it
            answers = iter(drafts)
            speculation = Speculation(Always(3), lambda ids, answers=answers: Right(next(answers), ids))  # type: ignore
            found = generate(model, inputs, eos_token_id=end, custom_generate=speculation, **kept)
            assert torch.equal(plain.sequences, found.sequences)
            differed |= not torch.equal(plain.sequences, free[:, : plain.sequences.shape[1]])
            for one, other in zip(plain.past_key_values.layers, found.past_key_values.layers, strict=True):
                assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
            assert torch.equal(torch.stack(plain.logits), torch.stack(found.logits))
    assert differed, "no text ended before another"


class Right(Drafter):
    """A drafter that knows the text as it would be if it never ended."""

    def __init__(self, answer: torch.Tensor, tokens: list[int]) -> None:
        self.answer = answer.tolist()
        self.place = place_behind(self.answer, tokens)

    def draft(self, length: int) -> list[int]:
        return self.answer[self.place : self.place + length]

    def extend(self, tokens: list[int]) -> None:
        self.place += len(tokens)


class _EndsIn(StoppingCriteria):
    """Ends each text at a token that transformers does not know as an end. So the text goes on while others do."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_speculation_measures_time_with_the_given_clock(original: PreTrainedModel, tokenizer: Any) -> None:
    model = patched(original)
    ticks = itertools.count(0.0, 0.5)
    speculation = Speculation(Always(3), clock=lambda: next(ticks))
    generate(model, tokenizer(PROMPTS["rewriting"], return_tensors="pt"), custom_generate=speculation)
    lengths = torch_mesh.stats(model).speculation.lengths
    assert all(each.timed == each.forwards - 1 and each.seconds == 2 * 0.5 * each.timed for each in lengths.values())
