"""Why an answer ends, and what is left of it: tokens without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from torch_mesh.serving.answer_parser import Content, Piece
from torch_mesh.serving.answers import Answer
from torch_mesh.serving.anthropic_api import _Message
from torch_mesh.serving.engine import Job, Token
from torch_mesh.serving.openai_api import OpenAI, collect_all
from torch_mesh.serving.processors import TokenLogprobs
from torch_mesh.serving.tool_formats import Call, answer_format

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = Call("look", "{}")


@pytest.fixture(scope="module")
def tokenizer(mesh_tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(mesh_tiny)


def _ended(
    tokenizer: Any,
    ids: Sequence[int],
    end: int | None = None,
    config: dict[str, Any] | None = None,
    prompt: Sequence[int] = (1,),
    **options: Any,
) -> tuple[Answer, list[Piece]]:
    """An answer of tokens ``ids``, which are as many as it may have, and its pieces."""

    async def tokens(job: Any) -> AsyncGenerator[list[Token], None]:
        for token in ids:
            yield [Token(token, None)]

    limits = {"max_new_tokens": len(ids), "eos_token_id": end} | (config or {})
    job = Job({"input_ids": torch.tensor([prompt])}, GenerationConfig(**limits))
    answer = Answer(SimpleNamespace(tokens=tokens), job, tokenizer, **options)

    async def read() -> list[Piece]:
        return [piece async for part in answer.parts() for piece in part.pieces]

    return answer, asyncio.run(read())


@pytest.mark.parametrize("format", [None, answer_format("<tool_call>", "")])
def test_a_special_token_may_be_a_stop_sequence(format: Any, tokenizer: Any) -> None:
    special = tokenizer.eos_token_id
    ids = [*tokenizer("In the")["input_ids"], special, *tokenizer(" end")["input_ids"]]
    mark = tokenizer.decode([special])
    answer, pieces = _ended(tokenizer, ids, format=format, stops=[mark])
    count = len(ids) - len(tokenizer(" end").input_ids)
    assert (answer.finish, answer.stopped_by, answer.count) == ("stop", mark, count)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "In the"
    _, shown = _ended(tokenizer, ids, format=format, stops=["never said"])
    assert "".join(piece.text for piece in shown if isinstance(piece, Content)) == "In the end"


def test_a_stop_sequence_that_is_the_end_changes_nothing(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    options: dict[str, Any] = {"format": answer_format("<tool_call>", ""), "schemas": {"look": None}}
    for text, finish in (("In the", "stop"), (CALL, "tool_calls")):
        ids = [*tokenizer(text)["input_ids"], end]
        answer, pieces = _ended(tokenizer, ids, end, stops=[tokenizer.decode([end])], **options)
        assert (answer.finish, answer.stopped_by) == (finish, None) and pieces


def test_a_call_before_a_stop_sequence_is_to_be_run(tokenizer: Any) -> None:
    ids = tokenizer(CALL + "\nI look.")["input_ids"]
    options: dict[str, Any] = {"format": answer_format("<tool_call>", ""), "schemas": {"look": None}}
    answer, _ = _ended(tokenizer, ids, stops=["I look"], **options)
    body = _Message("a", answer).body()
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("more", ["", "\n<tool_call>\n{", "\nI look."])
def test_an_answer_that_reaches_its_limit_is_cut_after_calls_too(more: str, tokenizer: Any) -> None:
    options: dict[str, Any] = {"format": answer_format("<tool_call>", ""), "schemas": {"look": None}}
    ids = tokenizer(CALL + more)["input_ids"]
    answer, (call, *_) = _ended(tokenizer, ids, **options)
    assert call == LOOK and answer.finish == "length"
    end = tokenizer.eos_token_id
    answer, (call, *_) = _ended(tokenizer, [*ids, end], end, **options)
    assert call == LOOK and answer.finish == "tool_calls"
    answer, (call, *rest) = _ended(tokenizer, ids, **options, one_call=True)
    assert call == LOOK and not rest and answer.finish == "tool_calls"


def test_an_answer_whose_time_is_over_is_cut(tokenizer: Any) -> None:
    ids, end = tokenizer("In the")["input_ids"], tokenizer.eos_token_id
    for config, finish in (({"max_time": 0.1}, "length"), ({}, "stop")):
        answer, _ = _ended(tokenizer, ids, end, config={"max_new_tokens": 100} | config)
        assert answer.finish == finish
        answer, _ = _ended(tokenizer, [*ids, end], end, config={"max_new_tokens": 100} | config)
        assert answer.finish == "stop"


@pytest.fixture(scope="module")
def sentence_piece() -> Any:
    """A tokenizer that leaves out the space before the first word, as Mixtral's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "world"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    rules = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rules.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _ids(tokenizer: Any, *texts: str) -> list[int]:
    """The ids of tokens by name, or of the bytes of a character."""
    known = tokenizer.get_vocab()
    names = [[text] if text in known else [f"<0x{byte:02X}>" for byte in text.encode()] for text in texts]
    return [known[name] for each in names for name in each]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["<s>", "▁Hello"], ["▁world", "world"], " worldworld"),
        (["<s>", "▁Hello"], ["▁", "▁world"], "  world"),
        (["<s>", "▁Hello", "</s>"], ["▁world"], " world"),
        (["▁Hello", "\U0001f600"], ["\U0001f601", "▁world"], "\U0001f601 world"),
        (["<s>"], ["▁world"], "world"),
    ],
)
def test_a_completion_begins_with_its_space(
    prompt: Sequence[str], answer: Sequence[str], text: str, sentence_piece: Any
) -> None:
    ids, before = _ids(sentence_piece, *answer), _ids(sentence_piece, *prompt)
    _, pieces = _ended(sentence_piece, ids, prompt=before)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
    options: dict[str, Any] = {"format": answer_format("", ""), "continues": True}
    _, pieces = _ended(sentence_piece, ids, prompt=before, **options)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
    _, pieces = _ended(sentence_piece, ids, prompt=before, format=answer_format("", ""))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text.removeprefix(" ")


@pytest.mark.parametrize("format", [None, answer_format("<think>", "")])
@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", "▁Hello"]])
def test_the_first_token_with_log_probabilities_begins_as_the_text(
    prompt: Sequence[str], format: Any, sentence_piece: Any
) -> None:
    ids = _ids(sentence_piece, "<s>", "▁Hello", "▁world")

    async def tokens(job: Any) -> AsyncGenerator[list[Token], None]:
        for token in ids:
            yield [Token(token, TokenLogprobs(token, -1.0, ()))]

    job = Job({"input_ids": torch.tensor([_ids(sentence_piece, *prompt)])}, GenerationConfig(max_new_tokens=3))
    answer = Answer(SimpleNamespace(tokens=tokens), job, sentence_piece, format)
    (found,) = asyncio.run(collect_all([answer]))
    api = OpenAI(SimpleNamespace(prompts=SimpleNamespace(tokenizer=sentence_piece)))  # type: ignore[arg-type]
    shown = [api._token(each)["token"] for each in found.logprobs if each.token != ids[0]]
    assert "".join(shown) == found.text == ("Hello world" if format or len(prompt) == 1 else " Hello world")


def test_tokens_with_log_probabilities_join_to_the_text(sentence_piece: Any) -> None:
    api = OpenAI(SimpleNamespace(prompts=SimpleNamespace(tokenizer=sentence_piece)))  # type: ignore[arg-type]
    start, hello, world, joined = _ids(sentence_piece, "<s>", "▁Hello", "▁world", "world")
    made = TokenLogprobs(world, -1.0, ((world, -1.0), (joined, -2.0)))
    found = api._completion_logprobs([start, hello], [None, TokenLogprobs(hello, -1.0, ()), made])
    assert found["tokens"] == ["<s>", "Hello", " world"] and found["text_offset"] == [0, 0, 5]
    assert found["top_logprobs"][2] == {" world": -1.0, "world": -2.0}
    begun = replace(made, begins_text=True)
    found = api._completion_logprobs((), [begun, made])
    assert found["tokens"] == ["world", " world"] and found["text_offset"] == [0, 5]
    token = api._token(begun)
    assert token["token"] == "world" and bytes(token["bytes"]) == b"world"
    found = api._completion_logprobs((), [made, made], 5)
    assert found["tokens"] == [" world", " world"] and found["text_offset"] == [5, 11]
