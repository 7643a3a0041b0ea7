"""Shared by the tests of residency."""

from __future__ import annotations

import pytest

from torch_mesh import _C


@pytest.fixture(params=["uring", "threads", "buffered"])
def reader(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and (why := _C.features()["uring"]):
        pytest.skip(why)
    return request.param
