"""An answer while it is generated: tokens become text, and text becomes content, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch_mesh.serving.answer_parser import Piece, parser_of
from torch_mesh.serving.engine import Job, Token
from torch_mesh.serving.text import PROMPT_END, Detokenizer, Stops
from torch_mesh.serving.tool_formats import AnswerFormat, Call


@dataclass(frozen=True)
class Part:
    """The parts that a batch of tokens adds to an answer."""

    pieces: Sequence[Piece]
    tokens: Sequence[Token]  # those of content; of an answer without a format all


@dataclass
class Answer:
    """One sequence that is generated.

    Args:
        engine: computes it.
        job: the sequence's inputs and options.
        tokenizer: of transformers.
        format: how the model writes calls and reasoning. None: all text is content.
        schemas: the parameters' JSON schema by tool.
        prompt_end: text of the prompt's last tokens.
        continues: the prompt has begun the content.
        stops: stop sequences.
        one_call: end with the first tool call.
    """

    engine: Any
    job: Job
    tokenizer: Any
    format: AnswerFormat | None = None
    schemas: Mapping[str, Any] | None = None
    prompt_end: str = ""
    continues: bool = False
    stops: Sequence[str] = ()
    one_call: bool = False
    count: int = field(default=0, init=False)  # generated tokens
    reasoning_count: int = field(default=0, init=False)  # those within reasoning
    finish: str = field(default="stop", init=False)  # why it ended: stop, length or tool_calls
    stopped_by: str | None = field(default=None, init=False)  # the stop sequence

    def __post_init__(self) -> None:
        ends = self.job.config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield parts as they are generated. Closing this iterator ends the computation."""
        marks = self.format.marks if self.format else ()
        ends = {self.tokenizer.decode([token]) for token in self._ends}
        # A stop sequence that is the end itself changes nothing: the answer ends as it would without.
        shown = (*marks, *(stop for stop in self.stops if stop not in ends))
        prompt = self.job.prompt[-PROMPT_END:].tolist() if self.format is None or self.continues else ()
        text = Detokenizer(self.tokenizer, shown, self._ends, prompt)
        stops = Stops(self.stops)
        parser = parser_of(self.format or AnswerFormat(), self.schemas, self.prompt_end, self.continues)
        last, called = None, False
        held: list[Token] = []  # of content, or of a mark that has begun
        batches = self.engine.tokens(self.job)

        def has_ended() -> bool:
            return stops.found is not None or (called and self.one_call)

        try:
            async for batch in batches:
                pieces: list[Piece] = []
                content: list[Token] = []
                for token in batch:
                    self.count, last = self.count + 1, token.id
                    self.reasoning_count += parser.is_reasoning
                    was_content = parser.is_content
                    if token.logprobs is not None and text.begins_with(token.id):
                        token = Token(token.id, replace(token.logprobs, begins_text=True))
                    pieces += parser.push(stops.push(text.push(token.id)))
                    if self.format is None:
                        content.append(token)
                    elif not (was_content and parser.is_content):
                        held = []  # these and this one are of a mark
                    elif not text.hides(token.id):
                        held.append(token)
                    if not parser.holds_text:
                        content, held = content + held, []
                    called = called or any(isinstance(piece, Call) for piece in pieces)
                    if has_ended():
                        break
                yield Part(_until_call(pieces) if self.one_call else pieces, content)
                if has_ended():
                    break
        finally:
            await batches.aclose()
        self.stopped_by = stops.found
        if not (called and self.one_call):
            rest = "" if stops.found is not None else stops.push(text.end()) + stops.end()
            pieces = [*parser.push(rest), *parser.end()]
            called = called or any(isinstance(piece, Call) for piece in pieces)
            if pieces or held:
                yield Part(pieces, held)
        ended = self.stopped_by is not None or last in self._ends or (called and self.one_call)
        config = self.job.config
        # generate does not say why it ended: it may have been one of its own stop strings.
        out_of_time = config.max_time is not None and config.stop_strings is None
        if not ended and (out_of_time or self.count >= config.max_new_tokens):
            self.finish = "length"  # after a call too: others may be missing
        elif called:
            self.finish = "tool_calls"


@contextlib.asynccontextmanager
async def running(*work: Awaitable[Any]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Tasks that have ended after the block: those that still run are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BodyBuilder(Protocol):
    """Makes the body of a response from the parts of an answer. ``add`` and ``close`` return events of a stream."""

    def add(self, part: Part) -> list[str]: ...

    def close(self) -> list[str]: ...

    def body(self) -> dict[str, Any]: ...


async def whole_body(answer: Answer, builder: BodyBuilder) -> dict[str, Any]:
    async with contextlib.aclosing(answer.parts()) as parts:
        async for part in parts:
            builder.add(part)
    builder.close()
    return builder.body()


def _until_call(pieces: Sequence[Piece]) -> list[Piece]:
    first = next((index for index, piece in enumerate(pieces) if isinstance(piece, Call)), len(pieces))
    return list(pieces[: first + 1])
