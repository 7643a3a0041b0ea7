"""Recorded routing: which experts each token used, layer by layer. docs/traces.md describes the file."""

from __future__ import annotations

import errno
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import MeshError
from torch_mesh.system.atomic_files import new_file

_MAX_FILE_BYTES = 4 * 2**30  # unpacked: a small zip file can hold any number of zeros
_MAX_EXPERTS = 65536


@dataclass(frozen=True)
class Trace:
    """Routing of ``len(offsets) - 1`` sequences, concatenated.

    ``ids`` int32 [tokens, layers, top_k], distinct within a layer; ``offsets`` int64 [sequences + 1], the first token
    of each sequence and the number of tokens; ``scores`` and ``lookahead`` float32 [tokens, layers, experts] or None:
    the router's probabilities, and those of a layer's router on the hidden states one layer before (0 where not
    recorded). ``forwards`` int64 [forwards], the first token of each forward, ascending from 0; None: each token was a
    decode step.
    """

    name: str
    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    experts: int
    scores: npt.NDArray[np.float32] | None = None
    lookahead: npt.NDArray[np.float32] | None = None
    forwards: npt.NDArray[np.int64] | None = None

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    def token_range(self, prompts: slice | None) -> tuple[int, int]:
        """First and last + 1 of the tokens of the sequences in ``prompts``; None: of all. Raises ValueError if there
        are none."""
        first, stop, _ = (prompts or slice(None)).indices(len(self.offsets) - 1)
        if first >= stop:
            raise ValueError(f"no prompts from {first} to {stop}; the trace has {len(self.offsets) - 1}")
        return int(self.offsets[first]), int(self.offsets[stop])


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises MeshError for an invalid file; OSError if it cannot be read."""
    path = Path(path)
    with path.open("rb") as file:
        try:
            held = _arrays(path, file)
        except MeshError:
            raise
        # numpy and zipfile raise any exception for garbage: TokenError, OverflowError, zlib.error, ...
        except Exception as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise MeshError(f"{path} is not a routing trace (an .npz file, see docs/traces.md): {error}") from error
    if strange := [name for name, values in held.items() if not isinstance(values, np.ndarray)]:
        raise MeshError(f"{path} is not a routing trace: {', '.join(strange)} is not an array (see docs/traces.md).")
    return _checked(path, held)


def _arrays(path: Path, file: BinaryIO) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > _MAX_FILE_BYTES:
        raise MeshError(f"{path} unpacks to {size} bytes; a trace has at most {_MAX_FILE_BYTES}.")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {
            name: arrays[name]
            for name in ("ids", "offsets", "experts", "scores", "lookahead", "forwards")
            if name in arrays
        }


def _checked(path: Path, held: dict[str, npt.NDArray[Any]]) -> Trace:
    def refuse(message: str) -> MeshError:
        return MeshError(f"{path}: {message}; docs/traces.md has the format.")

    ids = held.get("ids")
    if ids is None or ids.ndim != 3 or ids.size == 0 or ids.dtype.kind not in "iu":
        found = "missing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise refuse(f"'ids' must be integers [tokens, layers, top_k], none of them 0; it is {found}")
    experts = held.get("experts", np.int64(int(ids.max()) + 1))
    if experts.shape != () or experts.dtype.kind not in "iu" or not 1 <= int(experts) <= _MAX_EXPERTS:
        raise refuse(f"'experts' must be one integer from 1 to {_MAX_EXPERTS}; it is {experts}")
    if int(ids.min()) < 0 or int(ids.max()) >= int(experts):
        raise refuse(f"'ids' go from {ids.min()} to {ids.max()}; allowed: 0 to {int(experts) - 1}")
    ordered = np.sort(ids, axis=2)
    doubled = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
    if len(doubled):
        raise refuse(f"token {doubled[0][0]} uses an expert of layer {doubled[0][1]} twice")
    offsets = held.get("offsets", np.array([0, len(ids)]))
    rising = offsets.ndim == 1 and offsets.size >= 2 and offsets.dtype.kind in "iu"
    offsets = offsets.astype(np.int64) if rising else offsets
    if not rising or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
        raise refuse(f"'offsets' must rise from 0 to the number of tokens, {len(ids)}")
    forwards = held.get("forwards")
    if forwards is not None:
        integers = forwards.ndim == 1 and forwards.size >= 1 and forwards.dtype.kind in "iu"
        forwards = forwards.astype(np.int64) if integers else forwards
        if not integers or forwards[0] != 0 or forwards[-1] >= len(ids) or (np.diff(forwards) < 1).any():
            raise refuse(f"'forwards' must rise from 0 to below the number of tokens, {len(ids)}")
        if not np.isin(offsets[:-1], forwards).all():
            raise refuse("'forwards' lacks the first token of a sequence: a forward has tokens of one sequence")
    floats = {}
    for name in ("scores", "lookahead"):
        values = held.get(name)
        if values is None:
            continue
        shape = (*ids.shape[:2], int(experts))
        if values.dtype.kind != "f" or values.shape != shape:
            raise refuse(f"'{name}' must be floats {list(shape)}; it is {values.dtype} {list(values.shape)}")
        floats[name] = values.astype(np.float32)
        if not np.isfinite(floats[name]).all() or (floats[name] < 0).any():
            raise refuse(f"'{name}' must be finite and not negative")
    return Trace(path.stem, ids.astype(np.int32), offsets, int(experts), forwards=forwards, **floats)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace atomically."""
    arrays: dict[str, Any] = {
        "ids": trace.ids.astype(np.min_scalar_type(trace.experts - 1)),
        "offsets": trace.offsets.astype(np.int64),
        "experts": np.int64(trace.experts),
    }
    for name in ("scores", "lookahead"):
        if getattr(trace, name) is not None:
            arrays[name] = getattr(trace, name).astype(np.float16)
    if trace.forwards is not None:
        arrays["forwards"] = trace.forwards.astype(np.int64)
    with new_file(path) as file:
        np.savez_compressed(file, **arrays)
