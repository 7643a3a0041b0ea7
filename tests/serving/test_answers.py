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

from torch_mesh.serving.answers import Answer
from torch_mesh.serving.engine import Job, Token
from torch_mesh.serving.tool_calls import Call, Content, Piece, answer_format

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = Call("look", "{}")


@pytest.fixture(scope="module")
def tokenizer(mesh_tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(mesh_tiny)


def _ended(tokenizer: Any, ids: Sequence[int], end: int | None = None, **options: Any) -> tuple[Answer, list[Piece]]:
    """An answer of tokens ``ids``, which are as many as it may have, and its pieces."""

    async def tokens(job: Any) -> AsyncGenerator[list[Token], None]:
        for token in ids:
            yield [Token(token, None)]

    job = Job({"input_ids": torch.tensor([[1]])}, GenerationConfig(max_new_tokens=len(ids), eos_token_id=end))
    answer = Answer(SimpleNamespace(tokens=tokens), job, tokenizer, **options)

    async def read() -> list[Piece]:
        return [piece async for part in answer.parts() for piece in part.pieces]

    return answer, asyncio.run(read())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("format", [None, answer_format("<tool_call>", "")])
def test_a_special_token_may_be_a_stop_sequence(ends: bool, format: Any, tokenizer: Any) -> None:
    special = tokenizer.eos_token_id
    ids = [*tokenizer("In the")["input_ids"], special, *tokenizer(" end")["input_ids"]]
    mark = tokenizer.decode([special])
    answer, pieces = _ended(tokenizer, ids, special if ends else None, format=format, stops=[mark])
    assert (answer.finish, answer.stopped_by, answer.count) == (
        "stop",
        mark,
        len(ids) - len(tokenizer(" end").input_ids),
    )
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "In the"
    _, shown = _ended(tokenizer, ids, format=format, stops=["never said"])
    assert "".join(piece.text for piece in shown if isinstance(piece, Content)) == "In the end"


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
