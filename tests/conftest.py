"""Shared by all tests: seeds that can be replayed, the small trained model, GPU skips, a guard against leaked files."""

from __future__ import annotations

import os

# Two processes of tests on two cores: threads of torch that spin while they wait take the core that the others need.
# OpenMP reads it when torch is imported, and so do the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import contextlib
import gc
import importlib.util
import logging
import random
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

# Without a card Triton's kernels run in its interpreter, on CPU tensors. Triton wants to know before it is imported,
# and torch imports it too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests count what is read: nothing beside that is read into empty slots. tests/residency/test_fill.py turns it on.
os.environ.setdefault("TORCH_MESH_FILL", "off")

REPOSITORY = Path(__file__).parents[1]

# Two busy cores make any deadline for one example a coin toss.
hypothesis.settings.register_profile("torch_mesh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torch_mesh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replays the random draws of an earlier run")
    parser.addoption(
        "--seeds", type=int, default=1, help="repeats what draws at random with so many seeds, from --seed on"
    )


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("torch_mesh._testing") is None:
        raise pytest.UsageError(
            "torch_mesh._testing, which no wheel has, is not built: `make build-test` or `pip install -e .`"
        )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.seed is None:  # CI sets the variable, which the engine's tests read too
        given = os.environ.get("TORCH_MESH_TEST_SEED")
        config.option.seed = int(given) if given else random.SystemRandom().randrange(2**31)
    if config.option.seeds > 1:
        if config.getoption("numprocesses", 0) or hasattr(config, "workerinput"):
            raise pytest.UsageError("--seeds runs in one process; add -n 0")
        config.pluginmanager.register(_ManySeeds(config))


def pytest_report_header(config: pytest.Config) -> str:
    last = config.option.seed + config.option.seeds - 1
    return f"seed: {config.option.seed}" + f" to {last}" * (config.option.seeds > 1)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports what is never collected as leaks


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _mark_device_tests(items)
    yield  # -m selects by the marks
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    # A long module that begins last runs alone.
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))


def _mark_device_tests(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.gpu)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
        elif item.get_closest_marker("device") and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.thorough)  # Triton's interpreter takes seconds for a kernel


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"replay with --seed={item.config.option.seed}"))
    return report


def _seed_of(item: pytest.Item) -> int:
    return zlib.crc32(f"{item.config.option.seed} {item.nodeid}".encode())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Differs from test to test and from run to run; ``--seed`` of a failed run brings it back."""
    return _seed_of(request.node)


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules and sessions, which may draw too
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed_generators(_seed_of(item))


@pytest.fixture(autouse=True)
def _default_verbosity() -> None:
    """An earlier test's server or command may have set another level for the whole process."""
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Once more: whether the fixtures of a module were made before must not change a test's draws."""
    _seed_generators(_seed_of(request.node))


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _generators() -> tuple[Any, ...]:
    """The states of the generators that every test finds seeded."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


class _Draws:
    """Whether something draws from the generators as a test finds them. What is drawn after a call of
    ``torch.manual_seed`` is what that call says: its seed is a constant, or of the fixture ``seed``."""

    def __init__(self) -> None:
        self.found = False
        self._reseeded = False
        self._before = _generators()

    def reseed(self) -> None:
        self.found |= not self._reseeded and _generators()[-1] != self._before[-1]
        self._reseeded = True

    def end(self) -> bool:
        kept = slice(-1 if self._reseeded else None)
        return self.found or _generators()[kept] != self._before[kept]


class _ManySeeds:
    """Runs every test with the first seed, and with the others those that drew: no other can end differently."""

    # Each depends on --seed without the generators of a test.
    _FIXTURES = frozenset({"seed", "rng", "experts_of"})

    def __init__(self, config: pytest.Config) -> None:
        self._seeds = range(config.option.seed, config.option.seed + config.option.seeds)
        self._drawing = set(self._FIXTURES)  # names of fixtures
        self._drew: set[pytest.Item] = set()
        self._watching: list[_Draws] = []
        self._manual_seed = torch.manual_seed
        torch.manual_seed = self._reseed

    def _reseed(self, seed: int) -> torch.Generator:
        for each in self._watching:
            each.reseed()
        return self._manual_seed(seed)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[_Draws]:
        draws = _Draws()
        self._watching.append(draws)
        try:
            yield draws
        finally:
            self._watching.remove(draws)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        items = session.items
        for seed in self._seeds:
            if not items:
                break
            session.config.option.seed = seed
            for item, following in zip(items, [*items[1:], None], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            items = [item for item in items if item in self._drew]
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
        with self._watch() as draws:
            value = yield
            if fixturedef.argname != "_seeded" and draws.end():
                self._drawing.add(fixturedef.argname)
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._watch() as draws:
            try:
                yield
            finally:
                fixtures = getattr(item, "fixturenames", ())
                by_hypothesis = hasattr(getattr(item, "obj", None), "hypothesis")
                if by_hypothesis or self._drawing & set(fixtures) or draws.end():
                    self._drew.add(item)


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


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Collecting garbage does not visit what was there before the module: hundreds of thousands of objects of libraries
    took half a second for each test that leaves a model to the collector.

    Not for each test: a fixture of the module that is a cycle would stay for ever.
    """
    gc.collect()
    gc.freeze()


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
