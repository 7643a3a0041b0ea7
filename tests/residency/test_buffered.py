"""io="buffered": reads through the page cache into the pool, of stores and of raw checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raw_experts import RawExperts
from tiny_pools import Spec, TinyExperts, open_engine, ops, spec_with

from torch_mesh import _C, ReadError

SPEC = Spec(weights="int8", layers=2, experts=8)


def _forward(engine: _C.Engine, layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(4, SPEC.hidden, generator=generator)
    ids = torch.arange(8).view(4, 2)
    weights = torch.rand(4, 2, generator=generator)
    return ops.experts(x, ids, weights, torch.tensor([engine.id, layer]))


@pytest.mark.parametrize("raw", [False, True], ids=["store", "raw"])
def test_bits_are_those_of_direct_reads(tmp_path: Path, raw: bool) -> None:
    bf16 = spec_with(SPEC, weights="bf16")
    experts = RawExperts(bf16, tmp_path / "model.safetensors") if raw else TinyExperts(SPEC, seed=3)
    source = experts.source if raw else _C.Source(**experts.store(tmp_path / "store").source_arguments())
    engines = {io: open_engine(experts, source, slots=8, io=io) for io in ("threads", "buffered")}
    for layer in (0, 1, 0):
        direct, buffered = (_forward(engine, layer) for engine in engines.values())
        assert torch.equal(direct, buffered)
    about = engines["buffered"].describe()
    assert about["buffered"] == 1 and about["io"] in ("uring", "threads")
    assert about["pool_bytes"] == engines["threads"].describe()["pool_bytes"]
    for engine in engines.values():
        engine.validate()
        engine.close()


def test_a_store_cut_off_is_an_error_at_the_next_read(tmp_path: Path) -> None:
    experts = TinyExperts(SPEC, seed=3)
    store = experts.store(tmp_path / "store")
    path = store.folder / store.manifest.record_files[0].name
    engine = open_engine(experts, _C.Source(**store.source_arguments()), slots=8, io="buffered")
    right = [_forward(engine, layer) for layer in range(SPEC.layers)]
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(store.manifest.locate(0, 0)[1] + 1)
    assert torch.equal(_forward(engine, 1), right[1])  # resident records are in the pool's own memory
    with pytest.raises(ReadError) as caught:
        _forward(engine, 0)
    assert caught.value.layer == 0 and caught.value.file == str(path)
    engine.drain()
    with path.open("r+b") as file:
        file.write(whole)
    assert torch.equal(_forward(engine, 0), right[0])
    engine.validate()
    engine.close()
