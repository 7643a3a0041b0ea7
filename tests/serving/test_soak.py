"""The soak benchmark of a server, for seconds instead of minutes: no false errors, and real ones are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import MeshConfig

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=0.5), kept_bytes=2**20, log_level="error")


def test_clients_that_stop_reading_leave_a_server_that_answers(server: Any) -> None:
    import server_soak

    counts = server_soak.Counts()
    for _ in server_soak.quarters(server.address, 3, 2, counts):
        assert server.engine.is_healthy()
    assert counts.requests >= 12 and counts.errors == []  # three clients in four quarters, at least one request each
    body = {"prompt": "In the beginning", "max_tokens": 500, "stream": True}
    assert server_soak.send(server.address, "/v1/completions", body, 0.001, 1) is None
    assert server_soak.send(server.address, "/v1/completions", body | {"max_tokens": 2}, None, 0) is None
    for wrong, word in (({"max_tokens": -1}, "status 400"), ({"unknown": 1}, "status 400")):
        error = server_soak.send(server.address, "/v1/completions", body | wrong, None, 0)
        assert error is not None and word in error
