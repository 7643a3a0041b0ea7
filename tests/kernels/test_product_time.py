"""The functions of the test extension that benchmarks/row_thresholds.py calls."""

from __future__ import annotations

import pytest

from torch_mesh import _C, _testing

ISAS = _C.features()["isas"].split()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["bf16", "bf12", "int8", "int4", "lut4", "fp8"])
def test_each_way_of_a_product_can_be_timed(isa: str, weights: str) -> None:
    ways = _testing.product_ways(isa, weights)
    assert ways["few"] == 0 and set(ways) <= {"few", "panels", "tiles"}
    assert all(rows > 1 for way, rows in ways.items() if way != "few")
    for way in ways:
        group_size = 128 if weights == "fp8" else 64
        assert 0 < _testing.product_seconds(isa, weights, group_size, 128, 64, 3, way) < 60


def test_unknown_instruction_sets_ways_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match='no kernels for the instruction set "sse"'):
        _testing.product_ways("sse", "bf16")
    with pytest.raises(ValueError, match='do not go by "panels" on this machine'):
        _testing.product_seconds("scalar", "bf16", 0, 64, 64, 1, "panels")
    with pytest.raises(ValueError, match="rows is 0; allowed: 1 or more"):
        _testing.product_seconds("scalar", "bf16", 0, 64, 64, 0, "few")
