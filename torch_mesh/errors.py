"""Every exception that torch_mesh raises on purpose, apart from ``ValueError`` and ``TypeError`` for arguments."""

from __future__ import annotations


class MeshError(RuntimeError):
    """Base class. ``layer``, ``expert``, ``file`` and ``offset`` say where, and are None where that is unknown."""

    layer: int | None = None
    expert: int | None = None
    file: str | None = None
    offset: int | None = None


class UnsupportedModelError(MeshError):
    """The model or checkpoint is of a kind that torch_mesh cannot run; the message lists those it can."""


class StoreError(MeshError):
    """A store or checkpoint on disk is damaged, incomplete, or not what its manifest says."""


class HubError(MeshError):
    """The Hugging Face hub does not give a model: it has none of that name, asks for a token, or cannot be reached.

    ``__cause__`` is what the hub's own library raised.
    """


class ReadError(MeshError):
    """Reading an expert failed; ``errno`` is the operating system's."""

    errno: int | None = None


class ChecksumError(MeshError):
    """The bytes of an expert are not those that were stored, after a second read."""


class ReadTimeoutError(MeshError):
    """A read or a wait for a slot took longer than the pool's time-out."""


class PoolClosedError(MeshError):
    """The pool was closed (``unpatch``, or the model was deleted), or the handle is of an older generation."""


class ForkedProcessError(MeshError):
    """The pool was used in a forked child of the process that opened it. Start the child with the spawn method."""


class LostRankError(MeshError):
    """Another rank of a model that is divided among processes has ended, or has not answered within the process group's time-out."""


class DeviceError(MeshError):
    """The driver of a GPU refused a call, or there is none."""
