"""Allowed values of MeshConfig's fields: in words, and as checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from torch_mesh.formats import is_passthrough

# Must equal the extension's value; `torch-mesh doctor` has to run without the extension.
MAX_THREADS = 1024
MAX_TIMEOUT = 1e9  # seconds

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d{1,40}(?:\.\d{1,40})?)\s*([a-z]*)", re.ASCII)
_MAX_BYTES = 1 << 60  # sums of a few such sizes fit the engine's 64 bits


def parse_size(value: str | int, field: str) -> int:
    """Bytes of a size such as ``"8GiB"``, ``"500 mb"`` or ``1 << 30``. Raises ValueError, naming ``field`` and the
    allowed values."""
    size = 0
    value = _of_python(value)
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match and match[2] in _UNITS and (_UNITS[match[2]] > 1 or match[1].isdigit()):
            size = int(float(match[1]) * _UNITS[match[2]])
    if size > _MAX_BYTES:
        raise ValueError(
            f"{field}={value!r} is more than any machine has: give at most {_MAX_BYTES} bytes (1048576 TiB)."
        )
    if size > 0:
        return size
    raise ValueError(
        f"{field}={value!r} is not a size: give bytes or a number with a unit among KiB, MiB, GiB, TiB, KB, MB, GB, TB."
    )


@dataclass(frozen=True)
class Values:
    """``words`` for the documentation; ``check(name, value)`` returns the field's value, or raises ValueError about
    ``name``."""

    words: str
    check: Callable[[str, Any], Any]


def one_of(*allowed: str | int) -> Values:
    def check(name: str, value: Any) -> Any:
        for entry in allowed:
            if value == entry if isinstance(entry, str) else str(value).strip() == str(entry):
                return entry
        raise ValueError(f"{name}={value!r} is unknown; it is one of {', '.join(map(repr, allowed))}.")

    return Values(", ".join(shown(entry) for entry in allowed), check)


def reader(*allowed: str) -> Values:
    named = one_of(*allowed)

    def check(name: str, value: Any) -> str:
        if value == "mmap":
            raise ValueError(
                f"{name}='mmap' was removed, since it was slower at every size: give {name}='buffered', which reads "
                "through the page cache into the pool, or 'auto'."
            )
        return str(named.check(name, value))

    return Values(named.words, check)


def weights(*allowed: str) -> Values:
    named = one_of(*allowed)

    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value.startswith("auto:"):
            raise ValueError(
                f"{name}={value!r}: the memory and the error that a choice of format may take are fields of their own "
                'now: weights="auto", resident="8GiB", max_error="15%".'
            )
        if is_passthrough(value):  # a mixture of formats, as converted folders of GGUF files have them
            return str(value)
        return str(named.check(name, value))

    return Values(named.words, check)


@partial(Values, 'a fraction such as `0.15` or `"15%"`, or none')
def max_error(name: str, value: Any) -> float | None:
    if value is None:
        return None
    text = value.strip() if isinstance(value, str) else value
    number = _real(text[:-1]) if isinstance(text, str) and text.endswith("%") else _real(text)
    if number is not None and isinstance(text, str) and text.endswith("%"):
        number /= 100
    if number is None or not 0 <= number <= 1:
        raise ValueError(f"{name}={value!r} is not a fraction in [0, 1]: give 0.15 or '15%', or None.")
    return number


def count(of: str, minimum: int = 0, give: str = "0 or a positive number") -> Values:
    def check(name: str, value: Any) -> int:
        if (number := _whole(value)) is None or number < minimum:
            raise ValueError(f"{name}={value!r} is not a number of {of}: give {give}.")
        return number

    return Values(f"a number of {of}", check)


@partial(Values, "a number in [0, 1]")
def bias(name: str, value: Any) -> float:
    number = _real(value)
    if number is None or not 0 <= number <= 1:
        raise ValueError(
            f"{name}={value!r} is not a fraction of the spread of scores: give a number in [0, 1]; 0 is exact."
        )
    return number


def path(kind: str) -> Values:
    def check(name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ValueError(f"{name}={value!r} is not a {kind}: give a path, or None.")
        expanded = os.path.expanduser(os.fspath(value))
        if expanded.startswith("~"):
            raise ValueError(
                f"{name}={value!r}: there is no home folder for that; give a path without ~, or one that begins with "
                "./~"
            )
        return expanded

    return Values(f"a {kind}, or none", check)


_FOLDER = path("folder")


@partial(Values, '`"auto"`, `"off"`, or a file')
def prefetch(name: str, value: Any) -> str:
    if value in ("auto", "off"):
        return str(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and re.search(r"[./\\]", value)):
        return str(path("file").check(name, value))
    raise ValueError(
        f"{name}={value!r} is unknown; it is 'auto', 'off', or the path of a file of `torch-mesh routing fit`, with a "
        "dot or a slash in it."
    )


@partial(Values, '`"off"`, or two numbers: of layers and of experts')
def early_experts(name: str, value: Any) -> str | tuple[int, int]:
    if isinstance(value, str) and value == "off":
        return value
    parts = re.sub(r"^\s*\((.*)\)\s*$", r"\1", value).split(",") if isinstance(value, str) else value
    numbers = [_whole(part) for part in parts] if isinstance(parts, list | tuple) else []
    if len(numbers) == 2 and numbers[0] and numbers[1]:
        return numbers[0], numbers[1]
    raise ValueError(
        f"{name}={value!r} is unknown: give 'off' or two positive numbers, of layers and of experts in each: (1, 32)."
    )


@partial(Values, '`"auto"`, a size such as `"8GiB"`, bytes, or a fraction of all experts in (0, 1]')
def resident(name: str, value: Any) -> str | float:
    value = _of_python(value)
    if value == "auto":
        return value
    if isinstance(value, str) and re.fullmatch(r"[01]?\.\d+|[01]", value.strip()):
        value = float(value)
    if isinstance(value, str) and (percent := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip())):
        fraction = min(1.0, float(percent[1]) / 100)
        raise ValueError(f"{name}={value!r} is in percent: give a fraction of all experts in (0, 1], {fraction:g}.")
    if isinstance(value, float) or (value == 1 and not isinstance(value, bool)):
        if 0 < value <= 1:
            return float(value)
        size = f" Bytes are given as a whole number: {int(value)}." if value > 1 and value.is_integer() else ""
        raise ValueError(f"{name}={value!r} is not a fraction of all experts: it must be in (0, 1].{size}")
    try:
        parse_size(value, name)
    except ValueError as error:
        raise ValueError(f"{error} Or a fraction of all experts in (0, 1], or 'auto'.") from None
    return value


@partial(Values, 'a size such as `"256MiB"`, or bytes')
def size(name: str, value: Any) -> str | int:
    value = _of_python(value)
    parse_size(value, name)
    return value


@partial(Values, '`"auto"`, `"off"`, a size such as `"1GiB"`, or names')
def tables(name: str, value: Any) -> str | int | tuple[str, ...]:
    value = _of_python(value)
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    if isinstance(value, int) or (isinstance(value, str) and value.strip()[:1].isdigit()):
        parse_size(value, name)
        return value
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list | tuple) and names and all(isinstance(each, str) and each.strip() for each in names):
        return tuple(each.strip() for each in names)
    raise ValueError(
        f"{name}={value!r} is unknown: give 'auto', 'off', a size for the rows that are kept in memory, or the names "
        "of embeddings, such as 'embed_tokens_per_layer'."
    )


@partial(Values, "folders, in a string separated by commas")
def folders(name: str, value: Any) -> tuple[str, ...]:
    given = value.split(",") if isinstance(value, str) else [value] if isinstance(value, os.PathLike) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str | os.PathLike) for each in given):
        given = [""]
    paths = [each.strip() if isinstance(each, str) else os.fspath(each) for each in given]
    if not all(paths):
        raise ValueError(f"{name}={value!r} is not a list of folders: give paths, or a string of them with commas.")
    return tuple(str(_FOLDER.check(name, each)) for each in paths)


@partial(Values, f'`"auto"`, or 1 to {MAX_THREADS}')
def threads(name: str, value: Any) -> str | int:
    if value == "auto":
        return value
    number = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(f"{name}={value!r} is not a number of threads: give a positive number or 'auto'.")
    if len(number) > 9 or int(number) > MAX_THREADS:
        raise ValueError(
            f"{name}={value!r} is more than an engine supports: give 1 to {MAX_THREADS}, or 'auto' for as many as "
            "torch uses."
        )
    return int(number)


@partial(Values, f"0.001 to {MAX_TIMEOUT:.0f} seconds")
def seconds(name: str, value: Any) -> float:
    number = _real(value)
    if number is None or not 0 < number < float("inf"):
        raise ValueError(f"{name}={value!r} is not a time-out: give a positive number of seconds.")
    if not 1e-3 <= number <= MAX_TIMEOUT:
        raise ValueError(
            f"{name}={value!r} is not a time-out: give 0.001 to {MAX_TIMEOUT:.0f} seconds, which are 31 years."
        )
    return number


class _Mask(tuple[tuple[bool, ...], ...]):
    def __repr__(self) -> str:
        return f"<mask [{len(self)}, {len(self[0])}]>"


@partial(Values, 'a number of each layer, `"auto"`, or a bool mask [layers, experts]')
def placed_experts(name: str, value: Any) -> str | int | tuple[tuple[bool, ...], ...]:
    if isinstance(value, str) and value == "auto":  # comparing a mask would be elementwise
        return value
    value = _of_python(value)
    if isinstance(value, int | str) and (number := _whole(value)) is not None:
        return number
    rows = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, list | tuple) and row for row in rows):
        same = len({len(row) for row in rows}) == 1
        if same and all(isinstance(entry, bool) for row in rows for entry in row):
            return _Mask(map(tuple, rows))
    raise ValueError(
        f"{name}={value!r} is unknown: give a number of experts of each layer, 'auto', or a bool mask [layers, "
        "experts]."
    )


@partial(Values, '`"auto"`, `"off"`, or three numbers of seconds')
def streaming(name: str, value: Any) -> Any:
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    numbers = [_real(part) for part in parts] if isinstance(parts, list | tuple) else []
    if len(numbers) == 3 and all(number is not None and 0 <= number < float("inf") for number in numbers):
        return tuple(numbers)
    raise ValueError(
        f"{name}={value!r} is unknown: give 'auto', 'off', or three numbers of seconds: to copy an expert to the GPU, "
        "to compute one more row of it on the CPU, and for an expert on the CPU excluding its rows."
    )


def shown(value: Any) -> str:
    """A value in the reference, in Python's syntax."""
    if value is None:
        return "none"
    return f'`"{value}"`' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _of_python(value: Any) -> Any:
    """``value``, which may be a number of numpy."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _whole(value: Any) -> int | None:
    return None if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value).strip()) else int(value)


def _real(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
