"""Headers of safetensors files: the location of each tensor's bytes.

Files are untrusted: every count, size and offset is checked, and a failure is a ``StoreError`` that names the file and
the tensor. Independent of torch (docs/decisions/0003).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import StoreError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1 << 20
# Maximum number of commas and opening brackets in a JSON file. It bounds the parsed objects, about 64 bytes each,
# before they are built.
MAX_STRUCTURE = 4 * MAX_TENSORS
_METADATA = "__metadata__"
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SPACE = re.compile(r"[ \t\n\r]*")
_MAX_ENTRY_BYTES = 1 << 20  # bytes of one tensor's description
MAX_RANK = 32
MAX_INTEGER = (1 << 63) - 1
ALIGNMENT = 4096

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. ``offset`` counts from the start of the file, not of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors lie in the file, without overlaps and gaps."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def store_error(
    path: str | os.PathLike[str], problem: str, offset: int | None = None, kind: type[StoreError] = StoreError
) -> StoreError:
    """A ``StoreError`` about one file, with ``file`` and ``offset`` set."""
    error = kind(f"{os.fspath(path)}: {problem}")
    error.file = os.fspath(path)
    error.offset = offset
    return error


def utf8_path(path: str | os.PathLike[str]) -> str:
    """``path`` as text, which the engine and transformers take. Raises ``StoreError`` if it is not valid UTF-8."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise store_error(shown, "the path is not valid UTF-8, with which no model can be opened: rename it") from None
    return text


def read_header(path: str | os.PathLike[str]) -> Header:
    """The checked header of one safetensors file. Raises ``StoreError`` for invalid ones."""
    path = Path(path)
    text, file_bytes = _read_raw_header(path)
    try:
        header = _HeaderText(path, text, file_bytes).parse()
    except (ValueError, RecursionError) as problem:
        raise store_error(path, f"the header is not valid JSON: {problem}") from None
    _check_coverage(path, header.tensors.values(), header.data_start, file_bytes)
    return header


def parse_json(raw: bytes, floats: bool = False) -> Any:
    """Parse untrusted JSON. Raises ``ValueError`` for text that is not UTF-8, nests too deep, repeats a key, or has an
    integer beyond 64 bits, a constant like NaN or, without ``floats``, a float."""
    if raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_STRUCTURE:
        raise ValueError(f"it has more than {MAX_STRUCTURE} elements")
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_int=_parse_integer,
            parse_float=float if floats else _refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_range(path: str | os.PathLike[str], offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Read a range of a file. Raises ``StoreError`` if the file ends before it."""
    # Uninitialized, and large pages if large: clearing and page faults cost as much as reading.
    buffer = np.empty(size, dtype=np.uint8)
    read_into(path, offset, buffer.data)
    return buffer


def read_into(path: str | os.PathLike[str], offset: int, into: memoryview) -> None:
    """Fill ``into``, a view of bytes, from ``offset`` of a file on. Raises ``StoreError`` if the file ends before
    that."""
    size, done = len(into), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while done < size:
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if count == 0:
                raise store_error(path, f"ends before byte {offset + size}: it was cut since it was opened", offset)
            done += count
        # Read once to be packed: do not occupy the page cache.
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its size. Raises ``StoreError`` if it cannot be read or is not a regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise store_error(path, "is not a regular file")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as problem:
        raise store_error(path, f"cannot be read: {problem.strerror}") from problem


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Length field and header for tensors ``(name, dtype, shape, bytes)`` in order, padded so that the data starts at a
    multiple of 4 KiB."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, size in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}: use more files")
    return struct.pack("<Q", len(text)) + text


def read_headers(paths: Iterable[Path]) -> tuple[Header, ...]:
    """The checked headers of all files of a checkpoint, in the order of ``weight_files``.

    If several files have a tensor of one name, only the last is included: transformers reads the files in order,
    whatever the index says. Raises ``StoreError`` as ``read_header`` does.
    """
    headers = [read_header(path) for path in paths]
    last = {name: number for number, header in enumerate(headers) for name in header.tensors}
    if len(last) == sum(len(header.tensors) for header in headers):
        return tuple(headers)
    return tuple(
        replace(header, tensors={name: tensor for name, tensor in header.tensors.items() if last[name] == number})
        for number, header in enumerate(headers)
    )


def read_json_file(path: Path, floats: bool = False) -> Any:
    """``parse_json`` of a file of bounded size. Raises ``StoreError`` if it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # read() allocates what it is asked for. Only a regular file's size is known.
            limit = min(status.st_size, MAX_HEADER_BYTES) if stat.S_ISREG(status.st_mode) else MAX_HEADER_BYTES
            raw = file.read(limit + 1)
    except OSError as problem:
        raise store_error(path, f"cannot be read: {problem.strerror}") from problem
    if len(raw) > MAX_HEADER_BYTES:
        raise store_error(path, f"has more than the allowed {MAX_HEADER_BYTES} bytes")
    try:
        return parse_json(raw, floats)
    except ValueError as problem:
        raise store_error(path, f"is not valid JSON: {problem}") from None


def check_file_name(path: Path, name: object, what: str) -> None:
    """Raises ``StoreError`` unless ``name`` is a plain file name: non-empty, one path component, no control
    characters."""
    if not isinstance(name, str) or not is_plain_name(name):
        raise store_error(path, f"{what} is located in {name!r}, which is not a plain file name of this folder")


def check_inner_name(path: Path, name: object, what: str) -> None:
    """Raises ``StoreError`` unless ``name`` is a file in the folder or below: plain names with slashes."""
    if not isinstance(name, str) or not all(is_plain_name(part) for part in name.split("/")):
        raise store_error(
            path, f"{what} is located in {name!r}, which is not a plain file name in this folder or below"
        )


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is one path component that a manifest may name."""
    # Lone surrogates cannot be encoded as file names.
    return name not in ("", ".", "..") and re.search(r"[/\\\x00-\x1f]", name) is None and not _SURROGATE.search(name)


class _HeaderText:
    """Incremental parser of a header's JSON, tensor by tensor.

    ``text`` has a character for each byte: decoding would make a string four times as long for one character of another
    alphabet.
    """

    def __init__(self, path: Path, text: str, file_bytes: int) -> None:
        self._path = path
        self._text = text
        self._at = 0
        self._file_bytes = file_bytes
        self._data_start = 8 + len(text)
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def parse(self) -> Header:
        """Raises ``StoreError`` for an invalid header, ``ValueError`` for invalid JSON."""
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, str] | None = None
        for name in self._names():
            if name in tensors or (name == _METADATA and metadata is not None):
                raise ValueError(f"the key {name!r} occurs twice")
            if name == _METADATA:
                metadata = self._metadata()
            elif len(tensors) == MAX_TENSORS:
                raise store_error(self._path, f"the header has more than the allowed {MAX_TENSORS} tensors")
            else:
                tensors[name] = self._tensor(name)
        if self._next() is not None:
            raise ValueError(f"something follows it at byte {self._at}")
        return Header(self._path, tensors, metadata or {}, self._data_start, self._file_bytes)

    def _names(self) -> Iterator[str]:
        """The names of an object's members; the caller reads each value before the next name."""
        self._expect("{")
        if self._next() == "}":
            self._at += 1
            return
        while True:
            name = self._string()
            self._expect(":")
            self._next()
            yield name
            if self._next() == "}":
                self._at += 1
                return
            self._expect(",")

    def _next(self) -> str | None:
        """The next character that is not a space; None at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None, "the pattern matches an empty string"
        self._at = match.end()
        return self._text[self._at] if self._at < len(self._text) else None

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise ValueError(f"{character!r} is expected at byte {self._at}")
        self._at += 1

    def _string(self) -> str:
        if self._next() != '"':
            raise ValueError(f"a string is expected at byte {self._at}")
        begin = self._at
        value, self._at = _DECODER.raw_decode(self._text, begin)
        if not value.isascii():
            # Non-ASCII characters are bytes here, escaped ones are not.
            value = parse_json(self._text[begin : self._at].encode("latin-1"))
            if _SURROGATE.search(value):
                raise ValueError(f"the string at byte {begin} has a lone surrogate, which UTF-8 cannot encode")
        return value

    def _metadata(self) -> dict[str, str]:
        if self._text.startswith("null", self._at):
            self._at += len("null")
            return {}
        metadata: dict[str, str] = {}
        for name in self._names() if self._next() == "{" else [None]:
            if name is None or self._next() != '"' or len(metadata) == MAX_TENSORS:
                raise store_error(self._path, f"'{_METADATA}' is not an object of at most {MAX_TENSORS} strings")
            if name in metadata:
                raise ValueError(f"the key {name!r} occurs twice")
            metadata[name] = self._string()
        return metadata

    def _tensor(self, name: str) -> Tensor:
        entry: object = None
        if self._text.startswith("{", self._at):
            end = self._text.find("}", self._at, self._at + _MAX_ENTRY_BYTES) + 1
            if not end:
                raise ValueError(f"the description of tensor {name!r} does not end within {_MAX_ENTRY_BYTES} bytes")
            entry, length = _DECODER.raw_decode(self._text[self._at : end])
            self._at += length
        return _check_tensor(self._path, name, entry, self._data_start, self._file_bytes, self._shapes)


def _read_raw_header(path: Path) -> tuple[str, int]:
    """The header, a character for each byte, and the file size."""
    with open_regular(path) as (file, file_bytes):
        prefix = file.read(8)
        if len(prefix) < 8:
            raise store_error(
                path, f"ends after {len(prefix)} bytes; a safetensors file starts with an 8-byte length", 0
            )
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise store_error(path, f"says its header has {length} bytes; the format allows {MAX_HEADER_BYTES}", 0)
        if length > file_bytes - 8:
            raise store_error(path, f"says its header has {length} bytes, but has {file_bytes} in all: truncated?", 0)
        raw = file.read(length)
        if len(raw) < length:
            raise store_error(path, f"shrank while it was read: {len(raw)} of {length} header bytes", 8)
    if not raw.startswith(b"{"):
        raise store_error(path, "the header does not start with '{': not a safetensors file", 8)
    return raw.decode("latin-1"), file_bytes


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return table


def _parse_integer(digits: str) -> int:
    # int() of a long string of digits takes quadratic time before Python 3.11.
    if len(digits) > 20 or abs(int(digits)) > MAX_INTEGER:
        raise ValueError(f"an integer of {len(digits)} digits does not fit 64 bits")
    return int(digits)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not an integer, and only integers are allowed there")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_int=_parse_integer,
    parse_float=_refuse_number,
    parse_constant=_refuse_number,
)


def _check_tensor(
    path: Path,
    name: str,
    entry: object,
    data_start: int,
    file_bytes: int,
    shapes: dict[tuple[int, ...], tuple[int, ...]],
) -> Tensor:
    """Check one tensor's entry. ``shapes`` interns the shapes' tuples."""

    def refuse(problem: str) -> NoReturn:
        raise store_error(path, f"tensor {name!r}: {problem}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse(f"has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        refuse(f"has the shape {_short(shape)}; it must be a list of at most {MAX_RANK} sizes >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"has the data_offsets {_short(offsets)}; they must be [begin, end] with 0 <= begin <= end")
    begin, end = offsets
    if data_start + end > file_bytes:
        refuse(f"ends at byte {data_start + end}, the file at {file_bytes}: truncated?")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        refuse(f"has {end - begin} bytes, but {dtype} of shape {_short(shape)} has {_short(bits)} bits")
    sizes = tuple(shape)
    return Tensor(name, sys.intern(dtype), shapes.setdefault(sizes, sizes), data_start + begin, end - begin)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_coverage(path: Path, tensors: Iterable[Tensor], data_start: int, file_bytes: int) -> None:
    end, previous = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset < end:
            raise store_error(
                path, f"tensor {tensor.name!r} overlaps {previous} at byte {tensor.offset}", tensor.offset
            )
        if tensor.offset > end:
            raise store_error(path, f"{tensor.offset - end} bytes before tensor {tensor.name!r} belong to none", end)
        end, previous = tensor.offset + tensor.bytes, repr(tensor.name)
    if end != file_bytes:
        raise store_error(path, f"{file_bytes - end} bytes after {previous} belong to no tensor", end)
