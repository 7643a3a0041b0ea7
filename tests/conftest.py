"""Shared by all tests: seeds that can be replayed, the small trained model, GPU skips, a guard against leaked files."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# Without a card Triton's kernels run in its interpreter, on CPU tensors. Triton wants to know before it is imported, and torch
# imports it too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).parents[1]

# Two busy cores make any deadline for one example a coin toss.
hypothesis.settings.register_profile("torch_mesh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torch_mesh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replays the random draws of an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("torch_mesh._testing") is None:
        raise pytest.UsageError(
            "torch_mesh._testing is not built: `make build-test`, or `python setup.py build_ext --inplace` in a checkout"
        )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.seed is None:  # CI sets the variable, which the engine's tests read too
        given = os.environ.get("TORCH_MESH_TEST_SEED")
        config.option.seed = int(given) if given else random.SystemRandom().randrange(2**31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.gpu)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"replay with --seed={item.config.option.seed}"))
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Differs from test to test and from run to run; ``--seed`` of a failed run brings it back."""
    return zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def mesh_tiny() -> Path:
    """The folder of the small trained Qwen3-MoE that the project ships."""
    return REPOSITORY / "examples" / "mesh-tiny"


def _engine_files() -> set[tuple[str, str]]:
    """Descriptors that only an open pool or conversion holds: rings, checkpoints and stores."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the one that lists the folder
            continue
        if "io_uring" in target or ".safetensors" in target:
            found.add((descriptor, target))
    return found


@pytest.fixture(autouse=True)
def _no_leaked_files(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    before = _engine_files()
    yield
    # A library that is imported here may log an exception, which holds the frames of who imported it.
    caplog.get_records("call").clear()
    leaked = _engine_files() - before
    deadline = time.monotonic() + 5
    while leaked and time.monotonic() < deadline:
        gc.collect()  # models sit in reference cycles; only then is their pool closed
        leaked = _engine_files() - before
    assert not leaked, f"the test left files open: {sorted(target for _, target in leaked)}"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """For tests that compile: nothing that others compiled counts against torch's limits, or in its counters."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
