"""Find damage in a store: all of it, or damage to parts that are not checked when they are read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from torch_mesh.errors import StoreError
from torch_mesh.store.dense_codes import is_codes_file
from torch_mesh.store.header import store_error
from torch_mesh.store.manifest import (
    BLOCK_BYTES,
    WEIGHT_SUFFIXES,
    Manifest,
    OtherFile,
    Store,
    block_checksum,
    config_text,
    file_digest,
    quantization_table,
)
from torch_mesh.store.store_plan import Progress
from torch_mesh.store.table_files import is_table_file
from torch_mesh.store.weight_files import variant_in, weight_files
from torch_mesh.system.background import Task, TaskThreads, usable_processors

_CONFIG_NAME = "config.json"
_IS_READ = (".json", ".jinja", ".model", ".txt")
_MISSING = "is missing"
_STRAY = "is no file of this store, but transformers would load it in place of the store's weights: remove it"
_Arguments = ParamSpec("_Arguments")
_MAX_THREADS = 8  # enough to saturate any disk


@dataclass(frozen=True)
class Damage:
    """One bad record, or one bad other file (``layer`` and ``expert`` are None then)."""

    file: str
    problem: str
    layer: int | None = None
    expert: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        subject = "" if self.layer is None else f"layer {self.layer}, expert {self.expert}: "
        return f"{subject}{where}: {self.problem}"


def verify(store: Store, progress: Progress | None = None) -> Iterator[Damage]:
    """Every damage in ``store``, found by reading all of its records and other files."""
    manifest = store.manifest
    count = manifest.shape.layers * manifest.shape.experts
    total = count * manifest.record_bytes + sum(file.bytes for file in manifest.other_files)
    done = 0
    for damage, size in _checks(store):
        done += size
        if progress is not None:
            progress(done, total)
        if damage is not None:
            yield damage


def check_other_files(
    store: Store, verify: str, codes: bool = True, cached: bool = False, loaded: Sequence[str] | None = None
) -> None:
    """Check a model's files, except for records and rows of tables, which are checked when they are read. ``codes``:
    also check the codes of linear layers, which only ``dense="codes"`` reads. ``cached``: the store is in the cache.
    ``loaded``: the weight files that transformers loads, if the caller knows; those of other variants are not checked.

    Raises ``StoreError`` for changed tensors, index or config.json, whose ``quantization_config`` users may change, and
    for weights that are not the store's. Warns about a changed tokenizer and the like. Checks nothing if ``verify`` is
    'never'.
    """
    if verify == "never":
        return
    files = {file.name: file for file in store.manifest.other_files if codes or not is_codes_file(file.name)}
    variants = {variant_in(Path(file).name) for file in loaded or ()}
    if variants and None not in variants:  # an index may name files of other names
        files = {name: file for name, file in files.items() if variant_in(name) in {None, *variants}}
    # These determine the model's output.
    essential = {name for name in files if name == _CONFIG_NAME or name.endswith(WEIGHT_SUFFIXES)}
    others = {name for name in files if name.endswith(_IS_READ)} - essential
    rows = {name for name in files if is_table_file(name)}
    problems = _problems(store, [files[name] for name in sorted((essential | others) - rows)])
    sizes = {name: _size_problem(store.folder / name, files[name]) for name in sorted(rows)}
    problems |= {name: problem for name, problem in sizes.items() if problem is not None}
    problems = {name: problem for name, problem in problems.items() if name in essential or problem != _MISSING}
    if _CONFIG_NAME in problems and _only_quantization_changed(store, files[_CONFIG_NAME]):
        del problems[_CONFIG_NAME]
    again = (
        f"remove the conversion with torch-mesh cache rm {store.folder.name}, and open the model again"
        if cached
        else "copy the model again or convert it with --force"
    )
    for name, problem in problems.items():
        if name in essential:
            raise store_error(
                store.folder / name,
                f"{problem}. Undo that, or {again}; give changes of the config to from_pretrained. With "
                "verify='never' the model opens as it is",
            )
    for path in _stray_weights(store, loaded):
        raise store_error(path, f"{_STRAY}. With verify='never' the model opens as it is")
    if problems:
        changed = "; ".join(f"{store.folder / name} {problem}" for name, problem in problems.items())
        warnings.warn(f"{changed}. If that was not you, {again}.", stacklevel=2)


def _stray_weights(store: Store, loaded: Sequence[str] | None = None) -> list[Path]:
    """The weight files that transformers loads and the manifest does not list. Empty for a store of records alone, and
    for a damaged index, which is a problem of its own."""
    own = {store.folder / file.name for file in store.manifest.other_files}
    paths: list[Path] = []
    with contextlib.suppress(StoreError):
        paths = weight_files(store.folder) if loaded is None else [Path(file) for file in loaded]
    return [path for path in paths if own and path not in own]


def _problems(store: Store, files: Sequence[OtherFile]) -> dict[str, str]:
    """The problems of files, by their names."""
    found: dict[str, str] = {}
    tasks: list[tuple[str, Task[str | None]]] = []
    with TaskThreads(min(_MAX_THREADS, usable_processors())) as threads:
        for file in files:
            path = store.folder / file.name
            if problem := _size_problem(path, file):
                found[file.name] = problem
            elif file.checksums is None:
                tasks.append((file.name, threads.submit(_digest_problem, path, file)))
            else:
                for number, checksum in enumerate(file.checksums.split()):
                    task = threads.submit(_block_problem, store, file, number, checksum)
                    tasks.append((file.name, task))
        for name, task in tasks:
            if problem := task.result():
                found.setdefault(name, problem)
    return found


def _names_os_errors(check: Callable[_Arguments, str | None]) -> Callable[_Arguments, str | None]:
    """``check``, for which a file that cannot be read is a problem as others are."""

    @functools.wraps(check)
    def checked(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> str | None:
        try:
            return check(*arguments, **named)
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    return checked


@_names_os_errors
def _size_problem(path: Path, file: OtherFile) -> str | None:
    if not path.is_file():
        return _MISSING
    size = path.stat().st_size
    return None if size == file.bytes else f"has {size} bytes, not {file.bytes}"


@_names_os_errors
def _digest_problem(path: Path, file: OtherFile) -> str | None:
    return None if file_digest(path) == file.digest else "was changed since the conversion"


@_names_os_errors
def _block_problem(store: Store, file: OtherFile, number: int, checksum: str) -> str | None:
    begin = number * BLOCK_BYTES
    with (store.folder / file.name).open("rb", buffering=0) as stream:
        block = os.pread(stream.fileno(), BLOCK_BYTES, begin)
    if block_checksum(store.manifest.store_id, file.name, number, block) == checksum:
        return None
    return f"was changed since the conversion, between bytes {begin} and {begin + len(block)}"


def _only_quantization_changed(store: Store, file: OtherFile) -> bool:
    """Whether config.json only differs in entries that users may change about torch_mesh."""
    written = quantization_table(store.manifest.weights, store.manifest.group_size)

    def restored(table: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            if not isinstance(value, dict)
            else written
            if name == "quantization_config" and value.get("quant_method") == "mesh"
            else restored(value)
            for name, value in table.items()
        }

    try:
        config = json.loads((store.folder / file.name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict):
        return False
    return hashlib.blake2b(config_text(restored(config)).encode(), digest_size=16).hexdigest() == file.digest


def read_record(store: Store, layer: int, expert: int) -> bytes:
    """One record, checked. Raises ``StoreError`` for a damaged one."""
    manifest = store.manifest
    number, offset = manifest.locate(layer, expert)
    path = store.folder / manifest.record_files[number].name
    record, problem = _read_record(manifest, path, layer, expert, offset)
    if problem is not None:
        raise store_error(path, f"layer {layer}, expert {expert}: {problem}", offset)
    return record


def _checks(store: Store) -> Iterator[tuple[Damage | None, int]]:
    """Per record and file: its damage, if any, and its bytes."""
    for other in store.manifest.other_files:
        path = store.folder / other.name
        problem = _size_problem(path, other) or _digest_problem(path, other)
        yield Damage(str(path), problem) if problem else None, other.bytes
    for path in _stray_weights(store):
        yield Damage(str(path), _STRAY), 0
    yield from _record_checks(store)


def _record_checks(store: Store) -> Iterator[tuple[Damage | None, int]]:
    manifest = store.manifest
    records = store.records()
    for file in manifest.record_files:
        path = store.folder / file.name
        for number in range(file.records):
            layer, expert = next(records)
            offset = file.data_start + number * manifest.record_bytes
            _, problem = _read_record(manifest, path, layer, expert, offset)
            damage = None if problem is None else Damage(str(path), problem, layer, expert, offset)
            yield damage, manifest.record_bytes


def _read_record(manifest: Manifest, path: Path, layer: int, expert: int, offset: int) -> tuple[bytes, str | None]:
    """The record's bytes, and their problem, if any."""
    from torch_mesh import _C

    try:
        with path.open("rb", buffering=0) as stream:
            record = os.pread(stream.fileno(), manifest.record_bytes, offset)
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}"
    if len(record) < manifest.record_bytes:
        return record, f"ends after {len(record)} of {manifest.record_bytes} bytes"
    checksum = _C.record_checksum(manifest.store_id, layer, expert, record)
    return record, None if checksum == int(manifest.checksums[layer, expert]) else "its checksum is another"
