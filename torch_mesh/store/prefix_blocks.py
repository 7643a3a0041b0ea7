"""Files of tensors that may be removed at any time: each has a checksum, and all together have a limit.

``read`` returns None for a file that is missing, damaged, or a copy of another one. A killed process leaves at most a
hidden file, which is removed later. Several processes may use a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_mesh import _C
from torch_mesh.store.disk_cache import note_use
from torch_mesh.system.atomic_files import new_file

_LOG = logging.getLogger(__name__)
_MAGIC = b"mesh-prefix-1\n\0\0"
_START = len(_MAGIC) + 8  # first byte that the checksum covers
_ALIGNMENT = 64
_FREED = 0.1  # fraction of the limit that is freed beyond the need, since listing all files takes time
_UNLISTED = 0.1  # fraction of the limit that is written between two listings, which find other processes' files
_ABANDONED = 600.0  # seconds after which a hidden file counts as one of a killed process


class PrefixBlocks:
    """The files in ``folder``. Any thread may read; only one may write.

    ``limit``: bytes of all models' folders together. Every further process that writes may exceed it by a tenth.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._total = 0  # bytes at the last listing plus those written since
        self._list_above = -1  # the total from which on all files are listed again
        self._damaged: set[str] = set()  # damaged files that may still exist, if removing them failed

    def has(self, name: str) -> bool:
        return name not in self._damaged and os.path.exists(self.folder / name)

    def read(self, name: str) -> tuple[dict[str, Tensor], int] | None:
        """The tensors of a file, and the bytes read; None if it cannot be used. Removes a damaged file."""
        path = self.folder / name
        try:
            # Unlike np.fromfile, readinto releases the GIL, so other threads can read meanwhile.
            with open(path, "rb", buffering=0) as file:
                data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
                data = data[: file.readinto(memoryview(data))]  # type: ignore[arg-type]
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(name, str(error))
            return None
        tensors = self._parsed(name, data)
        if tensors is None:
            self._refuse(name, "its checksum differs")
            return None
        return tensors, data.nbytes

    def touch(self, names: Sequence[str]) -> None:
        """Record that these files were used. The first of them is removed last."""
        now = time.time_ns()
        note_use(self.folder)
        for age, name in enumerate(names):
            with contextlib.suppress(OSError):  # another process has removed it
                os.utime(self.folder / name, ns=(now - age, now - age))

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Write a file, removing the least recently used ones to make room. Returns its bytes; 0 if it exceeds the
        limit. Raises OSError."""
        data = self._packed(name, tensors)
        if not self._evict_for(data.nbytes):
            return 0
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(self.folder / name) as file:
            file.write(data)
        self._damaged.discard(name)
        self._total += data.nbytes
        return data.nbytes

    def _refuse(self, name: str, why: str) -> None:
        _LOG.warning("%s is not used: %s. It is removed, and computed again.", self.folder / name, why)
        self._damaged.add(name)
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)

    def _checksum(self, name: str, content: memoryview) -> bytes:
        identity = hashlib.blake2b(f"{self.folder.name}/{name}".encode(), digest_size=16).digest()
        return _C.record_checksum(identity, 0, 0, content).to_bytes(8, "little")

    def _packed(self, name: str, tensors: Mapping[str, Tensor]) -> npt.NDArray[np.uint8]:
        """Magic, checksum, the header's length, the header, and values at multiples of 64 bytes."""
        arrays = {
            label: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for label, tensor in tensors.items()
        }
        starts: dict[str, int] = {}
        end = 0
        for label, array in arrays.items():
            starts[label] = end
            end = _aligned(end + array.numel())
        header = {
            label: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), starts[label]]
            for label, tensor in tensors.items()
        }
        text = json.dumps(header).encode()
        values = _aligned(_START + 4 + len(text))
        data = np.zeros(values + end, dtype=np.uint8)
        view = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs hide the buffer before Python 3.12
        view[: len(_MAGIC)] = _MAGIC
        view[_START : _START + 4 + len(text)] = len(text).to_bytes(4, "little") + text
        for label, array in arrays.items():
            start = values + starts[label]
            data[start : start + array.numel()] = array.numpy()
        view[len(_MAGIC) : _START] = self._checksum(name, view[_START:])
        return data

    def _parsed(self, name: str, data: npt.NDArray[np.uint8]) -> dict[str, Tensor] | None:
        view = memoryview(data)  # type: ignore[arg-type]
        if len(view) < _START + 4 or view[: len(_MAGIC)] != _MAGIC:
            return None
        if view[len(_MAGIC) : _START] != self._checksum(name, view[_START:]):
            return None
        length = int.from_bytes(view[_START : _START + 4], "little")
        values = _aligned(_START + 4 + length)
        tensors = {}
        for label, (kind, shape, start) in json.loads(bytes(view[_START + 4 : _START + 4 + length])).items():
            dtype = getattr(torch, kind)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            part = data[values + start : values + start + size]
            tensors[label] = torch.from_numpy(part).view(dtype).view(shape)
        return tensors

    def _evict_for(self, size: int) -> bool:
        if size > self.limit:
            return False
        if self._total + size <= self._list_above:
            return True
        files = sorted(_files(self.folder.parent))
        self._total = sum(nbytes for _, nbytes, _ in files)
        if self._total + size > self.limit:
            goal = max(0, self.limit - size - int(_FREED * self.limit))
            for _, nbytes, path in files:
                if self._total <= goal:
                    break
                with contextlib.suppress(FileNotFoundError):  # another process removed it first
                    path.unlink()
                self._total -= nbytes
        self._list_above = min(self.limit, self._total + int(_UNLISTED * self.limit))
        return True


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of last use in nanoseconds, bytes and path of each file of all models. Removes files that killed processes
    left."""
    now = time.time()
    for model in folder.iterdir() if folder.is_dir() else ():
        if model.name.startswith(".") or not model.is_dir():  # being removed
            continue
        try:
            paths = list(model.iterdir())
        except FileNotFoundError:  # another process removed it
            continue
        for path in paths:
            try:
                status = path.stat()
                if path.name.startswith(".") and now - status.st_mtime > _ABANDONED:
                    path.unlink()
                    continue
            except FileNotFoundError:
                continue
            yield status.st_mtime_ns, status.st_size, path
