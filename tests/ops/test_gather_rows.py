"""gather_rows and prefetch_rows: the rows of the table, bit for bit, and the errors of an embedding and of a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first_quick
from row_files import RowFiles, handle_of, padded_files, raw_files
from tiny_pools import ops
from torch import Tensor
from torch.nn import functional

import torch_mesh
from torch_mesh import _C

ROWS, DIM = 1000, 160
# With this seed the first read takes about half of it.
SLOW = {"seed": 0, "delay": 1, "max_delay": 3.0}


@pytest.fixture(params=[raw_files, padded_files])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> RowFiles:
    return request.param(tmp_path, torch.randn(ROWS, DIM).bfloat16(), torch.randn(50, 33), torch.randn(9, 8192).half())


@pytest.fixture
def tables(files: RowFiles) -> Iterator[_C.Tables]:
    opened = files.open()
    yield opened
    opened.close()


def gather(files: RowFiles, tables: _C.Tables, ids: Tensor, table: int = 0) -> Tensor:
    weight = files.tables[table]
    return ops.gather_rows(ids, handle_of(tables, table), weight.size(1), weight.dtype)


@pytest.mark.parametrize("io", ["uring", "threads"])
@pytest.mark.parametrize("cache", [0, 20_000, 1 << 20])
def test_rows_are_those_of_an_embedding(files: RowFiles, cache: int, io: str) -> None:
    if io == "uring" and (why := _C.features()["uring"]):
        pytest.skip(why)
    tables = files.open(cache=cache, io=io)
    for number, weight in enumerate(files.tables):
        for shape in ((), (0,), (1,), (2, 0, 3), (2, 9, 16), (700,)):
            for dtype in (torch.int64, torch.int32):
                ids = torch.randint(len(weight), shape, dtype=dtype)
                assert torch.equal(gather(files, tables, ids, number), functional.embedding(ids, weight))
        strided = torch.randint(len(weight), (6, 8)).t()[::2]
        assert torch.equal(gather(files, tables, strided, number), functional.embedding(strided, weight))
    assert tables.describe()["io"] == io
    tables.close()


def test_repeated_ids_are_read_once_and_counted(files: RowFiles, tables: _C.Tables) -> None:
    gather(files, tables, torch.tensor([[3, 900, 3], [3, 4, 900]]))
    gather(files, tables, torch.tensor([4, 5]))
    counts = tables.stats()[0]
    assert {name: counts[name] for name in ("gathers", "lookups", "distinct", "reads", "hits", "failed")} == {
        "gathers": 2,
        "lookups": 8,
        "distinct": 5,
        "reads": 4,
        "hits": 1,
        "failed": 0,
    }
    assert counts["bytes_read"] >= 4 * DIM * 2
    assert tables.stats()[1]["lookups"] == 0
    tables.reset_stats()
    assert not any(tables.stats()[0].values())


def test_prefetched_rows_are_not_read_again(files: RowFiles, tables: _C.Tables) -> None:
    ids = torch.tensor([7, 8, 7])
    ops.prefetch_rows(ids, handle_of(tables))
    assert torch.equal(gather(files, tables, ids), files.tables[0][ids])
    counts = tables.stats()[0]
    assert (counts["prefetches"], counts["reads"], counts["hits"]) == (2, 0, 2)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_ids_that_are_no_rows(files: RowFiles, tables: _C.Tables, bad: int) -> None:
    ids = torch.tensor([[1, bad]])
    for call in (lambda: gather(files, tables, ids), lambda: ops.prefetch_rows(ids, handle_of(tables))):
        with pytest.raises(IndexError, match=rf"row {bad} is outside the table's \[0, {ROWS}\)"):
            call()
    assert tables.stats()[0]["reads"] == 0


def test_wrong_arguments(files: RowFiles, tables: _C.Tables) -> None:
    handle = handle_of(tables)
    with pytest.raises(ValueError, match="row ids have dtype Float; allowed: int32, int64"):
        ops.gather_rows(torch.tensor([1.0]), handle, DIM, torch.bfloat16)
    for dim, dtype in ((DIM + 1, torch.bfloat16), (DIM, torch.float32), (-DIM, torch.bfloat16)):
        with pytest.raises(ValueError, match="rows have 320 bytes"):
            ops.gather_rows(torch.tensor([1]), handle, dim, dtype)
    for wrong, message in ((handle[:2], "a torch_mesh handle"), (handle_of(tables, 3), r"names table 3.*\[0, 3\)")):
        with pytest.raises(ValueError, match=message):
            ops.gather_rows(torch.tensor([1]), wrong, DIM, torch.bfloat16)
    with pytest.raises(torch_mesh.PoolClosedError):  # the id of tables is never that of a pool
        ops.residency(handle)
    with pytest.raises(TypeError, match="knows no rows="):
        files.open(rows=3)


def test_closed_tables(files: RowFiles, tables: _C.Tables) -> None:
    tables.close()
    tables.close()
    for call in (lambda: gather(files, tables, torch.tensor([1])), tables.stats, tables.describe):
        with pytest.raises(torch_mesh.PoolClosedError):
            call()


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    files = padded_files(tmp_path, torch.randn(100, DIM).bfloat16())
    offset = 4096 + 12 * 512
    with files.files[0].open("r+b") as file:
        file.seek(offset + 5)
        file.write(b"damage")
    tables = files.open()
    with pytest.raises(torch_mesh.ChecksumError, match=r"row 12 of table0\.weight") as caught:
        gather(files, tables, torch.tensor([11, 12, 13]))
    assert (caught.value.file, caught.value.offset) == (str(files.files[0]), offset)
    rest = torch.tensor([11, 13, 99])
    assert torch.equal(gather(files, tables, rest), files.tables[0][rest])


def test_rows_in_the_wrong_place_are_found(tmp_path: Path) -> None:
    files = padded_files(tmp_path, torch.randn(100, DIM).bfloat16(), torch.randn(100, DIM).bfloat16())
    first, second = (about["stretches"] for about in files.described)
    files.described[0]["stretches"], files.described[1]["stretches"] = second, first
    with pytest.raises(torch_mesh.ChecksumError):
        gather(files, files.open(), torch.tensor([0]))


def test_a_file_that_is_cut_off(files: RowFiles, tables: _C.Tables) -> None:
    path = files.files[0]
    whole = path.read_bytes()
    os.truncate(path, 4096)
    last = torch.tensor([ROWS // 2 - 1])
    with pytest.raises(torch_mesh.ReadError, match="shorter than when it was opened") as caught:
        gather(files, tables, last)
    assert caught.value.file == str(path)
    with path.open("r+b") as file:
        file.write(whole)
    assert torch.equal(gather(files, tables, last), files.tables[0][last])


def test_a_missing_or_shorter_file_is_refused(files: RowFiles) -> None:
    sizes = [(str(path), path.stat().st_size) for path in files.files]
    options: dict[str, Any] = {"verify": True, "timeout": 1.0, "io": "auto"}
    tables: Any = [about | {"cache_bytes": 0} for about in files.described]
    os.truncate(files.files[-1], 100)
    with pytest.raises(torch_mesh.ReadError, match="cut off or replaced"):
        _C.Tables(files=sizes, tables=tables, **options)
    files.files[-1].unlink()
    with pytest.raises(torch_mesh.ReadError, match="cannot open"):
        _C.Tables(files=sizes, tables=tables, **options)


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_slow_reads_time_out(files: RowFiles) -> None:
    tables = files.open(faults=SLOW, timeout=0.05)
    with pytest.raises(torch_mesh.ReadTimeoutError, match=r"table0\.weight"):
        gather(files, tables, torch.tensor([1]))
    with pytest.raises(torch_mesh.ReadTimeoutError, match="reads of a closed engine take longer"):
        tables.close()


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_ctrl_c_ends_a_gather(files: RowFiles) -> None:
    tables = files.open(faults=SLOW)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        gather(files, tables, torch.tensor([1]))
    tables.close()


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_close_ends_a_gather_that_waits(files: RowFiles) -> None:
    tables = files.open(faults=SLOW)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            gather(files, tables, torch.tensor([1]))
        except torch_mesh.PoolClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not tables.stats()[0]["reads"]:
        assert thread.is_alive()
    tables.close()
    thread.join()
    assert len(failed) == 1


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_forked_children_are_told_so(files: RowFiles, tables: _C.Tables) -> None:
    gather(files, tables, torch.tensor([1, 2]))
    for _ in range(20):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                gather(files, tables, torch.tensor([1]))
            except torch_mesh.ForkedProcessError:
                code = 7
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(gather(files, tables, torch.tensor([1, 3])), files.tables[0][[1, 3]])


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0,)])
def test_opcheck(files: RowFiles, tables: _C.Tables, shape: tuple[int, ...]) -> None:
    ids = torch.randint(ROWS, shape)
    torch.library.opcheck(ops.gather_rows.default, (ids, handle_of(tables), DIM, torch.bfloat16))
    torch.library.opcheck(ops.gather_rows.default, (ids.int() % 50, handle_of(tables, 1), 33, torch.float32))
    torch.library.opcheck(ops.prefetch_rows.default, (ids, handle_of(tables)))


def test_it_compiles_without_graph_breaks(files: RowFiles, tables: _C.Tables) -> None:
    handle = handle_of(tables)

    def looked_up(ids: Tensor) -> Tensor:
        ops.prefetch_rows(ids, handle)
        return ops.gather_rows(ids, handle, DIM, torch.bfloat16).flatten(-2) * 2

    compiled: Callable[[Tensor], Tensor] = torch.compile(looked_up, fullgraph=True, backend="aot_eager")
    ids = torch.randint(ROWS, (3, 16))
    assert torch.equal(compiled(ids), looked_up(ids))
