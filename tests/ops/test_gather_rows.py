"""gather_rows and prefetch_rows: the table's rows, bit for bit, with the errors of an embedding and of a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from pairs import first_quick
from row_files import RowFiles, coded_files, decoded, handle_of, padded_files, raw_files
from tiny_pools import ops
from torch import Tensor
from torch.nn import functional

import torch_mesh
from torch_mesh import _C, _testing
from torch_mesh.formats import FORMATS, TABLE_FORMATS

ROWS, DIM = 1000, 160
PATIENCE = 60  # seconds: a child or a thread may be slow on a busy machine; this detects a hang
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


@pytest.mark.parametrize("io", ["uring", "threads"])
@pytest.mark.parametrize("weights", TABLE_FORMATS)
def test_rows_in_codes_become_their_values(weights: str, io: str, tmp_path: Path) -> None:
    if io == "uring" and (why := _C.features()["uring"]):
        pytest.skip(why)
    made = [torch.randn(300, DIM).bfloat16(), torch.randn(50, 33), torch.randn(9, 8193).half(), torch.randn(7, 1)]
    made[0][5] = 0
    files = coded_files(weights, tmp_path, *made)
    for cache in (0, 20_000, 1 << 20):
        tables = files.open(cache=cache, io=io)
        for number, values in enumerate(files.tables):
            for shape in ((), (0,), (2, 9, 16)):
                ids = torch.randint(len(values), shape)
                assert torch.equal(gather(files, tables, ids, number), functional.embedding(ids, values))
            strided = torch.arange(len(values)).repeat(2).flip(0)
            ops.prefetch_rows(strided, handle_of(tables, number))
            assert torch.equal(gather(files, tables, strided, number), values[strided])
        assert not gather(files, tables, torch.tensor([5])).any()
        tables.close()


@pytest.mark.parametrize("weights", TABLE_FORMATS)
@pytest.mark.parametrize("dim", [1, 31, 33, 160, 1000])
def test_codes_are_the_nearest_for_their_scale(weights: str, dim: int) -> None:
    """Computed in float64. Halfway between two codes either may be chosen."""
    values = (torch.randn(40, dim) * torch.logspace(-20, 20, 40)[:, None]).numpy()
    coded = _C.code_rows(weights, 0, values)
    group = FORMATS[weights].table_group or dim
    bits = dim * FORMATS[weights].bits
    assert coded.shape[1] == _C.coded_row_bytes(weights, dim) == -(-bits // 8) + -(-dim // group) * 2
    words = np.ascontiguousarray(coded[:, : -(-dim // group) * 2]).view(np.uint16).astype(np.uint32) << 16
    scales = np.repeat(words.view(np.float32).astype(np.float64), group, axis=1)[:, :dim]
    low, high = (-127, 127) if weights == "int8" else (-8, 7)
    nearest = np.clip(np.rint(values / scales), low, high) * scales
    error = np.abs(decoded(weights, coded, dim) - values)
    assert (error <= np.abs(nearest - values) * (1 + 1e-6) + np.abs(values) * 1e-7).all()
    if weights == "int8":
        assert (error <= np.abs(scales) / 2).all()


@pytest.mark.parametrize("weights", TABLE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_have_no_code(weights: str, bad: float) -> None:
    values = torch.randn(9, 33)
    values[6, 32] = bad
    with pytest.raises(ValueError, match=rf"row 106 has a value that is not finite, and {weights} has no code for it"):
        _C.code_rows(weights, 100, values.numpy())


def test_wrong_codes(tmp_path: Path) -> None:
    files = coded_files("int8", tmp_path, torch.randn(9, 40).half())
    tables = files.open()
    with pytest.raises(ValueError, match="stand for values of Half, not of BFloat16"):
        ops.gather_rows(torch.tensor([1]), handle_of(tables), 40, torch.bfloat16)
    with pytest.raises(ValueError, match="rows have 80 bytes"):
        ops.gather_rows(torch.tensor([1]), handle_of(tables), 20, torch.half)
    tables.close()
    for codes, message in (
        (("int8", "fp16", 41), "rows of 41 values in int8 take 43 bytes, not 42"),
        (("int8", "fp64", 40), "'fp64'; allowed: 'bf16', 'fp16', 'fp32'"),
        (("lut4", "fp16", 40), "no rows of 40 values in lut4"),
    ):
        files.described[0]["codes"] = codes
        with pytest.raises(ValueError, match=message):
            files.open()


@pytest.mark.parametrize("weights", TABLE_FORMATS)
def test_a_damaged_row_of_codes_is_not_returned(weights: str, tmp_path: Path) -> None:
    files = coded_files(weights, tmp_path, torch.randn(100, DIM).bfloat16())
    with files.files[0].open("r+b") as file:
        file.seek(4096 + 12 * files.described[0]["stride"] + 5)
        file.write(b"damage")
    tables = files.open()
    with pytest.raises(torch_mesh.ChecksumError, match=r"row 12 of table0\.weight"):
        gather(files, tables, torch.tensor([11, 12, 13]))
    rest = torch.tensor([11, 13, 99])
    assert torch.equal(gather(files, tables, rest), files.tables[0][rest])
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
    for wrong, message in ((handle[:1], "a torch_mesh handle"), (handle_of(tables, 3), r"names table 3.*\[0, 3\)")):
        with pytest.raises(ValueError, match=message):
            ops.gather_rows(torch.tensor([1]), wrong, DIM, torch.bfloat16)
    with pytest.raises(torch_mesh.PoolClosedError):  # ids of tables and pools differ
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
    with pytest.raises(torch_mesh.ReadError) as caught:
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
    with pytest.raises(torch_mesh.ReadError):
        _C.Tables(files=sizes, tables=tables, **options)


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_slow_reads_time_out(files: RowFiles) -> None:
    tables = files.open(faults=SLOW, timeout=0.05)
    with pytest.raises(torch_mesh.ReadTimeoutError, match=r"table0\.weight"):
        gather(files, tables, torch.tensor([1]))
    for _ in range(2):  # the second call waits for what the first one left
        with pytest.raises(torch_mesh.ReadTimeoutError):
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


# Gathers, closes and exits in a process whose reads last for a day.
STUCK = """
import functools, os, signal, sys, threading, time
from pathlib import Path
import torch
from row_files import handle_of, padded_files
from tiny_pools import ops
from torch_mesh import _C, _testing, PoolClosedError, ReadTimeoutError
from torch_mesh.pool.row_tables import RowTables
from torch_mesh.store.table_files import RowStretch, StoredTable

NEVER = {"seed": 1, "delay": 1, "max_delay": 86400.0}
files = padded_files(Path(sys.argv[1]), torch.randn(100, 160).bfloat16())

def gather(handle):
    ops.gather_rows(torch.tensor([1]), handle, 160, torch.bfloat16)

def prefetch(handle):
    begun = _testing.chunks_given()
    ops.prefetch_rows(torch.arange(40), handle)
    while _testing.chunks_given() == begun:  # or closing drops it
        time.sleep(0.001)

def open_stuck(timeout):
    tables = files.open(faults=NEVER, timeout=timeout, io=sys.argv[2])
    prefetch(handle_of(tables))
    return tables

tables = open_stuck(0.5)
try:
    tables.close()
except ReadTimeoutError as error:
    assert "what they read into is freed when they end" in str(error), error
else:
    raise AssertionError("reads that last for a day have ended")

tables, failed = open_stuck(2.0), []
def gather_late():
    try:
        gather(handle)
    except PoolClosedError as error:
        failed.append(error)
handle = handle_of(tables)
thread = threading.Thread(target=gather_late)
thread.start()
while tables.stats()[0]["gathers"] == 0:
    assert thread.is_alive(), failed
    time.sleep(0.001)
del tables  # under a gather that waits for its own read
thread.join()
assert failed

tables = open_stuck(1e6)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    tables.close()
except KeyboardInterrupt:
    print("interrupted")

_C.Tables = functools.partial(_C.Tables, interpose=_testing.faults(**NEVER))
about = files.described[0]
stored = StoredTable(
    about["name"], 160, torch.bfloat16, about["stride"], about["salt"], (RowStretch(files.files[0], 0, 100),), ()
)
tables = RowTables([stored], cache_bytes=1 << 20, verify="always", timeout=1e6, io=sys.argv[2])
prefetch(tables.handle(0))
print("at the end", flush=True)
"""


@pytest.mark.parametrize("io", first_quick("threads", "uring", "buffered"))
def test_reads_that_never_end_do_not_block_close_del_or_exit(io: str, tmp_path: Path) -> None:
    if io == "uring" and (why := _C.features()["uring"]):
        pytest.skip(why)
    done = warm.run(STUCK, tmp_path, io)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted", "at the end"]


@pytest.mark.parametrize("files", first_quick(raw_files, padded_files), indirect=True)
def test_forked_children_get_an_error(files: RowFiles, tables: _C.Tables) -> None:
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


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("files", [raw_files], indirect=True)
@pytest.mark.parametrize("children", first_quick(40, 400))
def test_no_forked_child_hangs_on_its_parents_locks(files: RowFiles, tables: _C.Tables, children: int) -> None:
    """Another thread may hold a lock of the registry, of tables or of their reader during a fork."""
    ending = threading.Event()
    handle = handle_of(tables)

    def gather_and_request(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        while not ending.is_set():
            ids = torch.randint(ROWS, (20,), generator=draw)
            ops.prefetch_rows(ids, handle)
            assert torch.equal(gather(files, tables, ids), files.tables[0][ids])

    def open_and_close() -> None:
        while not ending.is_set():
            files.open().close()

    calls: list[Callable[[], object]] = [
        lambda: ops.prefetch_rows(torch.tensor([1]), handle),
        lambda: gather(files, tables, torch.tensor([1])),
        tables.stats,
        tables.describe,
        tables.reset_stats,
        tables.close,
    ]

    def is_refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except torch_mesh.ForkedProcessError:
            return True
        return False

    with ThreadPoolExecutor(3) as threads:
        busy = [threads.submit(gather_and_request, 0), threads.submit(gather_and_request, 1)]
        busy.append(threads.submit(open_and_close))
        try:
            for number in range(children):
                child = os.fork()
                if child == 0:
                    try:
                        signal.alarm(PATIENCE)  # kills a child that hangs
                        os._exit(sum(1 << at for at, call in enumerate(calls) if not is_refused(call)))
                    finally:
                        os._exit(255)
                status = os.waitpid(child, 0)[1]
                assert status == 0, f"child {number}: {status}"
        finally:
            ending.set()
        for each in busy:
            each.result(PATIENCE)
    last = torch.tensor([1, 3])
    assert torch.equal(gather(files, tables, last), files.tables[0][last])


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0,)])
def test_opcheck(files: RowFiles, tables: _C.Tables, shape: tuple[int, ...]) -> None:
    ids = torch.randint(ROWS, shape)
    torch.library.opcheck(ops.gather_rows.default, (ids, handle_of(tables), DIM, torch.bfloat16))
    torch.library.opcheck(ops.gather_rows.default, (ids.int() % 50, handle_of(tables, 1), 33, torch.float32))
    torch.library.opcheck(ops.prefetch_rows.default, (ids, handle_of(tables)))


def test_gather_rows_compiles_without_graph_breaks(files: RowFiles, tables: _C.Tables) -> None:
    handle = handle_of(tables)

    def looked_up(ids: Tensor) -> Tensor:
        ops.prefetch_rows(ids, handle)
        return ops.gather_rows(ids, handle, DIM, torch.bfloat16).flatten(-2) * 2

    compiled: Callable[[Tensor], Tensor] = torch.compile(looked_up, fullgraph=True, backend="aot_eager")
    ids = torch.randint(ROWS, (3, 16))
    assert torch.equal(compiled(ids), looked_up(ids))


def test_raw_reads_that_benchmarks_compare_with(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(8 * 4096))
    offsets = [4096 * place for place in (3, 0, 7, 3)]
    if why := _C.features()["uring"]:
        pytest.skip(why)
    assert _testing.random_read_seconds(str(path), offsets, bytes=4096, depth=2, batch=3) > 0
    with pytest.raises(torch_mesh.ReadError, match="rows: read"):
        _testing.random_read_seconds(str(path), [*offsets, 8 * 4096], bytes=4096, depth=2)
    with pytest.raises(torch_mesh.ReadError, match="missing: open"):
        _testing.random_read_seconds(str(tmp_path / "missing"), offsets, bytes=4096, depth=2)
    with pytest.raises(ValueError, match="0 under way"):
        _testing.random_read_seconds(str(path), offsets, bytes=4096, depth=0)
