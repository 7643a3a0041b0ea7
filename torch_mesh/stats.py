"""What a patched model's pool did."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from . import _C
from .counters import Stats, engine_stats
from .errors import MeshError
from .modules import patched_modules


def stats(model: nn.Module) -> Stats:
    """The counters of a patched model. Copies of a model share its pool, and so its counters.

    Raises MeshError for a model that is not patched.
    """
    return engine_stats(engines_of(model))


def reset_stats(model: nn.Module) -> None:
    """Sets the counters of a patched model to zero. Raises MeshError for a model that is not patched."""
    for engine in engines_of(model):
        engine.reset_stats()


def engines_of(model: nn.Module) -> Iterator[_C.Engine]:
    """The engine of each pool of a patched model, once. Raises MeshError for a model that is not patched."""
    pools = {id(module._mesh_pool): module._mesh_pool for module in patched_modules(model)}
    if not pools:
        raise MeshError(f"{type(model).__name__} is not patched: it has no statistics. See torch_mesh.patch.")
    return (pool.engine for pool in pools.values())
