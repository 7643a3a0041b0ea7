"""_C.pack_raw: pieces in memory described by strides, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_mesh import _C
from torch_mesh.formats import FORMATS

HIDDEN, INTERMEDIATE = 64, 32
SIZES = (HIDDEN, INTERMEDIATE, False, True)


def _views() -> tuple[list[int], dict[str, Any]]:
    """Sizes of pieces and views of them: int4 codes with zero points and an order, each exactly as long as needed."""
    sizes: list[int] = []
    views: dict[str, Any] = {}

    def piece(size: int) -> dict[str, int]:
        sizes.append(size)
        return {"piece": len(sizes) - 1, "offset": 0}

    for part, rows, columns in (("up", INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        groups = columns // 32
        views[part] = {
            **piece(rows * columns // 2),
            "order": "pairs",
            "run": 32,
            "run_bytes": 16,
            "row_bytes": columns // 2,
            "scales": {
                **piece(rows * groups * 2),
                "type": "bf16",
                "rows": 1,
                "columns": 32,
                "row_bytes": 2 * groups,
                "column_bytes": 2,
            },
            "zeros": {**piece(8), "bytes": 8, "value": 0},
            "group_index": piece(4 * columns),
        }
        views[f"{part}_bias"] = {**piece(2 * rows), "row_stride": 1, "column_stride": 0}
    return sizes, views


def _pack(sizes: list[int], views: dict[str, Any], format: str = "int4", group_size: int = 32) -> bytes:
    pieces = [bytearray(size) for size in sizes]
    for part in ("up", "down"):
        turn = views.get(part, {}).get("group_index")
        if turn is not None and turn["piece"] < len(pieces):
            columns = HIDDEN if part == "up" else INTERMEDIATE
            order = (torch.arange(columns, dtype=torch.int32) // 32).numpy().tobytes()
            pieces[turn["piece"]][: len(order)] = order[: len(pieces[turn["piece"]])]
    return _C.pack_raw(pieces, "bf16", views, format, group_size, *SIZES)


def _unpacked(record: bytes, format: str, group_size: int) -> torch.Tensor:
    data = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    return torch.ops.torch_mesh.unpack(data, format, group_size, *SIZES)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64])
def test_scales_are_rounded_to_bf16_and_codes_are_kept(dtype: torch.dtype, group_size: int) -> None:
    columns, bytes_each = HIDDEN, dtype.itemsize
    scales = (torch.rand(INTERMEDIATE, HIDDEN // 64) + 0.01).to(dtype)
    codes = torch.randint(0, 256, (INTERMEDIATE, HIDDEN // 2), dtype=torch.uint8)
    pieces = [codes.numpy().tobytes(), scales.view(torch.uint8).numpy().tobytes(), bytes(4096), bytes(4096)]
    table = {
        "piece": 0,
        "offset": 0,
        "order": "pairs",
        "run": columns,
        "run_bytes": columns // 2,
        "row_bytes": columns // 2,
    }
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    of_up = {
        "piece": 1,
        "offset": 0,
        "type": name,
        "rows": 1,
        "columns": 64,
        "row_bytes": bytes_each,
        "column_bytes": bytes_each,
    }
    bias = {"piece": 3, "offset": 0, "row_stride": 1, "column_stride": 0}
    views = {"up": table | {"scales": of_up}, "down": _views()[1]["down"], "up_bias": bias, "down_bias": bias}
    views["down"] = table | {
        "piece": 2,
        "run": INTERMEDIATE,
        "row_bytes": INTERMEDIATE // 2,
        "scales": of_up | {"piece": 3, "row_bytes": 0},
    }
    record = _C.pack_raw(pieces, "bf16", views, "int4", group_size, *SIZES)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8
    expected = nibbles * scales.bfloat16().float().repeat_interleave(64, 1)
    assert torch.equal(_unpacked(record, "int4", group_size), expected)


def test_a_scale_beyond_bf16_is_refused() -> None:
    sizes, views = _views()
    scales = views["up"]["scales"]
    scales |= {"type": "fp32", "row_bytes": 8, "column_bytes": 4}
    sizes[scales["piece"]] *= 2
    pieces = [bytearray(size) for size in sizes]
    for part, columns in (("up", HIDDEN), ("down", INTERMEDIATE)):
        order = (torch.arange(columns, dtype=torch.int32) // 32).numpy().tobytes()
        pieces[views[part]["group_index"]["piece"]][:] = order
    pieces[scales["piece"]][:4] = b"\xff\xff\x7f\x7f"  # the largest finite number
    with pytest.raises(ValueError, match="a scale beyond bf16's range"):
        _C.pack_raw(pieces, "bf16", views, "int4", 32, *SIZES)


def test_pieces_of_the_exact_size_are_enough() -> None:
    sizes, views = _views()
    assert len(_pack(sizes, views)) == _C.record_bytes("int4", 32, *SIZES)


@pytest.mark.parametrize("piece", range(len(_views()[0])))
def test_a_piece_that_is_a_byte_short_is_refused(piece: int) -> None:
    sizes, views = _views()
    sizes[piece] -= 1
    with pytest.raises(ValueError, match="its shape needs"):
        _pack(sizes, views)


def _set(*path: str) -> Callable[[dict[str, Any], Any], None]:
    def change(views: dict[str, Any], value: Any) -> None:
        table = views
        for name in path[:-1]:
            table = table[name]
        table[path[-1]] = value

    return change


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("up", "piece"), 99, "names piece 99"),
        (("up", "piece"), -1, "names piece -1"),
        (("up", "offset"), -1, "negative"),
        (("up", "offset"), HUGE, "its shape needs"),
        (("up", "row_bytes"), -1, "negative"),
        (("up", "row_bytes"), HUGE, "its shape needs"),
        (("up", "run_bytes"), 0, "runs of 16 bytes, 0 apart"),
        (("up", "run_bytes"), HUGE, "its shape needs"),
        (("up", "run"), 1, "runs of 1"),
        (("up", "run"), 20, "nibbles in runs of 20|its shape needs|bytes, 16 apart"),
        (("up", "order"), "backwards", "order of codes is 'backwards'"),
        (("up", "order"), "bytes", "its shape needs|another number of bits|apart"),
        (("up", "flip"), 8, "another number of bits"),
        (("up", "first_row"), 2**31 - 1, "from row"),
        (("up", "first_row"), -1, "from row"),
        (("up", "first_row"), 1, "its shape needs"),
        (("up", "scales", "type"), "fp64", "scales are 'fp64'"),
        (("up", "scales", "type"), "e4m3", "scales of another type"),
        (("up", "scales", "rows"), 0, "scales for 0 x"),
        (("up", "scales", "columns"), 48, "in groups of 32"),
        (("up", "scales", "offset"), -2, "negative"),
        (("up", "scales", "row_bytes"), -4, "negative"),
        (("up", "scales", "column_bytes"), HUGE, "its shape needs"),
        (("up", "zeros", "bytes"), 9, "its shape needs"),
        (("up", "zeros", "bytes"), -1, "negative"),
        (("up", "zeros", "value"), 1, 'zero points; weights="int8" or "bf16" takes them'),
        (("up_bias", "row_stride"), -(2**63) + 64, "negative stride"),
        (("up_bias", "offset"), -(2**63), "negative offset"),
    ],
)
def test_invalid_views_are_refused(path: tuple[str, ...], value: Any, problem: str) -> None:
    sizes, views = _views()
    views = copy.deepcopy(views)
    _set(*path)(views, value)
    with pytest.raises(ValueError, match=problem):
        _pack(sizes, views)


@pytest.mark.parametrize("down", [None, {"piece": 0, "offset": 0, "row_stride": 1, "column_stride": 1}])
def test_a_matrix_without_codes_beside_one_with_them_is_refused(down: dict[str, int] | None) -> None:
    sizes, views = _views()
    views = {"up": views["up"]} if down is None else views | {"down": down}
    with pytest.raises(ValueError, match="raw_views lacks the codes of 'down'"):
        _pack(sizes, views)


@pytest.mark.parametrize("format", [name for name, each in FORMATS.items() if not each.codes])
def test_formats_that_cannot_hold_the_codes_are_refused(format: str) -> None:
    first = format.partition("+")[0]
    with pytest.raises(ValueError, match=f"{first} cannot hold the codes of another format.*allowed for codes: int8"):
        _pack(*_views(), format)
