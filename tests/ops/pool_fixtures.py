"""Fixtures: pools for the tests of the ops. Each pool is checked for leaks when its test ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_pools import OpenPool, Spec, TinyExperts, TinyPool, open_engine

import torch_mesh
from torch_mesh import _C


@pytest.fixture(scope="session")
def experts_of(request: pytest.FixtureRequest) -> Callable[[Spec], TinyExperts]:
    """The same random experts for a Spec throughout the run."""
    made: dict[Spec, TinyExperts] = {}

    def experts_of(spec: Spec) -> TinyExperts:
        if spec not in made:
            made[spec] = TinyExperts(spec, zlib.crc32(f"{request.config.option.seed} {spec}".encode()))
        return made[spec]

    return experts_of


@pytest.fixture
def open_pool(
    experts_of: Callable[[Spec], TinyExperts], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenPool]:
    """``open_pool(spec, in_memory=False, **options of _C.Engine)``; reads from a store unless ``in_memory``."""
    opened: list[TinyPool] = []

    def open_pool(spec: Spec, in_memory: bool = False, **options: Any) -> TinyPool:
        experts = experts_of(spec)
        source = None
        if not in_memory:
            store = experts.store(tmp_path_factory.mktemp(f"store-{spec.weights}") / "store")
            source = _C.Source(**store.source_arguments())
        opened.append(TinyPool(experts, open_engine(experts, source, **options)))
        return opened[-1]

    yield open_pool
    for pool in opened:
        _check_and_close(pool)


def _check_and_close(pool: TinyPool) -> None:
    try:
        pool.engine.drain()
        pool.engine.validate()
        assert pool.engine.pinned() == 0, "the test left slots pinned"
    except torch_mesh.PoolClosedError:
        pass  # the test closed it
    finally:
        pool.close()
