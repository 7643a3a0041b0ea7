"""Reading all of a store and naming what is not as it was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from torch_mesh.store.header import store_error
from torch_mesh.store.manifest import Manifest, Store
from torch_mesh.store.writer import Progress, file_digest


@dataclass(frozen=True)
class Damage:
    """One bad record, or one bad other file (``layer`` and ``expert`` are None then)."""

    file: str
    problem: str
    layer: int | None = None
    expert: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        who = "" if self.layer is None else f"layer {self.layer}, expert {self.expert}: "
        return f"{who}{place}: {self.problem}"


def verify(store: Store, progress: Progress | None = None) -> Iterator[Damage]:
    """Every damage in ``store``, found by reading all of its records and the files beside them."""
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


def read_record(store: Store, layer: int, expert: int) -> bytes:
    """One record, checked. Raises ``StoreError`` for a damaged one."""
    manifest = store.manifest
    number, offset = manifest.place(layer, expert)
    path = store.folder / manifest.record_files[number].name
    with path.open("rb", buffering=0) as stream:
        record, problem = _read_record(manifest, stream.fileno(), layer, expert, offset)
    if problem is not None:
        raise store_error(path, f"layer {layer}, expert {expert}: {problem}", offset)
    return record


def _checks(store: Store) -> Iterator[tuple[Damage | None, int]]:
    """Per record and file: what is wrong with it, and its bytes."""
    for other in store.manifest.other_files:
        path = store.folder / other.name
        if not path.is_file():
            yield Damage(str(path), "is missing"), other.bytes
        elif path.stat().st_size != other.bytes:
            yield Damage(str(path), f"has {path.stat().st_size} bytes, not {other.bytes}"), other.bytes
        else:
            changed = file_digest(path) != other.digest
            yield Damage(str(path), "was changed since the conversion") if changed else None, other.bytes
    yield from _record_checks(store)


def _record_checks(store: Store) -> Iterator[tuple[Damage | None, int]]:
    manifest = store.manifest
    places = store.records()
    for file in manifest.record_files:
        path = store.folder / file.name
        with path.open("rb", buffering=0) as stream:
            for number in range(file.records):
                layer, expert = next(places)
                offset = file.data_start + number * manifest.record_bytes
                _, problem = _read_record(manifest, stream.fileno(), layer, expert, offset)
                damage = None if problem is None else Damage(str(path), problem, layer, expert, offset)
                yield damage, manifest.record_bytes


def _read_record(manifest: Manifest, descriptor: int, layer: int, expert: int, offset: int) -> tuple[bytes, str | None]:
    """The bytes, and what is wrong with them."""
    from torch_mesh import _C

    try:
        record = os.pread(descriptor, manifest.record_bytes, offset)
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}"
    if len(record) < manifest.record_bytes:
        return record, f"ends after {len(record)} of {manifest.record_bytes} bytes"
    checksum = _C.record_checksum(manifest.store_id, layer, expert, record)
    return record, None if checksum == int(manifest.checksums[layer, expert]) else "its checksum is another"
