"""Mutations of bytes that typically break parsers: wrong numbers, truncation, repeated or misplaced pieces."""

from __future__ import annotations

import random
import re
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 255, 256, 4096, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_LARGE = (1 << 32, 1 << 40, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_TEXTS = (
    "-1",
    "1e308",
    "NaN",
    "null",
    "true",
    "[]",
    "{}",
    '""',
    '"F8_E4M3"',
    "[[[[[[]]]]]]",
    '"\\ud800"',
    "18446744073709551616",
)


def mutate(seeds: Sequence[bytes], rng: random.Random, text: bool = False, in_place: bool = False) -> bytes:
    """Return one of ``seeds``, damaged in one to four places. ``text``: JSON, whose whole words are changed as well.
    ``in_place``: keep the length."""
    data = bytearray(rng.choice(seeds))
    size = len(data)
    changes = _IN_PLACE if in_place else _OF_TEXT if text else _OF_BYTES
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(changes)(data, rng, seeds)
    return bytes(data[:size] if in_place else data)


@contextmanager
def limits(seconds: int, extra_bytes: int) -> Iterator[None]:
    """Abort after ``seconds``, and fail allocations that exceed the current address space by ``extra_bytes``."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _flip(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _put_number(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    form, numbers = ("<I", _NUMBERS) if rng.random() < 0.5 else ("<Q", _NUMBERS + _LARGE)
    at = rng.randrange(max(len(data), 1))
    number = rng.choice((*numbers, len(data), len(data) - at)) % (1 << (8 * struct.calcsize(form)))
    data[at : at + struct.calcsize(form)] = struct.pack(form, number)


def _add(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    if data:
        at = rng.randrange(len(data))
        data[at] = (data[at] + rng.choice((-1, 1))) % 256


def _cut(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    del data[rng.randrange(max(len(data), 1)) :]


def _drop(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(max(len(data), 1))
    del data[at : at + rng.randrange(1, 40)]


def _repeat(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(max(len(data), 1))
    data[at:at] = data[at : at + rng.randrange(1, 120)] * rng.choice((1, 1, 1, 50))


def _splice(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    at, begin = rng.randrange(max(len(data), 1)), rng.randrange(max(len(other), 1))
    size = rng.randrange(1, 200)
    data[at : at + size] = other[begin : begin + size]


def _put_text(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    """Replace a number, a string or a keyword by another."""
    words = list(re.finditer(rb'-?\d+|"[^"]*"|true|false|null', data))
    if words:
        word = rng.choice(words)
        others = rng.choice(words)[0]
        number = str(rng.choice(_NUMBERS + _LARGE)).encode()
        data[word.start() : word.end()] = rng.choice((rng.choice(_TEXTS).encode(), others, number))


_Change = Callable[[bytearray, random.Random, Sequence[bytes]], None]
_OF_BYTES: tuple[_Change, ...] = (_flip, _put_number, _put_number, _add, _add, _cut, _drop, _repeat, _splice)
_IN_PLACE: tuple[_Change, ...] = (_flip, _put_number, _add)
_OF_TEXT: tuple[_Change, ...] = (_put_text, _put_text, _put_text, _flip, _cut, _drop, _repeat, _splice)
