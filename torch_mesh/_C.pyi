"""The control plane: Python's interface to the engine outside of forwards. The data plane is torch.ops.torch_mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import Self

torch_version: str  # the torch that this extension was built against

def features() -> dict[str, str]:
    """Features of the build and of this machine.

    'isa', 'isas', 'uring' ('' or why not), 'numa_nodes' (with memory for this process),
    'numa_compute_nodes' (with CPUs for it too).
    """

def record_bytes(format: str, group_size: int, hidden: int, intermediate: int, gated: bool, bias: bool) -> int: ...
def record_layout(
    format: str, group_size: int, hidden: int, intermediate: int, gated: bool, bias: bool
) -> dict[str, int]:
    """Sizes and offsets of a record in bytes (csrc/store/record.h).

    'bytes', 'gate_up_offset', 'gate_up_block_bytes', 'gate_up_bias_offset', the same of 'down', 'group_bytes' and
    'scales_bytes'. The blocks of bf16 have no groups: 'group_bytes' is a block's and 'scales_bytes' 0. A missing bias
    is at -1.
    """

def calibration_order(format: str) -> tuple[int, int]:
    """(streams, step): the order in which ``torch.ops.torch_mesh.pack_calibrated`` codes a format's inputs.

    Stream k has the inputs k, k + streams, ... It is coded after stream k - 1, ``step`` inputs at a time. A step of 0:
    the format is not supported.
    """

def tokens_per_chunk(
    format: str,
    group_size: int,
    hidden: int,
    intermediate: int,
    gated: bool,
    bias: bool,
    top_k: int,
    workspace: int,
) -> int:
    """Tokens per chunk of a fused forward within ``workspace`` bytes, on this machine's kernels."""

MAX_THREADS: int  # of an engine
MAX_TIMEOUT: float  # in seconds
MAX_DECODE_ROWS: int  # a forward of a layer with more rows is prefill
MAX_RANK: int  # of a projection's active adapters together
HEAD_DIM_STEP: int  # head sizes are multiples of it
MAX_HEAD_DIM: int

def linear_bytes(format: str, group_size: int, in_features: int, out_features: int) -> int:
    """Bytes of a result of ``torch.ops.torch_mesh.pack_linear``."""

def record_checksum(
    store_id: bytes, layer: int, expert: int, record: memoryview | bytes | npt.NDArray[np.uint8]
) -> int: ...
def policy_names() -> list[str]: ...
def replay(
    ids: npt.NDArray[np.int32],
    *,
    experts: int,
    policy: str,
    slots: int,
    scores: npt.NDArray[np.float32] | None = None,
    lookahead: npt.NDArray[np.float32] | None = None,
    sequences: npt.NDArray[np.int64] | None = None,
    forwards: npt.NDArray[np.int64] | None = None,
    prefill: str = "auto",
    deferred: int = 0,
    predictor: str = "off",
    prefetch: int = 0,
    recall: float = 0.75,
    seed: int = 0,
    read_seconds: float = 1.0,
    expert_seconds: float = 1.0,
    rest_seconds: float = 0.0,
    profile: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
    early_layers: int = 0,
    early_experts: int = 0,
) -> dict[str, Any]:
    """Replay recorded routing with the pool's own core, see csrc/residency/replay.h.

    Returns the fields of ReplayResult: ``hits`` and ``accesses_of`` int64 [tokens], ``seconds_of`` float64 [tokens].
    ``ids`` [tokens, layers, top_k], -1 for experts of other ranks, after all others; ``scores`` and ``lookahead``
    [tokens, layers, experts]; ``sequences`` and ``forwards``: the first token of each. Raises ValueError for ids out of
    range or repeated, and for invalid options.
    """

def replay_ranks(
    ids: npt.NDArray[np.int32],
    exchange_seconds: npt.NDArray[np.float64],
    *,
    experts: int,
    policy: str,
    slots: int,
    lookahead: npt.NDArray[np.float32] | None = None,
    sequences: npt.NDArray[np.int64] | None = None,
    forwards: npt.NDArray[np.int64] | None = None,
    prefill: str = "auto",
    predictor: str = "off",
    prefetch: int = 0,
    read_seconds: float = 1.0,
    expert_seconds: float = 1.0,
    rest_seconds: float = 0.0,
    one_disk: bool = False,
) -> list[dict[str, Any]]:
    """As ``replay``, for ranks that each have ``experts`` of a layer and ``slots``, and wait for each other after each
    layer; a result for each.

    ``ids`` [ranks, tokens, layers, top_k], ``lookahead`` [ranks, tokens, layers, experts], in each
    rank's own numbering; ``exchange_seconds`` [forwards, layers], after the last rank has computed.
    """

def cuda_driver() -> str:
    """'CUDA driver 12.8', or why there is no usable one. Touches no device."""

class Driver:
    """The driver of one device, see csrc/gpu/driver.h: CUDA's, or a simulated one in tests (``torch_mesh._testing``)
    with CPU memory."""

def open_cuda_driver(device: int) -> Driver:
    """Raises DeviceError for a missing or too old driver, and for a device that does not exist."""

class HostShare:
    """The host's part of layers that are partly on a device, see csrc/gpu/host_share.h.

    ``handle`` may be that of any layer of the pool. Streams are torch.cuda.Stream.cuda_stream, 0 the default one.
    Raises DeviceError if the driver refuses a call, ForkedProcessError in a forked child.
    """

    def __init__(self, handle: Tensor, driver: Driver) -> None: ...
    def submit(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        table: Tensor,
        out: Tensor,
        layer: int,
        sentinels: bool,
        stream: int,
    ) -> int:
        """Enqueue after the work of ``stream``; returns a ticket for ``join``.

        Tensors are contiguous and kept by the caller until joined: x [tokens, hidden] bf16, fp16 or fp32, topk_ids
        int64 and topk_weights fp32 [tokens, k], table int32 [experts] (>= 0: on the device), out fp32 [tokens, hidden].
        Raises a pending error of an earlier host node.
        """

    def join(self, ticket: int, stream: int) -> None:
        """Make later work of ``stream`` wait for the host's sum in ``out``."""

    def wait(self, ticket: int) -> None:
        """Wait for the node of one call and raise its error, before 64 others have been submitted. Raises ValueError
        for a captured call."""

    def synchronize(self) -> None:
        """Wait for the host nodes of calls that were not captured, then ``check``."""

    def check(self) -> None:
        """Raise a pending error of a host node, once."""

    def set_capture_sizes(self, tokens: list[int], top_k: int) -> None: ...
    def capture_sizes(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]:
        """'calls', 'all_on_device', 'failed', 'bytes_down', 'bytes_up', 'node_seconds', 'waited_seconds',
        'waited_calls'."""

    def reset_stats(self) -> None: ...

class Turn:
    """A context manager: a prompt's use of an Uplift's buffers. Entering waits for the previous prompt."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def bring(self, layer: int, experts: list[int]) -> int:
        """Copy up to ``batch`` distinct experts to the device; return the buffer, 0 or 1, which has them in this order
        for later work of ``stream``."""

class Uplift:
    """Streams experts without a slot to the device, see csrc/gpu/experimental/uplift.h. The buffers are uint8 [records,
    record bytes], allocated in ``stream``."""

    def __init__(self, share: HostShare, first: Tensor, second: Tensor, stream: int) -> None: ...
    @property
    def batch(self) -> int: ...
    def bytes_up(self) -> int: ...
    def turn(self, stream: int) -> Turn: ...

class Mover:
    """Moves experts between a device's slots and the pool, see csrc/gpu/experimental/mover.h.

    ``records`` uint8 [slots, record bytes], ``table`` int32 [layers, experts]. ``source`` is a handle of the pool with
    the records for the device: the host share's, or one of the same layers and experts in another format.
    """

    def __init__(
        self,
        share: HostShare,
        source: Tensor,
        records: Tensor,
        table: Tensor,
        slots_of: list[int],
        moving: list[bool],
        *,
        batch: int,
        policy: str,
        patience: int,
    ) -> None: ...
    def step(self, stream: int) -> int: ...
    def move(self, up: list[int], down: list[int], stream: int) -> None:
        """Move experts, numbered layer * experts + expert, and wait."""

    def slots_of(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]:
        """'moved_up', 'batches', 'bytes_up', 'failed', 'last_failure' (an exception or None)."""

def direct_io_alignment(path: str) -> int:
    """The alignment in bytes that O_DIRECT needs on this file; 0 if unknown; -1 if O_DIRECT is refused, or needs
    more than the 4096 bytes that records are aligned to."""

class RawView(TypedDict):
    """One matrix inside the pieces of a raw expert: element (r, c) is piece[offset + r*row_stride + c*column_stride],
    in elements."""

    piece: int
    offset: int
    row_stride: int
    column_stride: int

class RawPlace(TypedDict):
    """A position in the pieces of a raw expert; bytes."""

    piece: int
    offset: int

class RawScales(RawPlace):
    type: str  # 'bf16', 'fp16', 'fp32', 'e8m0', 'e4m3'
    rows: int
    columns: int
    row_bytes: int
    column_bytes: int

class RawZeros(RawPlace):
    value: int
    bytes: int

class RawCodes(RawPlace, total=False):
    """One matrix in codes and scales, as in ``torch_mesh.store.sources.layout.Codes``; scales count rows from
    ``first_row`` before the matrix's."""

    order: str
    flip: int
    run: int
    run_bytes: int
    row_bytes: int
    first_row: int
    scales: RawScales
    factor: RawPlace
    divisor: RawPlace
    group_index: RawPlace
    zeros: RawZeros

def pack_raw(
    pieces: Sequence[bytes | bytearray | npt.NDArray[np.uint8]],
    raw_dtype: str,
    raw_views: Mapping[str, RawView | RawCodes],
    format: str,
    group_size: int,
    hidden: int,
    intermediate: int,
    gated: bool,
    bias: bool,
) -> bytearray:
    """Pack the pieces of an expert of a raw ``Source`` into a record. Raises ValueError for pieces that are too short,
    and for scales and codes that the format cannot hold."""

class Source:
    """The location of records. ``extents`` is int64 [layers, experts, pieces, 3] of (file, offset, bytes);
    ``checksums`` uint64 [layers, experts] or None.

    A raw source has ``raw_dtype`` ('bf16', 'fp16', 'fp32'; of biases alone if weights are in codes) and
    ``raw_views``, each with keys among gate, up, down, gate_bias, up_bias, down_bias. ``raw_views_of`` is int64
    [layers, experts], each expert's index in ``raw_views``; None if there is one for all.

    A rank has a range of the model's experts, from ``first_expert`` on, and numbers them from 0; checksums and errors
    use the model's numbers. ``routed_experts`` is how many routers choose from; 0: the source has all of them.

    ``copies``: for each file the paths of its copies on other drives, "" where a drive lacks one; empty: none at all.
    Raises ValueError for an extent outside of its file.
    """

    def __init__(
        self,
        files: list[tuple[str, int]],
        extents: npt.NDArray[np.int64],
        checksums: npt.NDArray[np.uint64] | None,
        store_id: bytes,
        raw_dtype: str | None = None,
        raw_views: Sequence[Mapping[str, RawView | RawCodes]] | None = None,
        raw_views_of: npt.NDArray[np.int64] | None = None,
        first_expert: int = 0,
        routed_experts: int = 0,
        copies: Sequence[Sequence[str]] = (),
    ) -> None: ...
    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers into which an engine reads raw records; 0 for a store."""

class _DetailedStats(TypedDict):
    """The phases' values are as those of ``Engine.stats``; ``experts`` has each field of ExpertStats as int64 [layers,
    experts]."""

    none: dict[str, npt.NDArray[np.int64]]
    prefill: dict[str, npt.NDArray[np.int64]]
    decode: dict[str, npt.NDArray[np.int64]]
    experts: dict[str, npt.NDArray[np.int64]]
    prefetch_error: Exception | None
    slots: int  # now
    early: int  # soft-pinned early experts, now
    max_slots: int
    shrinks: int
    grows: int
    resets: int  # times that the other counts were reset

class Interpose:
    """Intercepts an engine's reads; tests make one (``torch_mesh._testing.faults``)."""

class Lender:
    """Lends the slots of an engine made with ``lendable`` to up to ``workers`` processes of this user, see
    csrc/residency/lending/lender.h.

    Keeps the engine until the lender is closed. Raises ValueError for a path that is in use or too long, for an engine
    that has a Lender, and for more workers than slots; ReadError if the system refuses the socket.
    """

    def __init__(self, engine: Engine, path: str, workers: int) -> None: ...
    @property
    def workers(self) -> int:
        """Connected workers."""

    @property
    def slots(self) -> int:
        """Slots that each worker may hold."""

    @property
    def refused(self) -> int:
        """Connections that were ended for invalid requests."""

    def close(self) -> None:
        """Close the engine's pool and end all loans. Idempotent."""

class Table(TypedDict):
    """An embedding table in files. ``stretches`` has (file, offset of the first row, rows) of consecutive rows, in the
    order of the table."""

    name: str
    row_bytes: int  # in the file
    # The format of codes, the dtype of their values ('bf16', 'fp16', 'fp32') and the values of a row; None: rows are
    # values themselves.
    codes: tuple[str, str, int] | None
    stride: int  # bytes from one row to the next
    has_checksums: bool  # each row is followed by its checksum, as from ``pad_rows``
    salt: bytes  # 16, hashed into the checksums, so that rows of another table fail
    stretches: Sequence[tuple[int, int, int]]
    cache_bytes: int  # limit of the cache of rows in memory

class _TablesDescription(TypedDict):
    cache_rows: list[int]  # by table
    memory_bytes: int  # of caches and buffers
    io: str
    notes: list[str]

class Tables:
    """Embedding tables that are read from files, see csrc/tables/tables.h.

    Their handles are int64 [id, table]. Raises ValueError for rows outside their files, ReadError for files that
    cannot be opened, TypeError for an option that is missing, of another type, or unknown.
    """

    def __init__(
        self,
        *,
        files: Sequence[tuple[str, int]],
        tables: Sequence[Table],
        verify: bool,
        timeout: float,  # seconds that a gather may make no progress
        io: str,
        interpose: Interpose | None = None,
    ) -> None: ...
    @property
    def id(self) -> int: ...
    def stats(self) -> list[dict[str, int]]:
        """Counts of each table: 'gathers', 'lookups' (ids), 'distinct' (of those, in each gather), 'hits' and 'reads'
        (of the distinct ones), 'bytes_read', 'prefetches' (rows), 'failed' (reads), 'wait_nanoseconds'."""

    def reset_stats(self) -> None: ...
    def describe(self) -> _TablesDescription: ...
    def close(self, wait: bool = True) -> None:
        """As ``Engine.close``, for gathers."""

def padded_row_bytes(row_bytes: int) -> int:
    """Bytes of a row in a store: the row itself, its checksum and zeros. A row that fits in a sector never
    crosses its end."""

def pad_rows(salt: bytes, first_row: int, row_bytes: int, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Consecutive rows of a checkpoint in the form of a store. Raises ValueError unless ``rows`` are whole rows."""

def coded_row_bytes(weights: str, dim: int) -> int:
    """Bytes of a row of ``dim`` values in the format ``weights``, see csrc/tables/row_codes.h. Raises ValueError for a
    format that rows of tables cannot have."""

def code_rows(weights: str, first_row: int, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round values [rows, dim] to codes [rows, coded_row_bytes(weights, dim)]. Raises ValueError for a value that is
    not finite, with its row, counted from ``first_row``."""

class Engine:
    """The experts of one model: pool, reader and kernels. ``source=None`` keeps all records in memory (slots == layers
    * experts).

    Raises TypeError for an option that is missing, of another type, or unknown.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        format: str,
        group_size: int,
        hidden: int,
        intermediate: int,
        gated: bool,
        bias: bool,
        # as in csrc/kernels/activation.h, one for all layers or one for each; None: only grouped_linear is used
        activation: str | Sequence[str] | None,
        slots: int,
        policy: str,
        verify: str,
        io: str,
        threads: int,  # 0: torch's intra-op threads
        workspace: int,
        timeout: float,  # seconds
        prefill: str = "auto",  # or "window", "off", see csrc/residency/core/window.h
        source: Source | None,
        interpose: Interpose | None = None,
        min_slots: int = 1,  # minimum for resize()
        profile: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,  # in the form of model_use()
        # The next four: see soft_pins.h and warm_up.h in csrc/residency/core.
        early_layers: int = 0,
        early_experts: int = 0,
        on_gpu: list[bool] = [],  # [layers * experts]: on a GPU, so neither warmed nor pinned
        fill_empty: bool = False,  # read experts into empty slots while the disk is idle
        lendable: bool = False,  # slots in shared memory, for a Lender
        lender: str | None = None,  # the socket of a Lender, which sets the number of slots
    ) -> None: ...
    @property
    def id(self) -> int: ...
    def fill(self, layer: int, expert: int, record: npt.NDArray[np.uint8]) -> None: ...
    def read_record(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """Copy the packed record of an expert, which is promoted if it is cold."""

    def stats(self) -> dict[str, npt.NDArray[np.int64]]:
        """Each field of LayerStats (csrc/residency/core/statistics.h) as int64 [layers], over all phases."""

    def totals(self) -> dict[str, int]:
        """The sums of ``stats`` over all layers, and 'resets', atomically. Takes 10 µs."""

    def detailed_stats(self) -> _DetailedStats:
        """All counts, atomically."""

    def reset_stats(self) -> None: ...
    def record_misses(self, count: int) -> None:
        """Record when the next ``count`` misses (up to 2^20) were claimed, read and computed; 0: stop."""

    def misses(self) -> npt.NDArray[np.int64]:
        """The recorded misses as [misses, 7]: layer, expert, and nanoseconds of ``time.monotonic_ns()`` at which a
        forward claimed the expert, its read began, its read ended, it was handed over, and it was computed. 0: unknown,
        or not yet."""

    def warm_up(self) -> None:
        """Begin to read the profile's experts if ``on_gpu`` was given; otherwise the constructor has begun to."""

    def model_use(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens int64 [layers] and uses int64 [layers, experts] since the engine was made, added to its profile; never
        reset."""

    def forwards(self, layer: int) -> int:
        """Ended forwards of a layer since the engine was made; not affected by ``reset_stats``."""

    def wait_for_forwards(self, layer: int, forwards: int, patience: float) -> bool:
        """Wait at most ``patience`` seconds until ``forwards(layer)`` reaches ``forwards``; False if it has not, or at
        ``close``."""

    def resize(self, slots: int) -> int:
        """Set the number of slots, while forwards run, see Pool::resize in csrc/residency/pool.h; return the actual
        number.

        Raises ValueError for a number outside of [min_slots, max_slots] and for an engine without a source,
        MemoryError if there is no memory to grow (the pool then keeps its size), ReadTimeoutError if the I/O thread is
        stuck. Does not wait for forwards and reads.
        """

    def pinned(self) -> int: ...
    def validate(self) -> None: ...
    def drain(self) -> None: ...
    def close(self, wait: bool = True) -> None:
        """Refuse new forwards; with ``wait``, wait for running ones and for reads. Idempotent: a later call waits for
        what an earlier one left.

        Raises ValueError if a Lender of this engine is open. Raises ReadTimeoutError if these exceed the time-out,
        while they and freeing the engine go on. Raises MemoryError if no thread can be started to free it.
        """

    def describe_size(self) -> dict[str, int]:
        """Sizes of the pool now and its limits.

        'slots', 'slot_bytes' (their memory), 'min_slots', 'max_slots', 'record_bytes', 'segment_slots' (the unit of
        growth).
        """

    def describe(self) -> dict[str, object]:
        """A description of the engine.

        'slots' (now), 'max_slots', 'record_bytes', 'pool_bytes' (now), 'workspace_bytes', 'policy', 'io', 'buffered'
        (1: files are read through the page cache), 'isa', 'threads', 'notes'.
        """
