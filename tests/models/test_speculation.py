"""Several tokens verified in one forward: the tokens are those of plain decoding, whatever else is asked of
``generate``."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import itertools
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from near_ties import assert_same_tokens
from pairs import each_once_quick, first_quick
from tiny_models import ALL_EXPERTS, TINY_MODELS
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation.streamers import BaseStreamer

import torch_mesh
from torch_mesh import MeshConfig, UnsupportedModelError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.speculation import decoding, linear_attention
from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.decoding import Speculation, _Pool, _Text
from torch_mesh.speculation.drafter import Drafter
from torch_mesh.speculation.models import SpeculatingModel

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
LINEAR = [
    NEXT,
    "Qwen3_5MoeExperts",
    "NemotronHExperts",
    "JambaExperts",
    "GraniteMoeHybridExperts",
    "KimiLinearExperts",
    "Lfm2MoeExperts",
    "BailingHybridExperts",
]


class Always(Controller):
    """Drafts, whatever it costs."""

    def __init__(self, length: int) -> None:
        super().__init__((length,))
        self.accepted: list[int] = []

    def choose(self, most: int, tier: int = 0) -> int:
        return self.fitting(most)

    def observe(self, length: int, accepted: int, seconds: float | None, tier: int = 0) -> None:
        self.accepted.append(accepted)


def always(length: int) -> Speculation:
    return Speculation(Always(length))


def _place(answer: list[int], tokens: list[int]) -> int:
    """Where ``answer``, with padding on its left, goes on behind ``tokens``, without."""
    return next(at for at, token in enumerate(answer) if token == tokens[0]) + len(tokens)


class Oracle(Drafter):
    """In the place of a drafter: knows the text to come, and is wrong in every fourth token or so."""

    def __init__(self, answer: torch.Tensor, tokens: list[int]) -> None:
        self.answer = answer[0].tolist()
        self.place = _place(self.answer, tokens)

    def draft(self, length: int) -> list[int]:
        drafted = self.answer[self.place : self.place + length]
        right = torch.rand(len(drafted)) < 0.75
        return [token if known else token ^ 1 for token, known in zip(drafted, right.tolist(), strict=True)]

    def extend(self, tokens: list[int]) -> None:
        self.place += len(tokens)


def knowing(answer: torch.Tensor, length: int) -> Speculation:
    return Speculation(Always(length), functools.partial(Oracle, answer))


def _patched(original: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    return torch_mesh.patch(copy.deepcopy(original), **{"resident": 0.5, "attention": "mesh"} | fields)


def _generate(model: PreTrainedModel, inputs: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, **settings)


def _rows_are_exact(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether a token has the same bits in a forward of one and of sixteen: not so with every kernel and every linear
    layer of torch's."""
    ids = ids.repeat(1, 17)[:, :17]
    with torch.no_grad():
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        alone = [model(input_ids=ids[:, [i]], past_key_values=cache).logits[0] for i in range(17)]
        together = [model(input_ids=ids[:, :1], past_key_values=other).logits[0]]
        mixers = linear_attention.LinearAttention(model, other)
        together.append(model(input_ids=ids[:, 1:], past_key_values=other).logits[0])
        mixers.finish()
        return torch.equal(torch.cat(alone), torch.cat(together))


def _plain(model: PreTrainedModel, inputs: Any, **options: Any) -> Any:
    return _generate(model, inputs, return_dict_in_generate=True, output_logits=True, **options)


def _check(model: PreTrainedModel, inputs: Any, plain: Any, tokens: torch.Tensor) -> None:
    """``tokens`` are those of ``plain``; where rounding may differ, up to two logits that were nearly equal."""
    if not torch.equal(tokens, plain.sequences):
        assert not _rows_are_exact(model, inputs["input_ids"])
        assert_same_tokens(tokens, plain)


def _agree(model: PreTrainedModel, inputs: Any, how: Any, **options: Any) -> None:
    """Plainly and by ``how`` tokens are the same."""
    how = how if isinstance(how, dict) else {"custom_generate": how}
    _check(model, inputs, _plain(model, inputs, **options), _generate(model, inputs, **options, **how))


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
    model = _patched(original, resident=resident, **fields)
    speculation = always(7)
    for text in PROMPTS.values():
        _agree(model, tokenizer(text, return_tensors="pt"), speculation)
    found = torch_mesh.stats(model).speculation
    assert found is not None and found.acceptance > 0.2 and found.forwards < 0.7 * found.tokens


def test_the_controller_changes_no_token(original: PreTrainedModel, tokenizer: Any) -> None:
    model, speculation = _patched(original), torch_mesh.speculate()
    for text in ("chat", "rewriting"):
        _agree(model, tokenizer(PROMPTS[text], return_tensors="pt"), speculation, max_new_tokens=100)
    assert torch_mesh.stats(model).speculation.accepted > 0


def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(
    original: PreTrainedModel, tokenizer: Any
) -> None:
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    if not _rows_are_exact(model, inputs["input_ids"]):
        pytest.skip("here a token's bits depend on how many come with it")
    for options in ({"temperature": 0.7}, {"top_k": 20, "temperature": 1.3}, {"top_p": 0.9}):
        plain = _generate(model, inputs, do_sample=True, **options)
        assert torch.equal(plain, _generate(model, inputs, do_sample=True, custom_generate=always(7), **options))
    assert torch_mesh.stats(model).speculation.accepted > 0


def _drawn(table: torch.Tensor, drafter: Any, tokens: int) -> tuple[int, ...]:
    """A text of a model whose next token depends on the last one alone, ``table`` [tokens, tokens] of logits."""
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
def test_the_distribution_of_sampled_tokens_is_the_models(draws: int) -> None:
    torch.manual_seed(11)
    table, tokens = torch.randn(4, 4) * 1.5, 3
    share = table.softmax(-1)
    drafts = {0: [1, 2, 0], 1: [1, 1], 2: [], 3: [0]}  # right now and then, and never drawn
    found = Counter(_drawn(table, drafts.__getitem__, tokens) for _ in range(draws))
    squares = 0.0
    for text in itertools.product(range(4), repeat=tokens):
        expected = draws * float(torch.stack([share[a, b] for a, b in itertools.pairwise((0, *text))]).prod())
        squares += (found[text] - expected) ** 2 / expected
    assert squares < 63 + 6 * (2 * 63) ** 0.5, "chi-square of 63 degrees of freedom"


@pytest.mark.slow
@torch.no_grad()
def test_a_hundred_thousand_draws_are_distributed_as_in_plain_sampling() -> None:
    """Of a model, by ``generate``: texts of four tokens out of three, beside what plain forwards say of each."""
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
    likely = max(expected, key=expected.__getitem__)  # drafted each time, and so right now and then
    speculation = knowing(torch.cat([prompt, torch.tensor([[*likely, 0]])], dim=1), 2)
    texts, found = 4, Counter[tuple[int, ...]]()
    options = {"do_sample": True, "top_k": 0, "suppress_tokens": others, "max_new_tokens": 4, "eos_token_id": None}
    while sum(found.values()) * 4 < 100_000:
        drawn = model.generate(prompt.repeat(texts, 1), custom_generate=speculation, **options)[:, prompt.shape[1] :]
        found.update(map(tuple, drawn.tolist()))
    total = sum(found.values())
    assert set(found) <= set(expected)
    cells: dict[Any, list[float]] = {}  # drawn, and expected; texts that are rare in this model have one together
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
    """At the third time of a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([(input_ids[0] == self.token).sum() >= 3])


@pytest.mark.parametrize("length", [pytest.param(3, marks=pytest.mark.thorough), 15])
def test_processors_and_ends_are_asked_for_every_token(original: PreTrainedModel, tokenizer: Any, length: int) -> None:
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    common = int(_generate(model, inputs)[0, inputs["input_ids"].shape[1] :].mode().values)
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
        _agree(model, inputs, always(length), **options)


@pytest.mark.parametrize("texts", first_quick(2, 4))
@pytest.mark.parametrize("fields", first_quick({"weights": "int4", "dense": "int4"}, {"dense": "bf16"}))
def test_several_texts_at_a_time_have_the_tokens_of_plain_decoding(
    original: PreTrainedModel, tokenizer: Any, fields: dict[str, str], texts: int
) -> None:
    """Padded on the left to one length, some ending before others: with the same batch, plainly."""
    model = _patched(original, resident=0.25, **fields)
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    prompts = [*PROMPTS.values()][-texts:]
    inputs = tokenizer([prompts[0], *(prompts[0] + each for each in prompts[1:])], return_tensors="pt", padding=True)
    assert (inputs["attention_mask"] == 0).any()
    length = inputs["input_ids"].shape[1]
    answers = _generate(model, inputs)[:, length:]
    ends = int(answers[0, 25])  # in the first text there at the latest
    seven = 16 // texts - 1
    for options in (
        {},
        {"eos_token_id": ends},
        {"stopping_criteria": StoppingCriteriaList([_EndsIn(ends)])},
        {"do_sample": True, "temperature": 0.7},
        {"repetition_penalty": 1.01, "return_dict_in_generate": True, "output_scores": True},
    ):
        plain = _generate(model, inputs, **options)
        speculation = always(seven)
        found = _generate(model, inputs, **options, custom_generate=speculation)
        if not isinstance(plain, torch.Tensor):
            assert len(found.scores) == len(plain.scores)
            plain, found = plain.sequences, found.sequences
        assert torch.equal(plain, found), options
        assert options or sum(speculation._controllers[texts].accepted) > 0
        assert not speculation._controller.accepted  # which is for one text
    torch_mesh.reset_stats(model)
    speculation = torch_mesh.speculate()
    plain = _generate(model, inputs, max_new_tokens=70)
    for _ in range(2):
        assert torch.equal(plain, _generate(model, inputs, max_new_tokens=70, custom_generate=speculation))


def test_what_pools_did_is_counted_from_a_reset(original: PreTrainedModel) -> None:
    model = _patched(original, resident=0.3, prefetch="off")
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
def test_texts_that_end_have_padding_in_the_cache_and_not_their_drafts(
    original: PreTrainedModel, tokenizer: Any, ends: int
) -> None:
    """Each text but the last ends where others go on: what was drafted behind its end, or instead of it, is none of its
    tokens."""
    model = _patched(original, resident=0.25, dense="bf16")
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    inputs = tokenizer([*PROMPTS.values()], return_tensors="pt", padding=True)
    length = inputs["input_ids"].shape[1]
    free = _generate(model, inputs)
    kept = {"return_dict_in_generate": True, "output_logits": True}
    differed = False
    for end in list(dict.fromkeys(free[:3, length + 9 : length + 30].T.flatten().tolist()))[:ends]:
        plain = _generate(model, inputs, eos_token_id=end, **kept)
        for drafts in (free, free ^ (free == end)):  # that know the end, and that do not
            answers = iter(drafts)
            speculation = Speculation(Always(3), lambda ids, answers=answers: Right(next(answers), ids))  # type: ignore
            found = _generate(model, inputs, eos_token_id=end, custom_generate=speculation, **kept)
            assert torch.equal(plain.sequences, found.sequences)
            differed |= not torch.equal(plain.sequences, free[:, : plain.sequences.shape[1]])
            for one, other in zip(plain.past_key_values.layers, found.past_key_values.layers, strict=True):
                assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
            assert torch.equal(torch.stack(plain.logits), torch.stack(found.logits))
    assert differed, "no text ended before another"


class Right(Drafter):
    """In the place of a drafter: what the text would be if it never ended."""

    def __init__(self, answer: torch.Tensor, tokens: list[int]) -> None:
        self.answer = answer.tolist()
        self.place = _place(self.answer, tokens)

    def draft(self, length: int) -> list[int]:
        return self.answer[self.place : self.place + length]

    def extend(self, tokens: list[int]) -> None:
        self.place += len(tokens)


class _EndsIn(StoppingCriteria):
    """Each text at a token, which transformers does not know to end it: it goes on while others do."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stop_strings_work_where_generate_speculates_by_itself(original: PreTrainedModel, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    options = {"stop_strings": ["append(value)"], "tokenizer": tokenizer}
    plain = _generate(_patched(original), inputs, **options)
    model = _patched(original, speculation="lookup")
    model._mesh_speculation = always(7)
    assert torch.equal(_generate(model, inputs, **options), plain)
    assert torch_mesh.stats(model).speculation.accepted > 0


class _Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_streamer_gets_one_token_after_the_other(original: PreTrainedModel, tokenizer: Any, by_itself: bool) -> None:
    """transformers hands none to a custom_generate: should it begin to, ``_call_of_generate`` can go."""
    model = _patched(original, speculation="lookup" if by_itself else "off")
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    streamed = _Streamed()
    options = {} if by_itself else {"custom_generate": always(7)}
    tokens = _generate(model, inputs, streamer=streamed, **options)[0].tolist()
    assert [token for part in streamed.parts for token in part] == tokens and streamed.ended
    assert all(len(part) == 1 for part in streamed.parts[1:])
    reader = TextIteratorStreamer(tokenizer, timeout=5)
    _generate(model, inputs, streamer=reader, **options)
    assert "".join(reader) == tokenizer.decode(tokens)


class _Object:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)


def _on_another_thread(inner: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(inner, *args, **kwargs).result()

    return run


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: lambda *args, **kwargs: inner(*args, **kwargs),
        lambda inner: lambda *args, **kwargs: (_Object(_Object(inner)))(*args, **kwargs),
        lambda inner: functools.partial(inner),
        lambda inner: functools.partial(_Object(_Object(inner))),
        _Object,
        _on_another_thread,
        lambda inner: _Object(_on_another_thread(_Object(inner))),
    ],
    ids=["lambda", "nested", "partial", "partial object", "object", "thread", "thread in objects"],
)
def test_a_streamer_is_found_through_functions_around(original: PreTrainedModel, tokenizer: Any, around: Any) -> None:
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    reader = TextIteratorStreamer(tokenizer, timeout=20)
    tokens = _generate(model, inputs, streamer=reader, max_new_tokens=12, custom_generate=around(always(7)))[0]
    assert "".join(reader) == tokenizer.decode(tokens)


def test_each_of_two_calls_at_a_time_has_its_own_streamer(original: PreTrainedModel, tokenizer: Any) -> None:
    model = _patched(original)

    def call(words: str) -> bool:
        inputs, reader = tokenizer(words, return_tensors="pt"), TextIteratorStreamer(tokenizer, timeout=20)
        how = {"streamer": reader, "max_new_tokens": 12, "custom_generate": _on_another_thread(always(3))}
        tokens = model.generate(**inputs, do_sample=False, pad_token_id=0, **how)[0]
        return "".join(reader) == tokenizer.decode(tokens)

    with ThreadPoolExecutor(2) as executor:
        assert all(executor.map(call, [PROMPTS["rewriting"], "In the beginning"]))


@pytest.mark.parametrize("given", [True, None])
def test_a_call_whose_forwards_are_synced_is_refused(
    original: PreTrainedModel, tokenizer: Any, given: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers hands none of that to a custom_generate either."""
    if given is None:
        monkeypatch.setattr(decoding, "is_deepspeed_zero3_enabled", lambda: True)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="synced_gpus wants.*Leave custom_generate out"):
        _generate(
            original, tokenizer("Once", return_tensors="pt"), synced_gpus=given, custom_generate=torch_mesh.speculate()
        )


class _Gone(_Streamed):
    """A client that goes while a draft is verified."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.parts) == 20:
            raise ConnectionResetError


@pytest.mark.parametrize("static", [False, True])
def test_a_text_that_ends_early_leaves_a_cache_of_its_tokens(
    original: PreTrainedModel, tokenizer: Any, static: bool
) -> None:
    model, streamed = _patched(original), _Gone()
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    kind = functools.partial(StaticCache, max_cache_len=400) if static else DynamicCache
    plain, cache = _plain(model, inputs, past_key_values=kind(config=model.config)), kind(config=model.config)
    how = {"custom_generate": knowing(plain.sequences, 7), "streamer": streamed, "past_key_values": cache}
    with pytest.raises(ConnectionResetError):
        _generate(model, inputs, **how)
    tokens = torch.tensor([[token for part in streamed.parts for token in part]])
    assert int(cache.get_seq_length()) == tokens.shape[1] - 1 == inputs["input_ids"].shape[1] + 18
    rest = _generate(model, {"input_ids": tokens}, past_key_values=cache, max_new_tokens=60 - 19)
    _check(model, inputs, plain, rest)


def test_what_generate_returns_is_what_it_returns_plainly(original: PreTrainedModel, tokenizer: Any) -> None:
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.01,
    }
    plain, drafted = (_generate(model, inputs, **options, **more) for more in ({}, {"custom_generate": always(7)}))
    assert type(drafted) is type(plain) and drafted.keys() == plain.keys()
    assert len(drafted.scores) == len(drafted.logits) == 60
    assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    if _rows_are_exact(model, inputs["input_ids"]):
        for one, other in zip((*plain.scores, *plain.logits), (*drafted.scores, *drafted.logits), strict=True):
            assert torch.equal(one, other)
    # A conversation goes on with the cache.
    more = {"input_ids": torch.cat([plain.sequences, inputs["input_ids"]], dim=1)}
    answers = [
        _generate(model, more, past_key_values=each.past_key_values, custom_generate=always(3))
        for each in (plain, drafted)
    ]
    assert torch.equal(*answers)


def _spread(name: str) -> PreTrainedModel:
    """A tiny random model whose tokens differ; in fp32, where few logits are nearly equal."""
    tiny = TINY_MODELS[name]
    model = dataclasses.replace(tiny, fields={**tiny.fields, **ALL_EXPERTS}).build().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    return model


def _inputs(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 100, (1, length))}


@pytest.mark.parametrize(("length", "drafted"), each_once_quick([40, 13, 5], [15, 3]))
def test_windows_go_back(length: int, drafted: int) -> None:
    """The window of the tiny gpt-oss is of 16 tokens."""
    model = torch_mesh.patch(_spread(OSS), resident=0.5)
    inputs = _inputs(length)
    plain = _plain(model, inputs, eos_token_id=None)
    cache = DynamicCache(config=model.config)
    speculation = knowing(plain.sequences, drafted)
    found = _generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    _check(model, inputs, plain, found)
    assert sum(speculation._controller.accepted) > 0
    windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    assert windows and all(not layer.record_past and layer.keys.shape[-2] == 15 for layer in windows)


def _same_states(found: Any, plain: Any) -> None:
    """Within rounding: where it tips a value that experts round to bf16, a state moves by 0.001 of its norm.

    A token too many or too few moves one by all of its norm.
    """
    for one, other in zip(_states(found), _states(plain), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def _states(cache: Any) -> list[torch.Tensor]:
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    both = (states for layer in layers for states in (layer.conv_states, layer.recurrent_states))
    return [state for states in both for state in states.values() if state is not None]


# Of each kind of mixer one draft that is verified in part.
_MIXERS = (NEXT, "NemotronHExperts", "KimiLinearExperts", "Lfm2MoeExperts", "BailingHybridExperts")
_LENGTHS = [
    pytest.param(name, *lengths, marks=[] if name in _MIXERS and lengths == (20, 7) else [pytest.mark.thorough])
    for name in LINEAR
    for lengths in ((2, 3), (20, 7), (20, 15))
]


@pytest.mark.parametrize(("name", "length", "drafted"), _LENGTHS)
def test_linear_attention_goes_back(name: str, length: int, drafted: int) -> None:
    """Its state is in the end what single tokens leave: within rounding, for in fp32 torch's products of several rows
    have other bits."""
    model = torch_mesh.patch(_spread(name), resident=0.5)
    inputs = _inputs(length)
    plain = _plain(model, inputs, eos_token_id=None)
    speculation, cache = knowing(plain.sequences, drafted), DynamicCache(config=model.config)
    found = _generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    _check(model, inputs, plain, found)
    accepted = speculation._controller.accepted
    assert sum(accepted) > 0 and min(accepted) < drafted, "nothing was taken back"
    assert _states(cache) and cache.get_seq_length() == plain.past_key_values.get_seq_length()
    if torch.equal(found, plain.sequences):
        _same_states(cache, plain.past_key_values)


def test_mixers_become_what_they_were() -> None:
    model = torch_mesh.patch(_spread(NEXT), resident=0.5)
    before = [type(module) for module in model.modules()]
    inputs = _inputs(20)
    expected = _generate(model, inputs, eos_token_id=None)
    _generate(model, inputs, eos_token_id=None, custom_generate=knowing(expected, 7))
    mixers = [module for module in model.modules() if isinstance(module, linear_attention.SteppedMixer)]
    assert len(mixers) == 2 and {type(mixer).__name__ for mixer in mixers} == {"Qwen3NextGatedDeltaNet"}
    assert torch.equal(_generate(model, inputs, eos_token_id=None), expected)
    for made in (copy.deepcopy(mixers[0]), pickle.loads(pickle.dumps(mixers[0]))):
        assert type(made) is type(mixers[0]).__bases__[1] and made.layer_idx == mixers[0].layer_idx
    torch_mesh.unpatch(model, lossy=True)
    assert not any(isinstance(module, linear_attention.SteppedMixer) for module in model.modules())
    assert len(before) == len(list(model.modules()))


def test_two_texts_at_once_have_states_of_their_own() -> None:
    """The same mixers serve both, and one may begin or end while the other computes."""
    model = torch_mesh.patch(_spread(NEXT), resident=0.5)
    prompts = [_inputs(20), _inputs(9)]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = [model.generate(**inputs, **options) for inputs in prompts]
    with ThreadPoolExecutor() as threads:
        found = threads.map(
            lambda inputs, answer: model.generate(**inputs, **options, custom_generate=knowing(answer, 7)),
            prompts,
            plain,
        )
        for answer, tokens, inputs in zip(plain, found, prompts, strict=True):
            assert torch.equal(answer, tokens) or not _rows_are_exact(model, inputs["input_ids"])


@pytest.mark.parametrize("failing", [0, -1])
def test_a_forward_that_fails_leaves_the_states_before_it(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(_spread(NEXT), resident=0.5)
    inputs = _inputs(20)
    plain = _plain(model, inputs, eos_token_id=None)
    experts = [module for module in model.modules() if hasattr(module, "_mesh_pool")][failing]
    forward, seen = type(experts).forward, KeptTokens()

    def fails(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self is experts and len(x) == 8 and seen.count > 25:
            raise torch_mesh.ReadError("the disk is gone")
        return forward(self, x, *rest)

    cache = DynamicCache(config=model.config)
    with monkeypatch.context() as patched, pytest.raises(torch_mesh.ReadError):
        patched.setattr(type(experts), "forward", fails)
        _generate(
            model,
            inputs,
            eos_token_id=None,
            custom_generate=knowing(plain.sequences, 7),
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([seen]),
        )
    tokens = {"input_ids": plain.sequences[:, : seen.count]}
    rest = _generate(
        model, tokens, past_key_values=cache, eos_token_id=None, max_new_tokens=plain.sequences.shape[1] - seen.count
    )
    _check(model, inputs, plain, rest)


class _Breaks(LogitsProcessor):
    """Breaks at a token."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.at:
            raise ZeroDivisionError("a processor that breaks")
        return scores


@pytest.mark.parametrize("drafted", [pytest.param(0, marks=pytest.mark.thorough), 7])
@pytest.mark.parametrize("name", [NEXT, QWEN])
def test_a_processor_that_breaks_leaves_a_cache_of_the_tokens_so_far(name: str, drafted: int) -> None:
    """As in plain decoding: the last token is in it, in keys and in states."""
    model = torch_mesh.patch(_spread(name), resident=0.5)
    inputs = _inputs(20)
    answer = _generate(model, inputs, eos_token_id=None)
    for at in range(28, 36):  # behind a prompt of 20
        caches = []
        for how in ({}, {"custom_generate": knowing(answer, drafted)}):
            cache = DynamicCache(config=model.config)
            options = {"past_key_values": cache, "logits_processor": LogitsProcessorList([_Breaks(at)])}
            with pytest.raises(ZeroDivisionError):
                _generate(model, inputs, eos_token_id=None, **options, **how)
            caches.append(cache)
        plain, found = caches
        assert found.get_seq_length() == plain.get_seq_length() == at
        _same_states(found, plain)


def test_a_cache_that_records_linear_attention_goes_back() -> None:
    """transformers' own assisted decoding leaves such ones: the states of convolutions grow with each token."""
    model = torch_mesh.patch(_spread(NEXT), resident=0.5)
    inputs = _inputs(20)
    plain = _plain(model, inputs, eos_token_id=None)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    speculation = knowing(plain.sequences, 7)
    found = _generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    _check(model, inputs, plain, found)
    accepted = speculation._controller.accepted
    assert sum(accepted) > 0 and min(accepted) < 7, "nothing was taken back"
    assert all(layer.record_past for layer in cache.layers if isinstance(layer, LinearAttentionLayer))


def test_keys_that_a_server_keeps_are_kept() -> None:
    """Of a layer with a window it keeps more than the window, to go back to where two requests part."""
    original = _spread(OSS)
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.5)
    speculating = torch_mesh.patch(original, resident=0.5, speculation="lookup")
    config = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    kept, plainly = KeptKeys(speculating, limit=1 << 30), KeptKeys(model, limit=1 << 30)
    prompt = _inputs(40)["input_ids"]
    for turn in range(2):
        expected = plainly.generate(input_ids=prompt, generation_config=config)
        speculating._mesh_speculation = knowing(expected, 7)
        found = kept.generate(input_ids=prompt, generation_config=config)
        both = min(found.shape[1], expected.shape[1])
        same = int((found[:, :both] == expected[:, :both]).int().cumprod(1).sum())
        if same < both:  # rounding may tip two logits that were nearly equal
            with torch.no_grad():
                two = model(input_ids=expected[:, :same]).logits[0, -1].topk(2).values
            assert two[0] - two[1] <= two[0].abs() / 16
        else:
            assert found.shape == expected.shape
        windows = [
            layer for layer in kept.conversations[-1].cache.layers if isinstance(layer, DynamicSlidingWindowLayer)
        ]
        assert windows and (turn > 0 or all(layer.keys.shape[-2] == found.shape[1] - 1 for layer in windows))
        assert turn == 0 or kept.counts.reused_tokens == prompt.shape[1] - 14
        prompt = torch.cat([found[:, :-9], _inputs(14)["input_ids"]], dim=1)
    assert torch_mesh.stats(speculating).speculation.accepted > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.thorough), OSS])
@pytest.mark.thorough
def test_compiled_steps_stay_compiled(name: str) -> None:
    """Each number of drafted tokens is a graph."""
    model = torch_mesh.compile(torch_mesh.patch(_spread(name), resident=0.5), backend="eager", fullgraph=True)
    seen = {0}
    for length, drafted in [(5, 3), (20, 3), (30, 7), (12, 7), (21, 15), (9, 3)]:
        inputs = _inputs(length)
        plain = _plain(model, inputs, eos_token_id=None)
        speculation = knowing(plain.sequences, drafted)
        _check(model, inputs, plain, _generate(model, inputs, eos_token_id=None, custom_generate=speculation))
        assert sum(speculation._controller.accepted) > 0
        seen.add(drafted)
        assert counters["stats"]["unique_graphs"] == len(seen) and not counters["graph_break"]


def test_a_static_cache_goes_back(original: PreTrainedModel, tokenizer: Any) -> None:
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    plain = _generate(model, inputs, cache_implementation="static")
    assert torch.equal(plain, _generate(model, inputs, cache_implementation="static", custom_generate=always(15)))
    cache = StaticCache(
        config=model.config, max_cache_len=inputs["input_ids"].shape[1] + 59
    )  # just as long as it has to be
    assert torch.equal(plain, _generate(model, inputs, past_key_values=cache, custom_generate=always(15)))
    assert int(cache.get_seq_length()) == plain.shape[1] - 1


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_return_sequences": 5, "do_sample": True}, "up to 4 texts at a time, and here are 5"),
        ({"use_cache": False}, "use_cache=False leaves none"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ],
)
def test_calls_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    model = TINY_MODELS[QWEN].build()
    with pytest.raises(ValueError, match=message):
        _generate(model, _inputs(9), custom_generate=torch_mesh.speculate(), **options)


def test_models_and_caches_that_cannot_go_back_are_refused() -> None:
    model = TINY_MODELS[NEXT].build()
    with pytest.raises(ValueError, match="linear attention can be rewound in dynamic caches only"):
        _generate(model, _inputs(9), cache_implementation="static", custom_generate=torch_mesh.speculate())
    for name, message in (("ZayaExperts", "keys and a state"), ("DeepseekV4Experts", "which cannot be rewound")):
        model = TINY_MODELS[name].build()
        with pytest.raises(ValueError, match=message):
            _generate(model, _inputs(9), custom_generate=torch_mesh.speculate())
        with pytest.raises(UnsupportedModelError, match=message):
            torch_mesh.patch(model, resident=0.5, speculation="lookup")
    with pytest.raises(UnsupportedModelError, match="no generate"):
        torch_mesh.patch(TINY_MODELS[QWEN].build().model, resident=0.5, speculation="lookup")
    sliding = TINY_MODELS[OSS].build()
    with pytest.raises(ValueError, match="torch_mesh.compile gives one"):
        _generate(sliding, _inputs(9), cache_implementation="static", custom_generate=torch_mesh.speculate())


@pytest.mark.parametrize("lengths", [(), (0,), (16,), (3, "7"), (True, 2.5)])
def test_lengths_that_cannot_be_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="numbers of drafted tokens"):
        torch_mesh.speculate(lengths=lengths)


def test_models_that_are_not_patched_speculate_too() -> None:
    model = _spread(QWEN)
    inputs = _inputs(40)
    plain = _plain(model, inputs, eos_token_id=None)
    found = _generate(model, inputs, eos_token_id=None, custom_generate=knowing(plain.sequences, 7))
    _check(model, inputs, plain, found)
    torch_mesh.patch(model, resident=0.5)
    assert torch_mesh.stats(model).speculation.accepted > 0


def test_the_field_speculates_and_unpatch_ends_it(original: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    model = _patched(original, speculation="lookup")
    cls = type(model)
    assert isinstance(model, SpeculatingModel) and isinstance(model, type(original))
    assert (cls.__name__, cls.__module__) == (type(original).__name__, type(original).__module__)
    assert "speculation=lookup" in repr(model)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    expected = _generate(_patched(original), inputs)
    assert torch_mesh.stats(model).speculation is None
    assert torch.equal(_generate(model, inputs), expected)
    counts = torch_mesh.stats(model).speculation
    assert counts.tokens == 59 and counts.forwards <= 59
    assert (
        str(counts) in str(torch_mesh.stats(model)) and torch_mesh.stats(model).to_dict()["speculation"]["tokens"] == 59
    )
    copied = copy.deepcopy(model)
    assert torch.equal(_generate(copied, inputs), expected)
    torch_mesh.reset_stats(model)
    assert torch_mesh.stats(model).speculation.tokens == 0
    chosen = {name: _patched(original, attention="auto", speculation=name) for name in ("lookup", "off")}
    ours = {name: vars(each.model.layers[0].self_attn).get("_mesh_attention", False) for name, each in chosen.items()}
    assert ours["lookup"] and (not ours["off"] or torch_mesh.modules.dense.computes_dense(chosen["off"]))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=MeshConfig(resident=0.5, attention="mesh", speculation="lookup"),
    )
    assert again.config.architectures == [type(original).__name__]
    assert torch.equal(_generate(again, inputs), expected)
    torch_mesh.unpatch(model)
    assert type(model) is type(original) and not any("specul" in name for name in vars(model))


def test_other_ways_to_decode_are_as_they_were(original: PreTrainedModel, tokenizer: Any) -> None:
    plain, model = _patched(original), _patched(original, speculation="lookup")
    inputs = tokenizer(PROMPTS["prose"], return_tensors="pt")
    five = {name: tensor.repeat(5, 1) for name, tensor in inputs.items()}
    for asked, options in [
        (five, {}),
        (inputs, {"num_beams": 2}),
        (inputs, {"use_cache": False, "max_new_tokens": 9}),
        (inputs, {"return_dict_in_generate": True, "output_hidden_states": True}),
        (inputs, {"prompt_lookup_num_tokens": 3}),
        (inputs, {"assistant_model": original}),
        (inputs, {"assistant_model": plain}),
    ]:
        options = {"max_new_tokens": 12} | options
        expected, found = _generate(plain, asked, **options), _generate(model, asked, **options)
        if not isinstance(expected, torch.Tensor):
            expected, found = expected.sequences, found.sequences
        assert torch.equal(found, expected), options
    assert torch_mesh.stats(model).speculation is None
    # As an assistant, too.
    assert torch.equal(_generate(plain, inputs, assistant_model=model), _generate(plain, inputs, assistant_model=plain))
    assert torch_mesh.stats(model).speculation is None


@pytest.mark.parametrize("by_itself", [False, True])
def test_only_new_tokens_behind_a_padded_cache(by_itself: bool) -> None:
    """transformers takes the tokens that the cache has not, with a mask of all."""
    model = _spread(QWEN)
    plain = torch_mesh.patch(copy.deepcopy(model), resident=0.5, attention="mesh")
    speculating = torch_mesh.patch(model, resident=0.5, attention="mesh", speculation="lookup" if by_itself else "off")
    how = {} if by_itself else {"custom_generate": torch_mesh.speculate()}
    ids, mask = torch.randint(3, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    answers = []
    for each, options in ((plain, {}), (speculating, how)):
        cache = DynamicCache(config=each.config)
        with torch.no_grad():
            each(input_ids=ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        inputs = {"input_ids": ids[:, 8:], "attention_mask": mask, "past_key_values": cache}
        answers.append(_generate(each, inputs, eos_token_id=None, max_new_tokens=30, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize("assisted", [False, True])
def test_speculation_of_transformers_gives_the_greedy_tokens(
    original: PreTrainedModel, tokenizer: Any, assisted: bool
) -> None:
    model = _patched(original, resident=0.25)
    how: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if assisted:
        how = {"assistant_model": _patched(original, weights="int4", resident=0.25)}
    _agree(model, tokenizer(PROMPTS["rewriting"], return_tensors="pt"), how)


def test_time_is_that_of_the_clock_it_is_given(original: PreTrainedModel, tokenizer: Any) -> None:
    model = _patched(original)
    ticks = itertools.count(0.0, 0.5)
    speculation = Speculation(Always(3), clock=lambda: next(ticks))
    _generate(model, tokenizer(PROMPTS["rewriting"], return_tensors="pt"), custom_generate=speculation)
    lengths = torch_mesh.stats(model).speculation.lengths
    assert all(each.timed == each.forwards - 1 and each.seconds == 2 * 0.5 * each.timed for each in lengths.values())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_forward_that_fails_leaves_nothing_drafted(
    original: PreTrainedModel, tokenizer: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last experts fail, every layer has the drafted tokens, and no layer is longer than another."""
    model = _patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    answer = _generate(model, inputs)
    keys: Any = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=400)
    )
    last = [module for module in model.modules() if hasattr(module, "_mesh_pool")][-1]
    forward, rows = type(last).forward, []

    def fails(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self is last:
            rows.append(len(x))
            if rows[-1] == 8 and len(rows) > 3:
                raise torch_mesh.ReadError("the disk is gone")
        return forward(self, x, *rest)

    monkeypatch.setattr(type(last), "forward", fails)
    seen = KeptTokens()
    with pytest.raises(torch_mesh.ReadError):
        _generate(
            model,
            inputs,
            custom_generate=knowing(answer, 7),
            past_key_values=keys,
            stopping_criteria=StoppingCriteriaList([seen]),
        )
    assert {int(layer.get_seq_length()) for layer in keys.layers} == {seen.count - 1}


class KeptTokens(StoppingCriteria):
    """How many tokens a text had when it ended, however it did."""

    count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count = input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_older_transformers_has_not_every_kind_of_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BaseQuantizedLayer", "DummyLayer"):
        monkeypatch.delattr(f"transformers.cache_utils.{name}", raising=False)
    source = importlib.util.find_spec("torch_mesh.speculation.rewinding")
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    assert module.rewind_unsupported_reason(torch.nn.Module(), DynamicCache()) == ""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    module.Rewinding(torch.nn.Module(), cache).go_back(1)
    assert cache.get_seq_length() == 1
