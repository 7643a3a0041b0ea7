"""Shared by all tests: seeds that can be replayed, the small trained model, GPU skips, and a check for leaked files."""

from __future__ import annotations

import os

# Two test processes run on two cores. Threads of torch that spin while they wait would take the other process's core.
# OpenMP reads the variable when torch is imported, also in the processes that tests start.
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

# Without a card Triton's kernels run in its interpreter, on CPU tensors. The variable must be set before Triton is
# imported, which torch does too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests count reads, so the engine must not fill empty slots in the background. tests/residency/test_fill.py turns it
# on.
os.environ.setdefault("TORCH_MESH_FILL", "off")

REPOSITORY = Path(__file__).parents[1]

# On two busy cores an example may exceed any deadline.
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
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts background processes so
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
    gc.unfreeze()  # otherwise nanobind reports frozen objects as leaks


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _mark_device_tests(items)
    yield  # -m selects by the marks
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    # Long modules begin first, so that none is left running alone at the end.
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
    """Resets the log level, which a server or command in an earlier test may have set for the whole process."""
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seeds once more, after the fixtures of the module: a test's draws must not depend on whether these ran now."""
    _seed_generators(_seed_of(request.node))


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _generators() -> tuple[Any, ...]:
    """The states of the generators that are seeded before every test."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


class _Draws:
    """Detects draws from the generators as seeded before the test. Draws after a call of ``torch.manual_seed`` do not
    count: its seed is a constant, or comes from the fixture ``seed``."""

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
    """Runs every test with the first seed. With the other seeds it runs only the tests that drew, for no other test can
    end differently."""

    # Fixtures that depend on --seed without drawing from the seeded generators.
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


@pytest.fixture(scope="session")
def int8_store(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model converted to int8. Tests do not write there."""
    from torch_mesh.store.convert import convert

    return convert(mesh_tiny, tmp_path_factory.mktemp("store") / "int8", "int8").store.folder


def _engine_files() -> set[tuple[str, str]]:
    """Descriptors that only an open pool or conversion holds: rings, checkpoints and stores."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        if "io_uring" in target or ".safetensors" in target:
            found.add((descriptor, target))
    return found


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Exempts the objects that exist before the module from garbage collection. Visiting hundreds of thousands of
    library objects took half a second for each test that leaves a model to the collector.

    This is not done before each test: a fixture of the module that is part of a cycle would never be freed.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_leaked_files(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    before = _engine_files()
    yield
    # A log record of a library may hold an exception, and so the frames of its callers.
    caplog.get_records("call").clear()
    leaked = _engine_files() - before
    deadline = time.monotonic() + 5
    while leaked and time.monotonic() < deadline:
        gc.collect()  # the frames of an error hold models, which close their pools when they are freed
        leaked = _engine_files() - before
    assert not leaked, f"the test left files open: {sorted(target for _, target in leaked)}"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """For tests of objects that reference counts alone must free."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """For tests that compile: resets Dynamo, so that earlier compilations do not count in its limits and counters."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
