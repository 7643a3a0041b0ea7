"""Shared by the GPU tests. Without a GPU the kernels run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import random

import pytest
from device_layers import DEVICE
from pool_fixtures import experts_of, open_pool
from torch_mesh.ops import device as devices

from torch_mesh import _testing

__all__ = ["experts_of", "open_pool"]


@pytest.fixture(autouse=True)
def _simulated_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card a simulated driver replaces CUDA's. Its streams have random delays."""
    if DEVICE.type == "cpu":
        seed = random.randrange(2**31)
        monkeypatch.setattr(devices, "open_driver", lambda device: _testing.simulated_device(seed, max_delay_us=200))
