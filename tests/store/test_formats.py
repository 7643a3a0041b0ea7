"""The table of formats agrees with the extension and with the documentation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import torch_mesh  # noqa: F401  registers the ops
from torch_mesh import _C
from torch_mesh.formats import CALIBRATED_FORMATS, DENSE_FORMATS, FORMATS, ROUNDED_FORMATS, formats_of_fewer_bits

SIZES = (0, 16, 32, 64, 128, 256)
HIDDEN, INTERMEDIATE = 2048, 1024
EXPERT = HIDDEN, INTERMEDIATE, True, False
WEIGHTS = 3 * HIDDEN * INTERMEDIATE


def test_the_table_has_the_formats_of_the_extension() -> None:
    with pytest.raises(ValueError, match="unknown weight format") as error:
        _C.linear_bytes("none", 32, 64, 64)
    known = str(error.value).partition("there are ")[2].split(", ")
    assert set(known) == {name for name, each in FORMATS.items() if each.matrices is None}


@pytest.mark.parametrize("name", FORMATS)
def test_packing_rounds_to_the_formats_of_the_table(name: str) -> None:
    weight = torch.zeros(256, 256)
    args = weight, weight, weight.t(), None, None, None, name, FORMATS[name].group_sizes[-1]
    if FORMATS[name].rounded:
        assert torch.ops.torch_mesh.pack(*args).numel() > 0
    else:
        with pytest.raises(ValueError, match="nothing is rounded to"):
            torch.ops.torch_mesh.pack(*args)


@pytest.mark.parametrize("name", FORMATS)
def test_records_have_the_bits_and_groups_of_the_table(name: str) -> None:
    table = FORMATS[name]
    allowed = {}
    for group_size in SIZES:
        try:
            allowed[group_size] = 8 * _C.record_bytes(name, group_size, *EXPERT) / WEIGHTS
        except ValueError:
            assert group_size not in table.group_sizes
    if len(table.group_sizes) > 1:
        assert tuple(allowed) == table.group_sizes
    else:  # the extension ignores the given group size if the format has its own
        assert tuple(allowed) == SIZES
        assert len(set(allowed.values())) == 1
    for group_size in table.group_sizes:
        header = name in ("fp8", "nvfp4")
        expected = table.bits + (table.scale_bits / group_size if group_size else 0)
        assert allowed[group_size] == pytest.approx(expected, abs=0.26 if header else 0.002)


def test_the_table_marks_calibrated_formats_and_trellises() -> None:
    orders = {name: _C.calibration_order(name) for name in FORMATS}
    assert set(CALIBRATED_FORMATS) == {name for name, (_, step) in orders.items() if step > 0}
    assert {name for name, each in FORMATS.items() if each.trellis} == {
        name for name, (_, step) in orders.items() if step > 1
    }


def test_errors_cover_all_group_sizes_and_grow_with_them() -> None:
    for name in ROUNDED_FORMATS:
        errors = FORMATS[name].errors
        assert tuple(errors) == FORMATS[name].group_sizes
        assert list(errors.values()) == sorted(errors.values())
    assert set(DENSE_FORMATS) <= set(ROUNDED_FORMATS)


def test_two_formats_in_a_record_are_formats_of_the_table() -> None:
    for each in FORMATS.values():
        if each.matrices is not None:
            gate_up, down = (FORMATS[name] for name in each.matrices)
            assert each.bits == pytest.approx((2 * gate_up.bits + down.bits) / 3)
            assert each.group_sizes == gate_up.group_sizes == down.group_sizes


def test_fewer_bits() -> None:
    assert formats_of_fewer_bits("tcq2") == []
    assert formats_of_fewer_bits("int4") == ["tcq3", "tcq2+tcq3", "tcq2"]
    assert formats_of_fewer_bits("fp8") == ["int4", "lut4", "tcq3", "tcq2+tcq3", "tcq2"]


def test_the_page_has_the_table() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "formats_page.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run tools/formats_page.py"
