"""The manifest of a converted folder, and its checks. Independent of torch.

docs/architecture.md lists the files of a store. One that was written from a loaded model has only records and manifest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import StoreError
from torch_mesh.formats import FORMATS, GROUP_SIZES, TABLE_FORMATS, ExpertSizes, is_format, layer_formats
from torch_mesh.store.header import (
    ALIGNMENT,
    MAX_TENSORS,
    check_file_name,
    check_inner_name,
    encode_header,
    read_header,
    read_json_file,
    store_error,
    utf8_path,
)
from torch_mesh.store.weight_files import check_folder

MANIFEST_NAME = "mesh_manifest.json"
MAX_FILE_BYTES = 4 << 30
BLOCK_BYTES = 16 << 20  # block size of the checksums of files without records
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")  # users edit some of the other files
_MAX_PATH = 512
_MAX_SIZE = 1 << 20  # hidden, intermediate: as in csrc/store/record.h
_OPTIONAL = {"calibration", "tables"}  # not in manifests of earlier builds


@dataclass(frozen=True)
class Shape:
    """The experts of a model. ``activation`` is that of the fused kernel, one for each layer if they differ; None if
    the module's own gate must run."""

    layers: int
    experts: int  # per layer
    top_k: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    activation: str | tuple[str, ...] | None

    @property
    def sizes(self) -> ExpertSizes:
        return ExpertSizes(self.hidden, self.intermediate, self.gated, self.bias)

    def activation_of(self, layer: int) -> str | None:
        return self.activation[layer] if isinstance(self.activation, tuple) else self.activation

    def records(self) -> Iterator[tuple[int, int]]:
        """(layer, expert) in the order of the records of a store."""
        return itertools.product(range(self.layers), range(self.experts))

    def record_bytes(self, weights: str, group_size: int) -> int:
        """Bytes of one packed expert, padding included."""
        from torch_mesh import _C

        return _C.record_bytes(weights, group_size, *self.sizes)


@dataclass(frozen=True)
class RecordFile:
    """``records`` records from ``data_start`` on."""

    name: str
    bytes: int
    data_start: int
    records: int


@dataclass(frozen=True)
class OtherFile:
    """A file without records. ``digest`` is BLAKE2b-128 of its bytes.

    ``checksums`` are hexadecimal ``block_checksum``s, separated by spaces: twenty times as fast, for checks whenever a
    store is opened. None in a store of an earlier build.
    """

    name: str
    bytes: int
    digest: str
    checksums: str | None = None


@dataclass(frozen=True)
class Calibration:
    """The calibration of a store's records, docs/decisions/0057."""

    text: str  # BLAKE2b-128 of the token ids, int64
    tokens: int
    sequence_length: int
    method: str  # of packing, with its parameters


@dataclass(frozen=True)
class Manifest:
    """``checksums`` is uint64 [layers, experts], XXH3-64 over store id, layer, expert and the record's bytes."""

    store_id: bytes
    source_name: str
    source_fingerprint: str
    weights: str
    group_size: int  # 0: none
    record_bytes: int
    shape: Shape
    modules: tuple[str, ...]
    record_files: tuple[RecordFile, ...]
    other_files: tuple[OtherFile, ...]
    checksums: npt.NDArray[np.uint64]
    calibration: Calibration | None = None
    tables: str = ""  # the format that rows of embedding tables are rounded to; empty: they are as in the source

    @property
    def values_fingerprint(self) -> str:
        calibrated = "" if self.calibration is None else f" {self.calibration.text} {self.calibration.method}"
        return f"{self.source_fingerprint} {self.weights} {self.group_size}{calibrated}"

    def locate(self, layer: int, expert: int) -> tuple[int, int]:
        """Index in ``record_files`` and offset of a record."""
        index = layer * self.shape.experts + expert
        for number, file in enumerate(self.record_files):
            if index < file.records:
                return number, file.data_start + index * self.record_bytes
            index -= file.records
        raise IndexError(f"layer {layer}, expert {expert} of {self.shape.layers} x {self.shape.experts}")

    def check_format(self, folder: Path, weights: str, group_size: int | None) -> None:
        """Raises ValueError if the records in ``folder`` have another format or group size. None is any."""
        if weights not in ("auto", self.weights):
            raise ValueError(
                f"weights={weights!r}, but the experts in {folder} are {self.weights}: leave weights at 'auto', or "
                "give the original checkpoint."
            )
        if group_size not in (None, self.group_size) and FORMATS[self.weights].chosen_groups:
            raise ValueError(
                f"group_size={group_size}, but the experts in {folder} have groups of {self.group_size}: leave "
                "group_size out, or give the original checkpoint."
            )

    def to_json(self) -> str:
        table = fields_to_write(self)
        table["store_id"] = self.store_id.hex()
        table["checksums"] = [" ".join(f"{value:016x}" for value in row) for row in self.checksums.tolist()]
        table["digest"] = _digest(table)
        return json.dumps(table, indent=1) + "\n"


def fields_to_write(stored: Any) -> dict[str, Any]:
    """The fields of a manifest, or of a plan for one. Unset fields that earlier builds did not know are left out."""
    table = {"format_version": FORMATS[stored.weights].version, **asdict(stored)}
    return {name: value for name, value in table.items() if name not in ("calibration", "tables") or value}


@dataclass(frozen=True)
class Store:
    """A folder whose manifest, files and headers agree."""

    folder: Path
    manifest: Manifest

    def source_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``torch_mesh._C.Source``."""
        manifest = self.manifest
        found = [manifest.locate(layer, expert) for layer, expert in self.records()]
        extents = np.array([(file, offset, manifest.record_bytes) for file, offset in found], dtype=np.int64)
        return {
            "files": [(utf8_path(self.folder / file.name), file.bytes) for file in manifest.record_files],
            "extents": extents.reshape(manifest.shape.layers, manifest.shape.experts, 1, 3),
            "checksums": manifest.checksums,
            "store_id": manifest.store_id,
        }

    def records(self) -> Iterator[tuple[int, int]]:
        return self.manifest.shape.records()

    def layer_of(self, path: str) -> int:
        """The number of a model's layer.

        Raises ``StoreError`` for a missing layer.
        """
        modules = self.manifest.modules
        for index, module in enumerate(modules):
            if is_same_name(module, path):
                return index
        alike = [index for index, module in enumerate(modules) if _from_number(module) == _from_number(path)]
        if len(alike) == 1:
            return alike[0]
        raise store_error(self.folder, f"has no records for {path}; its modules are {modules[0]} to {modules[-1]}")


def is_same_name(one: str, other: str) -> bool:
    """Whether both name one module or parameter: in a part of a model, such as the text model, prefixes are missing."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _from_number(path: str) -> str:
    """``layers.3.mlp.experts`` of ``model.language_model.layers.3.mlp.experts``."""
    match = re.search(r"[^.]+\.\d+\..*", path)
    return path if match is None else match[0]


def block_checksum(store_id: bytes, name: str, number: int, block: bytes | memoryview) -> str:
    """Checksum of block ``number`` of a file without records: XXH3-64 over the store, the file's name, the number and
    the bytes."""
    from torch_mesh import _C

    salt = hashlib.blake2b(store_id + name.encode(), digest_size=16).digest()
    return f"{_C.record_checksum(salt, 0, number, block):016x}"


def described(path: Path, store_id: bytes) -> OtherFile:
    digest = hashlib.blake2b(digest_size=16)
    checksums: list[str] = []
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            checksums.append(block_checksum(store_id, path.name, len(checksums), block))
        size = stream.tell()
    return OtherFile(path.name, size, digest.hexdigest(), " ".join(checksums))


def file_digest(path: Path, before_each: Callable[[], None] = lambda: None) -> str:
    """BLAKE2b-128 of a file's bytes, in hex. ``before_each`` is called before each piece, and may raise."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            before_each()
            digest.update(chunk)
    return digest.hexdigest()


def quantization_table(weights: str, group_size: int) -> dict[str, Any]:
    """``quantization_config`` of a store's config.json."""
    table: dict[str, Any] = {"quant_method": "mesh", "weights": weights}
    return table | ({"group_size": group_size} if FORMATS[weights].chosen_groups else {})


def config_text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def is_store(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / MANIFEST_NAME).is_file()


def _check_record_bytes(path: Path, manifest: Manifest) -> None:
    """Needs the extension, which ``read_manifest`` does without."""
    try:
        expected = manifest.shape.record_bytes(manifest.weights, manifest.group_size)
    except ValueError as problem:  # impossible sizes
        raise store_error(path, str(problem)) from None
    if manifest.record_bytes != expected:
        raise store_error(
            path, f"a record has {manifest.record_bytes} bytes by 'record_bytes', and {expected} by 'shape'"
        )


def open_store(folder: str | os.PathLike[str]) -> Store:
    """The store in ``folder``, with everything checked but the records' bytes. Raises ``StoreError`` for
    inconsistencies."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    _check_record_bytes(folder / MANIFEST_NAME, manifest)
    first = 0
    for file in manifest.record_files:
        _check_record_file(folder, manifest, file, first)
        first += file.records
    return Store(folder, manifest)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises ``StoreError`` for a file of weights that is missing or has another size than the manifest says."""
    files: tuple[RecordFile | OtherFile, ...] = (*manifest.record_files, *manifest.other_files)
    for file in files:
        path = folder / file.name
        if not file.name.endswith(WEIGHT_SUFFIXES):
            continue
        if not path.is_file():
            raise store_error(path, "is missing")
        if (size := path.stat().st_size) != file.bytes:
            raise store_error(path, f"has {size} bytes, not {file.bytes}")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check it by itself."""
    path = folder / MANIFEST_NAME
    check_folder(folder)
    if not path.is_file():
        raise store_error(folder, f"is not a store: it has no {MANIFEST_NAME} (torch-mesh convert makes one)")
    return _parse_manifest(path, read_json_file(path))


def record_name(modules: tuple[str, ...], experts: int, index: int) -> str:
    """The tensor of the record of that index, counted layer by layer."""
    return f"{modules[index // experts]}.{index % experts}"


def plan_record_files(
    shape: Shape, modules: tuple[str, ...], record_bytes: int, store_id: bytes, max_file_bytes: int = MAX_FILE_BYTES
) -> list[tuple[RecordFile, bytes]]:
    """Distribute records over files; returns each file's header."""
    total = shape.layers * shape.experts
    each = max(1, max_file_bytes // record_bytes)
    count = -(-total // each)
    plan = []
    for number in range(count):
        indices = range(number * each, min(total, (number + 1) * each))
        header = record_file_header(shape, modules, record_bytes, store_id, indices)
        name = f"mesh-{number + 1:05d}-of-{count:05d}.safetensors"
        size = len(header) + len(indices) * record_bytes
        plan.append((RecordFile(name, size, len(header), len(indices)), header))
    return plan


def is_record_file(name: str) -> bool:
    """Whether a plan makes a file of this name."""
    return re.fullmatch(r"mesh-\d{5}-of-\d{5}\.safetensors", name) is not None


def record_file_header(
    shape: Shape, modules: tuple[str, ...], record_bytes: int, store_id: bytes, indices: range
) -> bytes:
    tensors = ((record_name(modules, shape.experts, i), "U8", (record_bytes,), record_bytes) for i in indices)
    return encode_header(tensors, {"format": "torch_mesh", "store_id": store_id.hex()})


def _digest(table: dict[str, object]) -> str:
    text = json.dumps({key: value for key, value in table.items() if key != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _parse_manifest(path: Path, table: object) -> Manifest:
    if not isinstance(table, dict):
        raise store_error(path, f"is a JSON {type(table).__name__}, not an object")
    _check_version(path, table)
    keys = {field.name for field in fields(Manifest)} | {"format_version", "digest"}
    if set(table) | _OPTIONAL != keys:
        raise store_error(
            path, f"lacks {sorted(keys - _OPTIONAL - set(table))} and has the unknown {sorted(set(table) - keys)}"
        )
    if table["digest"] != _digest(table):
        raise store_error(path, "was changed after it was written: its digest differs")
    try:
        return _typed_manifest(path, table)
    except (TypeError, ValueError, KeyError, AttributeError) as problem:
        raise store_error(path, f"is malformed: {problem}") from None


def is_of_another_release(folder: Path) -> bool:
    """Whether the manifest has records of a kind or version that this release does not read."""
    path = folder / MANIFEST_NAME
    try:
        table = read_json_file(path)
    except StoreError:
        return False
    if not isinstance(table, dict) or "format_version" not in table:
        return False
    return (table.get("weights"), table["format_version"]) not in [
        (name, each.version) for name, each in FORMATS.items()
    ]


def _check_version(path: Path, table: dict[str, Any]) -> None:
    weights, version = table.get("weights"), table.get("format_version")
    if not is_format(weights):  # ``weights`` may have any type
        raise store_error(path, f"holds {weights!r} records; this release reads {', '.join(FORMATS)}")
    if version != FORMATS[weights].version:
        raise store_error(
            path,
            f"holds {weights} records of format version {version!r}; this release reads version "
            f"{FORMATS[weights].version} of them: convert the original checkpoint again (torch-mesh convert; with "
            "--force it replaces this folder)",
        )


def _typed_manifest(path: Path, table: dict[str, Any]) -> Manifest:
    shape = _typed_shape(table["shape"])
    weights, group_size = table["weights"], _integer(table, "group_size", 0, max(GROUP_SIZES))
    if group_size not in FORMATS[weights].group_sizes:
        raise ValueError(
            f"'group_size' is {group_size} of {weights} records; it is one of {FORMATS[weights].group_sizes}"
        )
    if len(own := layer_formats(weights)) not in (1, shape.layers):
        raise ValueError(f"'weights' names the formats of {len(own)} layers, and there are {shape.layers}")
    record_bytes = _integer(table, "record_bytes", ALIGNMENT, 1 << 40)
    modules = table["modules"]
    if not isinstance(modules, list) or len(modules) != shape.layers or not all(map(_is_module_path, modules)):
        raise ValueError(f"'modules' must name {shape.layers} modules")
    if len(set(modules)) != len(modules):
        raise ValueError("'modules' names one module twice")
    record_files = tuple(_typed_record_file(path, entry, record_bytes) for entry in table["record_files"])
    other_files = tuple(_typed_other_file(path, entry) for entry in table["other_files"])
    names = [file.name for file in record_files] + [file.name for file in other_files]
    if len(set(names)) != len(names):
        raise ValueError("one file is listed twice")
    if sum(file.records for file in record_files) != shape.layers * shape.experts:
        raise ValueError(f"the files hold other than {shape.layers} x {shape.experts} records")
    return Manifest(
        store_id=_hex_bytes(table["store_id"], 16),
        source_name=_string(table, "source_name"),
        source_fingerprint=_string(table, "source_fingerprint"),
        weights=weights,
        group_size=group_size,
        record_bytes=record_bytes,
        shape=shape,
        modules=tuple(modules),
        record_files=record_files,
        other_files=other_files,
        checksums=_typed_checksums(table["checksums"], shape),
        calibration=_typed_calibration(table["calibration"]) if "calibration" in table else None,
        tables=_typed_tables(table["tables"]) if "tables" in table else "",
    )


def _typed_tables(weights: object) -> str:
    if weights not in TABLE_FORMATS:
        raise ValueError(f"'tables' is {weights!r}; this release reads {', '.join(TABLE_FORMATS)}")
    return str(weights)


def _typed_calibration(table: dict[str, Any]) -> Calibration:
    if set(table) != {field.name for field in fields(Calibration)}:
        raise ValueError("'calibration' has other keys than it should")
    return Calibration(
        text=_hex_bytes(table["text"], 16).hex(),
        tokens=_integer(table, "tokens", 1, 1 << 40),
        sequence_length=_integer(table, "sequence_length", 1, 1 << 40),
        method=_string(table, "method"),
    )


def _is_module_path(path: object) -> bool:
    return isinstance(path, str) and path.isprintable() and 0 < len(path) <= _MAX_PATH


def _typed_shape(table: dict[str, Any]) -> Shape:
    if set(table) != {field.name for field in fields(Shape)}:
        raise ValueError(f"'shape' has the keys {sorted(table)}")
    shape = Shape(
        layers=_integer(table, "layers", 1, MAX_TENSORS),
        experts=_integer(table, "experts", 1, MAX_TENSORS),
        top_k=_integer(table, "top_k", 1, MAX_TENSORS),
        hidden=_integer(table, "hidden", 1, _MAX_SIZE),
        intermediate=_integer(table, "intermediate", 1, _MAX_SIZE),
        gated=_boolean(table, "gated"),
        bias=_boolean(table, "bias"),
        activation=_typed_activation(table),
    )
    if isinstance(shape.activation, tuple) and len(shape.activation) != shape.layers:
        raise ValueError(f"'activation' has {len(shape.activation)} names for {shape.layers} layers")
    if shape.layers * shape.experts > MAX_TENSORS or shape.top_k > shape.experts:
        raise ValueError(f"top {shape.top_k} of {shape.experts} experts in {shape.layers} layers is out of bounds")
    return shape


def _typed_activation(table: dict[str, Any]) -> str | tuple[str, ...] | None:
    given = table["activation"]
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return tuple(given)
    return None if given is None else _string(table, "activation")


def _typed_record_file(path: Path, entry: dict[str, Any], record_bytes: int) -> RecordFile:
    file = RecordFile(
        name=_file_name(path, entry, check_file_name),
        bytes=_integer(entry, "bytes", 1, 1 << 60),
        data_start=_integer(entry, "data_start", ALIGNMENT, 1 << 30),
        records=_integer(entry, "records", 1, MAX_TENSORS),
    )
    if file.data_start % ALIGNMENT or file.bytes != file.data_start + file.records * record_bytes:
        raise ValueError(f"the sizes of {file.name} do not add up")
    return file


def _typed_other_file(path: Path, entry: dict[str, Any]) -> OtherFile:
    file = OtherFile(
        _file_name(path, entry, check_inner_name),
        _integer(entry, "bytes", 0, 1 << 60),
        _hex_bytes(entry["digest"], 16).hex(),
        entry.get("checksums"),
    )
    if file.checksums is not None:
        count = len(_checksums(file.checksums))
        if count != -(-file.bytes // BLOCK_BYTES):
            raise ValueError(f"{file.name} has {file.bytes} bytes and {count} checksums")
    return file


def _checksums(text: object) -> list[str]:
    words = text.split(" ") if isinstance(text, str) and text else []
    if not isinstance(text, str) or not all(re.fullmatch("[0-9a-f]{16}", word) for word in words):
        raise ValueError("there are checksums that are not numbers of 16 hexadecimal digits")
    return words


def _typed_checksums(rows: list[str], shape: Shape) -> npt.NDArray[np.uint64]:
    if len(rows) != shape.layers:
        raise ValueError(f"checksums of {len(rows)} layers, not {shape.layers}")
    values = np.empty((shape.layers, shape.experts), dtype=np.uint64)
    for layer, row in enumerate(rows):
        words = _checksums(row)
        if len(words) != shape.experts:
            raise ValueError(f"layer {layer} has {len(words)} checksums and {shape.experts} experts")
        values[layer] = [int(word, 16) for word in words]
    return values


def _check_record_file(folder: Path, manifest: Manifest, file: RecordFile, first: int) -> None:
    path = folder / file.name
    header = read_header(path)
    if (header.file_bytes, header.data_start, len(header.tensors)) != (file.bytes, file.data_start, file.records):
        raise store_error(
            path,
            f"has {header.file_bytes} bytes and {len(header.tensors)} tensors from byte {header.data_start} on; "
            f"the manifest says {file.bytes}, {file.records} and {file.data_start}",
        )
    expected = record_file_header(
        manifest.shape, manifest.modules, manifest.record_bytes, manifest.store_id, range(first, first + file.records)
    )
    with path.open("rb") as stream:
        if stream.read(len(expected)) != expected:
            raise store_error(path, "has another header than the manifest describes: a file of another store?", 0)


def _integer(table: dict[str, Any], key: str, low: int, high: int) -> int:
    value = table[key]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key!r} is {value!r}; it must be an integer in [{low}, {high}]")
    return value


def _boolean(table: dict[str, Any], key: str) -> bool:
    if type(table[key]) is not bool:
        raise ValueError(f"{key!r} is {table[key]!r}; it must be true or false")
    return table[key]


def _string(table: dict[str, Any], key: str) -> str:
    if not isinstance(table[key], str):
        raise TypeError(f"{key!r} is {table[key]!r}; it must be a string")
    return table[key]


def _hex_bytes(text: object, count: int) -> bytes:
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * count}}}", text):
        raise ValueError(f"{text!r} is not {2 * count} hexadecimal digits")
    return bytes.fromhex(text)


def _file_name(path: Path, entry: dict[str, Any], check: Callable[[Path, object, str], None]) -> str:
    check(path, entry["name"], "a part of the store")
    return entry["name"]
