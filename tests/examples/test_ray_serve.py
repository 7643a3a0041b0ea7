"""examples/ray_serve.py with two replicas, where Ray is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torch_mesh.pool.shared_pool import SharedPool
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import open_store

pytest.importorskip("ray.serve", reason="pip install 'ray[serve]'")
SCRIPT = Path(__file__).parents[2] / "examples" / "ray_serve.py"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_both_replicas_give_the_same_answer(tmp_path: Path, mesh_tiny: Path, shared: bool) -> None:
    convert(mesh_tiny, tmp_path / "store", "int4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "store"), "--port", str(port), "--ask", "The sea was"]
    pool = None
    if shared:
        command += ["--shared", str(tmp_path / "pool")]
        pool = SharedPool(open_store(tmp_path / "store"), tmp_path / "pool", 0.5, workers=2)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        if pool is not None:
            assert pool.engine.stats()["accesses"].sum() > 0
    finally:
        if pool is not None:
            pool.close()
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 8 and len({answer["text"] for answer in answers}) == 1
    assert len({answer["process"] for answer in answers}) == 2
