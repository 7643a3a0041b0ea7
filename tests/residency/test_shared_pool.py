"""Several processes share one pool: their bits, their memory, and the state after some are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from transformers import AutoModelForCausalLM
from waiting import eventually

import torch_mesh
from torch_mesh import MeshConfig, ReadError
from torch_mesh.cli import main
from torch_mesh.pool.shared_pool import SharedPool
from torch_mesh.store.convert import convert
from torch_mesh.store.manifest import OtherFile, Store, open_store

PROMPT = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def store(mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("shared") / "store"
    convert(mesh_tiny, folder, "int8")
    return open_store(folder)


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "socket")


@pytest.fixture
def share(store: Store, socket: str) -> Iterator[Callable[..., SharedPool]]:
    opened: list[SharedPool] = []

    def open_shared(resident: str | float = 0.5, workers: int = 2) -> SharedPool:
        opened.append(SharedPool(store, socket, resident, workers))
        return opened[-1]

    yield open_shared
    for shared in opened:
        shared.close()


def open_model(store: Store | Path, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        getattr(store, "folder", store), dtype=torch.bfloat16, quantization_config=MeshConfig(**config)
    )


def generated(model: Any, tokens: int = 12) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)[0].tolist()


def test_bench_compares_a_shared_pool_with_no_plan_of_an_own_one(
    store: Store, socket: str, share: Callable[..., SharedPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it refuse to measure where an own pool would not fit."""
    share(resident=0.5, workers=2)
    monkeypatch.setattr("torch_mesh.planning.plan.available_bytes", lambda: 0)
    out = tmp_path / "out.json"
    assert main(["bench", str(store.folder), "--shared", socket, "--tokens", "4", "--json", str(out)]) == 0
    measured = json.loads(out.read_text())
    planned = measured["plan"]
    assert planned["status"] == "unknown" and "owner of the shared pool" in planned["advice"]
    assert planned["hit_rate"] is planned["tokens_per_second"] is planned["peak_bytes"] is planned["slots"] is None
    assert measured["stats"]["slots"] == 48


def test_a_shared_pool_gives_the_bits_of_an_own_pool(
    store: Store, socket: str, share: Callable[..., SharedPool]
) -> None:
    own = open_model(store, resident=0.25)
    shared = share(resident=0.5, workers=2)
    with torch.no_grad():
        logits, tokens = own(PROMPT).logits, generated(own)
        models = [open_model(store, shared=socket) for _ in range(2)]
        for model in models:
            assert torch.equal(model(PROMPT).logits, logits)
            assert generated(model) == tokens
            stats = torch_mesh.stats(model)
            assert stats.slots == shared.lender.slots == shared.slots // 2
            assert "of a shared pool" in str(model)
    assert shared.lender.workers == 2
    shared.engine.validate()
    del model, models
    assert eventually(lambda: shared.lender.workers == 0 and shared.engine.pinned() == 0)


def test_the_size_may_come_from_the_environment(store: Store, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def noted(_store: Store, _socket: str, resident: str | float, _workers: int, _mirrors: Sequence[str]) -> None:
        given.append(resident)
        raise ValueError

    monkeypatch.setattr("torch_mesh.pool.shared_pool.SharedPool", noted)
    arguments = ["share", str(store.folder), "--socket", socket]
    assert main(arguments) == 2
    monkeypatch.setenv("TORCH_MESH_RESIDENT", "0.25")
    assert [main(arguments), main([*arguments, "--resident", "0.5"])] == [2, 2]
    assert given == ["auto", 0.25, 0.5]


def test_bf12_in_a_shared_pool_has_the_bits_of_bf16(mesh_tiny: Path, tmp_path: Path, socket: str) -> None:
    own = open_model(mesh_tiny, resident=0.25)
    store = convert(mesh_tiny, tmp_path / "store", "bf12").store
    with contextlib.closing(SharedPool(store, socket, 0.5, 1)), torch.no_grad():
        model = open_model(store, shared=socket)
        assert torch.equal(model(PROMPT).logits, own(PROMPT).logits)
        assert generated(model) == generated(own)


def test_a_worker_gets_an_error_after_the_owner_closes(
    store: Store, socket: str, share: Callable[..., SharedPool]
) -> None:
    shared = share(resident=0.25, workers=1)
    model = open_model(store, shared=socket)
    generated(model, 2)
    shared.close()
    with pytest.raises(ReadError, match="torch-mesh share again") as caught:
        generated(model, 40)
    assert caught.value.layer is not None


def test_settings_and_stores_that_do_not_fit_are_refused(
    store: Store,
    mesh_tiny: Path,
    socket: str,
    tmp_path: Path,
    share: Callable[..., SharedPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ReadError, match="torch-mesh share STORE --socket"):
        open_model(store, shared=socket)
    share(resident=0.5, workers=2)
    fields: dict[str, Any]
    for fields in (
        {"resident": 0.5},
        {"io": "threads"},
        {"verify": "always"},
        {"residency": {"guard": "on"}},
        {"lossy": {"routing_bias": 0.1}},
    ):
        with pytest.raises(ValueError, match="excludes other settings"):
            open_model(store, shared=socket, **fields)
    with pytest.raises(ValueError, match="converted store"):
        open_model(mesh_tiny, shared=socket)
    convert(mesh_tiny, tmp_path / "other", "int4")
    with pytest.raises(ValueError, match="another store"):
        open_model(tmp_path / "other", shared=socket)
    plain = AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="in memory only"):
        torch_mesh.patch(plain, MeshConfig(shared=socket))
    with pytest.raises(ValueError, match="answers"):
        SharedPool(store, socket, 0.25, 1)
    with pytest.raises(ValueError, match="every token needs"):
        SharedPool(store, f"{socket}2", "64KiB", 1)
    with pytest.raises(ValueError, match="at most --workers 48"):  # of 192 experts
        SharedPool(store, f"{socket}2", 1.0, 49)
    lender = torch_mesh._C.Lender
    with monkeypatch.context() as patch:  # a slot for each worker
        patch.setattr(
            torch_mesh._C, "Lender", lambda engine, path, _: lender(engine, path, engine.describe_size()["max_slots"])
        )
        small = SharedPool(store, f"{socket}2", 0.001, 1)
    with contextlib.closing(small), pytest.raises(ValueError, match="fewer --workers"):
        open_model(store, shared=f"{socket}2")


def test_an_engine_has_one_lender_and_closes_after_it(
    store: Store, socket: str, share: Callable[..., SharedPool]
) -> None:
    shared = share()
    with pytest.raises(ValueError, match="lent already"):
        torch_mesh._C.Lender(shared.engine, f"{socket}2", 1)
    with pytest.raises(ValueError, match="close its Lender first"):
        shared.engine.close()
    model = open_model(store, shared=socket)
    assert len(generated(model, 2)) == PROMPT.numel() + 2
    shared.lender.close()
    shared.engine.close()


def test_a_dropped_pool_ends_its_loans_before_its_engine(store: Store, socket: str) -> None:
    shared = SharedPool(store, socket, 0.5, 1)
    engine, lender = weakref.ref(shared.engine), shared.lender
    del shared  # drops its engine first, whose end would wait for the lender
    assert engine() is not None and lender.workers == 0
    del lender
    assert engine() is None and not Path(socket).exists()


@pytest.mark.parametrize("kind", ["tables", "dense"])
def test_auto_reserves_no_memory_for_rows_and_codes_in_files(
    store: Store, socket: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_mesh.system.memory.available_bytes", lambda: 8 << 30)
    large = OtherFile(f"mesh-{kind}-00001-of-00001.safetensors", 1 << 50, "")
    manifest = dataclasses.replace(store.manifest, other_files=(*store.manifest.other_files, large))
    with contextlib.closing(SharedPool(dataclasses.replace(store, manifest=manifest), socket, "auto", 2)) as pool:
        assert pool.slots == manifest.shape.layers * manifest.shape.experts


def test_auto_reserves_memory_for_the_rest_of_each_worker(
    store: Store, share: Callable[..., SharedPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.manifest
    rest = sum(file.bytes for file in manifest.other_files) + MeshConfig().workspace_bytes
    free = 4 * rest + 100 * manifest.record_bytes * 4 // 3  # a quarter of which is auto's margin
    monkeypatch.setattr("torch_mesh.system.memory.available_bytes", lambda: free)
    assert share(resident="auto", workers=4).slots == 100


# A worker: generates until it is killed, and prints the start time and the tokens of each run.
WORK = """
import sys, time
import torch
from transformers import AutoModelForCausalLM
from torch_mesh import MeshConfig
torch.set_num_threads(1)
config = MeshConfig(shared=sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=config)
prompt = torch.arange(5, 25)[None]
while True:
    begun = time.monotonic()
    tokens = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0].tolist()
    print(begun, *tokens, flush=True)
"""


class Worker:
    def __init__(self, store: Store, socket: str, expected: list[int]) -> None:
        self._process, self._expected = warm.start(WORK, store.folder, socket), expected
        self.pid = self._process.pid

    def expect_tokens(self, since: float = 0.0) -> None:
        """Check the tokens of all runs up to the first that began at ``since`` or later."""
        begun = -1.0
        while begun < since:
            line = self._process.stdout.readline().split()
            assert line, self._process.communicate()
            begun = float(line[0])
            assert list(map(int, line[1:])) == self._expected

    def kill(self) -> None:
        with self._process:
            self._process.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_worker_leaves_no_pins_and_the_others_go_on(
    store: Store, socket: str, share: Callable[..., SharedPool], kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    expected = generated(open_model(store, resident=0.25))
    workers = 4 if kills > 4 else 2
    shared = share(resident=0.5, workers=workers)

    running = [Worker(store, socket, expected) for _ in range(workers)]
    try:
        for worker in running:
            worker.expect_tokens()
        for _ in range(kills):
            victim = draw.randrange(workers)
            time.sleep(draw.uniform(0, 0.05))
            running[victim].kill()
            killed = time.monotonic()
            assert eventually(lambda: shared.lender.workers == workers - 1)
            assert shared.engine.pinned() <= (workers - 1) * shared.lender.slots
            shared.engine.validate()
            for index, worker in enumerate(running):
                if index != victim:
                    worker.expect_tokens(since=killed)
            running[victim] = Worker(store, socket, expected)
            running[victim].expect_tokens()
    finally:
        for worker in running:
            worker.kill()
    assert eventually(lambda: shared.lender.workers == 0 and shared.engine.pinned() == 0)
    shared.engine.validate()
    assert shared.lender.refused == 0


def _pool_pss(pid: int) -> int:
    """Return the bytes of the shared pool in a process's proportional set size (PSS)."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:torch_mesh_pool" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_workers_share_the_memory_of_one_pool(store: Store, tmp_path: Path, socket: str) -> None:
    how = ["share", store.folder, "--socket", socket, "--resident", "0.8", "--workers", "4"]
    owner = warm.start_command(*how)
    ready = owner.stdout.readline()
    assert "4 workers" in ready, owner.communicate()
    slots = int(ready.split()[0])
    expected = generated(open_model(store, resident=0.25))
    running: list[Worker] = []
    try:
        running += [Worker(store, socket, expected) for _ in range(4)]
        for worker in running:
            worker.expect_tokens()
        pool = slots * store.manifest.record_bytes
        shares = [_pool_pss(worker.pid) for worker in running] + [_pool_pss(owner.pid)]
        assert 0.9 * pool <= sum(shares) <= 1.1 * pool, (shares, pool)
        assert all(each > 0.1 * pool for each in shares)
    finally:
        for worker in running:
            worker.kill()
        owner.send_signal(signal.SIGINT)
        output, errors = owner.communicate(timeout=60)
    assert owner.returncode == 0, errors
    assert re.search(r"Lent \d+ times, \d+ of them from memory", output)
    assert not Path(socket).exists()
