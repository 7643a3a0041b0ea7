"""Common parts of all formats: a weight in several tensors, and how it is read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from torch_mesh.formats import BF16_ERROR, FORMATS
from torch_mesh.store.dtypes import DTYPES
from torch_mesh.store.gguf import BLOCK_TYPES
from torch_mesh.store.header import Tensor, read_range, store_error

Shape = tuple[int, ...]

_UNSUPPORTED = ("U16", "U32", "U64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
_READ_AS = {name: dtype for name, dtype in DTYPES.items() if name not in _UNSUPPORTED} | dict.fromkeys(
    BLOCK_TYPES, torch.uint8
)
SCALE_TYPES: Mapping[str, str] = {
    "BF16": "bf16",
    "F16": "fp16",
    "F32": "fp32",
    "U8": "e8m0",
    "F8_E8M0": "e8m0",
    "F8_E4M3": "e4m3",
}
EXPONENTS = ("U8", "F8_E8M0")  # one byte with a power of two
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class MisfitError(Exception):
    """One tensor of a weight violates its format."""

    def __init__(self, role: str, problem: str) -> None:
        super().__init__(problem)
        self.role = role


@dataclass(frozen=True)
class Nearest:
    """The nearest format of ours for a weight, and why."""

    weights: str
    group_size: int
    error: float  # typical relative RMS error; 0: exact
    why: str

    @property
    def exact(self) -> bool:
        return self.error == 0


@dataclass(frozen=True)
class Scales:
    """Scales of codes: one for each ``rows`` x ``columns`` weights, and the strides in bytes."""

    type: str  # 'bf16', 'fp16', 'fp32', 'e8m0', 'e4m3'
    rows: int
    columns: int
    row_bytes: int
    column_bytes: int
    part: str = "scale"  # the part that holds them


@dataclass(frozen=True)
class Codes:
    """The layout of a weight's codes and scales in its parts, if a record can hold them unchanged; in a stack, of one
    expert.

    ``kind`` is 'int4', 'int8', 'fp8', 'mxfp4', 'nvfp4' or a type of GGUF; ``groups`` are the possible group sizes of
    records, best first: smaller groups repeat scales. ``run`` inputs are adjacent: one code per byte, two per byte
    ('pairs', the first in the lower bits), their first half in the lower bits and the second in the upper ones
    ('halves'), or all that a block of GGUF has ('blocks', without ``scales``).
    """

    kind: str
    groups: tuple[int, ...]
    order: str  # 'bytes', 'pairs', 'halves', 'blocks'
    run: int
    run_bytes: int
    row_bytes: int
    scales: Scales | None
    offset: int = 0  # of the first code in the part 'codes'
    flip: int = 0  # bits of each code that are inverted in a record
    factor: str | None = None  # the part that multiplies all scales
    divisor: str | None = None  # the part that divides them
    zeros: int | None = None  # required value of each byte of the part 'zeros', since codes are symmetric
    group_index: str | None = None  # the part whose values have to show that groups are in order


# Groups of 32 have the least error for their bytes: docs/decisions/0040.
_INT8_ERROR = FORMATS["int8"].errors[32]
_INT8 = Nearest("int8", 32, _INT8_ERROR, f"which rounds by about {_INT8_ERROR:.1%} of a weight's typical size")
IN_BF16 = Nearest("bf16", 0, 0.0, "which holds every value exactly")


def in_int8(what: str) -> Nearest:
    """The nearest format for values that no format of ours holds exactly, because of ``what``."""
    return replace(_INT8, why=f"{_INT8.why}; {what}")


def integer_codes(bits: int, scales: Scales, depth: int, **packing: Any) -> Codes | None:
    """Codes of symmetric integers with scales of bf16, fp16 or fp32. None if no group of ours lies within one of
    theirs."""
    groups = tuple(size for size in (128, 64, 32) if scales.columns % size == 0)
    if not groups and scales.columns < depth:
        return None
    # A row with a single scale may have a partial last group.
    return Codes(f"int{bits}", groups or (32,), "pairs" if bits == 4 else "bytes", scales=scales, **packing)


def scale_type(scale: Tensor) -> str:
    return SCALE_TYPES[scale.dtype]


def nearest_to(dtype: str) -> Nearest:
    """The nearest format for unquantized weights."""
    if dtype.lower() == "bf16":
        return IN_BF16
    return Nearest("bf16", 0, BF16_ERROR, f"to which {dtype} weights are rounded")


class Layout(ABC):
    """The format of one weight in several tensors.

    A weight is found by the tensor with the role 'codes', whose name ends in ``ending``. The unquantized weight has
    ``becomes`` instead, and the weight's other parts one of the endings that ``others`` has for their role.
    """

    title: str
    quantized: ClassVar[bool] = True
    ending: str = ""
    becomes: str = ""
    others: ClassVar[Mapping[str, Sequence[str]]] = {}
    required: ClassVar[frozenset[str]] = frozenset()  # roles besides the codes
    dtype: str | None = None  # of the codes, if it tells this layout from others
    scale_dtypes: ClassVar[Sequence[str]] = ()  # dtypes of the part 'scale', if they tell this layout from others
    is_transposed: ClassVar[bool] = False  # ``read`` gives the transpose of the model's weight

    def weight_of(self, name: str, tensors: Mapping[str, Tensor]) -> str | None:
        """The unquantized name of the weight with the codes tensor ``name``; None if ``name`` is not of this layout."""
        if not name.endswith(self.ending) or self.dtype not in (None, tensors[name].dtype):
            return None
        scales = [tensors[scale] for scale in self.companions(name).get("scale", ()) if scale in tensors]
        if self.scale_dtypes and not (scales and scales[0].dtype in self.scale_dtypes):
            return None
        return name.removesuffix(self.ending) + self.becomes

    def companions(self, name: str) -> Mapping[str, Sequence[str]]:
        """Per role, the possible names of the tensors that belong to the codes ``name``."""
        stem = name.removesuffix(self.ending)
        return {role: [stem + ending for ending in endings] for role, endings in self.others.items()}

    @abstractmethod
    def shape(self, parts: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> Shape:
        """The weight's shape. ``read`` reads a small part, if necessary. Raises ``MisfitError`` for inconsistent
        parts."""

    @abstractmethod
    def values(self, parts: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
        """Dequantize to fp32. Raises ``MisfitError`` for scales and codes that are not finite."""

    def codes(self, parts: Mapping[str, Tensor], shape: Shape) -> Codes | None:
        """The weight's codes, from headers only. None if no record holds them."""
        return None

    @abstractmethod
    def rounded(self, parts: Mapping[str, Tensor], shape: Shape) -> Nearest:
        """The format nearest to its values, from headers only."""


@dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint: ``shape`` as stored, [out, in], preceded by the experts of a stack."""

    name: str
    shape: Shape
    layout: Layout
    parts: Mapping[str, tuple[Path, Tensor]]

    @property
    def codes(self) -> tuple[Path, Tensor]:
        return self.parts["codes"]

    @property
    def is_plain(self) -> bool:
        """Whether the weight is not quantized."""
        return not self.layout.quantized

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.bytes for _, tensor in self.parts.values())

    def read(self, expert: int | None = None) -> torch.Tensor:
        """Read the values in fp32; of a stack, those of one expert or of all. Raises ``StoreError``."""
        shape = self.shape if expert is None else self.shape[1:]
        # While transformers builds a model, the default device is "meta".
        with torch.device("cpu"), _named(self.parts):
            return self.layout.values({role: self._read_part(role, expert) for role in self.parts}, shape)

    def rounded(self) -> Nearest:
        return self.layout.rounded(self._headers(), self.shape)

    def passthrough_codes(self) -> Codes | None:
        return self.layout.codes(self._headers(), self.shape)

    def part(self, role: str, expert: int | None) -> tuple[Path, Tensor]:
        """The location of a part; in a stack, that of one expert's range, unless all experts share the part."""
        path, tensor = self.parts[role]
        if expert is None or not tensor.shape or tensor.shape[0] != self.shape[0]:
            return path, tensor
        size = tensor.bytes // tensor.shape[0]
        return path, replace(tensor, offset=tensor.offset + expert * size, bytes=size, shape=tensor.shape[1:])

    def pieces(self, expert: int | None) -> tuple[tuple[Path, int, int], ...]:
        """The ranges that ``read`` reads: file, offset and bytes of each part."""
        found = (self.part(role, expert) for role in self.parts)
        return tuple((path, tensor.offset, tensor.bytes) for path, tensor in found)

    def _headers(self) -> dict[str, Tensor]:
        return {role: tensor for role, (_, tensor) in self.parts.items()}

    def _read_part(self, role: str, expert: int | None) -> torch.Tensor:
        return read_tensor(*self.part(role, expert))


def make_weight(name: str, layout: Layout, parts: Mapping[str, tuple[Path, Tensor]]) -> Weight:
    """Raises ``StoreError`` for inconsistent dtypes and shapes."""
    with _named(parts):
        for role, (_, tensor) in parts.items():
            if tensor.dtype not in _READ_AS:
                raise MisfitError(role, f"is {tensor.dtype}, which is not supported here")
        shape = layout.shape(
            {role: tensor for role, (_, tensor) in parts.items()}, lambda role: read_tensor(*parts[role])
        )
        if any(size == 0 for size in shape):
            raise MisfitError("codes", f"has the shape {parts['codes'][1].shape}, which is empty")
    return Weight(name, shape, layout, parts)


def read_tensor(path: Path, tensor: Tensor) -> torch.Tensor:
    """Read ``tensor`` of a file. Raises ``StoreError`` if the file ends before it."""
    data = read_range(path, tensor.offset, tensor.bytes)
    return torch.frombuffer(data, dtype=_READ_AS[tensor.dtype]).reshape(tensor.shape)


@contextmanager
def _named(parts: Mapping[str, tuple[Path, Tensor]]) -> Iterator[None]:
    """Adds file and tensor to the message of a ``MisfitError``."""
    try:
        yield
    except MisfitError as problem:
        path, tensor = parts[problem.role]
        raise store_error(path, f"tensor {tensor.name!r} {problem}", tensor.offset) from None


def check_dtype(parts: Mapping[str, Tensor], role: str, *allowed: str) -> None:
    if role in parts and parts[role].dtype not in allowed:
        raise MisfitError(role, f"is {parts[role].dtype}, not {' or '.join(allowed)}")


def check_shape(parts: Mapping[str, Tensor], role: str, *allowed: Shape) -> None:
    if role in parts and parts[role].shape not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        codes = parts["codes"]
        raise MisfitError(
            role,
            f"has the shape {list(parts[role].shape)}; {expected} belongs to {codes.name!r} of {list(codes.shape)}",
        )


def check_rank(parts: Mapping[str, Tensor], *allowed: int) -> None:
    codes = parts["codes"]
    if len(codes.shape) not in allowed:
        raise MisfitError("codes", f"has the shape {list(codes.shape)}, which is not that of a matrix")


def scale_values(parts: Mapping[str, torch.Tensor], role: str = "scale") -> torch.Tensor:
    """Scales in fp32; one-byte scales are powers of two. Raises ``MisfitError`` for scales that are not finite."""
    scale = parts[role]
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scale.view(torch.uint8)
        if bool((exponents == 255).any()):
            raise MisfitError(role, "has the scale 255, which is not a number")
        return _powers().index_select(0, exponents.flatten().int()).reshape(exponents.shape)
    scale = scale.float()
    if not bool(torch.isfinite(scale).all()):
        raise MisfitError(role, "holds a scale that is not finite")
    return scale


def e4m3_values(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    values = parts["codes"].float()
    if bool(values.sum().isnan()):  # NaN propagates; E4M3 has no infinities
        raise MisfitError("codes", "holds a weight that is not a number")
    return values


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    """The low four bits of each byte, then its high ones."""
    flat = codes.view(torch.uint8).flatten().int()
    return _fp4_pairs().index_select(0, flat).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


@cache
def _powers() -> torch.Tensor:
    """The powers of bytes 0 to 254; 2^-127 for byte 0 is subnormal in fp32."""
    return torch.exp2(torch.arange(255, dtype=torch.float64, device="cpu") - 127).float()


@cache
def _fp4_pairs() -> torch.Tensor:
    table = torch.tensor(_FP4, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1)


def scaled_in_groups(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``values`` [..., in], in place times ``scale`` [..., groups]."""
    grouped = values.view(*scale.shape, values.shape[-1] // scale.shape[-1])
    grouped *= scale.unsqueeze(-1)
    return values


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, columns] as uint8 [rows, columns * 32 / bits]: the lowest bits of each word first."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def is_multiple(number: int, of: int) -> bool:
    return of > 0 and number % of == 0


def grid(rows: int, columns: int, block: tuple[int, int]) -> Shape:
    """The number of blocks, including partial ones."""
    return math.ceil(rows / block[0]), math.ceil(columns / block[1])
