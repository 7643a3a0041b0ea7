"""Reasoning: in earlier turns, in the number of tokens, and where a client does not want its text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from torch_mesh.serving.answers import Answer
from torch_mesh.serving.engine import Job, Token
from torch_mesh.serving.openai_api import OpenAI, collect_all
from torch_mesh.serving.processors import TokenLogprobs
from torch_mesh.serving.prompts import response_messages
from torch_mesh.serving.tool_formats import answer_format

pytest.importorskip("fastapi")

USER = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "Yes."}
CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "a"}


def _thought(*texts: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in texts]}


A, B, NOTHING = _thought("A"), _thought("B1", "B2"), _thought()


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([A, SAID, B, CALL, RESULT], [("assistant", "Yes.", "A\n\nB1B2"), ("tool", "a", None)]),
        ([A, B, CALL], [("assistant", "", "A\n\nB1B2")]),
        ([A, CALL, RESULT, B, SAID], [("assistant", "", "A"), ("tool", "a", None), ("assistant", "Yes.", "B1B2")]),
        ([A, USER, SAID], [("assistant", "", "A"), ("user", "Why?", None), ("assistant", "Yes.", None)]),
        ([CALL, A, RESULT], [("assistant", "", "A"), ("tool", "a", None)]),
        ([SAID, A], [("assistant", "Yes.", "A")]),
        ([A], [("assistant", "", "A")]),
        ([NOTHING, USER], [("user", "Why?", None)]),
    ],
)
def test_earlier_reasoning_stays_in_its_turn(items: list[Any], expected: list[Any]) -> None:
    first, *messages = response_messages([USER, *items], None)
    assert first == USER
    assert [(each["role"], each["content"], each.get("reasoning_content")) for each in messages] == expected
    assert sum("tool_calls" in each for each in messages) == items.count(CALL)


def _answer(folder: Path, text: str, template: str, logprobs: bool = False) -> Answer:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def tokens(job: Job) -> AsyncGenerator[list[Token], None]:
        for token in tokenizer(text)["input_ids"]:
            yield [Token(token, TokenLogprobs(token, -1.0, ()) if logprobs else None)]

    job = Job({"input_ids": torch.tensor([[1]])}, GenerationConfig(max_new_tokens=99))
    return Answer(SimpleNamespace(tokens=tokens), job, tokenizer, answer_format(template, ""))


def _events(made: Any) -> list[dict[str, Any]]:
    async def read() -> list[str]:
        return [each async for each in made.events()]

    return [json.loads(each.partition("data: ")[2]) for each in asyncio.run(read())]


@pytest.mark.parametrize("text", ["<think>Hm.</think>\n\nYes, 1.", "Yes, 1.", "<think>\n\n</think>Yes, 1."])
def test_tokens_of_reasoning_have_no_log_probabilities(text: str, folder: Path) -> None:
    """Clients pair log-probabilities with the content."""
    answer = _answer(folder, text, "<think></think>", logprobs=True)
    (found,) = asyncio.run(collect_all([answer]))
    assert found.text == "Yes, 1."
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.decode([each.token for each in found.logprobs])
    assert tokens.lstrip("\n") == found.text

    async def read() -> list[str]:
        service: Any = SimpleNamespace(prompts=SimpleNamespace(tokenizer=tokenizer), served="a")
        return [each async for each in OpenAI(service)._chat_events({}, [answer], logprobs=True, usage=False)]

    answer = _answer(folder, text, "<think></think>", logprobs=True)
    chunks = [json.loads(each.partition("data: ")[2]) for each in asyncio.run(read())[:-1]]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [token["token"] for each in logprobs if each is not None for token in each["content"]]
    assert "".join(streamed) == tokens
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == found.text


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("<think></think>", "<think>", "</think>Yes."),
        ("<|channel|><|message|>", "<|channel|>analysis<|message|>", "<|end|><|channel|>final<|message|>Yes."),
    ],
)
def test_tokens_of_reasoning_are_counted(template: str, begin: str, end: str, folder: Path) -> None:
    from torch_mesh.serving.openai_api import OpenAI, _Response

    api = OpenAI(SimpleNamespace(served="a"))  # type: ignore[arg-type]
    counts = []
    for thought in ("I think.", "I think. And I think."):
        answer = _answer(folder, begin + thought + end, template)
        usage = _events(_Response(api, {}, answer))[-1]["response"]["usage"]
        counts.append(usage["output_tokens_details"]["reasoning_tokens"])
        assert counts[-1] < usage["output_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = [len(tokenizer(begin + thought + end)["input_ids"]) for thought in ("I think.", "I think. And I think.")]
    assert counts[0] > 0 and counts[1] - counts[0] == lengths[1] - lengths[0]
    answer = _answer(folder, "Yes.", template)
    usage = _events(_Response(api, {}, answer))[-1]["response"]["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_omitted_reasoning_is_an_empty_block_whose_signature_has_it_for_the_next_turn(folder: Path) -> None:
    from torch_mesh.serving.anthropic_api import _Message, _messages

    message = _Message("a", _answer(folder, "<think>Why?</think>Yes.", "<think></think>"), omits=True)
    events = _events(message)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert blocks == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    signature, *deltas = deltas
    assert signature["type"] == "signature_delta"
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "Yes."
    content = message.body()["content"]
    assert content[0] == {"type": "thinking", "thinking": "", "signature": signature["signature"]}
    theirs = {"type": "thinking", "thinking": "Why not?", "signature": "EqQBCgIYAhIM"}
    for blocks, reasoning in ((content, "Why?"), ([theirs, content[1]], "Why not?")):
        (turn,) = _messages({"messages": [{"role": "assistant", "content": blocks}]}, {})
        assert turn == {"role": "assistant", "content": "Yes.", "reasoning_content": reasoning}


@pytest.mark.parametrize(
    ("thinking", "arguments", "expected"),
    [
        ({}, {}, {"enable_thinking": False}),
        ({}, {"enable_thinking": True}, {}),  # --reasoning on
        ({"thinking": {"type": "adaptive"}}, {}, {}),
        ({"thinking": {"type": "enabled"}}, {}, {"enable_thinking": True}),
    ],
)
def test_a_message_without_thinking_turns_reasoning_off(
    thinking: dict[str, Any], arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    from torch_mesh.serving.anthropic_api import Anthropic

    for reads, found in ((True, expected), (False, {})):
        prompts = SimpleNamespace(
            reads=lambda _, reads=reads: reads, default_arguments=arguments, format=answer_format("</think>", "")
        )
        assert Anthropic(SimpleNamespace(prompts=prompts))._thinking(thinking) == found  # type: ignore[arg-type]
