"""io="mmap": experts used in the page cache, and what becomes of a process whose store changes under it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from raw_experts import RawExperts
from tiny_pools import Spec, TinyExperts, open_engine, ops

from torch_mesh import _C, ReadError
from torch_mesh.system.memory import resident_slots

SPEC = Spec(weights="int8", layers=2, experts=8)
EVERY = SPEC.layers * SPEC.experts


@pytest.fixture
def experts() -> TinyExperts:
    return TinyExperts(SPEC, seed=3)


@pytest.fixture
def engine(experts: TinyExperts, tmp_path: Path) -> Iterator[_C.Engine]:
    source = _C.Source(**experts.store(tmp_path / "store").source_arguments())
    engine = open_engine(experts, source, slots=EVERY, io="mmap")
    yield engine
    engine.close()


def _forward(engine: _C.Engine, layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(4, SPEC.hidden, generator=generator)
    ids = torch.arange(8).view(4, 2)
    weights = torch.rand(4, 2, generator=generator)
    return ops.experts(x, ids, weights, torch.tensor([engine.id, layer, engine.generation]))


def test_it_says_what_it_is(engine: _C.Engine) -> None:
    about = engine.describe()
    assert about["io"] == "mmap" and about["pool_bytes"] == 0
    assert about["mapped_bytes"] >= EVERY * about["record_bytes"]
    assert any("page cache" in note for note in about["notes"])


def test_a_store_cut_off_between_promotion_and_use_is_an_error(experts: TinyExperts, engine: _C.Engine) -> None:
    store = experts.store(Path())
    path = store.folder / store.manifest.record_files[0].name
    right = [_forward(engine, layer) for layer in range(SPEC.layers)]
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(store.manifest.place(1, 0)[1])
    for _ in range(3):
        with pytest.raises(ReadError) as caught:
            _forward(engine, 1)
        assert caught.value.layer == 1 and caught.value.file == str(path)
        assert engine.pinned() == 0
        engine.validate()
        assert torch.equal(_forward(engine, 0), right[0])
    engine.drain()  # or a read that is still under way fails for the next forward, too
    with path.open("r+b") as file:
        file.write(whole)
    assert torch.equal(_forward(engine, 1), right[1])
    engine.validate()


def test_a_raw_checkpoint_is_refused(tmp_path: Path) -> None:
    raw = RawExperts(Spec(weights="bf16", layers=2, experts=4), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="convert it"):
        open_engine(raw, raw.source, slots=4, io="mmap")


def test_more_may_be_resident_than_memory_holds() -> None:
    sizes = {"layers": 4, "experts": 8, "top_k": 2, "record_bytes": 1000, "available": 4000}
    with pytest.raises(MemoryError):
        resident_slots(1.0, **sizes)
    assert resident_slots(1.0, **sizes, mapped=True) == 32
    assert resident_slots("20KB", **sizes, mapped=True) == 20


_FOREIGN_FAULT = """
import faulthandler, mmap, os, sys, tempfile
faulthandler.enable()
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from tiny_pools import Spec, TinyExperts, open_engine
from torch_mesh import _C
with tempfile.TemporaryDirectory() as folder:
    experts = TinyExperts(Spec(), seed=0)
    source = _C.Source(**experts.store(Path(folder) / "store").source_arguments())
    engine = open_engine(experts, source, slots=4, io="mmap")
    file = open(Path(folder) / "other", "w+b")
    file.write(bytes(8192))
    file.flush()
    view = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    print("touching", flush=True)
    view[5000]
"""


def test_faults_of_others_are_reported_as_ever() -> None:
    """Python's faulthandler, enabled before, still gets the bus errors that are none of the store's."""
    tests = Path(__file__).parents[1]
    folders = [str(tests.parent), str(tests / "ops"), str(tests.parent / "benchmarks")]
    done = subprocess.run(
        [sys.executable, "-c", _FOREIGN_FAULT, *folders], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "touching", done.stderr
    assert done.returncode == -7 and "Bus error" in done.stderr
