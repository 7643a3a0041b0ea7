"""Headers of GGUF files: where each tensor's bytes are, and the model's metadata.

The reader of the ``gguf`` package trusts the file: a count of an array is a loop of that length, whatever the file's
size. So the header is parsed here, and treated as hostile: docs/decisions/0041. Independent of torch.
"""

from __future__ import annotations

import functools
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.store.header import (
    MAX_HEADER_BYTES,
    MAX_INTEGER,
    MAX_STRUCTURE,
    MAX_TENSORS,
    Header,
    Tensor,
    open_regular,
    store_error,
)

SUFFIX = ".gguf"
ROPE_DIVISORS = "rope_freqs.weight"  # a tensor that goes into the config: a divisor for each frequency
MAX_FREQUENCIES = 1 << 12  # maximum number of frequencies of a head
# Types in blocks, which the gguf package dequantizes. Other types are refused, except single numbers.
BLOCK_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
_SINGLE_TYPES = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
# Types that only ik_llama.cpp has, for an error that names them.
_IK_TYPES = """
97 Q8_0_X4, 98 Q8_1_X4, 99 Q8_2_X4, 133 Q6_0, 134 IQ1_BN, 135 IQ2_BN, 136 Q8_K64, 137 IQ2_K, 138 IQ3_K,
139 IQ4_K, 140 IQ5_K, 141 IQ6_K, 144 IQ4_KS, 145 IQ2_KS, 146 IQ4_KSS, 147 Q8_K16, 148 Q8_K32, 149 Q8_KR8,
150 Q8_K128, 151 Q8_KV, 152 IQ5_KS, 153 IQ2_KT, 154 IQ3_KT, 155 IQ4_KT, 156 IQ3_KS, 157 IQ2_KL, 158 IQ1_KT,
202 Q4_0_R8, 206 Q5_0_R4, 208 Q8_0_R8, 210 Q2_K_R4, 211 Q3_K_R4, 212 Q4_K_R4, 213 Q5_K_R4, 214 Q6_K_R4,
216 IQ2_XXS_R4, 217 IQ2_XS_R4, 218 IQ3_XXS_R4, 219 IQ1_S_R4, 220 IQ4_NL_R4, 221 IQ3_S_R4, 222 IQ2_S_R4,
223 IQ4_XS_R8, 229 IQ1_M_R4, 230 BF16_R16, 233 Q6_0_R4, 335 IQ2_BN_R4, 337 IQ2_K_R4, 338 IQ3_K_R4, 339 IQ4_K_R4,
340 IQ5_K_R4, 344 IQ4_KS_R4, 352 IQ5_KS_R4, 398 Q8_KV_R8, 399 Q8_K_R8
"""
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    number: struct.Struct(f"<{code}") for number, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_MAX_RANK = 4
_CHUNK_BYTES = 1 << 20
_MAX_KEY = (1 << 16) - 1  # bytes of a key or of a tensor's name
_MAX_KEPT = 1 << 14  # elements of arrays: enough for one per layer, not for one per token
_SPLIT = re.compile(r"-(\d{5})(-of-(\d{5})\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Counted:
    """The length of an array that is not kept, such as a vocabulary."""

    count: int


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as in the header. ``at``: its position there; ``offset`` counts from the beginning of the data."""

    at: int
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """One checked file. Its tensors are ``header.tensors``; those in blocks have the shape of their bytes.

    ``metadata`` has numbers and strings, and short arrays of numbers as lists.
    """

    header: Header
    metadata: Mapping[str, Any]


class Readable(Protocol):
    """The methods of a file that parsing a header needs."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = ..., /) -> int: ...


def keys_within(metadata: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The metadata of a group of keys, such as an architecture's, by their names in it."""
    prefix = f"{group}."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is called like a GGUF file, here or on the hub, and is no folder."""
    return os.fspath(path).lower().endswith(SUFFIX) and not os.path.isdir(path)


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """The header of one GGUF file. Raises ``StoreError`` for damaged files, ``UnsupportedModelError`` for types that
    cannot be read."""
    path = Path(path)
    with open_regular(path) as (file, file_bytes):
        return parse_gguf(path, file, file_bytes)


def parse_gguf(path: Path, file: Readable, file_bytes: int) -> Gguf:
    """The header of ``file``, which has ``file_bytes`` and is called ``path`` in errors.

    Reads at most ``_CHUNK_BYTES`` beyond the header. Raises as ``read_gguf`` does.
    """
    return _Parser(path, file, file_bytes).parse()


def part_names(name: str) -> list[str]:
    """The names of all files of the model whose first file is ``name``. Raises ``ValueError`` if ``name`` is not a
    first file."""
    match = _SPLIT.search(name)
    if match is None:
        return [name]
    number, count = int(match[1]), int(match[3])
    if number != 1 or count < 1:
        first = f"{name[: match.start()]}-00001{match[2]}"
        raise ValueError(f"is part {number} of {count} of a model: name the first, {os.path.basename(first)}")
    return [f"{name[: match.start()]}-{part + 1:05d}{match[2]}" for part in range(count)]


def gguf_files(path: str | os.PathLike[str], all_there: bool = True) -> list[Path]:
    """The files of a model, of which ``path`` is the first. Raises ``StoreError`` if it is not the first or, with
    ``all_there``, if files are missing."""
    path = Path(path)
    try:
        files = [path.with_name(name) for name in part_names(path.name)]
    except ValueError as problem:
        raise store_error(path, str(problem)) from None
    for file in files if all_there else ():
        if not file.exists():
            parts = f": it is one of the {len(files)} parts of {path.name}" if len(files) > 1 else ""
            raise store_error(file, f"there is no such file{parts}")
    return files


def read_parts(path: str | os.PathLike[str]) -> tuple[Gguf, ...]:
    """Read all files of a model. Raises ``StoreError`` if they are not parts of one model."""
    files = gguf_files(path)
    parts = tuple(read_gguf(file) for file in files)
    if len(parts) == 1 and parts[0].metadata.get("split.count", 0) in (0, 1):
        return parts
    tensors = sum(len(part.header.tensors) for part in parts)
    for number, part in enumerate(parts):
        declared = part.metadata.get("split.no"), part.metadata.get("split.count")
        if declared != (number, len(parts)):
            raise store_error(
                part.header.path,
                f"says that it is part {declared[0]} of {declared[1]} (split.no counts from 0), and by its name it is "
                f"part {number} of {len(parts)}: the files of a split model keep the names that they were given",
            )
        if part.metadata.get("split.tensors.count", tensors) != tensors:
            raise store_error(
                part.header.path,
                f"says that the model has {part.metadata['split.tensors.count']} tensors; its parts have {tensors}",
            )
    return parts


def require_package() -> None:
    """Raises ``UnsupportedModelError`` if the gguf package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as problem:
        raise UnsupportedModelError(
            f"GGUF files are read with the gguf package, which is not here ({problem}): pip install torch_mesh[gguf]"
        ) from problem


@functools.cache
def _types() -> Mapping[int, tuple[str, int, int]]:
    """By the type's number: its name, and the values and bytes of a block."""
    require_package()
    from gguf.constants import GGML_QUANT_SIZES

    known = {*BLOCK_TYPES, *_SINGLE_TYPES}
    return {int(each): (each.name, *sizes) for each, sizes in GGML_QUANT_SIZES.items() if each.name in known}


class _Parser:
    """Reads a header from front to back. Every count is compared with the bytes that are left before it is used."""

    def __init__(self, path: Path, file: Readable, file_bytes: int) -> None:
        self._path = path
        self._file = file
        self._file_bytes = file_bytes
        self._last = min(file_bytes, MAX_HEADER_BYTES)  # the header has to end by this offset
        self._at = 0
        self._elements = self._kept = 0  # counts of array elements, in all and kept

    def parse(self) -> Gguf:
        magic = self._take(4, "the mark 'GGUF'")
        if magic != b"GGUF":
            raise store_error(self._path, f"starts with {magic!r}, not with b'GGUF': not a GGUF file", 0)
        version = self._number("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            swapped = ", written for machines of the other byte order" if version & 0xFFFF == 0 else ""
            raise UnsupportedModelError(f"{self._path}: GGUF version {version}{swapped}; torch_mesh reads {known}.")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        self._check_count(tensor_count, 32, "tensors", MAX_TENSORS)
        self._check_count(key_count, 13, "keys", MAX_TENSORS)
        metadata = self._metadata(key_count)
        alignment = self._alignment(metadata)
        described = [self._tensor_info() for _ in range(tensor_count)]
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for each in described:
            if each.name in tensors:
                self._refuse(f"two tensors are called {each.name!r}", each.at)
            tensors[each.name] = self._tensor(each, data_start, alignment)
        self._check_apart(tensors)
        return Gguf(Header(self._path, tensors, {}, min(data_start, self._file_bytes), self._file_bytes), metadata)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            at = self._at
            key = self._string(_MAX_KEY, "a key")
            if key in metadata:
                self._refuse(f"the key {key!r} occurs twice", at)
            metadata[key] = self._value(self._number("I"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(MAX_HEADER_BYTES, f"the value of {key!r}")
        if kind != _ARRAY:
            self._refuse(f"the key {key!r} has a value of type {kind}, which GGUF does not define")
        element, count = self._number("I"), self._number("Q")
        if element not in _SCALARS and element != _STRING:
            nested = "arrays" if element == _ARRAY else f"type {element}, which GGUF does not define"
            self._refuse(f"the key {key!r} has an array of {nested}")
        self._check_count(
            count, 8 if element == _STRING else _SCALARS[element].size, f"elements of {key!r}", MAX_STRUCTURE
        )
        self._elements += count
        if self._elements > MAX_STRUCTURE:
            self._refuse(f"the arrays have more than the {MAX_STRUCTURE} elements that are accepted")
        if element == _STRING:
            self._skip_strings(count, f"a string of {key!r}")
        elif self._kept + count <= _MAX_KEPT:
            self._kept += count
            return [self._scalar(_SCALARS[element]) for _ in range(count)]
        else:
            self._skip(count * _SCALARS[element].size, f"the elements of {key!r}")
        return Counted(count)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r:.40}; it must be a power of two")
        return alignment

    def _tensor_info(self) -> _Described:
        at = self._at
        name = self._string(_MAX_KEY, "a tensor's name")
        rank = self._number("I")
        if not 1 <= rank <= _MAX_RANK:
            self._refuse(f"tensor {name!r} has {rank} dimensions; 1 to {_MAX_RANK} are allowed", at)
        shape = tuple(reversed([self._number("Q") for _ in range(rank)]))
        return _Described(at, name, shape, self._number("I"), self._number("Q"))

    def _tensor(self, each: _Described, data_start: int, alignment: int) -> Tensor:
        name, shape = each.name, each.shape

        def refuse(problem: str) -> NoReturn:
            self._refuse(f"tensor {name!r} {problem}", each.at)

        if each.kind not in _types():
            self._refuse_type(name, each.kind)
        dtype, values, size = _types()[each.kind]
        if not all(shape) or math.prod(shape) > MAX_INTEGER:
            refuse(f"has the shape {list(shape)}, which is empty or has more values than any file")
        if shape[-1] % values:
            refuse(f"has rows of {shape[-1]}, which is no multiple of {dtype}'s blocks of {values}")
        if each.offset % alignment:
            refuse(f"stands at {each.offset}, which is no multiple of the alignment {alignment}")
        row = shape[-1] // values * size
        begin, count = data_start + each.offset, math.prod(shape[:-1]) * row
        if begin + count > self._file_bytes:
            refuse(f"ends at byte {begin + count}, the file at {self._file_bytes}: truncated?")
        if dtype in BLOCK_TYPES:
            shape = *shape[:-1], row
        return Tensor(name, dtype, shape, begin, count)

    def _refuse_type(self, name: str, kind: int) -> NoReturn:
        own = re.search(rf"\b{kind} (\w+)", _IK_TYPES)
        called = f" ({own[1]}, of ik_llama.cpp alone)" if own else ""
        raise UnsupportedModelError(
            f"{self._path}: tensor {name!r} is of the type {kind}{called}. torch_mesh reads "
            f"{', '.join((*_SINGLE_TYPES, *BLOCK_TYPES))}: take a file of one of these types."
        )

    def _check_apart(self, tensors: Mapping[str, Tensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"tensor {tensor.name!r} overlaps {previous!r}", tensor.offset)
            end, previous = tensor.offset + tensor.bytes, tensor.name

    def _scalar(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size, "a number"))[0]

    def _number(self, code: str) -> int:
        form = _SCALARS[4] if code == "I" else _SCALARS[10]
        return self._scalar(form)

    def _string(self, limit: int, what: str) -> str:
        at, size = self._at, self._number("Q")
        if size > limit:
            self._refuse(f"{what} is said to have {size} bytes; at most {limit} are accepted", at)
        raw = self._take(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            self._refuse(f"{what} is not UTF-8: {problem}", at)

    def _check_count(self, count: int, min_bytes: int, what: str, limit: int) -> None:
        """Raises ``StoreError`` unless ``count`` items of at least ``min_bytes`` bytes can follow."""
        if count * min_bytes > self._file_bytes - self._at or count > limit:
            self._refuse(
                f"says that {count} {what} follow, and {self._file_bytes - self._at} bytes do; at most {limit} are "
                "accepted"
            )

    def _take(self, size: int, what: str) -> bytes:
        self._check_left(size, what)
        raw = self._file.read(size)
        if len(raw) < size:
            self._refuse(f"shrank while it was read: {len(raw)} of {size} bytes")
        self._at += size
        return raw

    def _skip(self, size: int, what: str) -> None:
        self._check_left(size, what)
        self._file.seek(size, os.SEEK_CUR)
        self._at += size

    def _skip_strings(self, count: int, what: str) -> None:
        """Skip ``count`` strings in large reads: a vocabulary has hundreds of thousands."""
        unpack, at, end = _SCALARS[10].unpack_from, self._at, self._at
        chunk = b""
        for _ in range(count):
            if at + 8 > end:
                self._at = at
                self._check_left(8, what)
                self._file.seek(at)
                chunk = self._file.read(_CHUNK_BYTES)
                end = at + len(chunk)
                if len(chunk) < 8:
                    self._refuse(f"shrank while it was read: {what} is not there")
            (size,) = unpack(chunk, at - end + len(chunk))
            at += 8 + size
            if at > self._last:
                self._at = at - size
                self._check_left(size, what)
        self._at = at
        self._file.seek(at)

    def _check_left(self, size: int, what: str) -> None:
        left = self._last - self._at
        if size > left:
            short = "truncated?" if self._file_bytes <= MAX_HEADER_BYTES else f"a header may have {MAX_HEADER_BYTES}"
            self._refuse(f"{what} has {size} bytes, and {left} are left: {short}")

    def _refuse(self, problem: str, offset: int | None = None) -> NoReturn:
        raise store_error(self._path, problem, self._at if offset is None else offset)
