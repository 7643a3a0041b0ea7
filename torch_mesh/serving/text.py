"""Decode tokens to text one at a time, and find stop sequences."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character
PROMPT_END = 8  # tokens of a prompt that may be read again: a character has fewer


class Detokenizer:
    """Decodes a sequence piece by piece, at a constant cost per token.

    Args:
        tokenizer: of transformers.
        shown: special tokens that are part of the text, such as those around a tool call. Others decode to nothing.
        ends: ids of tokens that end a sequence; they decode to nothing.
        prompt: the tokens before the sequence, if its text continues theirs.
    """

    def __init__(
        self, tokenizer: Any, shown: Collection[str] = (), ends: Collection[int] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        special = {*tokenizer.all_special_ids, *ends}
        self._hidden = frozenset(token for token in special if tokenizer.decode([token]) not in shown)
        # A sequence that is decoded alone loses the space before its first word, as SentencePiece writes it.
        self._ids = self._whole_end([token for token in prompt[-PROMPT_END:] if token not in self._hidden])
        self._start = 0  # the first token that the next piece is decoded with
        self._read = len(self._ids)  # the end of the returned pieces

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" within a character."""
        if self.hides(token):
            return ""
        self._ids.append(token)
        # A token's text may depend on the previous one, such as the space before a word.
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def begins_with(self, token: int) -> bool:
        """Whether ``token``, if pushed now, is the first one that is decoded."""
        return not self._ids and not self.hides(token)

    def hides(self, token: int) -> bool:
        return token in self._hidden

    def end(self) -> str:
        """The text of tokens that never completed a character."""
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _whole_end(self, ids: list[int]) -> list[int]:
        """The fewest last tokens that are whole characters; none if there are no such tokens."""
        ends = (ids[-count:] for count in range(1, len(ids) + 1))
        return next((end for end in ends if _INCOMPLETE not in self._decode(end)), [])

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass
class Stops:
    """Ends a text before the first of ``sequences`` in it."""

    sequences: Sequence[str]
    found: str | None = None
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Return the text that cannot be the beginning of a stop sequence; "" after one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        if stop := first_mark(text, self.sequences):
            position, self.found = stop
            self._held = ""
            return text[:position]
        text, self._held = split_held(text, self.sequences)
        return text

    def end(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def token_bytes(tokenizer: Any, token: int, is_first: bool = False) -> bytes:
    """The UTF-8 bytes of a token, which may be a part of a character.

    ``is_first``: the token begins a text, where SentencePiece leaves out the space before a word.
    """
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if _INCOMPLETE not in text:
        if is_first:
            return text.encode()
        twice: str = tokenizer.decode([token, token], clean_up_tokenization_spaces=False)
        return twice[len(text) :].encode()
    written = tokenizer.convert_ids_to_tokens(token)
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", written):  # SentencePiece's
        return bytes.fromhex(byte[1])
    found = [_byte_of_character().get(character) for character in written]
    return text.encode() if None in found else bytes(byte for byte in found if byte is not None)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters by which a byte-level vocabulary, as GPT-2's, writes bytes: printable ones of Latin-1 stand for
    themselves, the others for those from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Position and text of the first of ``marks`` in ``text``."""
    return min(((position, mark) for mark in marks if (position := text.find(mark)) >= 0), default=None)


def split_held(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Divide ``text`` before its longest suffix that may be the beginning of one of ``marks``."""
    longest = min(len(text), max(map(len, marks), default=0))
    held = next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
    return text[: len(text) - held], text[len(text) - held :]
