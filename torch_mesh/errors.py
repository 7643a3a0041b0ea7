"""Exceptions of torch_mesh, besides ``ValueError`` and ``TypeError`` for arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def prefix_errors_with(weights: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the name of the weights that it is about."""
    try:
        yield
    except ValueError as error:
        kind = NoRoomError if isinstance(error, NoRoomError) else ValueError
        raise kind(f"{weights}: {error}") from error


class NoRoomError(ValueError):
    """Weights have no room in bf12, since their magnitudes differ too much."""


class MeshError(RuntimeError):
    """Base class. ``layer``, ``expert``, ``file`` and ``offset`` locate the error, None where unknown."""

    layer: int | None = None
    expert: int | None = None
    file: str | None = None
    offset: int | None = None


class UnsupportedModelError(MeshError):
    """The model or checkpoint is of an unsupported kind; the message lists supported ones."""


class StoreError(MeshError):
    """A store or checkpoint on disk is damaged, incomplete, or does not match its manifest."""


class HubError(MeshError):
    """The Hugging Face hub does not provide a model: unknown name, missing token, or no connection.

    ``__cause__`` is the error of the hub's own library.
    """


class ReadError(MeshError):
    """Reading an expert failed; ``errno`` is the operating system's."""

    errno: int | None = None


class ChecksumError(MeshError):
    """The bytes of an expert differ from those stored, after a second read."""


class ReadTimeoutError(MeshError):
    """A read or a wait for a slot exceeded the pool's time-out."""


class PoolClosedError(MeshError):
    """The pool was closed: ``unpatch``, or the model was deleted."""


class ForkedProcessError(MeshError):
    """The pool was used in a forked child of the process that opened it. Start the child with the spawn method."""


class LostRankError(MeshError):
    """Another rank of a distributed model has ended, or has not answered within the process group's time-out."""


class DeviceError(MeshError):
    """The driver of a GPU refused a call, or there is none."""
