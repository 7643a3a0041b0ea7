"""Divide an answer into content, reasoning and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mesh.serving.text import first_mark, split_held
from torch_mesh.serving.tool_formats import GPT_OSS, AnswerFormat, Call, NotACallError


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


Piece = Content | Reasoning | Call


def parser_of(
    format: AnswerFormat, schemas: Mapping[str, Any] | None, prompt_end: str, continues: bool = False
) -> Parser | _ChannelParser:
    """Return an object that divides an answer into content, reasoning and calls while it is generated.

    Args:
        schemas: the parameters' JSON schema by tool. None: calls are content, except in channels.
        prompt_end: the end of the prompt, which may have begun the reasoning.
        continues: the prompt has begun the content.
    """
    return _ChannelParser(continues) if format.channels else Parser(format, schemas, prompt_end, continues)


class _Reader:
    """Text that comes in parts, and the state of what it is."""

    _state: str
    _text: str  # that is not divided yet

    @property
    def is_content(self) -> bool:
        return self._state == "content"

    @property
    def holds_text(self) -> bool:
        """Whether the end of the text so far may be the beginning of a mark."""
        return bool(self._text)

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        raise NotImplementedError


@dataclass
class Parser(_Reader):
    """Finds calls and reasoning by the marks around them; see ``parser_of``."""

    format: AnswerFormat
    schemas: Mapping[str, Any] | None
    prompt_end: str
    continues: bool = False
    _state: str = field(default="content", init=False)
    _text: str = field(default="", init=False)
    _blank: str = field(default="", init=False)  # held back: white space before a mark is not content
    _begun: bool = field(default=False, init=False)  # there was text since the last mark
    _has_content: bool = field(default=False, init=False)  # no reasoning follows: a mark of it is text
    # In the text of a call: where to search for its end, and where its last complete value ends.
    _searched: int = field(default=0, init=False)
    _values_end: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        thinking = self.format.thinking
        if thinking and self.prompt_end.rstrip().endswith(thinking[0].rstrip()):
            self._state = "reasoning"
        self._begun = self._state == "content"
        self._has_content = self.continues

    def end(self) -> list[Piece]:
        """The remaining pieces. An incomplete call is content."""
        pieces: list[Piece] = []
        while self._state == "call" and (found := first_mark(self._text, self._marks())):  # in a value without an end
            before, self._text = self._text[: found[0]], self._text[found[0] + len(found[1]) :]
            pieces += [*self._call(before), *self._pieces()]
        text, self._text = self._text, ""
        if self._state == "call" and self.format.tools is not None:
            return [*pieces, Content(self._blank + self.format.tools.begin + text)]
        kind = Reasoning if self.is_reasoning else Content
        text = self._blank + text if self._begun else text
        return [*pieces, kind(text)] if text and (self._state == "content" or text.strip()) else pieces

    def _next_mark(self) -> tuple[int, str] | None:
        """Position and text of the mark that ends the current state. Marks within values of a call are none."""
        tools = self.format.tools
        if self._state != "call" or tools is None:
            return first_mark(self._text, self._marks())
        while (found := self._text.find(tools.end, self._searched)) >= 0:
            self._searched = found + 1
            is_open, self._values_end = tools.follow(self._text, self._values_end, found)
            if not is_open:
                return found, tools.end
        self._searched = max(self._searched, len(self._text) - len(tools.end) + 1)
        return None

    def _see_content(self) -> None:
        """Notice whether the text begins with content, and not with a mark or a part of one."""
        text, marks = self._text.lstrip(), self._marks()
        if (
            self._state == "content"
            and text
            and not any(text.startswith(mark) or mark.startswith(text) for mark in marks)
        ):
            self._has_content = True

    def _pieces(self) -> Iterator[Piece]:
        self._see_content()
        while found := self._next_mark():
            position, mark = found
            before, self._text = self._text[:position], self._text[position + len(mark) :]
            if self._state == "call":
                yield from self._call(before)
                self._see_content()
                continue
            yield from self._text_pieces(before)
            self._begun = False
            tools, thinking = self.format.tools, self.format.thinking
            if tools is not None and mark == tools.begin:
                self._state = "call"
                continue  # white space before it is content, if it is no call
            self._blank = ""
            if thinking is not None and mark in thinking:
                self._state = "reasoning" if mark == thinking[0] else "content"
            self._see_content()
        if self._state != "call":
            ready, self._text = split_held(self._text, self._marks())
            yield from self._text_pieces(ready)

    def _marks(self) -> Sequence[str]:
        """The marks that end the current state."""
        tools, thinking = self.format.tools if self.schemas is not None else None, self.format.thinking
        if self._state == "call":
            return (tools.end,) if tools is not None else ()
        if self.is_reasoning:
            return (thinking[1],) if thinking is not None else ()
        found = (thinking[0],) if thinking is not None and not self._has_content else ()
        return (*found, *filter(None, (tools.begin, tools.header, tools.footer))) if tools is not None else found

    def _text_pieces(self, text: str) -> Iterator[Piece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        if not self._marks():
            text, self._blank = self._blank + text, ""
            if text:
                yield Content(text)
            return
        stripped = (self._blank + text).rstrip()
        self._blank = (self._blank + text)[len(stripped) :]
        if stripped:
            yield Reasoning(stripped) if self.is_reasoning else Content(stripped)

    def _call(self, text: str) -> Iterator[Piece]:
        tools = self.format.tools
        assert tools is not None
        self._state, self._searched, self._values_end = "content", 0, 0
        blank, self._blank = self._blank, ""
        try:
            yield from tools.read(text, self.schemas or {})
            self._has_content = False  # models may reason between calls
        except NotACallError:
            broken, end, rest = text.partition(tools.end)
            if end:  # it was taken for a part of a value
                self._text = rest + tools.end + self._text
            self._begun = self._has_content = True
            yield Content(blank + tools.begin + broken + tools.end)


class _ChannelParser(_Reader):
    """gpt-oss's messages: ``<|start|>ROLE<|channel|>NAME<|message|>TEXT``, and then ``<|end|>``, ``<|call|>`` or
    ``<|return|>``. A call's recipient is after the role or after the channel's name."""

    def __init__(self, continues: bool) -> None:
        self._state = "content" if continues else "between"  # where a prompt ends
        self._text = self._header = ""

    def end(self) -> list[Piece]:
        """The remaining pieces. An incomplete call is content."""
        text, self._text = self._text, ""
        return [] if self._state == "between" else list(self._message(text))

    def _pieces(self) -> Iterator[Piece]:
        # The beginning of the next message ends one whose own end is missing.
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
        while True:
            if self._state == "between":
                before, found, rest = self._text.partition("<|channel|>")
                name, complete, body = rest.partition("<|message|>")
                if not found or not complete:
                    return
                self._text, self._header = body, before.rpartition("<|start|>")[2] + found + name
                is_call = "to=functions." in self._header
                self._state = "call" if is_call else "reasoning" if "analysis" in name else "content"
            end = first_mark(self._text, ends)
            if end is None:
                break
            body, self._text = self._text[: end[0]], self._text[end[0] :]
            yield from self._message(body)
            self._state = "between"
        if self._state != "call":
            ready, self._text = split_held(self._text, ends)
            yield from self._message(ready)

    def _message(self, body: str) -> Iterator[Piece]:
        if self._state != "call":
            if body:
                yield Reasoning(body) if self._state == "reasoning" else Content(body)
            return
        try:
            yield from GPT_OSS.read(f"{self._header}<|message|>{body}", {})
        except NotACallError:
            yield Content(body)
