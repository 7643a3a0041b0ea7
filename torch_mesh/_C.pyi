"""The control plane: what Python asks of the engine outside of a forward. The data plane is torch.ops.torch_mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import Self

torch_version: str  # of the torch this extension was built against

def features() -> dict[str, str]:
    """What was built in and what this machine has: 'isa', 'isas', 'uring' ('' or why not), 'brgemm_bf16', 'brgemm_int8' (likewise),
    'populate_read' (likewise, of mapped files), 'numa_nodes' (with memory for this process), 'numa_compute_nodes' (with processors for it too).
    """

def record_bytes(format: str, group_size: int, hidden: int, intermediate: int, gated: bool, bias: bool) -> int: ...
def record_layout(
    format: str, group_size: int, hidden: int, intermediate: int, gated: bool, bias: bool
) -> dict[str, int]:
    """Bytes: 'bytes', and where things are (csrc/store/record.h): 'gate_up_offset', 'gate_up_block_bytes', 'gate_up_bias_offset', the
    same of 'down', 'group_bytes' and 'scales_bytes'. Of bf16, whose blocks have no groups, the latter are a block's and 0; a bias
    that is not there is at -1.
    """

def calibration_order(format: str) -> tuple[int, int]:
    """(streams, step): how ``torch.ops.torch_mesh.pack_calibrated`` goes through a format's inputs, those of one stream (k, k + streams ...) after
    those of another, ``step`` of a stream together; a step of 0: it does not take the format."""

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
    """How many tokens a fused forward computes at a time in ``workspace`` bytes, on this machine's kernels."""

MOST_THREADS: int  # of an engine
LONGEST_TIMEOUT: float  # in seconds
MOST_DECODE_ROWS: int  # a forward of a layer with more rows is prefill
HEAD_DIM_STEP: int  # sizes of attention heads are its multiples
MOST_HEAD_DIM: int

def linear_bytes(format: str, group_size: int, in_features: int, out_features: int) -> int:
    """Bytes of what ``torch.ops.torch_mesh.pack_linear`` gives."""

def record_checksum(
    store_id: bytes, layer: int, expert: int, record: memoryview | bytes | npt.NDArray[np.uint8]
) -> int: ...
def policy_names() -> list[str]: ...
def predictor_names() -> list[str]: ...
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
    pins: float = 0.0,
    early_layers: int = 0,
    early_experts: int = 0,
) -> dict[str, Any]:
    """Recorded routing through the pool's own core, see csrc/residency/replay.h; the fields of ReplayResult, ``hits`` and ``accesses_of``
    int64 [tokens], ``seconds_of`` float64 [tokens].

    ``ids`` [tokens, layers, top_k], of experts that are elsewhere -1, behind all others; ``scores`` and ``lookahead`` [tokens, layers, experts],
    ``sequences`` and ``forwards`` the first token of each.
    Raises ValueError for ids out of range or doubled, and for options that make no sense.
    """

def replay_ranks(
    ids: npt.NDArray[np.int32],
    exchange_seconds: npt.NDArray[np.float64],
    *,
    experts: int,
    policy: str,
    slots: int,
    scores: npt.NDArray[np.float32] | None = None,
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
    """As ``replay``, of ranks that each have ``experts`` of a layer and ``slots``, and wait for each other after each layer: an answer for each.

    ``ids`` [ranks, tokens, layers, top_k], ``scores`` and ``lookahead`` [ranks, tokens, layers, experts], by each rank's own numbers;
    ``exchange_seconds`` [forwards, layers], what comes after the last rank has computed.
    """

def cuda_driver() -> str:
    """'CUDA driver 12.8', or why there is none that will do. Starts nothing on any device."""

class Driver:
    """Of one device, see csrc/gpu/driver.h: CUDA's, or in tests one in process (``torch_mesh._testing``), whose memory is the CPU's."""

def open_cuda_driver(device: int) -> Driver:
    """Raises DeviceError where there is none or it is too old, and for a device that does not exist."""

class HostShare:
    """What of the layers that lie partly on a device the host computes, see csrc/gpu/host_share.h.

    ``handle`` is of any layer of the pool. Streams are torch.cuda.Stream.cuda_stream, 0 the default one.
    Raises DeviceError where the driver refuses a call, ForkedProcessError in a child of the process that made it.
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
        """Begins behind what ``stream`` was given; returns a ticket to join by.

        Contiguous tensors, the caller's to keep until joined: x [tokens, hidden] bf16, fp16 or fp32, topk_ids int64 and topk_weights fp32
        [tokens, k], table int32 [experts] (>= 0: the device's own), out fp32 [tokens, hidden]. Raises what an earlier host node failed with.
        """

    def join(self, ticket: int, stream: int) -> None:
        """What ``stream`` is given from here on finds the host's sum in ``out``."""

    def wait(self, ticket: int) -> None:
        """Waits for the node of one call and raises what it failed with, before 64 others have been submitted. ValueError for a captured call."""

    def synchronize(self) -> None:
        """Waits for the host nodes of calls that were not captured, then as ``check``."""

    def check(self) -> None:
        """Raises what a host node failed with, once."""

    def set_capture_sizes(self, tokens: list[int], top_k: int) -> None: ...
    def capture_sizes(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]:
        """'calls', 'all_on_device', 'failed', 'bytes_down', 'bytes_up', 'node_seconds', 'waited_seconds', 'waited_calls'."""

    def reset_stats(self) -> None: ...

class Turn:
    """A context manager: a prompt's use of an Uplift's buffers. Entering waits for the prompt before."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def bring(self, layer: int, experts: list[int]) -> int:
        """Sends up to ``batch`` distinct experts up; returns the buffer, 0 or 1, that ``stream`` finds them in, in their order."""

class Uplift:
    """The way up for experts without a slot on the device, see csrc/gpu/uplift.h. The buffers are uint8 [records, record bytes]."""

    def __init__(self, share: HostShare, first: Tensor, second: Tensor) -> None: ...
    @property
    def batch(self) -> int: ...
    def bytes_up(self) -> int: ...
    def turn(self, stream: int) -> Turn: ...

class Mover:
    """Moves experts between a device's slots and the pool, see csrc/gpu/mover.h. ``records`` uint8 [slots, record bytes], ``table`` int32 [layers, experts].

    ``source`` is a handle of the pool whose records go up: the share's, or one of the same layers and experts in another format.
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
        """Experts as layer * experts + expert. Waits."""

    def slots_of(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]:
        """'moved_up', 'batches', 'bytes_up', 'failed', 'last_failure' (an exception or None)."""

def direct_io_alignment(path: str) -> int:
    """Bytes that O_DIRECT on this file wants offsets and lengths to be multiples of; 0 if it reports none; -1 if O_DIRECT is refused."""

class RawView(TypedDict):
    """One matrix inside the pieces of a raw expert: element (r, c) is piece[offset + r*row_stride + c*column_stride], in elements."""

    piece: int
    offset: int
    row_stride: int
    column_stride: int

class RawPlace(TypedDict):
    """Where in the pieces of a raw expert something begins; bytes."""

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
    """One matrix in codes and scales, as ``torch_mesh.store.sources.layout.Codes`` says it; scales count rows from ``first_row`` before the matrix's."""

    order: str
    flip: int
    run: int
    run_bytes: int
    row_bytes: int
    first_row: int
    scales: RawScales
    factor: RawPlace
    divisor: RawPlace
    in_turn: RawPlace
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
    """The record of an expert that a raw ``Source`` describes, of its pieces in memory. Raises ValueError for pieces that are too short, and for
    scales and codes that the format cannot hold."""

class Source:
    """Where records are. ``extents`` is int64 [layers, experts, pieces, 3] of (file, offset, bytes); ``checksums`` uint64 [layers, experts] or None.

    A raw source gives ``raw_dtype`` ('bf16', 'fp16', 'fp32'; of biases alone where weights are in codes) and
    ``raw_views``, each with keys among gate, up, down, gate_bias, up_bias, down_bias. ``raw_views_of`` is int64
    [layers, experts], the index in ``raw_views`` of each expert's; None where all experts have the only one.

    A rank of several has those from ``first_expert`` on of the ``routed_experts`` among which routers choose, and counts them from 0;
    checksums and errors have the model's numbers. 0: all of them.
    Raises ValueError if an extent does not lie within its file.
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
    ) -> None: ...
    @property
    def staging_bytes(self) -> int:
        """Of the buffers that an engine's raw records are read into; 0 for a store."""

class _DetailedStats(TypedDict):
    """The phases' values are as those of ``Engine.stats``; ``experts`` has each field of ExpertStats as int64 [layers, experts]."""

    none: dict[str, npt.NDArray[np.int64]]
    prefill: dict[str, npt.NDArray[np.int64]]
    decode: dict[str, npt.NDArray[np.int64]]
    experts: dict[str, npt.NDArray[np.int64]]
    prefetch_error: Exception | None
    slots: int  # now
    kept: int  # experts that are never given up, now
    most_slots: int
    shrinks: int
    grows: int
    resets: int  # times that all counts but this one were set to zero

class Interpose:
    """What stands between an engine's reader and what carries its reads out; tests make one (``torch_mesh._testing.faults``)."""

class Lender:
    """Lends the slots of an engine made with ``lendable`` to up to ``workers`` processes of this user, see csrc/residency/lending/lender.h.

    Raises ValueError for a path that is taken or too long, and for more workers than slots; ReadError where the system refuses the socket.
    """

    def __init__(self, engine: Engine, path: str, workers: int) -> None: ...
    @property
    def workers(self) -> int:
        """Connected now."""

    @property
    def places(self) -> int:
        """Slots that each of them may hold."""

    @property
    def refused(self) -> int:
        """Connections that were ended for what they sent."""

    def close(self) -> None:
        """Closes the engine's pool and ends all loans. Idempotent."""

class Engine:
    """The experts of one model: pool, reader and kernels. ``source=None`` keeps all records in memory (slots == layers * experts).

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
        # as in csrc/kernels/activation.h, of all layers or of each; None: only grouped_linear is used
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
        least_slots: int = 1,  # that resize() may leave
        profile: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,  # as of model_use()
        pins: float = 0.0,  # these three: see csrc/residency/core/kept.h
        early_layers: int = 0,
        early_experts: int = 0,
        elsewhere: list[bool] = [],  # of layers * experts: neither warmed nor pinned
        fill_empty: bool = False,  # reads experts into empty slots while the disk is idle
        lendable: bool = False,  # its slots lie in shared memory, for a Lender
        lender: str
        | None = None,  # a socket at which a Lender lends slots: as many as it gives, whatever ``slots`` says
    ) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def fill(self, layer: int, expert: int, record: npt.NDArray[np.uint8]) -> None: ...
    def read_record(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """A copy of the packed record, promoted if it is cold."""

    def stats(self) -> dict[str, npt.NDArray[np.int64]]:
        """Each field of LayerStats (csrc/residency/core/statistics.h) as int64 [layers], over all phases."""

    def totals(self) -> dict[str, int]:
        """What ``stats`` counts, over all layers, and 'resets', at one moment: takes a hundredth of a millisecond."""

    def detailed_stats(self) -> _DetailedStats:
        """All counts of one moment."""

    def reset_stats(self) -> None: ...
    def warm_up(self) -> None:
        """Begins to read what the profile names, where ``elsewhere`` named something; else that began when the engine was made."""

    def model_use(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens int64 [layers] and uses int64 [layers, experts] since the engine was made, on top of its profile; never reset."""

    def forwards(self, layer: int) -> int:
        """Forwards of a layer that have ended since the engine was made; ``reset_stats`` leaves it alone."""

    def wait_for_forwards(self, layer: int, forwards: int, patience: float) -> bool:
        """Waits, for ``patience`` seconds at most, until ``forwards(layer)`` has come that far; False if it has not, or at ``close``."""

    def resize(self, slots: int) -> int:
        """Keeps ``slots`` experts from now on while forwards go on, see Pool::resize in csrc/residency/pool.h; returns how many it keeps.

        Raises ValueError for a number outside of [least_slots, most_slots] and for an engine without a source, MemoryError if the
        system has no memory to grow (the pool then keeps what it has), ReadTimeoutError when the I/O thread is stuck. Forwards and reads are not waited for.
        """

    def pinned(self) -> int: ...
    def validate(self) -> None: ...
    def drain(self) -> None: ...
    def close(self, wait: bool = True) -> None:
        """Refuses new forwards; with ``wait`` waits for those that run and for reads under way, without it for nothing. Idempotent.

        Raises ReadTimeoutError when either take longer than the time-out; they, and what frees the engine after them, go on. Raises
        MemoryError where the system has no thread left to free it with.
        """

    def describe_size(self) -> dict[str, int]:
        """'slots' and 'slot_bytes' (what they take; of 'mapped_bytes', in the page cache) now, 'least_slots', 'most_slots', 'record_bytes', 'segment_slots' (memory goes and comes in so many)."""

    def describe(self) -> dict[str, object]:
        """'slots' (now), 'most_slots', 'record_bytes', 'pool_bytes' (now), 'mapped_bytes' (in the page cache and not in those), 'workspace_bytes', 'policy', 'io', 'isa', 'threads', 'notes'."""
