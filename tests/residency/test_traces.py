"""Recording traces, and reading untrusted files."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_mesh
from torch_mesh.models.families import find_experts
from torch_mesh.routing.traces import Trace, load_trace, save_trace


def _written(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_a_trace_round_trips_through_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    ids = np.stack([rng.permutation(300)[:5] for _ in range(21)]).reshape(7, 3, 5).astype(np.int32)
    scores = rng.random((7, 3, 300)).astype(np.float16).astype(np.float32)
    trace = Trace("t", ids, np.array([0, 2, 7]), 300, scores=scores, forwards=np.array([0, 1, 2, 6]))
    save_trace(trace, tmp_path / "t.npz")
    read = load_trace(tmp_path / "t.npz")
    assert (read.ids == ids).all() and (read.offsets == [0, 2, 7]).all() and read.experts == 300
    assert (read.scores == scores).all() and read.lookahead is None
    assert read.forwards is not None and read.forwards.tolist() == [0, 1, 2, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


GOOD = {"ids": np.array([[[0, 1]], [[2, 1]]]), "offsets": np.array([0, 2]), "experts": np.int64(4)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ids": np.zeros((2, 2))}, "integers"),
        ({"ids": np.zeros((0, 1, 2), int)}, "integers"),
        ({"ids": np.array([[[0, 0]], [[2, 1]]])}, "token 0 uses an expert of layer 0 twice"),
        ({"ids": np.array([[[0, 4]], [[2, 1]]])}, "allowed: 0 to 3"),
        ({"ids": np.array([[[0, -1]], [[2, 1]]])}, "allowed: 0 to 3"),
        ({"offsets": np.array([0, 3])}, "rise from 0"),
        ({"offsets": np.array([0, 2, 2])}, "rise from 0"),
        ({"offsets": np.array([0.0, 2.0])}, "rise from 0"),
        ({"forwards": np.array([1])}, "'forwards' must rise from 0"),
        ({"forwards": np.array([0, 2])}, "'forwards' must rise from 0"),
        ({"forwards": np.array([0, 0])}, "'forwards' must rise from 0"),
        ({"offsets": np.array([0, 1, 2]), "forwards": np.array([0])}, "lacks the first token of a sequence"),
        ({"experts": np.int64(0)}, "from 1 to"),
        ({"experts": np.array([4, 4])}, "one integer"),
        ({"scores": np.zeros((2, 1, 3), np.float32)}, "floats"),
        ({"scores": np.full((2, 1, 4), np.nan, np.float32)}, "finite"),
        ({"ids": np.array([{}], dtype=object)}, "not a routing trace"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    load_trace(_written(tmp_path / "good.npz", **GOOD))
    with pytest.raises(torch_mesh.MeshError, match=message):
        load_trace(_written(tmp_path / "wrong.npz", **{**GOOD, **wrong}))


def test_damaged_files_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = _written(tmp_path / "t.npz", **GOOD).read_bytes()
    for _ in range(60):
        damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for _ in range(4):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        (tmp_path / "d.npz").write_bytes(damaged)
        with contextlib.suppress(torch_mesh.MeshError):  # anything else fails the test
            load_trace(tmp_path / "d.npz")
    (tmp_path / "text.npz").write_text("ids")
    with pytest.raises(torch_mesh.MeshError, match="not a routing trace"):
        load_trace(tmp_path / "text.npz")
    with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
        pass
    with pytest.raises(torch_mesh.MeshError, match="missing"):
        load_trace(tmp_path / "empty.npz")


def _npy(header: str) -> bytes:
    """Return the bytes of an npy file with this header."""
    text = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (2, ",  # TokenError
        "{'descr': '<i4', 'fortran_order': False, 'shape': (100000000000000000000000000000, 1, 2)}",  # OverflowError
        "{'descr': '<i4', 'fortran_order': False, 'shape': (-1, 1, 2)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4, 4)}",
        "{'descr': ['<i4'], 'fortran_order': False, 'shape': (1, 1, 2)}",
        "{'descr': '<i99999999999999999999', 'fortran_order': False, 'shape': (1, 1, 2)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 2)}",
        "[" * 200,
        "(" * 5000,
        "\x00",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1, 2)} if True else 3",
        "'\\",
    ],
)
@pytest.mark.parametrize("name", ["ids", "experts"])
def test_arrays_with_invalid_headers_are_refused(tmp_path: Path, header: str, name: str) -> None:
    rest = {key: value for key, value in GOOD.items() if key != name}
    with zipfile.ZipFile(_written(tmp_path / "t.npz", **rest), "a") as archive:
        archive.writestr(f"{name}.npy", _npy(header))
    with pytest.raises(torch_mesh.MeshError, match="not a routing trace"):
        load_trace(tmp_path / "t.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_damaged_compression_is_refused(tmp_path: Path, rng: np.random.Generator, method: int) -> None:
    plain = _npy("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1, 2)}") + rng.bytes(4000)
    with zipfile.ZipFile(tmp_path / "t.npz", "w", method) as archive:
        archive.writestr("ids.npy", plain)
    whole = bytearray((tmp_path / "t.npz").read_bytes())
    for place in rng.integers(40, len(whole) - 100, 30):
        damaged = whole.copy()
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "t.npz").write_bytes(damaged)
        with contextlib.suppress(torch_mesh.MeshError):  # anything else fails the test
            load_trace(tmp_path / "t.npz")


def test_a_missing_trace_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "absent.npz")
    with pytest.raises(IsADirectoryError):
        load_trace(tmp_path)


def test_recording_keeps_the_choices_of_the_routers(tmp_path: Path, mesh_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    prompts = [torch.arange(3, 12)[None], torch.arange(40, 45)[None]]
    for name in ("plain", "patched"):
        if name == "patched":
            torch_mesh.patch(model, resident=0.25, weights="bf16")
        with torch_mesh.record_trace(model, tmp_path / f"{name}.npz", scores=True, lookahead=True):
            for prompt in prompts:
                model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        trace = load_trace(tmp_path / f"{name}.npz")
        assert trace.offsets.tolist() == [0, 12, 20]  # the last token of each sequence is never an input
        assert trace.forwards is not None and trace.forwards.tolist() == [0, 9, 10, 11, 12, 17, 18, 19]
        assert (trace.layers, trace.experts, trace.top_k) == (6, 32, 4)
        assert trace.scores is not None and trace.lookahead is not None
        chosen = np.take_along_axis(trace.scores, trace.ids, 2)
        assert (np.sort(chosen, 2) >= np.sort(trace.scores, 2)[..., -4:] - 1e-3).all()
        assert np.allclose(trace.scores.sum(2), 1, atol=1e-2)
        predicted = np.argsort(-trace.lookahead[:, 1:], 2)[..., :4]
        assert (predicted[..., None] == trace.ids[:, 1:, None, :]).any(-1).mean() > 0.5
        assert not trace.lookahead[:, 0].any()


def test_recording_refuses_batches_and_leaves_no_hooks(tmp_path: Path, mesh_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    with pytest.raises(ValueError, match="one sequence"), torch_mesh.record_trace(model, tmp_path / "t.npz"):
        model(torch.arange(8).view(2, 4))
    with pytest.raises(torch_mesh.MeshError, match="No forward"), torch_mesh.record_trace(model, tmp_path / "t.npz"):
        pass
    assert not list(tmp_path.iterdir())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_recording_to_a_missing_folder_is_refused_before_the_first_forward(tmp_path: Path, mesh_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    for name in ("missing/t.npz", "."):
        recording = torch_mesh.record_trace(model, tmp_path / name)
        with pytest.raises(OSError, match="no such folder|is a directory"), recording:
            pytest.fail("the block ran")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def _assert_equal_traces(found: Trace, expected: Trace) -> None:
    for field in ("ids", "offsets", "scores", "lookahead", "forwards"):
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field


@pytest.mark.parametrize("last", [False, True])
def test_failed_forwards_are_not_recorded(
    tmp_path: Path, mesh_tiny: Path, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward fails before its first layer of experts, or in the last one."""
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    first, second = torch.arange(3, 12)[None], torch.arange(40, 45)[None]
    experts = find_experts(model)[-1].module

    def fails(*_: Any, **__: Any) -> None:
        raise IndexError("the disk is gone")

    def fail() -> None:
        with monkeypatch.context() as broken, pytest.raises(IndexError):
            if last:
                broken.setattr(experts, "forward", fails)
            model(torch.tensor([[5, 6, 7 if last else 10**6]]))

    with torch.no_grad():
        with torch_mesh.record_trace(model, tmp_path / "expected.npz", scores=True, lookahead=True):
            model(first)
            model(second)
        with torch_mesh.record_trace(model, tmp_path / "found.npz", scores=True, lookahead=True):
            fail()
            model(first)
            fail()
            fail()
            model(second)
            fail()
        nothing = torch_mesh.record_trace(model, tmp_path / "nothing.npz")
        with pytest.raises(torch_mesh.MeshError, match="No forward"), nothing:
            fail()
    _assert_equal_traces(load_trace(tmp_path / "found.npz"), load_trace(tmp_path / "expected.npz"))
