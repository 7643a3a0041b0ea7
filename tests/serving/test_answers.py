"""Why an answer ends, and what is left of it: tokens without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from torch_mesh.serving.answer_parser import Content, Piece
from torch_mesh.serving.answers import Answer
from torch_mesh.serving.anthropic_api import _Message
from torch_mesh.serving.engine import Job, Token
from torch_mesh.serving.tool_formats import Call, answer_format

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = Call("look", "{}")


@pytest.fixture(scope="module")
def tokenizer(mesh_tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(mesh_tiny)


def _ended(
    tokenizer: Any, ids: Sequence[int], end: int | None = None, config: dict[str, Any] | None = None, **options: Any
) -> tuple[Answer, list[Piece]]:
    """An answer of tokens ``ids``, which are as many as it may have, and its pieces."""

    async def tokens(job: Any) -> AsyncGenerator[list[Token], None]:
        for token in ids:
            yield [Token(token, None)]

    limits = {"max_new_tokens": len(ids), "eos_token_id": end} | (config or {})
    job = Job({"input_ids": torch.tensor([[1]])}, GenerationConfig(**limits))
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
