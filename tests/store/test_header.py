import contextlib
import itertools
import json
import os
import struct
import tracemalloc
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy

from torch_mesh.errors import StoreError
from torch_mesh.store import dense_codes, header, table_files
from torch_mesh.store.header import encode_header, read_header
from torch_mesh.store.weight_files import INDEX_NAME, read_index, weight_files


def write(path: Path, table: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = {"a": tensor(), "b": tensor("BF16", [2, 1], [4, 8])}

# name -> (header, data, a part of the message)
HOSTILE: dict[str, tuple[object, bytes, str]] = {
    "not-json": (b"{'a': 1}", b"", "not valid JSON"),
    "a-list": (b"[]", b"", "does not start with"),
    "leading-space": (b" {}", b"", "does not start with"),
    "trailing-garbage": (b"{} x", b"", "not valid JSON"),
    "not-utf-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "nested-too-deep": (b'{"a":' + b"[" * 200_000, b"", "'a': is not described"),
    "nested-too-deep-in-tensor": (b'{"a":{"dtype":' + b"[" * 200_000 + b"]}}", b"", "not valid JSON"),
    "endless-tensor": (b'{"a":{"dtype":"' + b"U" * (2 << 20), b"", "does not end within"),
    "cut-off": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', b"", "not valid JSON"),
    "no-comma": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]} "b":3}', b"", "',' is expected at byte"),
    "no-colon": (b'{"a" {}}', b"", "':' is expected at byte 5"),
    "trailing-comma": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},}', b"", "a string is expected"),
    "control-character-in-name": (b'{"\x01":{}}', b"", "not valid JSON"),
    "brace-in-dtype": (b'{"a":{"dtype":"}","shape":[0],"data_offsets":[0,0]}}', b"", "not valid JSON"),
    "duplicate-tensor": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        "'a' occurs twice",
    ),
    "duplicate-metadata": (b'{"__metadata__":{},"__metadata__":{}}', b"", "'__metadata__' occurs twice"),
    "duplicate-key-in-metadata": (b'{"__metadata__":{"a":"","a":""}}', b"", "'a' occurs twice"),
    "duplicate-key-in-tensor": (b'{"a":{"dtype":"U8","dtype":"I8"}}', b"", "'dtype' occurs twice"),
    "surrogate-in-name": ({"\ud800": tensor()}, b"1234", "lone surrogate"),
    "surrogate-in-metadata": ({"__metadata__": {"a": "\udfff"}}, b"", "lone surrogate"),
    "entry-not-object": ({"a": 3}, b"", "'a': is not described"),
    "entry-lacks-shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234", "'a': is not described"),
    "entry-has-more": ({"a": {**tensor(), "strides": [1]}}, b"1234", "'a': is not described"),
    "unknown-dtype": ({"a": tensor("U7")}, b"1234", "unknown dtype 'U7'"),
    "dtype-not-string": ({"a": tensor(8)}, b"1234", "unknown dtype 8"),
    "dtype-unhashable": ({"a": tensor(["U8"])}, b"1234", "unknown dtype"),
    "shape-not-list": ({"a": tensor(shape=4)}, b"1234", "has the shape 4"),
    "shape-of-strings": ({"a": tensor(shape=["4"])}, b"1234", "has the shape"),
    "shape-of-booleans": ({"a": tensor(shape=[True, 4])}, b"1234", "has the shape"),
    "negative-size": ({"a": tensor(shape=[-2, -2])}, b"1234", "has the shape"),
    "rank-too-high": ({"a": tensor(shape=[1] * 33 + [4])}, b"1234", "at most 32 sizes"),
    "float-size": (b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', b"1234", "only integers"),
    "nan-size": (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234", "only integers"),
    "huge-integer": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,4]}}',
        b"1234",
        "64 bits",
    ),
    "integer-of-65-bits": (b'{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}}', b"", "64 bits"),
    "shape-overflows": ({"a": tensor(shape=[1 << 62] * 32)}, b"1234", "'a': has 4 bytes, but U8"),
    "shape-wraps-to-zero": ({"a": tensor(shape=[1 << 32, 1 << 32], offsets=[0, 0])}, b"", "'a': has 0 bytes, but U8"),
    "bytes-not-those-of-shape": ({"a": tensor("F32", [4], [0, 4])}, b"1234", "'a': has 4 bytes, but F32"),
    "offsets-not-two": ({"a": tensor(offsets=[0, 4, 4])}, b"1234", "data_offsets"),
    "offsets-reversed": ({"a": tensor(offsets=[4, 0])}, b"1234", "data_offsets"),
    "offsets-negative": ({"a": tensor(offsets=[-4, 0])}, b"1234", "data_offsets"),
    "offsets-beyond-the-file": ({"a": tensor()}, b"123", "truncated"),
    "offsets-overflow": ({"a": tensor(offsets=[(1 << 63) - 4, (1 << 63) - 1])}, b"1234", "truncated"),
    "overlap": ({"a": tensor(), "b": tensor(offsets=[2, 6])}, b"123456", "'b' overlaps 'a'"),
    "same-bytes-twice": ({"a": tensor(), "b": tensor()}, b"1234", "overlaps"),
    "hole-before": ({"a": tensor(offsets=[4, 8])}, b"12345678", "4 bytes before tensor 'a'"),
    "hole-between": ({"a": tensor(), "b": tensor(offsets=[6, 10])}, b"1234567890", "2 bytes before tensor 'b'"),
    "hole-after": (GOOD, b"123456789", "1 bytes after 'b'"),
    "data-without-tensors": ({}, b"1234", "4 bytes after the header"),
    "metadata-not-object": ({"__metadata__": []}, b"", "__metadata__"),
    "metadata-not-strings": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    table, data, expected = HOSTILE[name]
    path = write(tmp_path / "x.safetensors", table, data)
    with pytest.raises(StoreError) as caught:
        read_header(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2), struct.pack("<Q", 100) + b"{}"])
def test_truncated_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="ends after|truncated"):
        read_header(path)


def test_header_beyond_the_cap_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", header.MAX_HEADER_BYTES + 1) + b"{")
    os.truncate(path, 1 << 40)  # sparse, but reading it would read a terabyte
    with pytest.raises(StoreError, match="the format allows"):
        read_header(path)


def test_json_of_too_many_elements_is_refused_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_STRUCTURE", 1000)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    (tmp_path / INDEX_NAME).write_bytes(b'{"a":[' + b"[]," * 1001 + b"[]]}")
    with pytest.raises(StoreError, match="more than 1000 elements"):
        read_index(tmp_path / INDEX_NAME)


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_TENSORS", 3)
    table = {str(number): tensor(shape=[0], offsets=[0, 0]) for number in range(4)}
    with pytest.raises(StoreError, match="more than the allowed 3 tensors"):
        read_header(write(tmp_path / "x.safetensors", table))
    with pytest.raises(StoreError, match="at most 3 strings"):
        read_header(write(tmp_path / "x.safetensors", {"__metadata__": {str(number): "" for number in range(4)}}))
    table.popitem()
    assert len(read_header(write(tmp_path / "x.safetensors", table)).tensors) == 3


def _names_of_a_model(count: int) -> bytes:
    names = (f"model.layers.{n // 384}.mlp.experts.{n // 3 % 128}.{'gud'[n % 3]}_proj.weight" for n in range(count))
    return json.dumps({name: tensor("BF16", [0, 2048], [0, 0]) for name in names}).encode()


# name -> (header, limit of memory for reading it as a multiple of its size)
LARGE: dict[str, tuple[bytes, float]] = {
    "a-model": (_names_of_a_model(10_000), 4),
    "one-name-of-another-alphabet": (_names_of_a_model(10_000).replace(b"model", "\U0001f9ff".encode(), 1), 4),
    "least-tensors": (
        b"{" + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(10_000)) + b"}",
        7,
    ),
    "brackets": (b'{"a":[' + b"[]," * 300_000 + b"[]]}", 2.5),
    "brackets-in-tensor": (b'{"a":{"dtype":[' + b"[]," * 500_000 + b"[]]}}", 2.5),
    "metadata": (b'{"__metadata__":{"a":"' + b'\\"' * 500_000 + b'"}}', 4),
}


@pytest.mark.parametrize("name", LARGE)
def test_reading_takes_a_few_times_the_headers_size(tmp_path: Path, name: str) -> None:
    raw, times = LARGE[name]
    path = write(tmp_path / "x.safetensors", raw)
    tracemalloc.start()
    try:
        with contextlib.suppress(StoreError):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < times * len(raw), f"{peak / len(raw):.1f} times"


@pytest.mark.parametrize("content", [b'{"weight_map": {}}', b""])
def test_a_small_index_takes_little_memory(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / INDEX_NAME, content)
    tracemalloc.start()
    try:
        with contextlib.suppress(StoreError):
            read_index(tmp_path / INDEX_NAME)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_folder_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a regular file"):
        read_header(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        read_header(tmp_path / "pipe")


def test_trailing_spaces_scalars_and_empty_tensors_are_accepted(tmp_path: Path) -> None:
    table = {"scalar": tensor("F32", [], [0, 4]), "empty": tensor("F32", [0, 7], [4, 4])}
    path = write(tmp_path / "x.safetensors", json.dumps(table).encode() + b"   ", b"1234")
    tensors = read_header(path).tensors
    assert tensors["scalar"].shape == () and tensors["scalar"].bytes == 4
    assert tensors["empty"].shape == (0, 7) and tensors["empty"].bytes == 0


arrays = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(
        st.sampled_from(["uint8", "int8", "float16", "float32", "int64"]),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    max_size=6,
)


@hypothesis.given(arrays)
def test_agrees_with_what_the_safetensors_library_writes(tmp_path_factory: pytest.TempPathFactory, arrays) -> None:
    path = tmp_path_factory.mktemp("written") / "x.safetensors"
    contents = {
        name: np.frombuffer(os.urandom(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
        for name, (dtype, shape) in arrays.items()
    }
    safetensors.numpy.save_file(contents, path)
    tensors = read_header(path).tensors
    raw = path.read_bytes()
    assert tensors.keys() == contents.keys()
    for name, array in contents.items():
        found = tensors[name]
        assert found.shape == array.shape
        assert raw[found.offset : found.offset + found.bytes] == array.tobytes()


@hypothesis.given(arrays, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
@hypothesis.settings(max_examples=50)
def test_encoded_header_is_read_by_the_safetensors_library(
    tmp_path_factory: pytest.TempPathFactory, arrays, metadata: dict[str, str]
) -> None:
    names = {"uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32", "int64": "I64"}
    metadata = {
        key.encode("utf-8", "ignore").decode(): value.encode("utf-8", "ignore").decode()
        for key, value in metadata.items()
    }
    sizes = {n: int(np.prod(shape)) * np.dtype(dtype).itemsize for n, (dtype, shape) in arrays.items()}
    encoded = encode_header(
        ((n, names[dtype], tuple(shape), sizes[n]) for n, (dtype, shape) in arrays.items()), metadata
    )
    assert len(encoded) % 4096 == 0
    path = tmp_path_factory.mktemp("encoded") / "x.safetensors"
    path.write_bytes(encoded + os.urandom(sum(sizes.values())))
    assert safetensors.numpy.load_file(path).keys() == arrays.keys()
    assert read_header(path).metadata == metadata


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300)
def test_mutated_header_is_refused_or_describes_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(struct.pack("<Q", len(json.dumps(GOOD))) + json.dumps(GOOD).encode() + b"12345678")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        hypothesis.assume(raw)
    path = tmp_path_factory.mktemp("mutated") / "x.safetensors"
    path.write_bytes(raw)
    try:
        found = read_header(path)
    except StoreError as error:
        assert str(path) in str(error)
        return
    spans = sorted((t.offset, t.offset + t.bytes) for t in found.tensors.values())
    assert spans == [] or spans[-1][1] == len(raw)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@hypothesis.given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_but_store_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("random") / "x.safetensors"
    for raw in (
        content,
        struct.pack("<Q", len(content)) + content,
        struct.pack("<Q", len(content) + 1) + b"{" + content,
    ):
        path.write_bytes(raw)
        with contextlib.suppress(StoreError):
            read_header(path)


def write_index(folder: Path, weight_map: object) -> Path:
    path = folder / INDEX_NAME
    path.write_text(json.dumps({"metadata": {"total_size": 8.0}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/../b.safetensors",
        "a/../../b.safetensors",
        "a//b.safetensors",
        "a/",
        "./a",
        "..",
        ".",
        "",
        "a\\b",
        "a\0b",
        "a\nb",
        "\udc80",
        3,
        None,
        ["a"],
    ],
)
def test_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: object) -> None:
    with pytest.raises(StoreError, match="not a plain file name"):
        read_index(write_index(tmp_path, {"a": name}))


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(StoreError, match="weight_map"):
        read_index(write_index(tmp_path, weight_map))


def test_weight_files_are_the_single_one_or_those_of_the_index(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has neither"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(StoreError, match="pickled"):
        weight_files(tmp_path)
    write_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    assert [path.name for path in weight_files(tmp_path)] == ["1.safetensors", "2.safetensors"]
    write_index(tmp_path, {"a": "b/2.safetensors", "b": "3.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "3.safetensors", tmp_path / "b" / "2.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


DEEP = "[" * 200_000
ROWS = '{"dtype": "BF16", "salt": "00", "dim": 2, "first_row": %s}'


@pytest.mark.parametrize(
    ("about", "message"),
    [("[]", "not an object"), (ROWS % "Infinity", "Infinity is not an integer"), (DEEP, "nests too deep")],
    ids=["a-list", "infinite", "nested-too-deep"],
)
def test_hostile_descriptions_of_rows_are_refused(tmp_path: Path, about: str, message: str) -> None:
    assert table_files._read_part(_described(tmp_path, "table", ROWS % "3"))[0] == 3
    with pytest.raises(StoreError, match=message):
        table_files._read_part(_described(tmp_path, "table", about))


@pytest.mark.parametrize("about", ["[]", '{"a": Infinity}', DEEP], ids=["a-list", "infinite", "nested-too-deep"])
def test_hostile_descriptions_of_codes_are_refused(tmp_path: Path, about: str) -> None:
    with pytest.raises(StoreError, match="no file of codes"):
        list(dense_codes._read_file(_described(tmp_path, "codes", about)))


def _described(folder: Path, key: str, about: str) -> Path:
    path = folder / "rows.safetensors"
    path.write_bytes(encode_header([("a", "U8", (2, 2), 4)], {key: about}) + bytes(4))
    return path
